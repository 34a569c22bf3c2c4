"""The arrays of the original algorithm (float64), reproduced by reference and fast path.

``golden/fastclip_golden.npz``: 6 steps (v2: 3) of B = 8 on n = 20 samples from the authors' loss
classes. Its states advance by the released rule; ``math_*`` arrays are the exact gradients on the
same state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import run_distributed

from disco_ds.losses import FastCLIPLoss
from disco_ds.losses.fastclip_reference import FastCLIPReference, Step, TauAdam, gamma_of

GOLDEN = {
    name: torch.from_numpy(array)
    for name, array in np.load(Path(__file__).parent / "golden/fastclip_golden.npz").items()
}
TOLERANCE = 1e-10


def close(found: torch.Tensor, name: str, step: int, **options: Any) -> None:
    expected = GOLDEN[name][step]
    limit = TOLERANCE * float(expected.abs().max())
    torch.testing.assert_close(
        found, expected, rtol=TOLERANCE, atol=limit, msg=lambda text: f"{name}: {text}", **options
    )


def inputs(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return GOLDEN["in_e1"][step], GOLDEN["in_e2"][step], GOLDEN["in_idx"][step]


def reference_pair(version: str) -> tuple[FastCLIPReference, FastCLIPReference]:
    config = GOLDEN[f"{version}_cfg"]
    settings = {"tau": float(config[0]), "rho": float(config[1]), "eps": float(config[2])}
    return tuple(
        FastCLIPReference(version, int(GOLDEN["in_n"]), mode=mode, **settings)
        for mode in ("fastclip_compat", "exact")
    )


@pytest.mark.parametrize("version", ["v0", "v3"])
def test_global_temperature(version: str) -> None:
    compat, exact = reference_pair(version)
    for step in range(6):
        tau = float(GOLDEN[f"{version}_tau_before"][step])
        gamma = float(GOLDEN["in_gamma"][step])
        found: Step = compat.step(*inputs(step), gamma=gamma, tau=tau)
        close(found.value, f"{version}_loss", step)
        close(found.image_gradient, f"{version}_grad_e1", step)
        close(found.text_gradient, f"{version}_grad_e2", step)
        close(-tau * found.tau_gradients[0], f"{version}_grad_s", step)
        close(compat.u[0], f"{version}_u1_all", step)
        close(compat.u[1], f"{version}_u2_all", step)
        found = exact.step(*inputs(step), gamma=gamma, tau=tau)
        close(found.image_gradient, f"{version}_math_grad_e1", step)
        close(found.text_gradient, f"{version}_math_grad_e2", step)
        if version == "v3":
            close(found.tau_gradients[0], "v3_math_grad_tau", step)


def test_individual_temperatures() -> None:
    config = GOLDEN["v2_cfg"]
    adam = TauAdam(*(float(config[k]) for k in (3, 4, 5, 6, 7, 8)))
    compat, exact = reference_pair("v2")
    for step in range(3):
        index = inputs(step)[2]
        gamma = float(GOLDEN["in_gamma"][step])
        exact.tau.copy_(compat.tau)
        found = compat.step(*inputs(step), gamma=gamma)
        close(found.value, "v2_loss", step)
        close(found.image_gradient, "v2_grad_e1", step)
        close(found.text_gradient, "v2_grad_e2", step)
        close(found.tau_gradients[0], "v2_gtau1", step)
        close(found.tau_gradients[1], "v2_gtau2", step)
        compat.adam(index, found.tau_gradients, adam, epoch=int(GOLDEN["in_epoch"][step]))
        for side in (0, 1):
            close(compat.tau[side], f"v2_tau{side + 1}_all", step)
            close(compat.moments[0][side], f"v2_m{side + 1}_all", step)
            close(compat.moments[1][side], f"v2_v{side + 1}_all", step)
            close(compat.u[side].log(), f"v2_logu{side + 1}_all", step)
        found = exact.step(*inputs(step), gamma=gamma)
        close(found.image_gradient, "v2_math_grad_e1", step)
        close(found.text_gradient, "v2_math_grad_e2", step)
        close(found.tau_gradients[0], "v2_math_gtau1", step)
        close(found.tau_gradients[1], "v2_math_gtau2", step)


def test_gamma_schedule_of_the_golden_run() -> None:
    decay, low = float(GOLDEN["in_gamma_decay_epochs"]), float(GOLDEN["in_gamma_min"])
    for epoch, gamma in zip(GOLDEN["in_epoch"], GOLDEN["in_gamma"], strict=True):
        found = gamma_of(float(epoch), schedule="cosine", gamma_min=low, decay_epochs=decay)
        assert found == pytest.approx(float(gamma), rel=1e-12)


def fast_path(version: str, mode: str, **options: Any) -> FastCLIPLoss:
    config = GOLDEN[f"{version}_cfg"]
    adam = {"tau_lr": float(config[3])} if version == "v2" else {}
    return FastCLIPLoss(
        version,
        num_samples=int(GOLDEN["in_n"]),
        gamma_min=float(GOLDEN["in_gamma_min"]),
        gamma_decay_epochs=float(GOLDEN["in_gamma_decay_epochs"]),
        rho=float(config[1]),
        eps=float(config[2]),
        tau_init=float(config[0]),
        mode=mode,
        table_dtype=torch.float64,
        **{**adam, **options},
    )


def run_fast(loss: FastCLIPLoss, step: int, tau: float, rows: slice = slice(None)) -> dict:
    images, texts, index = inputs(step)
    leaves = [part[rows].clone().requires_grad_() for part in (images, texts)]
    scale = torch.tensor(1 / tau, dtype=torch.float64, requires_grad=True)
    loss.set_progress(float(GOLDEN["in_epoch"][step]))
    value = loss(*leaves, scale, index=index[rows])
    value.backward()
    return {
        "value": value.detach(),
        "e1": leaves[0].grad,
        "e2": leaves[1].grad,
        "scale": scale.grad,
    }


@pytest.mark.parametrize("version", ["v0", "v3"])
def test_fast_path_follows_the_released_run(version: str) -> None:
    """The tables advance over all six steps; d/ds is scale times d/d(scale)."""
    loss = fast_path(version, "fastclip_compat")
    for step in range(6):
        tau = float(GOLDEN[f"{version}_tau_before"][step])
        found = run_fast(loss, step, tau)
        loss.after_step(skipped=False)
        close(found["value"], f"{version}_loss", step)
        close(found["e1"], f"{version}_grad_e1", step)
        close(found["e2"], f"{version}_grad_e2", step)
        close(found["scale"] / tau, f"{version}_grad_s", step)
        tables = loss.table.read(torch.arange(int(GOLDEN["in_n"])))
        for side, name in ((1, "log_u_image"), (2, "log_u_text")):
            u = torch.where(tables["visits"] > 0, tables[name].exp(), 0.0)
            close(u, f"{version}_u{side}_all", step)


@pytest.mark.parametrize("version", ["v0", "v3"])
def test_fast_path_has_the_exact_gradients(version: str) -> None:
    loss = fast_path(version, "exact")
    for step in range(6):
        tau = float(GOLDEN[f"{version}_tau_before"][step])
        found = run_fast(loss, step, tau)
        loss.after_step(skipped=False)
        close(found["e1"], f"{version}_math_grad_e1", step)
        close(found["e2"], f"{version}_math_grad_e2", step)
        if version == "v3":
            close(-found["scale"] / tau**2, "v3_math_grad_tau", step)


def test_fast_path_moves_individual_temperatures() -> None:
    loss = fast_path("v2", "fastclip_compat")
    for step in range(3):
        found = run_fast(loss, step, 0.07)
        loss.after_step(skipped=False)
        close(found["value"], "v2_loss", step)
        close(found["e1"], "v2_grad_e1", step)
        close(found["e2"], "v2_grad_e2", step)
        for side, name in ((1, "image"), (2, "text")):
            close(loss.table.columns[f"tau_{name}"], f"v2_tau{side}_all", step)


def _two_ranks(rank: int, world_size: int) -> None:
    """Before averaging, each rank's feature gradients and the mean of the scalars."""
    rows = slice(4 * rank, 4 * rank + 4)
    for version in ("v0", "v3"):
        loss = fast_path(version, "fastclip_compat")
        for step in range(6):
            tau = float(GOLDEN[f"{version}_tau_before"][step])
            found = run_fast(loss, step, tau, rows)
            loss.after_step(skipped=False)
            for name in ("e1", "e2"):
                expected = GOLDEN[f"{version}_K2_grad_{name}"][step, rank]
                limit = TOLERANCE * float(expected.abs().max())
                torch.testing.assert_close(found[name], expected, rtol=TOLERANCE, atol=limit)
            dist.all_reduce(found["scale"])
            close(found["scale"] / 2 / tau, f"{version}_grad_s", step)


def test_two_ranks_equal_the_released_code() -> None:
    run_distributed(_two_ranks, world_size=2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize(("name", "eps"), [("eps14", 1e-14), ("eps6", 1e-6)])
def test_underflow_of_exp_does_not_matter(
    name: str, eps: float, dtype: torch.dtype, tolerance: float
) -> None:
    """tau 0.01 with negatives far below: exp underflows fp32, its logarithm does not."""
    loss = FastCLIPLoss(
        "v3",
        num_samples=6,
        gamma_schedule="constant",
        gamma_min=0.4,
        rho=8.0,
        eps=eps,
        table_dtype=torch.float64,
    )
    for column in loss.table.columns.values():
        column.fill_(float(np.log(0.5)))
    loss.table.visits.fill_(1)
    leaves = [GOLDEN[f"stress_easy_e{k}"].to(dtype, copy=True).requires_grad_() for k in (1, 2)]
    scale = torch.tensor(100.0, dtype=dtype, requires_grad=True)
    loss(*leaves, scale, index=torch.arange(6)).backward()
    loss.after_step(skipped=False)
    found = {
        "logu1": loss.table.columns["log_u_image"],
        "logu2": loss.table.columns["log_u_text"],
        f"{name}_math_grad_e1": leaves[0].grad,
        f"{name}_math_grad_e2": leaves[1].grad,
        f"{name}_math_grad_tau": -scale.grad * 100**2,
    }
    for key, value in found.items():
        expected = GOLDEN[f"stress_easy_{key}"]
        limit = tolerance * float(expected.abs().max())
        torch.testing.assert_close(
            value.double(), expected, rtol=tolerance, atol=limit, msg=lambda t, k=key: f"{k}: {t}"
        )
