"""``disco-ds evaluate``: every kind of weights, every kind of set, and clear refusals."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from demo_run import disco_ds, two_ranks, workplace
from safetensors.torch import load_file, save_file
from shards import write_shards

from disco_ds.checkpoint import export
from disco_ds.evaluation.command import EvaluateCommand, table
from disco_ds.evaluation.weights import find_weights, load_model
from disco_ds.models import register_model_configs

MODEL = "disco-demo-vit"


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    register_model_configs()
    torch.manual_seed(0)
    return open_clip.create_model(MODEL, load_weights=False).eval()


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    return write_shards(tmp_path / "pairs", num_shards=2, per_shard=10)


def values(command: EvaluateCommand, output: Path) -> dict[str, float]:
    assert command.run() == 0
    found: dict[str, float] = json.loads(output.read_text())["values"]
    return found


def test_any_form_of_open_clip_weights(
    model: torch.nn.Module, tmp_path: Path, pairs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As training writes them, bare, in a Hugging Face folder, in another layout: one result."""
    state = model.state_dict()
    training, bare, safe = (
        tmp_path / name for name in ("train.pt", "bare.pth", "safe.safetensors")
    )
    torch.save({"name": "x", "state_dict": {f"module.{k}": v for k, v in state.items()}}, training)
    torch.save(state, bare)
    save_file({key: value.contiguous() for key, value in state.items()}, safe)
    folder = tmp_path / "hf"
    folder.mkdir()
    shutil.copy(safe, folder / "open_clip_model.safetensors")
    config = {"model_cfg": open_clip.get_model_config(MODEL), "preprocess_cfg": {}}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    custom = tmp_path / "custom.safetensors"
    shutil.copy(safe, custom)
    own_config = {**open_clip.get_model_config(MODEL), "custom_text": True}
    custom.with_suffix(".json").write_text(json.dumps(own_config))
    script = tmp_path / "script.pt"
    torch.jit.save(torch.jit.script(_Holder(state)), script)
    output = tmp_path / "found.json"
    found = [
        values(EvaluateCommand(source, (pairs,), model=name, output=output), output)
        for source, name in (
            (training, MODEL),
            (bare, MODEL),
            (safe, MODEL),
            (folder, None),
            (folder / "open_clip_model.safetensors", None),
            (custom, None),
            (script, MODEL),
        )
    ]
    assert all(each == found[0] for each in found)
    assert found[0]["eval/retrieval/num_images"] == 20
    printed = capsys.readouterr().out
    assert "image_to_text_R@1" in printed
    assert str(output) in printed


class _Holder(torch.nn.Module):
    """Parameters under their names, in a form that TorchScript takes."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in state.items():
            *path, last = name.split(".")
            owner: torch.nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            owner.register_buffer(last, value.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_weights_of_siglip_have_a_bias(model: torch.nn.Module, tmp_path: Path) -> None:
    state = {key: value.contiguous() for key, value in model.state_dict().items()}
    path = tmp_path / "siglip.safetensors"
    save_file({**state, "logit_bias": torch.tensor(-4.0)}, path)
    clip = load_model(find_weights(path, MODEL))
    assert "clip.logit_bias" not in dict(clip.encoders.named_parameters())


def test_preprocessing_of_the_weights_counts(model: torch.nn.Module, tmp_path: Path) -> None:
    save_file(
        {k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "w.safetensors"
    )
    config = {
        "model_cfg": open_clip.get_model_config(MODEL),
        "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"},
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    clip = load_model(find_weights(tmp_path, None))
    assert tuple(clip.preprocess["mean"]) == (0.5, 0.5, 0.5)
    assert clip.preprocess["resize_mode"] == "squash"
    assert clip.image_size == (64, 64)


def test_an_exported_folder(tmp_path: Path) -> None:
    run = two_ranks()
    folder = export(run, tmp_path / "folder")
    expected = load_file(run / "checkpoints" / "step_00000040" / "model.safetensors")
    found = load_model(find_weights(folder, None)).encoders.clip.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_run_says_which_model_it_is() -> None:
    with pytest.raises(ValueError, match=r"--model ViT-B-32: .*step_00000040 says which model"):
        find_weights(two_ranks(), "ViT-B-32")


def test_a_run_is_evaluated_on_its_own_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, output = two_ranks(), tmp_path / "found.json"
    monkeypatch.chdir(workplace())
    found = values(EvaluateCommand(run, output=output), output)
    sets = {key.split("/")[1] for key in found}
    assert sets == {"retrieval", "zero_shot_skin_tone", "zero_shot_gender"}
    content = json.loads(output.read_text())
    assert (content["step"], content["source"]) == (40, str(run))
    assert len(content["zero_shot"]["skin_tone"]["classes"]) == 5
    example = content["retrieval"]["retrieval"]["image_to_text"]["worst"][0]
    assert example["picture"].startswith("data:image/jpeg;base64,")
    assert example["rank"] > 1
    assert not any(answer["correct"] for answer in example["answers"][: example["rank"] - 1])


def test_an_image_folder_with_a_users_files(tmp_path: Path) -> None:
    """The skin-tone set as folders of pictures scores as it does from its shards."""
    two_ranks()
    source = workplace() / "data" / "demo" / "zero_shot" / "skin_tone"
    folder, output = tmp_path / "tones", tmp_path / "found.json"
    with tarfile.open(source / "test" / "0.tar") as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
    for name, data in files.items():
        if name.endswith(".png"):
            label = int(files[name.replace(".png", ".cls")])
            (folder / f"class_{label}").mkdir(parents=True, exist_ok=True)
            (folder / f"class_{label}" / name).write_bytes(data)
    command = EvaluateCommand(
        two_ranks(),
        (str(folder), str(source)),
        classes=str(source / "classnames.txt"),
        templates=str(source / "zeroshot_classification_templates.txt"),
        output=output,
    )
    found = values(command, output)
    metrics = [key.rpartition("/")[2] for key in found if "skin_tone" in key]
    assert {"top1", "top5", "mean_per_class"} <= set(metrics)
    for metric in metrics:
        expected = found[f"eval/zero_shot_skin_tone/{metric}"]
        assert found[f"eval/zero_shot_tones/{metric}"] == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "nowhere"}, r"nowhere: no complete checkpoint there \(no such folder\)"),
        ({"source": "x.txt"}, r"x\.txt: weights end in \.safetensors, \.pt"),
        ({"model": None}, r"w\.safetensors: which model is it\? Give --model NAME"),
        ({"model": "ViT-B-33"}, r"--model ViT-B-33: .* nearest: ViT-B-32"),
        ({"model": "disco-demo-rn"}, r"w\.safetensors: cannot load it as the model disco-demo-rn"),
        ({"source": "broken.pt"}, r"broken\.pt: cannot load it as the model"),
        ({"data": ()}, r"--data: nothing to evaluate .* on; name a set"),
        ({"data": ("nowhere.tar",)}, r"nowhere\.tar: no such shard"),
        ({"batch_size": 0}, r"batch_size 0: must be at least 1"),
        ({"chunk_size": 0}, r"chunk_size 0: must be at least 1"),
        ({"output": Path("splits")}, r"--output splits: cannot write there \(it is a folder"),
        ({"data": ("splits",)}, r"train, val are splits, not classes: name one .* splits/val"),
        ({"output": Path("x.txt/found.json")}, r"--output x\.txt/found\.json: cannot write there"),
    ],
)
def test_what_is_wrong_is_said(
    model: torch.nn.Module,
    tmp_path: Path,
    pairs: str,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, "w.safetensors")
    Path("x.txt").touch()
    Path("broken.pt").write_bytes(b"?")
    for name in ("train", "val"):
        Path("splits", name, "cat").mkdir(parents=True)
    arguments = {"source": "w.safetensors", "data": (pairs,), "model": MODEL, **change}
    arguments["source"] = Path(arguments["source"])
    with pytest.raises(ValueError, match=message):
        EvaluateCommand(**arguments).run()


def test_several_retrieval_sets_are_several_results(model: torch.nn.Module, tmp_path: Path) -> None:
    """Never one pool of all of them: no number of it could be compared with anything."""
    weights = tmp_path / "w.safetensors"
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, weights)
    write_shards(tmp_path / "a" / "test", num_shards=1, per_shard=10)
    write_shards(tmp_path / "b" / "test", num_shards=1, per_shard=14)
    sets = tuple(str(tmp_path / name / "test") for name in "ab")
    output = tmp_path / "out.json"
    together = values(EvaluateCommand(weights, sets, MODEL, output), output)
    for name, source, count in (("a_test", sets[0], 10), ("b_test", sets[1], 14)):
        alone = values(EvaluateCommand(weights, (source,), MODEL, output), output)
        assert alone["eval/retrieval/num_images"] == count
        for key, value in alone.items():
            assert together[key.replace("/retrieval/", f"/retrieval_{name}/")] == value
    assert len(together) == 2 * len(alone)


def test_ranks_report_an_error_once() -> None:
    result = disco_ds(
        "evaluate", str(two_ranks()), "--data", "nowhere.tar", "--device", "cpu", ranks=2, expect=1
    )
    assert result.stderr.count("error: ") == 1
    assert "nowhere.tar: no such shard" in result.stderr


def test_table() -> None:
    shown = table({"eval/pets/top1": 0.5, "eval/pets/num_images": 12, "eval/b/median_rank": 3})
    assert [line.split() for line in shown.splitlines()] == [
        ["pets"],
        ["top1", "50.00", "%"],
        ["num_images", "12"],
        ["b"],
        ["median_rank", "3"],
    ]
