"""Weights to start from: any of open_clip's forms, strict, reported, and safe."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import save_file

from disco_ds.models import ModelConfig, create_clip, register_model_configs
from disco_ds.weights import find_initial_weights, read_weights

NAME = "disco-demo-vit"


@pytest.fixture
def theirs() -> Any:
    register_model_configs()
    torch.manual_seed(5)
    model = open_clip.create_model(NAME, load_weights=False)
    torch.nn.init.constant_(model.logit_scale, 3.25)
    return model


def created(path: Path, **options: Any) -> Any:
    return create_clip(ModelConfig(NAME, init=str(path), **options), seed=1)


def same(parts: Any, model: Any) -> bool:
    state = model.state_dict()
    own = parts.encoders.clip.state_dict()
    return all(torch.equal(value, state[name].float()) for name, value in own.items())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"epoch": 3, "name": "x", "state_dict": state, "optimizer": {"lr": 0.1}},
        lambda state: {"state_dict": {f"module.{n}": t for n, t in state.items()}},
        lambda state: {f"_orig_mod.{n}": t for n, t in state.items()},
        lambda state: {
            n.replace("resblocks.0.", "resblocks.0._checkpoint_wrapped_module."): t
            for n, t in state.items()
        },
        lambda state: {n: t.half() for n, t in state.items()},
        lambda state: {n: t.reshape(1) if n == "logit_scale" else t for n, t in state.items()},
    ],
    ids=["plain", "training", "ddp", "compiled", "recomputed", "half", "scale 1-D"],
)
def test_forms(theirs: Any, tmp_path: Path, wrap: Any, caplog: Any) -> None:
    state = theirs.state_dict()
    torch.save(wrap(state), tmp_path / "w.pt")
    if wrap(state).keys() == state.keys():
        theirs.load_state_dict({n: t.reshape(state[n].shape) for n, t in wrap(state).items()})
    with caplog.at_level(logging.INFO, logger="disco_ds"):
        logging.getLogger("disco_ds").propagate = True
        parts = created(tmp_path / "w.pt")
    assert same(parts, theirs)
    assert parts.scalars["logit_scale"].item() == 3.25
    count = len(state) - 1
    assert f"{count} of {count} tensors" in caplog.text and "logit_scale 3.250" in caplog.text


def test_safetensors(theirs: Any, tmp_path: Path) -> None:
    save_file(theirs.state_dict(), tmp_path / "w.safetensors")
    assert same(created(tmp_path / "w.safetensors"), theirs)


def test_position_embeddings_are_resized(theirs: Any, tmp_path: Path) -> None:
    state = theirs.state_dict()
    width = state["visual.positional_embedding"].shape[1]
    state["visual.positional_embedding"] = torch.randn(1 + 9, width)
    torch.save(state, tmp_path / "w.pt")
    own = created(tmp_path / "w.pt").encoders.clip.visual.positional_embedding
    assert own.shape == theirs.visual.positional_embedding.shape
    assert torch.equal(own[0], state["visual.positional_embedding"][0])


def test_what_does_not_fit_is_named(theirs: Any, tmp_path: Path, caplog: Any) -> None:
    state = theirs.state_dict()
    del state["text_projection"]
    state["extra.weight"] = torch.zeros(2)
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"1 missing \(text_projection\), 1 unexpected.*extra\.w"):
        created(tmp_path / "w.pt")
    with caplog.at_level(logging.INFO, logger="disco_ds"):
        logging.getLogger("disco_ds").propagate = True
        parts = created(tmp_path / "w.pt", init_partial=True)
    fresh = create_clip(ModelConfig(NAME), seed=1).encoders.clip
    assert torch.equal(parts.encoders.clip.text_projection, fresh.text_projection)
    assert torch.equal(parts.encoders.clip.visual.proj, theirs.visual.proj)
    assert "1 left as initialised (text_projection)" in caplog.text
    assert "1 not used (extra.weight)" in caplog.text


def test_foreign_objects_need_leave(theirs: Any, tmp_path: Path) -> None:
    foreign = {"state_dict": theirs.state_dict(), "args": argparse.Namespace(lr=1)}
    torch.save(foreign, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"--model\.init_trusted True"):
        created(tmp_path / "w.pt")
    assert same(created(tmp_path / "w.pt", init_trusted=True), theirs)


def test_not_weights(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_text("no")
    torch.save({"a": 1}, tmp_path / "empty.pt")
    cases = {
        "w.pt": r"w\.pt is not a file of weights",
        "empty.pt": r"there is no tensor in it",
    }
    for name, reason in cases.items():
        with pytest.raises(ValueError, match=reason):
            read_weights(tmp_path / name)
    with pytest.raises(ValueError, match=r"no weight file, and no name of weights: none known"):
        find_initial_weights(NAME, str(tmp_path / "nothing.pt"))
    with pytest.raises(ValueError, match=r"laion2b_s34b_b79k"):
        find_initial_weights("ViT-B-32", "laion3b")


def test_names_are_open_clips(theirs: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Its table gives the file and the preprocessing; here the file is already there."""
    path = tmp_path / "w.pt"
    torch.save(theirs.state_dict(), path)
    known = {"file": str(path), "mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, NAME, {"mine": known})
    parts = create_clip(ModelConfig(NAME, init="mine"), seed=1)
    assert same(parts, theirs)
    assert parts.preprocess["mean"] == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match=r"open_clip's weights of .* are mine"):
        find_initial_weights(NAME, "other")
