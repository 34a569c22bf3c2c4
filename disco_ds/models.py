"""Models from open_clip, split into encoders (wrapped, sharded) and temperature (never sharded).

open_clip keeps ``logit_scale`` (and SigLIP's ``logit_bias``) as 0-dimensional parameters of the
model. ZeRO and FSDP2 refuse such parameters, and ZeRO undoes a clamp that is not written to its
fp32 master copy. Here they live in :class:`Temperature`, replicated in fp32 outside whatever
wraps the encoders, and go back under open_clip's names and shapes in :func:`full_state_dict`.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from disco_ds.batch_norm import BatchNormMode, use_batch_norm_
from disco_ds.blocks import checkpoint_blocks_, transformer_blocks
from disco_ds.weights import (
    SCALAR_NAMES,
    find_initial_weights,
    load_initial_weights,
)

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True)
class ModelConfig:
    """Which model to train and what of it."""

    name: str = "ViT-B-32"
    """Model name: any of open_clip's, or disco-demo-vit / disco-demo-rn."""

    init: str | None = None
    """Weights to start from: a file with open_clip's names, a run or checkpoint folder of ours, or
    the name of weights that open_clip knows for the model (downloaded)."""

    init_partial: bool = False
    """Load what fits of ``init``; the rest stays as initialised. Either way the log says what."""

    init_trusted: bool = False
    """Load ``init`` even if it needs unpickling, which can run any code: for trusted files."""

    activation_checkpointing: bool = False
    """Recompute transformer blocks in the backward pass instead of keeping their activations."""

    checkpoint_every: int = 1
    """With activation checkpointing: recompute every so many blocks of a tower (1: all)."""

    checkpoint_towers: Literal["both", "image", "text"] = "both"
    """With activation checkpointing: the towers that recompute."""

    batch_norm: BatchNormMode = "local"
    """ResNets: normalise with this rank's micro-batch, with those of all ranks (synced), or with
    the running statistics, which then do not change (frozen)."""

    lock_image: bool = False
    """Freeze the image tower."""

    lock_text: bool = False
    """Freeze the text tower."""

    def __post_init__(self) -> None:
        if self.checkpoint_every < 1:
            raise ValueError(f"--model.checkpoint_every {self.checkpoint_every}: must be positive")
        if self.lock_image and self.lock_text:
            raise ValueError("--model.lock_image and --model.lock_text: nothing left to train")


@dataclass(frozen=True)
class TemperatureConfig:
    """The learnable temperature: ``logit_scale = exp(parameter)``."""

    init: float = 1 / 0.07
    """Starting logit_scale (linear)."""

    minimum: float = 1.0
    """Lower bound of logit_scale (linear), applied after every step."""

    maximum: float = 100.0
    """Upper bound of logit_scale (linear), applied after every step."""

    learnable: bool = True
    """False keeps logit_scale at its starting value."""

    lr: float | None = None
    """Peak learning rate of the temperature; the encoders' when not given."""

    def __post_init__(self) -> None:
        if not 0 < self.minimum <= self.init <= self.maximum:
            raise ValueError(
                f"--temperature.init {self.init:g}: must lie between --temperature.minimum "
                f"{self.minimum:g} and --temperature.maximum {self.maximum:g} (a logit_scale, such "
                "as 14.3, not its logarithm)"
            )


class Encoders(nn.Module):
    """The two towers of a CLIP model; ``forward`` is the only way in, for every strategy.

    ``forward(image, text)`` takes ``[b, 3, S, S]`` floats and ``[b, context]`` int64 tokens,
    either of them None, and returns their features ``[b, d]``, not normalised, in the dtype of
    the model (None for a missing input).
    """

    def __init__(self, clip: nn.Module, *, batch_norm: BatchNormMode = "local") -> None:
        super().__init__()
        self.clip = clip
        use_batch_norm_(clip, batch_norm)

    def forward(
        self, image: Tensor | None = None, text: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Encode what is given."""
        dtype = next(self.parameters()).dtype
        image_features = text_features = None
        if image is not None:
            image_features = self.clip.encode_image(image.to(dtype))  # type: ignore[operator]
        if text is not None:
            text_features = self.clip.encode_text(text)  # type: ignore[operator]
        return image_features, text_features


class Temperature(nn.Module):
    """``logit_scale`` (kept as its logarithm) and ``logit_bias``: fp32 scalars on every rank."""

    def __init__(self, config: TemperatureConfig, *, bias: float | None = None) -> None:
        super().__init__()
        self.bounds = (math.log(config.minimum), math.log(config.maximum))
        self.is_bounded = config.learnable
        self.logit_scale = nn.Parameter(
            torch.tensor(math.log(config.init)), requires_grad=config.learnable
        )
        self.logit_bias = None if bias is None else nn.Parameter(torch.tensor(bias))

    @torch.no_grad()
    def load_scalars_(self, scalars: Mapping[str, Tensor]) -> None:
        """Take over ``logit_scale`` (log) and ``logit_bias``, 0-D or ``[1]``, where given."""
        for name, value in scalars.items():
            parameter = getattr(self, name)
            if parameter is not None:
                parameter.copy_(value.reshape(()))

    def forward(self) -> tuple[Tensor, Tensor | None]:
        """The linear ``logit_scale`` and the bias (or None), both 0-D and differentiable."""
        return self.logit_scale.exp(), self.logit_bias

    @torch.no_grad()
    def clamp_(self) -> None:
        """Bring a learnable ``logit_scale`` back between its bounds."""
        if self.is_bounded:
            self.logit_scale.clamp_(*self.bounds)


@dataclass(frozen=True)
class ClipParts:
    """What :func:`create_clip` makes of a model name."""

    encoders: Encoders
    train_transform: Callable[[Image.Image], Tensor]
    eval_transform: Callable[[Image.Image], Tensor]
    tokenize: Callable[[list[str]], Tensor]
    image_size: tuple[int, int]
    scalars: dict[str, Tensor]
    """``logit_scale`` (log) and ``logit_bias`` of the weights in ``init``; empty without."""

    preprocess: dict[str, Any]
    """open_clip's preprocessing settings: mean, std, interpolation, resize mode."""


def register_model_configs() -> None:
    """Make this package's model configurations known to open_clip."""
    import open_clip

    for entry in resources.files("disco_ds").joinpath("model_configs").iterdir():
        open_clip.add_model_config(str(entry))


def check_model_name(name: str) -> None:
    """Refuse a model that open_clip does not know.

    Raises:
        ValueError: naming the nearest known model.
    """
    import open_clip

    register_model_configs()
    known = open_clip.list_models()
    if name in known:
        return
    if name.startswith("hf-hub:"):
        raise ValueError(
            f"--model.name {name}: name the model as open_clip does, such as ViT-B-32, and its "
            "weights with --model.init, such as laion2b_s34b_b79k or a file"
        )
    by_case = {other.lower(): other for other in known}
    near = [by_case[n] for n in difflib.get_close_matches(name.lower(), by_case, n=1, cutoff=0.0)]
    raise ValueError(f"--model.name {name}: open_clip has no such model; nearest: {near[0]}")


def check_tokenizer(name: str) -> None:
    """Load a tokenizer that comes from elsewhere, so that workers need not find it missing.

    Raises:
        ValueError: naming the model and the remedy.
    """
    import open_clip

    text = (open_clip.get_model_config(name) or {}).get("text_cfg", {})
    if not (source := text.get("hf_tokenizer_name") or text.get("hf_model_name")):
        return
    try:
        open_clip.get_tokenizer(name)
    except (OSError, ImportError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"--model.name {name}: cannot load its tokenizer {source} "
            f"({reason}): pip install transformers, and load it once where "
            "there is a network; HF_HOME is where it is kept, HF_HUB_OFFLINE=1 uses only that"
        ) from error


def check_trainable(name: str) -> None:
    """Refuse a model with parts that no contrastive loss trains.

    Raises:
        ValueError: naming it.
    """
    import open_clip

    check_model_name(name)
    if "multimodal_cfg" in (open_clip.get_model_config(name) or {}):
        raise ValueError(
            f"--model.name {name}: CoCa's decoder learns from a captioning loss, which disco_ds "
            "does not have; train its towers as a CLIP model, such as ViT-B-32"
        )


def create_clip(config: ModelConfig, *, seed: int, device: str = "cpu") -> ClipParts:
    """Build the encoders in fp32 on the CPU, equal on every rank, with transforms and tokenizer.

    ``device="meta"`` builds shapes without values.

    Raises:
        ValueError: unknown model name, or ``init`` does not fit the model.
    """
    import open_clip

    check_model_name(config.name)
    with torch.random.fork_rng(devices=[]), quiet_logger(logging.getLogger()), torch.device(device):
        torch.manual_seed(seed)
        clip = open_clip.create_model(
            config.name, precision="fp32", load_weights=False, device=device
        )
    scalars: dict[str, Tensor] = {}
    if config.init is not None:
        scalars = _initialise_(clip, config)
    parts = as_parts(clip, config.name, scalars, batch_norm=config.batch_norm)
    _lock(parts.encoders, config)
    if config.activation_checkpointing:
        _checkpoint_activations(parts.encoders.clip, config)
    return parts


def _initialise_(clip: nn.Module, config: ModelConfig) -> dict[str, Tensor]:
    """Load ``config.init``; the file's temperature."""
    from open_clip.model import set_model_preprocess_cfg
    from open_clip.transform import merge_preprocess_dict

    assert config.init is not None
    weights = find_initial_weights(config.name, config.init)
    scalars = load_initial_weights(
        clip, weights, partial=config.init_partial, trusted=config.init_trusted
    )
    visual: Any = clip.visual
    preprocess = {k: v for k, v in weights.known.items() if k in ("mean", "std", "interpolation")}
    if preprocess:
        set_model_preprocess_cfg(clip, merge_preprocess_dict(visual.preprocess_cfg, preprocess))
    return scalars


def as_parts(
    clip: nn.Module,
    name: str,
    scalars: dict[str, Tensor],
    *,
    batch_norm: BatchNormMode = "local",
) -> ClipParts:
    """Take an open_clip model apart; ``name`` finds its tokenizer."""
    train_transform, eval_transform = _transforms(clip)
    encoders = Encoders(_without_scalars(clip), batch_norm=batch_norm)
    size: Any = encoders.clip.visual.image_size  # type: ignore[union-attr]
    return ClipParts(
        encoders,
        train_transform,
        eval_transform,
        _Tokenizer(name),
        (size, size) if isinstance(size, int) else (size[0], size[1]),
        scalars,
        _preprocess(encoders.clip),
    )


def _preprocess(clip: nn.Module) -> dict[str, Any]:
    visual: Any = clip.visual
    names = ("mean", "std", "interpolation", "resize_mode")
    return {name: visual.preprocess_cfg[name] for name in names if name in visual.preprocess_cfg}


@contextmanager
def quiet_logger(logger: logging.Logger) -> Iterator[None]:
    """Without open_clip's warning that a model to be trained starts untrained."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _transforms(clip: nn.Module) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    from open_clip.transform import PreprocessCfg, image_transform_v2

    visual: Any = clip.visual
    settings = PreprocessCfg(**visual.preprocess_cfg)
    return image_transform_v2(settings, is_train=True), image_transform_v2(settings, is_train=False)


class _Tokenizer:
    """open_clip's tokenizer of a model, made at first use in each process.

    Data workers get the name instead of the tokenizer: fast tokenizers own threads, which do
    not survive a fork.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self._tokenizer: Callable[[list[str]], Tensor] | None = None

    def __call__(self, texts: list[str]) -> Tensor:
        if self._tokenizer is None:
            import open_clip

            register_model_configs()
            self._tokenizer = open_clip.get_tokenizer(self.model_name)
        return self._tokenizer(texts)

    def __getstate__(self) -> dict[str, Any]:
        return {"model_name": self.model_name, "_tokenizer": None}


def decode_captions(model_name: str, tokens: Tensor) -> list[str]:
    """What a model's tokenizer kept of captions: ``[n, context]`` token ids to n texts."""
    import open_clip

    register_model_configs()
    tokenizer: Any = open_clip.get_tokenizer(model_name)
    if not hasattr(tokenizer, "eot_token_id"):
        return [
            str(text) for text in tokenizer.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        ]
    texts = []
    for row in tokens.tolist():
        end = row.index(tokenizer.eot_token_id) if tokenizer.eot_token_id in row else len(row)
        texts.append(tokenizer.decode(row[1:end]).strip())
    return texts


def _without_scalars(clip: nn.Module) -> nn.Module:
    for name in SCALAR_NAMES:
        if getattr(clip, name, None) is not None:
            delattr(clip, name)
            setattr(clip, name, None)
    return clip


def _lock(encoders: Encoders, config: ModelConfig) -> None:
    image_names = {name for name, _ in encoders.named_parameters() if ".visual." in name}
    for name, parameter in encoders.named_parameters():
        locked = config.lock_image if name in image_names else config.lock_text
        parameter.requires_grad_(not locked)
    encoders.train()


def _checkpoint_activations(clip: nn.Module, config: ModelConfig) -> None:
    visual: Any = clip.visual
    image_blocks = transformer_blocks(visual)
    text_blocks = [block for block in transformer_blocks(clip) if block not in image_blocks]
    for tower, blocks in (("image", image_blocks), ("text", text_blocks)):
        if config.checkpoint_towers not in ("both", tower):
            continue
        if not checkpoint_blocks_(blocks, every=config.checkpoint_every):
            warnings.warn(
                f"activation checkpointing has no effect on the {tower} tower: it has no blocks "
                f"to recompute (ResNets have none) or fewer than {config.checkpoint_every}",
                stacklevel=2,
            )


def initial_logit_bias(loss: str, global_batch_size: int) -> float | None:
    """Starting bias: SigLIP's prior that one pair in B is positive; the others have none."""
    return -math.log(global_batch_size - 1) if loss == "siglip" else None


def full_state_dict(encoders: Mapping[str, Tensor], temperature: Temperature) -> dict[str, Tensor]:
    """Encoder tensors (named as in :class:`Encoders`) and temperature, as open_clip has them."""
    state = {name.removeprefix("clip."): tensor for name, tensor in encoders.items()}
    state["logit_scale"] = temperature.logit_scale.detach().cpu().clone()
    if temperature.logit_bias is not None:
        state["logit_bias"] = temperature.logit_bias.detach().cpu().clone()
    return state


def split_state_dict(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The inverse: tensors named as in :class:`Encoders`, and the temperature's (0-D)."""
    scalars = {name: state[name].reshape(()) for name in SCALAR_NAMES if name in state}
    encoders = {f"clip.{name}": t for name, t in state.items() if name not in SCALAR_NAMES}
    return encoders, scalars


def model_config_json(name: str, *, logit_bias: bool = False) -> str:
    """open_clip's configuration of a model as JSON, to lie beside an export.

    ``logit_bias``: the weights have one, also where the model's own configuration has none.
    """
    import open_clip

    register_model_configs()
    config = open_clip.get_model_config(name)
    if logit_bias:
        config.setdefault("init_logit_bias", 0.0)
    return json.dumps(config, indent=2)
