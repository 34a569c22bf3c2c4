from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from disco_ds.models import (
    ModelConfig,
    Temperature,
    TemperatureConfig,
    check_tokenizer,
    check_trainable,
    create_clip,
    full_state_dict,
    split_state_dict,
)


def test_same_seed_same_weights_and_global_state_untouched() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    config = ModelConfig("disco-demo-vit")
    first, second, other = (create_clip(config, seed=s).encoders for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.clip.text_projection, other.clip.text_projection)


def test_encoders_hold_no_scalar_and_state_dict_puts_them_back() -> None:
    import open_clip

    for name in ("disco-demo-vit", "disco-demo-rn"):
        encoders = create_clip(ModelConfig(name), seed=0).encoders
        assert all(parameter.ndim > 0 for parameter in encoders.parameters())
        state = full_state_dict(encoders.state_dict(), Temperature(TemperatureConfig()))
        plain = open_clip.create_model(name, load_weights=False)
        assert {k: v.shape for k, v in state.items()} == {
            k: v.shape for k, v in plain.state_dict().items()
        }
        plain.load_state_dict(state)
        back, scalars = split_state_dict(state)
        assert back.keys() == encoders.state_dict().keys()
        assert scalars["logit_scale"].shape == ()


def test_locked_towers_do_not_train() -> None:
    encoders = create_clip(ModelConfig("disco-demo-vit", lock_image=True), seed=0).encoders
    trainable = {name for name, p in encoders.named_parameters() if p.requires_grad}
    assert trainable
    assert not any(".visual." in name for name in trainable)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_start_from_weights_in_either_scalar_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    state = full_state_dict(
        create_clip(ModelConfig("disco-demo-vit"), seed=7).encoders.state_dict(),
        Temperature(TemperatureConfig(init=50)),
    )
    state["logit_scale"] = state["logit_scale"].reshape(shape)
    path = tmp_path / "weights.pt"
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, path)
    parts = create_clip(ModelConfig("disco-demo-vit", init=str(path)), seed=0)
    assert torch.equal(parts.encoders.clip.text_projection, state["text_projection"])
    temperature = Temperature(TemperatureConfig())
    temperature.load_scalars_(parts.scalars)
    assert temperature()[0].item() == pytest.approx(50)
    assert temperature.logit_scale.shape == ()


class _Object:
    pass


@pytest.mark.parametrize("content", [b"not weights", None, "object", "other model"])
def test_bad_weights_are_refused(tmp_path: Path, content: object) -> None:
    path = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "object":
        torch.save({"state_dict": {}, "args": _Object()}, path)
    elif content == "other model":
        torch.save({"text_projection": torch.zeros(2, 2)}, path)
    with pytest.raises(ValueError, match=r"weights\.pt"):
        create_clip(ModelConfig("disco-demo-vit", init=str(path)), seed=0)


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"--model.name ViT-B32: .*nearest: ViT-B-32$"):
        create_clip(ModelConfig("ViT-B32"), seed=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit-b-32", "nearest: ViT-B-32$"),
        ("hf-hub:laion/CLIP-ViT-B-32", "--model.init, such as laion2b_s34b_b79k or a file"),
        ("coca_ViT-B-32", "captioning loss"),
    ],
)
def test_models_that_are_named_otherwise_or_cannot_be_trained(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_trainable(name)


def test_a_tokenizer_that_is_not_there_is_said_before_workers_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def offline(name: str) -> None:
        raise OSError("couldn't connect to https://huggingface.co\nmore")

    monkeypatch.setattr("open_clip.get_tokenizer", offline)
    check_tokenizer("ViT-B-32")  # open_clip's own needs no network
    with pytest.raises(ValueError, match=r"ViT-B-16-SigLIP: .*SigLIP.*huggingface.co\).*HF_HOME"):
        check_tokenizer("ViT-B-16-SigLIP")


def test_temperature_is_clamped_between_one_and_its_maximum() -> None:
    temperature = Temperature(TemperatureConfig(maximum=50))
    for value, expected in ((10.0, 50.0), (-3.0, 1.0), (math.log(20), 20.0)):
        with torch.no_grad():
            temperature.logit_scale.fill_(value)
        temperature.clamp_()
        assert temperature()[0].item() == pytest.approx(expected, rel=1e-6)


def test_tokenizer_travels_without_its_threads() -> None:
    import pickle

    tokenize = create_clip(ModelConfig("disco-demo-vit"), seed=0).tokenize
    tokens = tokenize(["a cat", "flags"])
    copy = pickle.loads(pickle.dumps(tokenize))  # noqa: S301
    assert copy._tokenizer is None
    assert torch.equal(copy(["a cat", "flags"]), tokens)
    assert tokens.shape == (2, 12)
