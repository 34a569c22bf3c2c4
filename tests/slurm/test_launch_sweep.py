"""Sweeps: which runs they mean, under which names, and which of them run again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from launch_cases import ROOT, train_arguments

from disco_ds.launch.array import plan_sweep, select_members
from disco_ds.launch.folder import Event, RunFolder
from disco_ds.launch.resources import Resources
from disco_ds.launch.submission import write_spec
from disco_ds.launch.sweep import (
    Sweep,
    chunks,
    load_sweep,
    parse_set,
    share_parallel,
    strip_arguments,
)

CPU = Resources(gpus_per_node=0, cluster="local")
BASE = train_arguments("nowhere.tar", steps=4)


def sweep_file(folder: Path, text: str) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(text)
    return path


def test_grid_zip_and_list_multiply(tmp_path: Path) -> None:
    sweep = load_sweep(
        sweep_file(
            tmp_path,
            """
grid:
  optim.lr: [1e-3, 1e-4]
zip:
  global_batch_size: [8, 16]
  steps: [4, 2]
list:
  - {loss: siglip}
  - {loss: fastclip, loss.version: v1}
""",
        )
    )
    found = [(m.config, m.run_dir.name) for m in plan_sweep(BASE, CPU, sweep, tmp_path)]
    settings = [
        (config.optim.lr, config.global_batch_size, config.steps, config.loss.name)
        for config, _ in found
    ]
    assert settings == [
        (lr, batch, steps, loss)
        for lr in (1e-3, 1e-4)
        for batch, steps in ((8, 4), (16, 2))
        for loss in ("siglip", "fastclip")
    ]
    names = [name for _, name in found]
    assert len(set(names)) == 8
    assert names[0].startswith("lr=1e-3_global_batch_size=8_steps=4_loss=siglip-")
    assert not any(set(name) & set(", :") for name in names)


def test_set_adds_axes_and_replaces_those_of_the_file(tmp_path: Path) -> None:
    sweep = load_sweep(sweep_file(tmp_path, "grid: {optim.lr: [1, 2], seed: [0, 1]}"))
    more = dict(parse_set(text) for text in ("optim.lr=1e-3,1e-4,1e-5", "--data.num_workers=0"))
    members = sweep.with_grid(more).members()
    assert len(members) == 6
    assert members[0] == {"seed": ("0",), "optim.lr": ("1e-3",), "data.num_workers": ("0",)}


def test_values_of_several_words_and_switches(tmp_path: Path) -> None:
    text = "grid: {data.shards: [[a.tar, b.tar], c.tar], model.activation_checkpointing: [true]}"
    members = plan_sweep(BASE, CPU, load_sweep(sweep_file(tmp_path, text)), tmp_path)
    assert [m.config.data.shards for m in members] == [("a.tar", "b.tar"), ("c.tar",)]
    assert all(m.config.model.activation_checkpointing for m in members)


@pytest.mark.parametrize("path", sorted((ROOT / "launchers" / "sweeps").glob("*.yaml")))
def test_the_examples_are_valid(path: Path, tmp_path: Path) -> None:
    assert len(plan_sweep(["--preset", "demo"], CPU, load_sweep(path), tmp_path)) >= 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zip: {seed: [1, 2], steps: [1]}", "zip: all need the same number of values"),
        ("grid: {seed: [1]}\nzip: {seed: [1]}", "seed: in more than one of grid, zip, list"),
        ("gird: {seed: [1]}", "key gird: unknown; known are grid, zip, list"),
        ("grid: {seed: 1}", "grid.seed must be a list, is '1'"),
        ("grid: {seed: []}", "seed: no values"),
        ("list: [1]", "list must hold mappings"),
        ("[]", "needs at least one of grid, zip, list"),
        ("grid: {optim.lrr: [1]}", "sweep member optim.lrr=1: --optim.lrr: unknown; did you mean"),
        ("grid: {seed: [1, 1]}", "sweep members seed=1 and seed=1 are the same run"),
    ],
)
def test_a_wrong_sweep_is_refused_before_anything_is_submitted(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError) as caught:
        plan_sweep(BASE, CPU, load_sweep(sweep_file(tmp_path, text)), tmp_path / "runs")
    assert message in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_arguments_that_members_set_are_taken_out() -> None:
    arguments = ["--seed", "1", "--optim.lr=3", "loss:disco", "--data.shards", "a", "b"]
    assert strip_arguments(arguments, {"seed": (), "loss": ()}) == [
        *("--optim.lr=3", "--data.shards", "a", "b")
    ]
    assert strip_arguments(arguments, {"data.shards": (), "optim.lr": ()}) == [
        *("--seed", "1", "loss:disco")
    ]
    hyphens = ["--optim.weight-decay", "0.3", "--data.shards=a", "--data.shards", "b/lr=1.tar", "c"]
    assert strip_arguments(hyphens, {"optim.weight_decay": (), "data.shards": ()}) == []
    assert parse_set("optim.weight-decay=1") == ("optim.weight_decay", (("1",),))


@pytest.mark.parametrize(("count", "size"), [(1, 1), (5, 3), (1000, 1001), (2003, 1001)])
def test_chunks_stay_below_the_limit_and_lose_nothing(count: int, size: int) -> None:
    parts = list(chunks(count, size))
    assert [index for part in parts for index in part] == list(range(count))
    assert all(0 < len(part) <= size for part in parts)


@pytest.mark.parametrize("limit", range(2, 9))
def test_chunks_share_the_limit(limit: int) -> None:
    shares = share_parallel(limit, [3, 2])
    assert sum(share or 0 for share in shares) == limit
    assert min(share or 0 for share in shares) >= 1
    assert share_parallel(None, [3, 2]) == [None, None]
    # Too few for both: one after the other, each with all of it.
    assert share_parallel(1, [3, 2]) == [1, 1]


def test_finished_members_are_not_run_again_whatever_the_spelling(tmp_path: Path) -> None:
    """The signature is that of the resolved configuration, not of the flags."""
    first = plan_sweep(BASE, CPU, Sweep(grid={"seed": (("0",), ("1",), ("2",))}), tmp_path)
    for member, ending in zip(first, ("done", "failed", "stopped"), strict=True):
        run: RunFolder = write_spec(member, CPU, code=tmp_path)
        run.add_event(Event(time.time(), "started", "7"))
        run.add_event(Event(time.time(), ending, "7", "0" if ending == "done" else "1"))
    again = plan_sweep(
        [*BASE, "--seed", "9"],
        CPU,
        Sweep(grid={"seed": tuple((f"0{n}",) for n in range(4))}),
        tmp_path,
    )
    assert [m.signature for m in again[:3]] == [m.signature for m in first]
    known = [*first, again[3]]
    chosen, left_out = select_members(known, retry_failed=False)
    assert [m.config.seed for m in chosen] == [3]
    assert left_out == {"done": 1, "failed": 1, "stopped": 1}
    chosen, left_out = select_members(known, retry_failed=True)
    assert [m.config.seed for m in chosen] == [1, 2, 3]
    assert left_out == {"done": 1}
