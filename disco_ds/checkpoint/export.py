"""Weights of a run for everybody else: an open_clip file, or a Hugging Face folder.

One process, no GPU. Tensors are memory-mapped, changed and written one at a time, so memory does
not grow with the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

from disco_ds.checkpoint import torch_file
from disco_ds.checkpoint.find import find_checkpoint
from disco_ds.checkpoint.folder import MODEL_FILE, STATE_FILE, complete_folders
from disco_ds.checkpoint.read import verify_checkpoint
from disco_ds.checkpoint.tensor_file import TensorSpec, write_tensors

HF_WEIGHTS, HF_CONFIG = "open_clip_model.safetensors", "open_clip_config.json"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DtypeName = Literal["fp32", "fp16", "bf16"]


@dataclass(frozen=True)
class ExportCommand:
    """Write the weights of a run or checkpoint for open_clip.

    A file gets the model's configuration beside it (FILE.json). Several sources are averaged.
    """

    sources: tyro.conf.Positional[tuple[Path, ...]]
    """Run or checkpoint folders of one model; several are averaged with equal weight."""

    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """What to write: FILE.pt, FILE.safetensors, or a folder (no ending) as Hugging Face has it."""

    dtype: DtypeName = "fp32"
    """Type of the written floating-point tensors; BatchNorm's statistics stay fp32."""

    average_last: int = 1
    """Average the newest so many checkpoints of the one run folder given."""

    def run(self) -> int:
        """Export; returns the exit status."""
        path = export(self.sources, self.output, dtype=self.dtype, average_last=self.average_last)
        print(path)  # noqa: T201
        return 0


def export(
    sources: Path | Sequence[Path],
    output: Path,
    *,
    dtype: DtypeName = "fp32",
    average_last: int = 1,
) -> Path:
    """Write a checkpoint's weights to ``output`` with open_clip's names and 0-D scalars.

    ``open_clip.create_model(NAME, pretrained=FILE)`` loads a file, and
    ``open_clip.create_model("local-dir:FOLDER")`` a folder, strictly.

    Raises:
        ValueError: no complete checkpoint, checkpoints of different models, or another ending.
    """
    if output.suffix not in (".pt", ".safetensors", ""):
        raise ValueError(
            f"{output}: an export ends in .pt or .safetensors, or is a folder (no ending)"
        )
    given = [sources] if isinstance(sources, Path) else list(sources)
    folders = _checkpoints(given, average_last)
    states = [_verified_state(folder) for folder in folders]
    _check_same_model(folders, states)
    state, weights = states[-1], [folder / MODEL_FILE for folder in folders]
    if output.suffix:
        _check_is_ours(output.with_suffix(".json"), state["model_config"])
        output.parent.mkdir(parents=True, exist_ok=True)
        _write_file(weights, output, dtype, state)
        output.with_suffix(".json").write_text(state["model_config"] + "\n")
    else:
        output.mkdir(parents=True, exist_ok=True)
        _write_file(weights, output / HF_WEIGHTS, dtype, state)
        config = {
            "model_cfg": json.loads(state["model_config"]),
            "preprocess_cfg": state["preprocess"],
        }
        (output / HF_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return output


def _checkpoints(sources: Sequence[Path], average_last: int) -> list[Path]:
    if not sources:
        raise ValueError("export: name a run folder or a checkpoint folder")
    if average_last < 1:
        raise ValueError(f"--average_last {average_last}: must be positive")
    if average_last == 1:
        return [found for source in sources if (found := find_checkpoint(source, str(source)))]
    if len(sources) > 1 or not (sources[0] / "checkpoints").is_dir():
        raise ValueError(f"--average_last {average_last} needs one run folder as the source")
    folders = complete_folders(sources[0] / "checkpoints")
    if len(folders) < average_last:
        raise ValueError(
            f"--average_last {average_last}: {sources[0]} has {len(folders)} checkpoints; "
            "--checkpoint.keep_last keeps more"
        )
    return folders[-average_last:]


def _check_is_ours(path: Path, content: str) -> None:
    """The file beside the weights: an earlier export's may be replaced."""
    if not path.exists():
        return
    try:
        found = path.read_text()
        is_ours = found.strip() == content or "embed_dim" in json.loads(found)
    except (OSError, ValueError, TypeError):
        is_ours = False
    if not is_ours:
        raise ValueError(
            f"{path} is there and no model configuration: an export writes one under that name; "
            "choose another name or folder"
        )


def _verified_state(folder: Path) -> dict[str, Any]:
    verify_checkpoint(folder)
    state: dict[str, Any] = json.loads((folder / STATE_FILE).read_text())
    return state


def _check_same_model(folders: Sequence[Path], states: Sequence[Mapping[str, Any]]) -> None:
    for folder, state in zip(folders, states, strict=True):
        if state["model_config"] != states[0]["model_config"]:
            raise ValueError(
                f"{folder} holds a {state['model']}, {folders[0]} a {states[0]['model']}: only "
                "checkpoints of one model can be averaged"
            )


def _write_file(
    weights: Sequence[Path], output: Path, dtype: DtypeName, state: Mapping[str, Any]
) -> None:
    """Complete or absent, as a checkpoint is."""
    from safetensors.torch import load_file

    partial = output.with_name(f".{output.name}.partial")
    merged = output.with_name(f".{output.name}.merged")
    try:
        if output.suffix == ".safetensors":
            _write_safetensors(weights, partial, dtype)
        else:
            source = weights[0]
            if len(weights) > 1 or dtype != "fp32":
                source = merged
                _write_safetensors(weights, merged, dtype)
            content = {"name": state["model"], "epoch": state["epoch"]}
            torch_file.save({**content, "state_dict": load_file(source)}, partial)
        partial.replace(output)
    finally:
        for path in (partial, merged):
            path.unlink(missing_ok=True)


def _write_safetensors(weights: Sequence[Path], output: Path, dtype: DtypeName) -> None:
    from safetensors import safe_open

    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in weights]
        names = sorted(files[0].keys())
        specs = [_spec(name, files[0].get_tensor(name), dtype) for name in names]
        with output.open("wb") as file:
            write_tensors(file, specs, _averages(files, specs))


def _spec(name: str, tensor: Tensor, dtype: DtypeName) -> TensorSpec:
    keeps = not tensor.is_floating_point() or ".running_" in name
    return TensorSpec(name, tensor.dtype if keeps else DTYPES[dtype], tuple(tensor.shape))


def _averages(files: Sequence[Any], specs: Sequence[TensorSpec]) -> Iterator[Tensor]:
    """One tensor at a time; counters (BatchNorm's number of batches) come from the newest."""
    for spec in specs:
        newest: Tensor = files[-1].get_tensor(spec.name)
        if len(files) == 1 or not newest.is_floating_point():
            yield newest.to(spec.dtype)
            continue
        total = newest.double()
        for file in files[:-1]:
            total += file.get_tensor(spec.name).double()
        yield (total / len(files)).to(spec.dtype)
