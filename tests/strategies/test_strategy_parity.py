"""Any engine, ranks, micro-batches and memory saving give the single-process result.

Everything of three AdamW steps is compared: losses, gradient norms, temperature, weights and
moments (so gradients as well). float64 for DDP and FSDP2, fp32 for ZeRO, whose sums run in another
order.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from harness import run_distributed
from parity import Case, References, covering, errors_of, full_matrix, references

from disco_ds.distributed import World

_references = functools.cache(references)


def _run(rank: int, world_size: int, cases: list[Case], expected: References, output: Path) -> None:
    world = World(rank, world_size, rank)
    errors = errors_of(cases, expected, world)
    if world.is_main:
        torch.save(errors, output)


def _errors(cases: list[Case], world_size: int, folder: Path, timeout: float) -> dict[Case, float]:
    output = folder / f"errors-{world_size}"
    run_distributed(_run, cases, _references(), output, world_size=world_size, timeout=timeout)
    errors: dict[Case, float] = torch.load(output, weights_only=False)
    return errors


def _wrong(errors: dict[Case, float]) -> list[str]:
    # not <=: a NaN is wrong as well.
    return [f"{case}: {error:.1e}" for case, error in errors.items() if not error <= case.tolerance]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_strategies_equal_one_process(world_size: int, tmp_path: Path) -> None:
    assert not _wrong(_errors(covering(world_size), world_size, tmp_path, 280))


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_full_matrix(world_size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = _errors(full_matrix(world_size), world_size, tmp_path, 3500)
    with capsys.disabled():
        print(f"\n{world_size} ranks, {len(errors)} cases\n\n{table(errors)}")
    assert not _wrong(errors)


def table(errors: dict[Case, float]) -> str:
    """Markdown: the worst error per strategy, loss and number of micro-batches."""
    columns = [(loss, micro) for loss in ("disco", "siglip") for micro in (1, 2, 3)]
    lines = [
        "| strategy | " + " | ".join(f"{loss} m={micro}" for loss, micro in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name in dict.fromkeys(case.strategy for case in errors):
        cells = [
            max(
                error
                for case, error in errors.items()
                if (case.strategy, case.loss, case.micro_batches) == (name, loss, micro)
            )
            for loss, micro in columns
        ]
        lines.append(f"| {name} | " + " | ".join(f"{cell:.0e}" for cell in cells) + " |")
    return "\n".join(lines)
