from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from disco_ds.checkpoint import (
    MANIFEST_FILE,
    CheckpointConfig,
    CheckpointWriter,
    SaveFailed,
    Snapshot,
    find_checkpoint,
    load_checkpoint,
    step_folder,
    torch_file,
)
from disco_ds.checkpoint.folder import complete_folders, step_of
from disco_ds.distributed import World


def snapshot(step: int) -> Snapshot:
    return Snapshot(
        step=step,
        model={"weight": torch.arange(6.0).view(2, 3) + step, "logit_scale": torch.tensor(2.6)},
        optimizer={"exp_avg/weight": torch.randn(2, 3)},
        rank_state={"random": {"cpu": torch.get_rng_state()}, "data": {"epoch": 1, "seen": [3]}},
        shared={"model": "m", "epoch": 0.5},
    )


def save(root: Path, *steps: int, **config: Any) -> None:
    """As a run does that goes on from the newest checkpoint."""
    folder = root / "checkpoints"
    first = max((step_of(path) or 0 for path in complete_folders(folder)), default=0)
    writer = CheckpointWriter(folder, CheckpointConfig(**config), World(), first_step=first)
    for step in steps:
        writer.save(snapshot(step))
    writer.finish()


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
    save(tmp_path, 1, 2, 10, 9, keep_last=2)
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


DAMAGES = {
    "truncate": lambda content, other: content[:-7],
    "empty": lambda content, other: b"",
    "flip first": lambda content, other: bytes([content[0] ^ 1]) + content[1:],
    "flip middle": lambda content, other: (
        content[: len(content) // 2]
        + bytes([content[len(content) // 2] ^ 16])
        + content[len(content) // 2 + 1 :]
    ),
    "swap": lambda content, other: other,
    "delete": None,
}
FILES = [
    "model.safetensors",
    "optimizer.safetensors",
    "rank_00000.pt",
    "state.json",
    "manifest.json",
]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damage_names_the_file(tmp_path: Path, damage: str, name: str) -> None:
    """Also of the newest of two, asked for as "latest": never an older state, never a fresh one."""
    save(tmp_path, 1, 2)
    folder = find_checkpoint(tmp_path, "latest")
    assert folder is not None
    path, older = folder / name, step_folder(tmp_path / "checkpoints", 1)
    change = DAMAGES[damage]
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes(), (older / name).read_bytes()))
    # A foreign or damaged manifest fits no file, and names the first of those it does not fit.
    expected = name if name != "manifest.json" else r"(manifest\.json|step_00000002/\w+\.\w+)"
    with pytest.raises(ValueError, match=expected.replace("s.", r"s\.")) as caught:
        load_checkpoint(folder, World())
    assert "--resume" in str(caught.value) and "step_00000001" in str(caught.value)


def test_a_deleted_checkpoint_is_not_replaced_in_silence(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    shutil.rmtree(step_folder(tmp_path / "checkpoints", 2))
    with pytest.raises(ValueError, match=r"latest names step_00000002, which is not there"):
        find_checkpoint(tmp_path, "latest")
    (tmp_path / "checkpoints" / "latest").unlink()
    assert find_checkpoint(tmp_path, "latest") == step_folder(tmp_path / "checkpoints", 1)


def test_unfinished_save_is_not_a_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    save(tmp_path, 1)
    for background in (False, True):
        monkeypatch.setattr(
            "disco_ds.checkpoint.write.digest",
            lambda path: (_ for _ in ()).throw(OSError("disk full")),
        )
        with pytest.raises(SaveFailed, match=r"cannot save .*step_00000002: disk full"):
            save(tmp_path, 2, background=background)
        monkeypatch.undo()
        assert find_checkpoint(tmp_path, "latest") == step_folder(tmp_path / "checkpoints", 1)
        assert not list((tmp_path / "checkpoints").glob(".*"))
    save(tmp_path, 2)
    assert find_checkpoint(tmp_path, "latest") == step_folder(tmp_path / "checkpoints", 2)


def test_leftovers_of_a_killed_save_are_ignored_and_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in (".step_00000002.partial", ".step_00000001.old", ".step_00000007.partial"):
        leftover = tmp_path / "checkpoints" / name
        leftover.mkdir()
        (leftover / "model.safetensors").write_text("half")
    assert find_checkpoint(tmp_path, "latest") == step_folder(tmp_path / "checkpoints", 1)
    save(tmp_path, 3)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step_00000001", "step_00000003"]


def test_what_a_resume_from_an_earlier_step_leaves_behind_is_set_aside(tmp_path: Path) -> None:
    """Or the newest checkpoints, and means of them, would be of two histories."""
    save(tmp_path, 2, 4, 6, keep_last=9)
    folder = tmp_path / "checkpoints"
    old = load_checkpoint(step_folder(folder, 4), World()).optimizer["exp_avg/weight"].clone()
    writer = CheckpointWriter(folder, CheckpointConfig(keep_last=2), World(), first_step=2)
    for step in (4, 5):  # the 4 of the first history makes way
        writer.save(snapshot(step))
    assert [path.name for path in complete_folders(folder)] == ["step_00000004", "step_00000005"]
    aside = folder / "abandoned"
    assert sorted(path.name for path in aside.iterdir()) == ["step_00000004", "step_00000006"]
    kept = load_checkpoint(aside / "step_00000004", World()).optimizer["exp_avg/weight"]
    assert torch.equal(kept, old)


def test_a_users_copies_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    for name in ("step_00000001_keep", "step_best", "mine"):
        shutil.copytree(step_folder(folder, 1), folder / name)
    save(tmp_path, 2, 3, 4, keep_last=1, every_steps=1, keep_every_steps=2)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("latest", "mine", "step_00000001_keep", "step_00000002", "step_00000004", "step_best"),
    ]


def test_every_jth_is_kept(tmp_path: Path) -> None:
    save(tmp_path, *range(10, 110, 10), every_steps=10, keep_last=1, keep_every_steps=30)
    folders = sorted((tmp_path / "checkpoints").glob("step_*"))
    assert [int(f.name.removeprefix("step_")) for f in folders] == [30, 60, 90, 100]
    with pytest.raises(ValueError, match=r"keep_every_steps 25: .* multiple of .*every_steps 10"):
        CheckpointConfig(every_steps=10, keep_every_steps=25)


def test_what_is_written_in_the_background_does_not_change_any_more(tmp_path: Path) -> None:
    table = torch.zeros(3)
    writer = CheckpointWriter(tmp_path, CheckpointConfig(background=True), World())
    state = dataclasses.replace(snapshot(1), rank_state={"loss": {"u": table}})
    writer.save(state)
    table += 1
    writer.finish()
    loaded = load_checkpoint(step_folder(tmp_path, 1), World())
    assert loaded.rank_states[0]["loss"]["u"].tolist() == [0, 0, 0]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(SaveFailed, match=r"cannot save the checkpoint .*checkpoints"):
        save(tmp_path, 1)


def test_manifest_lists_every_file(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = step_folder(tmp_path / "checkpoints", 1)
    listed = set(json.loads((folder / MANIFEST_FILE).read_text()))
    assert listed == {path.name for path in folder.iterdir()} - {MANIFEST_FILE}


def test_everything_loads_weights_only(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for path in step_folder(tmp_path / "checkpoints", 1).glob("*.pt"):
        torch.load(path, weights_only=True)


def test_a_full_disk_is_named() -> None:
    """torch's own error is about positions in its file."""
    with pytest.raises(OSError, match="No space left on device"):
        torch_file.save({"u": torch.zeros(1_000_000)}, Path("/dev/full"))
