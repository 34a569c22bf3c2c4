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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from disco_ds.blocks import checkpoint_blocks_, transformer_blocks

if TYPE_CHECKING:
    from PIL import Image

SCALAR_NAMES = ("logit_scale", "logit_bias")


@dataclass(frozen=True)
class ModelConfig:
    """Which model to train and what of it."""

    name: str = "ViT-B-32"
    """Model name: any of open_clip's, or disco-demo-vit / disco-demo-rn."""

    init: str | None = None
    """Weights to start from: a .pt or .safetensors file with open_clip's names."""

    activation_checkpointing: bool = False
    """Recompute transformer blocks in the backward pass instead of keeping their activations."""

    checkpoint_every: int = 1
    """With activation checkpointing: recompute every so many blocks of a tower (1: all)."""

    checkpoint_towers: Literal["both", "image", "text"] = "both"
    """With activation checkpointing: the towers that recompute."""

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

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self.clip = clip
        for module in clip.modules():
            if type(module) is nn.BatchNorm2d:
                module.__class__ = _BatchNorm2dFp32

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

    def train(self, mode: bool = True) -> Encoders:
        """Training mode, but for BatchNorm without trainable weights: a locked tower stays put."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, _BatchNorm2dFp32) and not module.weight.requires_grad:
                module.eval()
        return self


class _BatchNorm2dFp32(nn.BatchNorm2d):
    """BatchNorm in fp32 whatever its weights' dtype: engines cast weights, but not statistics."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``[b, c, h, w]``; the result has the input's dtype."""
        if self.weight.dtype in (torch.float32, torch.float64):
            return super().forward(input.to(self.weight.dtype)).to(input.dtype)
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return nn.functional.batch_norm(
            input.float(),
            self.running_mean,
            self.running_var,
            self.weight.float(),
            self.bias.float(),
            training=self.training,
            momentum=self.momentum or 0.0,
            eps=self.eps,
        ).to(input.dtype)


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
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise ValueError(f"--model.name {name}: open_clip has no such model; nearest: {near[0]}")


def create_clip(config: ModelConfig, *, seed: int) -> ClipParts:
    """Build the encoders in fp32 on the CPU, equal on every rank, with transforms and tokenizer.

    Raises:
        ValueError: unknown model name, or ``init`` does not fit the model.
    """
    import open_clip

    check_model_name(config.name)
    with torch.random.fork_rng(devices=[]), _quiet(logging.getLogger()):
        torch.manual_seed(seed)
        clip = open_clip.create_model(config.name, precision="fp32", load_weights=False)
    scalars: dict[str, Tensor] = {}
    if config.init is not None:
        load_weights_(clip, Path(config.init))
        _, scalars = split_state_dict({k: v.clone() for k, v in clip.state_dict().items()})
    train_transform, eval_transform = _transforms(clip)
    encoders = Encoders(_without_scalars(clip))
    _lock(encoders, config)
    if config.activation_checkpointing:
        _checkpoint_activations(encoders.clip, config)
    tokenize = _Tokenizer(config.name)
    size: Any = encoders.clip.visual.image_size  # type: ignore[union-attr]
    image_size = (size, size) if isinstance(size, int) else (size[0], size[1])
    return ClipParts(encoders, train_transform, eval_transform, tokenize, image_size, scalars)


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
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


def load_weights_(clip: nn.Module, path: Path) -> None:
    """Load an open_clip weight file strictly into ``clip``, weights only.

    Raises:
        ValueError: no such file, not a weight file, or other names or shapes than the model's.
    """
    state = read_weights(path)
    own = clip.state_dict()
    for name in SCALAR_NAMES:
        if name in state and name in own:
            state[name] = state[name].reshape(own[name].shape)
    wrong = [
        name
        for name in own.keys() | state.keys()
        if name not in own or name not in state or own[name].shape != state[name].shape
    ]
    if wrong:
        raise ValueError(
            f"{path} does not fit the model: {len(wrong)} tensors missing, unexpected or of "
            f"another shape, such as {', '.join(sorted(wrong)[:3])}"
        )
    clip.load_state_dict(state)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of an open_clip ``.pt`` or ``.safetensors`` file, wrapper prefixes stripped.

    Raises:
        ValueError: no such file, or not a file of weights (pickled objects are never loaded).
    """
    if not path.is_file():
        raise ValueError(f"no weight file {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: dict[str, Any] = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} is not a file of weights: {error}") from error
    state = state.get("state_dict", state)
    return {name.removeprefix("module.").removeprefix("_orig_mod."): t for name, t in state.items()}


def model_config_json(name: str) -> str:
    """open_clip's configuration of a model as JSON, to lie beside an export."""
    import open_clip

    register_model_configs()
    return json.dumps(open_clip.get_model_config(name), indent=2)
