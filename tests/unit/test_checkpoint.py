from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_ds.checkpoint import (
    MANIFEST_FILE,
    Snapshot,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    step_folder,
)
from disco_ds.distributed import World


def snapshot(step: int) -> Snapshot:
    return Snapshot(
        step=step,
        model={"weight": torch.arange(6.0).view(2, 3) + step, "logit_scale": torch.tensor(2.6)},
        optimizer={"exp_avg/weight": torch.randn(2, 3)},
        rank_state={"random": {"cpu": torch.get_rng_state()}, "data": {"epoch": 1, "seen": [3]}},
        shared={"model": "m", "epoch": 0.5},
    )


def save(root: Path, *steps: int, keep: int = 2) -> None:
    for step in steps:
        save_checkpoint(root / "checkpoints", snapshot(step), World(), keep=keep)


def test_round_trip(tmp_path: Path) -> None:
    save(tmp_path, 3)
    folder = find_checkpoint(tmp_path, "latest")
    assert folder is not None
    loaded, expected = load_checkpoint(folder, World()), snapshot(3)
    assert loaded.step == 3
    assert torch.equal(loaded.model["weight"], expected.model["weight"])
    assert loaded.model["logit_scale"].shape == ()
    assert loaded.rank_states[0]["data"] == {"epoch": 1, "seen": [3]}
    assert loaded.shared["model"] == "m"


def test_newest_are_kept_and_latest_moves(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 10, 9, keep=2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step_00000009", "step_00000010"]
    assert find_checkpoint(tmp_path, "latest") == step_folder(tmp_path / "checkpoints", 9)


def test_latest_of_nothing_starts_fresh_but_a_path_must_exist(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path, "latest") is None
    with pytest.raises(ValueError, match="no complete checkpoint there"):
        find_checkpoint(tmp_path, str(tmp_path / "nowhere"))


@pytest.mark.parametrize("form", ["run", "checkpoint"])
def test_explicit_paths(tmp_path: Path, form: str) -> None:
    save(tmp_path, 1, 2)
    expected = step_folder(tmp_path / "checkpoints", 2)
    source = tmp_path if form == "run" else expected
    assert find_checkpoint(tmp_path / "other", str(source)) == expected


@pytest.mark.parametrize("damage", ["truncate", "delete", "flip"])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "rank_00000.pt", "state.json"]
)
def test_damage_names_the_file(tmp_path: Path, damage: str, name: str) -> None:
    save(tmp_path, 1)
    folder = step_folder(tmp_path / "checkpoints", 1)
    path = folder / name
    content = path.read_bytes()
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(content[:-7])
    else:
        path.write_bytes(content[:20] + bytes([content[20] ^ 1]) + content[21:])
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        load_checkpoint(folder, World())


def test_unfinished_save_is_not_a_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    save(tmp_path, 1)
    monkeypatch.setattr(
        "disco_ds.checkpoint._digest", lambda path: (_ for _ in ()).throw(OSError("disk full"))
    )
    with pytest.raises(ValueError, match=r"cannot save the checkpoint .*step_00000002: disk full"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert find_checkpoint(tmp_path, "latest") == step_folder(tmp_path / "checkpoints", 1)
    save(tmp_path, 2)
    assert find_checkpoint(tmp_path, "latest") == step_folder(tmp_path / "checkpoints", 2)


def test_manifest_lists_every_file(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = step_folder(tmp_path / "checkpoints", 1)
    listed = set(json.loads((folder / MANIFEST_FILE).read_text()))
    assert listed == {path.name for path in folder.iterdir()} - {MANIFEST_FILE}


def test_everything_loads_weights_only(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for path in step_folder(tmp_path / "checkpoints", 1).glob("*.pt"):
        torch.load(path, weights_only=True)
