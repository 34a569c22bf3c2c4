"""Any engine, ranks, micro-batches and memory saving give the single-process result.

Everything of three AdamW steps is compared: losses, gradient norms, temperature, weights and
moments (so gradients as well). float64 for DDP and FSDP2, fp32 for ZeRO, whose sums run in another
order.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

import pytest
import torch
from engines import NAMES
from harness import run_distributed
from parity import Case, References, covering, errors_of, full_matrix, references

from disco_ds.distributed import World

_references = functools.cache(references)


def _run(rank: int, world_size: int, cases: list[Case], expected: References, output: Path) -> None:
    world = World(rank, world_size, rank)
    start = time.monotonic()
    errors = errors_of(cases, expected, world)
    if world.is_main:
        torch.save(errors, output)
        print(f"{len(cases)} cases in {time.monotonic() - start:.0f} s")


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
    errors = _errors(covering(NAMES, world_size), world_size, tmp_path, 280)
    assert not _wrong(errors)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(3600)
def test_full_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = {size: _errors(full_matrix(), size, tmp_path, 3000) for size in (1, 2, 3)}
    with capsys.disabled():
        print("\n" + table(errors))
    assert not [text for of_size in errors.values() for text in _wrong(of_size)]


def table(errors: dict[int, dict[Case, float]]) -> str:
    """Markdown: the worst error of every strategy, number of ranks and micro-batches."""
    columns = [(size, micro) for size in sorted(errors) for micro in (1, 2, 3)]
    lines = [
        "| strategy | " + " | ".join(f"W={size} m={micro}" for size, micro in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name in dict.fromkeys(case.strategy for case in next(iter(errors.values()))):
        cells = [
            max(
                error
                for case, error in errors[size].items()
                if case.strategy == name and case.micro_batches == micro
            )
            for size, micro in columns
        ]
        lines.append(f"| {name} | " + " | ".join(f"{cell:.0e}" for cell in cells) + " |")
    return "\n".join(lines)
