"""Hugging Face accelerate: its launcher and plugins decide, the step stays ours.

accelerate wraps the encoders in DDP, FSDP2 or a DeepSpeed engine; the step then talks to what it
made. accelerate's own ``backward`` is not used: with DeepSpeed it takes the optimizer step as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from disco_ds.blocks import transformer_blocks
from disco_ds.models import Encoders
from disco_ds.strategies.config import Precision
from disco_ds.strategies.ddp import DDPStrategy
from disco_ds.strategies.fsdp2 import FSDP2Strategy
from disco_ds.strategies.zero import ZeroStrategy

if TYPE_CHECKING:
    from accelerate import Accelerator

Kind = Literal["ddp", "fsdp2", "zero"]


def kind_from_environment(environment: Mapping[str, str], deepspeed_config: str | None) -> Kind:
    """What accelerate was told to use, by ``accelerate launch`` or by a DeepSpeed JSON.

    Raises:
        ValueError: FSDP version 1.
    """
    if deepspeed_config or _is_true(environment, "ACCELERATE_USE_DEEPSPEED"):
        return "zero"
    if not _is_true(environment, "ACCELERATE_USE_FSDP"):
        return "ddp"
    if environment.get("FSDP_VERSION", "1") != "2":
        raise ValueError("accelerate's fsdp_version is 1: set fsdp_version: 2 in its file")
    return "fsdp2"


def deepspeed_file(environment: Mapping[str, str], deepspeed_config: str | None) -> str:
    """The DeepSpeed JSON, from the flag or from accelerate's file.

    Raises:
        ValueError: none, or two different ones.
    """
    theirs = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if theirs and deepspeed_config and theirs != deepspeed_config:
        raise ValueError(
            f"--deepspeed_config {deepspeed_config}, but accelerate's deepspeed_config_file is "
            f"{theirs}: leave one out"
        )
    if not (found := deepspeed_config or theirs):
        raise ValueError(
            "accelerate uses DeepSpeed without deepspeed_config_file: name one in its file, or "
            "give --deepspeed_config"
        )
    return found


def check_precision(environment: Mapping[str, str], precision: Precision) -> None:
    """Refuse two opinions on precision.

    Raises:
        ValueError: naming both.
    """
    theirs = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if theirs not in ("no", precision):
        raise ValueError(
            f"accelerate's mixed_precision is {theirs}, but --precision is {precision}: leave "
            "mixed_precision out of accelerate's file, or give the same to --precision"
        )


def _is_true(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() in ("true", "1")


def import_accelerate() -> Any:
    """The package.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import accelerate
    except ImportError as error:
        raise ValueError(
            "--strategy accelerate needs accelerate: pip install 'disco_ds[accelerate]'"
        ) from error
    return accelerate


class AccelerateDDPStrategy(DDPStrategy):
    """DDP as :meth:`Accelerator.prepare` makes it."""

    name = "accelerate (ddp)"

    def _wrap(self, encoders: Encoders) -> nn.Module:
        accelerate = import_accelerate()
        wrapped: nn.Module = accelerate.Accelerator(
            cpu=self.world.device.type == "cpu",
            mixed_precision="no",  # autocast is ours, as everywhere
            kwargs_handlers=[
                accelerate.DistributedDataParallelKwargs(
                    broadcast_buffers=False, gradient_as_bucket_view=True
                )
            ],
        ).prepare(encoders)
        if not isinstance(wrapped, DistributedDataParallel):
            raise ValueError("--strategy accelerate on one process: leave it out (single)")
        return wrapped


class AccelerateFSDP2Strategy(FSDP2Strategy):
    """FSDP2 by accelerate's plugin, with our units, precision and offload."""

    name = "accelerate (fsdp2)"

    def _wrap(self, encoders: Encoders) -> nn.Module:
        accelerator = self._accelerator(self._plugin(encoders))
        # accelerate insists on an optimizer to re-point; ours is made of the wrapped parameters.
        placeholder = torch.optim.SGD(encoders.parameters(), lr=0.0)
        wrapped: nn.Module = accelerator.prepare(encoders, placeholder)[0]
        if not isinstance(wrapped, FSDPModule):
            raise ValueError(
                "accelerate ignores FSDP on this device: use --strategy fsdp2 instead of accelerate"
            )
        return wrapped

    def _plugin(self, encoders: Encoders) -> Any:
        accelerate = import_accelerate()
        return accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=sorted(
                {type(block).__name__ for block in transformer_blocks(encoders)}
            ),
            reshard_after_forward=self.config.reshard_after_forward,
            cpu_offload=self._offload_policy(),
            mixed_precision_policy=self._precision_policy(),
            cpu_ram_efficient_loading=False,
        )

    def _accelerator(self, plugin: Any) -> Accelerator:
        accelerator: Accelerator = import_accelerate().Accelerator(
            cpu=self.world.device.type == "cpu", mixed_precision="no", fsdp_plugin=plugin
        )
        return accelerator


class AccelerateZeroStrategy(ZeroStrategy):
    """The DeepSpeed engine of accelerate's plugin, driven directly."""

    name = "accelerate (zero)"

    def _initialize(self, encoders: Encoders, optimizer: torch.optim.Optimizer) -> Any:
        accelerate = import_accelerate()
        from accelerate.utils import InitProcessGroupKwargs

        engine, _ = accelerate.Accelerator(
            deepspeed_plugin=accelerate.DeepSpeedPlugin(
                hf_ds_config=self.ds_config, zero3_init_flag=False
            ),
            # Without it, accelerate believes to be alone on CPU.
            kwargs_handlers=[InitProcessGroupKwargs(backend=dist.get_backend())],
        ).prepare(encoders, optimizer)
        return engine
