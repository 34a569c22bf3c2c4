"""Weights to start from (``--model.init``): where they are, what of them fits the model.

open_clip converts what other projects and older releases call their tensors and resizes position
embeddings; here it is made strict, and reported.
"""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

SCALAR_NAMES = ("logit_scale", "logit_bias")
WRAPPER_PARTS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class InitialWeights:
    """A file of weights, and what open_clip knows about it when it has a name there."""

    path: Path
    known: dict[str, Any]


def find_initial_weights(model: str, init: str) -> InitialWeights:
    """The file that ``--model.init`` means: a path, or one of open_clip's names for the model.

    Named weights are downloaded unless they are in open_clip's cache.

    Raises:
        ValueError: neither a file nor a known name, or the download failed.
    """
    import open_clip
    from open_clip.pretrained import download_pretrained, get_pretrained_cfg

    if Path(init).is_file():
        return InitialWeights(Path(init), {})
    names = open_clip.list_pretrained_tags_by_model(model)
    if init not in names:
        known = f"open_clip's weights of {model} are {', '.join(names)}" if names else "none known"
        raise ValueError(f"--model.init {init}: no weight file, and no name of weights: {known}")
    known_of = dict(get_pretrained_cfg(model, init))
    try:
        path = download_pretrained(known_of)
    except Exception as error:
        raise ValueError(
            f"--model.init {init}: cannot download it ({error}); on a machine without network "
            "give the path of a file"
        ) from error
    return InitialWeights(Path(path), known_of)


def load_initial_weights(
    clip: nn.Module, weights: InitialWeights, *, partial: bool = False, trusted: bool = False
) -> dict[str, Tensor]:
    """Load into ``clip``, an open_clip model, and say in the log what was loaded.

    Args:
        clip: the model.
        weights: from :func:`find_initial_weights`.
        partial: load what fits instead of insisting on every tensor.
        trusted: unpickle a file that needs it.

    Returns:
        ``logit_scale`` (a logarithm) and ``logit_bias`` of the file, 0-D, where it has them.

    Raises:
        ValueError: not a weight file, or, unless ``partial``, other tensors than the model's.
    """
    state = _as_open_clip(clip, weights.path, trusted=trusted)
    scalars = {name: state.pop(name).float().reshape(()) for name in SCALAR_NAMES if name in state}
    own = {name: t for name, t in clip.state_dict().items() if name not in SCALAR_NAMES}
    fitting = {n: t for n, t in state.items() if n in own and own[n].shape == t.shape}
    missing = sorted(own.keys() - fitting.keys())
    unused = sorted(state.keys() - fitting.keys())
    if not partial and (missing or unused):
        raise ValueError(
            f"--model.init {weights.path} does not fit the model: {_listed(missing, 'missing')}, "
            f"{_listed(unused, 'unexpected or of another shape')}; load what fits with "
            "--model.init_partial True"
        )
    if not fitting:
        raise ValueError(f"--model.init {weights.path}: not one tensor fits the model")
    clip.load_state_dict(fitting, strict=False)
    _report(weights, fitting, own, missing, unused, scalars)
    return scalars


def _report(
    weights: InitialWeights,
    fitting: dict[str, Tensor],
    own: dict[str, Tensor],
    missing: list[str],
    unused: list[str],
    scalars: dict[str, Tensor],
) -> None:
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in fitting.values()})
    parts = [f"{len(fitting)} of {len(own)} tensors ({', '.join(dtypes)})"]
    parts += [f"{name} {value:.3f}" for name, value in scalars.items()]
    parts += [_listed(names, what) for names, what in ((missing, "left as initialised"),) if names]
    parts += [_listed(unused, "not used")] if unused else []
    logger.info("initial weights %s: %s", weights.path, "; ".join(parts))
    if weights.known.get("quick_gelu"):
        logger.warning(
            "these weights were trained with QuickGELU: unless --model.name ends in -quickgelu, "
            "the model computes something else with them"
        )


def _listed(names: list[str], what: str) -> str:
    if not names:
        return f"none {what}"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{len(names)} {what} ({', '.join(names[:3])}{more})"


def _as_open_clip(clip: Any, path: Path, *, trusted: bool) -> dict[str, Tensor]:
    """Tensors by the names that the model uses, position embeddings of its size."""
    from open_clip.convert import convert_state_dict
    from open_clip.model import (
        convert_to_custom_text_state_dict,
        resize_pos_embed,
        resize_text_pos_embed,
    )

    if path.suffix in (".npz", ".npy"):
        from open_clip.convert import load_big_vision_weights

        load_big_vision_weights(clip, str(path))
        return {name: tensor.clone() for name, tensor in clip.state_dict().items()}
    state: dict[str, Tensor] = dict(convert_state_dict(clip, read_weights(path, trusted=trusted)))
    if "positional_embedding" in state and not hasattr(clip, "positional_embedding"):
        state = convert_to_custom_text_state_dict(state)
    state.pop("text.transformer.embeddings.position_ids", None)
    try:
        resize_pos_embed(state, clip)
        resize_text_pos_embed(state, clip)
    except (AssertionError, RuntimeError, AttributeError) as error:
        logger.debug("position embeddings are left as they are: %s", error)
    return state


def read_weights(path: Path, *, trusted: bool = False) -> dict[str, Tensor]:
    """Tensors of an open_clip ``.pt`` or ``.safetensors`` file, parts of wrappers stripped.

    Raises:
        ValueError: no such file, or not a file of weights. Pickled objects are loaded only from
            a ``trusted`` file.
    """
    if not path.is_file():
        raise ValueError(f"no weight file {path}")
    state = _read(path, trusted=trusted)
    if isinstance(state, nn.Module):  # a TorchScript archive, as OpenAI published its models
        state = {n: t for n, t in state.state_dict().items() if "." in n or n in SCALAR_NAMES}
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict):
        raise ValueError(f"{path} is not a file of weights: it holds a {type(state).__name__}")
    tensors = {_plain_name(name): t for name, t in state.items() if isinstance(t, Tensor)}
    if not tensors:
        raise ValueError(f"{path} is not a file of weights: there is no tensor in it")
    return tensors


def _read(path: Path, *, trusted: bool) -> Any:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=not trusted)
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError) and _is_pickle(path):
            raise ValueError(
                f"{path} holds more than tensors and plain values, and pickled objects can run "
                "any code: if you trust the file, allow it with --model.init_trusted True"
            ) from error
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a file of weights: {reason}") from error


def _is_pickle(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4).startswith((b"PK", b"\x80"))  # torch.save, since 1.6 and before


def _plain_name(name: str) -> str:
    for part in WRAPPER_PARTS:
        name = name.replace(part, "") if part != "module." else name.removeprefix(part)
    return name
