"""The Triton kernels in Triton's CPU interpreter, against the same reference."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loss_cases import Case, assert_none, failures

from disco_ds.losses import DiscoLoss, reference

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: it comes with torch's CUDA builds",
)
OPTIONS = (("kernel", "triton"),)


def parity_cases(sizes: tuple[int, ...]) -> list[Case]:
    regimes = [("converged", 100.0, "fp32"), ("opposite", 100.0, "fp32")]
    regimes += [("random", 14.3, "fp32"), ("random", 14.3, "bf16_wire")]
    return [
        Case(loss, OPTIONS, precision, scale, regime, sizes, dim=33)
        for loss in ("disco", "siglip")
        for regime, scale, precision in regimes
    ]


def odd_cases() -> list[Case]:
    return [
        Case(loss, OPTIONS, "fp32", 14.3, "random", (5, 3), dim)
        for loss in ("disco", "siglip")
        for dim in (100, 1)
    ]


def ragged(rank: int) -> None:
    """65 rows and 70 columns: partial blocks in rows, columns and d, several row tiles."""
    assert_none(failures(parity_cases((65, 70)), rank))


def odd_dims(rank: int) -> None:
    assert_none(failures(odd_cases(), rank))


def excluded(rank: int) -> None:
    torch.manual_seed(0)
    images, texts = torch.nn.functional.normalize(torch.randn(2, 140, 16), dim=-1)
    rows = slice(70 * rank, 70 * rank + 70)
    index = torch.arange(140) % 9
    results = []
    for kernel in ("torch", "triton"):
        leaves = [f[rows].clone().requires_grad_() for f in (images, texts)]
        loss = DiscoLoss(kernel=kernel, positives="index")
        value = loss(*leaves, 14.3, index=index[rows])
        results.append((value, *torch.autograd.grad(value, leaves)))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def main(rank: int, store: str) -> None:
    """Run all checks on one of two ranks, in a process that is about to import triton."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for check in (ragged, odd_dims, excluded):
        check(rank)
    dist.destroy_process_group()


@needs_triton
def test_in_the_interpreter(tmp_path: Path) -> None:
    """In new processes: the interpreter must be on before anything imports triton."""
    store = str(tmp_path / "store")
    paths = os.pathsep.join(sys.path)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from test_triton import main; main({rank}, {store!r})",
            ],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)[-3000:]


@needs_triton
def test_kernels_compile_for_a_gpu() -> None:
    """Without a GPU: the interpreter accepts what the compiler may not."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from disco_ds.losses import pairwise_triton

    common = {"HAS_INDEX": True, "IS_OWN": True, "DTYPE": tl.bfloat16, "PRECISION": "tf32x3"}
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_D": 32}
    flags = {"IS_SOFTMAX": True, "HAS_GRADIENT": True, "HAS_SUMS": False}
    kernels = (
        (pairwise_triton._lse_kernel, {**common, **blocks}),
        (pairwise_triton._gradient_kernel, {**common, **blocks, **flags}),
        (pairwise_triton._gradient_kernel, {**common, **blocks, **flags, "IS_SOFTMAX": False}),
    )
    types = dict.fromkeys(("x", "y"), "*bf16") | dict.fromkeys(("scale", "bias"), "fp32")
    types |= dict.fromkeys(("row_index", "column_index"), "*i64")
    pointers = ("row_parts", "column_parts", "gradient", "row_lse", "column_lse", "diagonal")
    types |= dict.fromkeys((*pointers, "sums"), "*fp32")
    for kernel, constants in kernels:
        names = kernel.arg_names
        signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32))
        assert compiled.metadata.shared <= 160 * 1024


def test_triton_on_a_cpu_is_refused_and_auto_falls_back() -> None:
    features = torch.eye(4)
    with pytest.raises(ValueError, match='kernel="triton" needs'):
        DiscoLoss(kernel="triton")(features, features, 1.0)
    assert torch.equal(
        DiscoLoss(kernel="auto")(features, features, 1.0),
        DiscoLoss(kernel="torch")(features, features, 1.0),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(kernel: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    unit = torch.nn.functional.normalize(torch.randn(2, 1000, 384, device="cuda"), dim=-1)
    leaves = [f.to(dtype).requires_grad_() for f in unit]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    value = DiscoLoss(kernel=kernel)(*leaves, 14.3)
    want = reference.info_nce(*exact, 14.3)
    torch.testing.assert_close(value.double(), want, rtol=1e-6, atol=0)
    tolerance = 3e-5 if dtype == torch.float32 else 2**-8  # of the gradient's own dtype
    for got, right in zip(
        torch.autograd.grad(value, leaves), torch.autograd.grad(want, exact), strict=True
    ):
        assert (got.double() - right).abs().max() <= tolerance * right.abs().max()
