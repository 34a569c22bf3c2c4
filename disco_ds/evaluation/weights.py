"""From what ``disco-ds evaluate`` is given to a model: runs, checkpoints, open_clip weights."""

from __future__ import annotations

import difflib
import json
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from disco_ds.checkpoint import (
    HF_CONFIG,
    MODEL_FILE,
    STATE_FILE,
    find_checkpoint,
    verify_checkpoint,
)
from disco_ds.models import ClipParts, as_parts, quiet_logger, register_model_configs

logger = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
OWN_NAME = "evaluated-model"
"""What open_clip calls a configuration that came with the weights."""


@dataclass(frozen=True)
class Weights:
    """Where weights are and which model they are of."""

    file: Path
    model_name: str | None = None
    """One of open_clip's."""
    model_config: dict[str, Any] | None = None
    """open_clip's configuration, where one came along."""
    preprocess: dict[str, Any] | None = None
    run_config: dict[str, Any] | None = None
    """Settings of the training run that saved it."""
    step: int | None = None
    run_dir: Path | None = None


def find_weights(source: Path, model: str | None) -> Weights:
    """Understand a run folder, a checkpoint, a Hugging Face folder or an open_clip weight file.

    Args:
        source: what the user named.
        model: open_clip's name of the model, for files that do not come with a configuration.

    Raises:
        ValueError: nothing there, a damaged checkpoint, or which model it is remains unknown.
    """
    if source.is_dir() and (source / HF_CONFIG).is_file():
        files = [p for p in sorted(source.iterdir()) if p.suffix in WEIGHT_SUFFIXES]
        if not files:
            raise ValueError(f"{source}: no weights ({', '.join(WEIGHT_SUFFIXES)}) in the folder")
        return _with_config_of(source / HF_CONFIG, files[0], model)
    if source.is_file():
        return _of_file(source, model)
    folder = find_checkpoint(source, str(source))
    assert folder is not None
    if model is not None:
        raise ValueError(f"--model {model}: {folder} says which model it is; leave the flag out")
    verify_checkpoint(folder)
    state = json.loads((folder / STATE_FILE).read_text())
    return Weights(
        folder / MODEL_FILE,
        model_config=json.loads(state["model_config"]),
        preprocess=state.get("preprocess"),
        run_config=state["config"],
        step=state["step"],
        run_dir=folder.parent.parent,
    )


def _of_file(file: Path, model: str | None) -> Weights:
    if file.suffix not in WEIGHT_SUFFIXES:
        raise ValueError(f"{file}: weights end in {', '.join(WEIGHT_SUFFIXES)}")
    beside = [file.with_suffix(".json"), file.parent / HF_CONFIG]
    config = next((path for path in beside if path.is_file()), None)
    if model is None and config is not None:
        return _with_config_of(config, file, model)
    if model is None:
        raise ValueError(
            f"{file}: which model is it? Give --model NAME (such as ViT-B-32), or put its "
            f"configuration beside it as {beside[0].name}"
        )
    return Weights(file, model_name=model)


def _with_config_of(config_file: Path, file: Path, model: str | None) -> Weights:
    if model is not None:
        return Weights(file, model_name=model)
    try:
        content = json.loads(config_file.read_text())
        config = content.get("model_cfg", content)
        if not {"embed_dim", "vision_cfg", "text_cfg"} <= config.keys():
            raise ValueError("it lacks embed_dim, vision_cfg or text_cfg")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{config_file}: not a model configuration of open_clip ({error}); give --model NAME"
        ) from error
    return Weights(file, model_config=config, preprocess=content.get("preprocess_cfg"))


def load_model(weights: Weights) -> ClipParts:
    """The model in fp32 on the CPU, with its transform and tokenizer. Loads no pickled code.

    Raises:
        ValueError: open_clip has no such model, or the weights do not fit it.
    """
    import open_clip
    from open_clip.model import set_model_preprocess_cfg
    from open_clip.transform import merge_preprocess_dict

    name = _registered_name(weights)
    # A bias of its own takes in SigLIP's weights; open_clip fills it with 0 for the others.
    with quiet_logger(logging.getLogger()):
        clip = open_clip.create_model(
            name,
            precision="fp32",
            load_weights=False,
            pretrained_image=False,
            pretrained_text=False,
            init_logit_bias=0.0,
        )
    if weights.preprocess:
        visual: Any = clip.visual
        settings = merge_preprocess_dict(visual.preprocess_cfg, weights.preprocess)
        set_model_preprocess_cfg(clip, settings)
    _load(clip, weights.file, name)
    for parameter in clip.parameters():
        parameter.requires_grad_(False)
    return as_parts(clip, name, {})


def _registered_name(weights: Weights) -> str:
    import open_clip

    register_model_configs()
    if weights.model_config is not None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{OWN_NAME}.json"
            path.write_text(json.dumps(weights.model_config))
            open_clip.add_model_config(str(path))
        # open_clip reads its list of files again whenever one is added.
        return OWN_NAME
    assert weights.model_name is not None
    known = open_clip.list_models()
    if weights.model_name not in known:
        near = difflib.get_close_matches(weights.model_name, known, n=1, cutoff=0.0)
        raise ValueError(
            f"--model {weights.model_name}: open_clip has no such model; nearest: {near[0]}"
        )
    return weights.model_name


def _load(clip: nn.Module, file: Path, name: str) -> None:
    from open_clip import load_checkpoint

    try:
        try:
            load_checkpoint(clip, str(file), weights_only=True)
        except RuntimeError as error:
            if "TorchScript" not in str(error):
                raise
            with tempfile.TemporaryDirectory() as folder:
                load_checkpoint(clip, str(_plain_copy(file, Path(folder))), weights_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())
        known = "" if name == OWN_NAME else f" {name}"
        raise ValueError(f"{file}: cannot load it as the model{known}: {reason[:300]}") from error


def _plain_copy(archive: Path, folder: Path) -> Path:
    """The tensors of a TorchScript archive, as OpenAI published CLIP, in a file of their own."""
    from safetensors.torch import save_file

    state: dict[str, Tensor] = torch.jit.load(archive, map_location="cpu").state_dict()
    extra = ("input_resolution", "context_length", "vocab_size")
    path = folder / "weights.safetensors"
    save_file({k: v.float().contiguous() for k, v in state.items() if k not in extra}, path)
    return path
