"""What is planned: one training step of one model on so many ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from disco_ds.losses.disco import DiscoConfig
from disco_ds.losses.fastclip import FastCLIPConfig
from disco_ds.losses.siglip import SigLIPConfig
from disco_ds.models import ModelConfig
from disco_ds.optim import OptimConfig
from disco_ds.strategies.config import EngineConfig, Precision
from disco_ds.strategies.ds_config import RunNumbers

LossConfig = DiscoConfig | SigLIPConfig | FastCLIPConfig

STRATEGIES = (
    *("single", "ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3"),
    *("zero2_offload", "zero3_offload"),
)
_OFFLOAD = {"device": "cpu", "pin_memory": True}
_BUCKET = 50_000_000


def shipped_ds_config(strategy: str) -> dict[str, Any]:
    """What ``ds_configs/<strategy>.json`` says about memory and communication."""
    stage = int(strategy.removeprefix("zero")[0])
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= {
            "reduce_bucket_size": _BUCKET,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_scatter": True,
        }
    if stage in (1, 2):
        zero["allgather_bucket_size"] = _BUCKET
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": _BUCKET,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 1_000_000_000,
            "sub_group_size": 1_000_000_000,
        }
    if strategy.endswith("offload"):
        zero["offload_optimizer"] = _OFFLOAD
        if stage == 3:
            zero["offload_param"] = _OFFLOAD
    config: dict[str, Any] = {"zero_optimization": zero, "communication_data_type": "fp32"}
    if stage == 0:
        config["torch_autocast"] = {"enabled": "auto", "dtype": "auto"}
    return config


@dataclass(frozen=True)
class PlanRequest:
    """One step: model, batch, ranks, engine and loss."""

    model: ModelConfig
    global_batch_size: int
    world_size: int = 1
    micro_batch_size: int | None = None
    """Pairs per forward and rank; all at once when None."""
    precision: Precision = "bf16"
    strategy: str = "ddp"
    """One of :data:`STRATEGIES`."""
    loss: LossConfig = field(default_factory=DiscoConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    ds_config: Mapping[str, Any] | None = None
    """DeepSpeed JSON as given; that of ``ds_configs/`` when None."""
    ds_source: str | None = None
    """Its file, for messages."""
    num_samples: int = 0
    """Samples of the data set, for the tables of FastCLIP."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"--strategy {self.strategy}: choose from {', '.join(STRATEGIES)}")
        if self.world_size < 1:
            raise ValueError(f"--gpus {self.world_size}: must be at least 1")
        if self.strategy == "single" and self.world_size > 1:
            raise ValueError(
                f"--strategy single on --gpus {self.world_size}: choose ddp, fsdp2 or a zero stage"
            )
        if self.global_batch_size < 2:
            raise ValueError(
                f"--global_batch_size {self.global_batch_size}: a contrastive loss needs at least "
                "2 pairs"
            )
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise ValueError(f"--micro_batch_size {self.micro_batch_size}: must be at least 1")
        size, rest = divmod(self.global_batch_size, self.world_size)
        if rest:
            nearest = [str(n * self.world_size) for n in (size, size + 1) if n]
            raise ValueError(
                f"--global_batch_size {self.global_batch_size} does not divide by --gpus "
                f"{self.world_size}: use {' or '.join(nearest)}"
            )

    @property
    def local_batch_size(self) -> int:
        """Pairs per rank and step."""
        return self.global_batch_size // self.world_size

    @property
    def micro_batch(self) -> int:
        """Pairs per forward and rank."""
        return min(self.local_batch_size, self.micro_batch_size or self.local_batch_size)

    @property
    def micro_batches(self) -> int:
        """Forwards per step and rank (one more each when there are several)."""
        return -(-self.local_batch_size // self.micro_batch)

    @property
    def stage(self) -> int | None:
        """ZeRO stage, or None for the other engines."""
        return int(self.strategy[4]) if self.strategy.startswith("zero") else None

    @property
    def given_ds_config(self) -> dict[str, Any]:
        """The DeepSpeed JSON of this plan; empty for other engines."""
        if self.stage is None:
            return {}
        return dict(self.ds_config or shipped_ds_config(self.strategy))

    @property
    def zero(self) -> dict[str, Any]:
        """Its ``zero_optimization`` section."""
        section: dict[str, Any] = self.given_ds_config.get("zero_optimization", {})
        return section

    @property
    def in_host(self) -> frozenset[str]:
        """What DeepSpeed keeps in host memory: ``optimizer`` and ``param``."""
        sections = {kind: self.zero.get(f"offload_{kind}") or {} for kind in ("optimizer", "param")}
        return frozenset(k for k, v in sections.items() if v.get("device", "none") != "none")

    @property
    def offloads(self) -> bool:
        """Part of the state lies in host memory."""
        return self.engine.cpu_offload or bool(self.in_host)

    @property
    def numbers(self) -> RunNumbers:
        """What the DeepSpeed JSON must agree with."""
        return RunNumbers(
            global_batch_size=self.global_batch_size,
            world_size=self.world_size,
            micro_batch_size=self.micro_batch,
            precision=self.precision,
            max_grad_norm=self.optim.max_grad_norm,
        )

    @property
    def autocast(self) -> bool:
        """Weights stay fp32 and are cast operation by operation."""
        if self.precision == "fp32" or self.strategy == "fsdp2":
            return False
        if self.stage is None:
            return True
        section = self.given_ds_config.get("torch_autocast", {})
        return section.get("enabled", False) in (True, "auto")

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight as the forward of the engine sees it."""
        return 4 if self.precision == "fp32" or self.autocast else 2

    def with_(self, **changes: Any) -> PlanRequest:
        """A copy that differs in these fields."""
        return replace(self, **changes)
