"""Exports: strict in plain open_clip, in a process that does not know this package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from disco_ds.checkpoint import (
    CheckpointConfig,
    CheckpointWriter,
    Snapshot,
    export,
    step_folder,
)
from disco_ds.checkpoint.tensor_file import TensorSpec, write_tensors
from disco_ds.distributed import World
from disco_ds.models import (
    ModelConfig,
    Temperature,
    TemperatureConfig,
    create_clip,
    full_state_dict,
    model_config_json,
)

MODELS = ("disco-demo-rn", "disco-demo-vit")

LOAD = """
import sys, json, torch, open_clip
for name, file, config, out in json.loads(sys.argv[1]):
    if config:
        open_clip.add_model_config(config)
    model = open_clip.create_model(name, pretrained=file or None)
    model.eval()
    torch.manual_seed(0)
    size = model.visual.image_size
    size = size if isinstance(size, int) else size[0]
    image = torch.randn(2, 3, size, size)
    text = torch.randint(1, 9, (2, model.context_length))
    with torch.no_grad():
        features = model.encode_image(image), model.encode_text(text)
    torch.save({"features": features, "scale": model.logit_scale.detach()}, out)
assert "disco_ds" not in sys.modules
"""


def run_with(
    folder: Path, model: str, *, steps: tuple[int, ...] = (1,), bias: bool = False
) -> Path:
    """A run folder with checkpoints of randomly moved weights."""
    parts = create_clip(ModelConfig(model), seed=0)
    temperature = Temperature(TemperatureConfig(), bias=-3.0 if bias else None)
    config = CheckpointConfig(keep_last=10)
    writer = CheckpointWriter(folder / "checkpoints", config, World())
    for step in steps:
        torch.manual_seed(step)
        state = parts.encoders.state_dict()
        moved = {
            name: t + 0.01 * torch.randn_like(t) if t.is_floating_point() else t + step
            for name, t in state.items()
        }
        writer.save(
            Snapshot(
                step=step,
                model=full_state_dict(moved, temperature),
                optimizer={},
                rank_state={},
                shared={
                    "model": model,
                    "model_config": model_config_json(model, logit_bias=bias),
                    "preprocess": parts.preprocess,
                    "epoch": 0.5,
                },
            )
        )
    return folder


def features_of(folder: Path, model: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What our encoders make of the same inputs as :data:`LOAD`."""
    parts = create_clip(ModelConfig(model, init=str(folder / "model.safetensors")), seed=3)
    parts.encoders.eval()
    torch.manual_seed(0)
    image = torch.randn(2, 3, *parts.image_size)
    text = torch.randint(1, 9, (2, 12))
    with torch.no_grad():
        return parts.encoders(image, text)


def load_in_open_clip(folder: Path, jobs: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Load each (model name, weight file, configuration file) in one process without us."""
    outs = [str(folder / f"out-{number}.pt") for number in range(len(jobs))]
    arguments = json.dumps([(*job, out) for job, out in zip(jobs, outs, strict=True)])
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    subprocess.run([sys.executable, "-c", LOAD, arguments], check=True, env=environment, cwd=folder)
    return [dict(torch.load(out)) for out in outs]


def test_plain_open_clip_computes_the_same(tmp_path: Path) -> None:
    jobs, expected = [], []
    for model in MODELS:
        run = run_with(tmp_path / model, model)
        for form in ("w.pt", "w.safetensors", "folder"):
            output = export(run, tmp_path / model / form)
            if form == "folder":
                jobs.append((f"local-dir:{output}", "", ""))
            else:
                # open_clip names a configuration after its file: the model's name.
                config = tmp_path / model / f"{model}.json"
                config.write_text(output.with_suffix(".json").read_text())
                jobs.append((model, str(output), str(config)))
            expected.append(features_of(step_folder(run / "checkpoints", 1), model))
    run = run_with(tmp_path / "bias", "disco-demo-vit", bias=True)
    folder = export(run, tmp_path / "hf")
    assert load_file(folder / "open_clip_model.safetensors")["logit_bias"].item() == -3.0
    jobs.append((f"local-dir:{folder}", "", ""))
    expected.append(features_of(step_folder(run / "checkpoints", 1), "disco-demo-vit"))
    for found, features in zip(load_in_open_clip(tmp_path, jobs), expected, strict=True):
        for own, other in zip(found["features"], features, strict=True):
            assert torch.allclose(own, other, rtol=0, atol=1e-6)
        assert found["scale"].shape == ()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("form", ["w.pt", "w.safetensors"])
def test_other_dtypes(tmp_path: Path, dtype: str, form: str) -> None:
    run = run_with(tmp_path / "run", "disco-demo-rn")
    output = export(run, tmp_path / form, dtype=dtype)  # type: ignore[arg-type]
    state = load_file(output) if form.endswith("s") else torch.load(output)["state_dict"]
    exact = load_file(step_folder(run / "checkpoints", 1) / "model.safetensors")
    assert state.keys() == exact.keys()
    wanted = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    for name, tensor in state.items():
        keeps = ".running_" in name or "num_batches" in name
        assert tensor.dtype == (exact[name].dtype if keeps else wanted)
        assert torch.equal(tensor, exact[name].to(tensor.dtype))
        assert tensor.shape == exact[name].shape


def test_averages(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", "disco-demo-rn", steps=(1, 2, 3))
    folders = [step_folder(run / "checkpoints", step) for step in (2, 3)]
    by_count = load_file(export(run, tmp_path / "a.safetensors", average_last=2))
    by_name = torch.load(export(folders, tmp_path / "b.pt"))["state_dict"]
    older, newer = (load_file(folder / "model.safetensors") for folder in folders)
    for name, tensor in by_count.items():
        assert torch.equal(tensor, by_name[name])
        if tensor.is_floating_point():
            mean = (older[name].double() + newer[name].double()) / 2
            assert torch.equal(tensor, mean.float())
        else:
            assert torch.equal(tensor, newer[name])


def test_refusals(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", "disco-demo-rn", steps=(1, 2))
    other = run_with(tmp_path / "other", "disco-demo-vit")
    (tmp_path / "clip.json").write_text('{"mine": 1}')
    cases = [
        (r"w\.ckpt: an export ends in", lambda: export(run, tmp_path / "w.ckpt")),
        (r"no complete checkpoint", lambda: export(tmp_path / "none", tmp_path / "w.pt")),
        (r"only checkpoints of one model", lambda: export([run, other], tmp_path / "w.pt")),
        (r"average_last 3: .* has 2", lambda: export(run, tmp_path / "w.pt", average_last=3)),
        (r"clip\.json is there and no model", lambda: export(run, tmp_path / "clip.pt")),
        (
            r"needs one run folder",
            lambda: export([run, other], tmp_path / "w.pt", average_last=2),
        ),
    ]
    for reason, call in cases:
        with pytest.raises(ValueError, match=reason):
            call()
    path = step_folder(run / "checkpoints", 2) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged"):
        export(run, tmp_path / "w.pt")
    assert not list(tmp_path.glob("w.*")) and not list(tmp_path.glob(".w*"))


def test_written_one_by_one_reads_as_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.tensor(1.5, dtype=torch.bfloat16),
        "c": torch.arange(7),
        "empty": torch.zeros(0, 4, dtype=torch.float16),
        "d": torch.tensor([True, False]),
    }
    specs = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    with (tmp_path / "own").open("wb") as file:
        write_tensors(file, specs, tensors.values())
    save_file(tensors, tmp_path / "theirs")
    own, theirs = load_file(tmp_path / "own"), load_file(tmp_path / "theirs")
    assert own.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert own[name].dtype == tensor.dtype and own[name].shape == tensor.shape
        assert torch.equal(own[name], tensor)


MEASURE = """
import resource, sys
from pathlib import Path
from disco_ds.checkpoint import export
export(Path(sys.argv[1]), Path(sys.argv[2]))
# Before the first time: imports. Anonymous memory only, file pages are the system's to drop.
status = Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in status if line.startswith("RssAnon")))
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """64 tensors of 4 MiB, under an address space that could not hold them all twice."""
    weights = {f"w{i}": torch.full((1024, 1024), float(i)) for i in range(64)}
    writer = CheckpointWriter(tmp_path / "checkpoints", CheckpointConfig(), World())
    shared = {"model": "m", "model_config": "{}", "preprocess": {}, "epoch": 0.0}
    writer.save(Snapshot(1, weights, {}, {}, shared))
    del weights
    for form in ("w.safetensors", "w.pt"):
        found = subprocess.run(
            [sys.executable, "-c", MEASURE, str(tmp_path), str(tmp_path / form)],
            check=True,
            capture_output=True,
            text=True,
        )
        baseline = subprocess.run(
            [sys.executable, "-c", MEASURE.replace("export(Path", "(Path"), "a", "b"],
            check=True,
            capture_output=True,
            text=True,
        )
        grown_mib = (int(found.stdout) - int(baseline.stdout)) / 1024
        assert grown_mib < 100, grown_mib
    assert json.loads((tmp_path / "w.json").read_text()) == {}
