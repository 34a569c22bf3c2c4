"""``disco-ds plan``: will it fit, how far can it go, what does a step cost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from disco_ds.losses.base import Gather, WireDtype
from disco_ds.losses.disco import DiscoConfig, GradientReduction
from disco_ds.losses.fastclip import FastCLIPConfig
from disco_ds.losses.fastclip_objective import Version
from disco_ds.losses.siglip import SigLIPConfig
from disco_ds.models import ModelConfig
from disco_ds.optim import OptimConfig, OptimizerName
from disco_ds.output import check_writable
from disco_ds.planner.cost import Hardware
from disco_ds.planner.engines import check_engine
from disco_ds.planner.plan import Plan, check_card, check_model, make_plan
from disco_ds.planner.plot import plot_memory
from disco_ds.planner.request import STRATEGIES, LossConfig, PlanRequest
from disco_ds.planner.solve import cheapest, largest_batch, remedy
from disco_ds.planner.table import full_table, rows_table, trace_table
from disco_ds.planner.trace import Trace
from disco_ds.planner.units import parse_bytes, parse_flops, parse_rate
from disco_ds.strategies.config import EngineConfig, Precision
from disco_ds.strategies.ds_config import read_comm_hook, read_ds_config
from disco_ds.strategies.ds_keys import check_keys

DONE, DOES_NOT_FIT = 0, 1


@dataclass(frozen=True)
class PlanCommand:
    """Memory, traffic and time floor of a training step, from shapes; no GPU needed.

    Exit status 0: it fits. 1: it does not. 2: the question makes no sense.
    """

    gpus: int
    """Number of GPUs (ranks)."""

    gpu_memory: str
    """Memory of one, such as 40GiB or 80GB."""

    model: str = "ViT-B-32"
    """Model name: any of open_clip's, or disco-demo-vit / disco-demo-rn."""

    global_batch_size: int | None = None
    """Pairs per optimizer step, over all GPUs; may be left out with --solve."""

    strategy: str = "zero2"
    """single, ddp, fsdp2, zero0 to zero3, zero2_offload, zero3_offload."""

    deepspeed_config: Path | None = None
    """DeepSpeed JSON of a zero strategy; that of ds_configs/ when not given."""

    precision: Precision = "bf16"
    """Arithmetic of the encoders."""

    micro_batch_size: int | None = None
    """Pairs per forward and GPU; all at once when not given."""

    activation_checkpointing: bool = False
    """Recompute transformer blocks in the backward pass."""

    checkpoint_every: int = 1
    """With activation checkpointing: recompute every so many blocks (1: all)."""

    reduce_every_micro_batch: bool = False
    """Reduce gradients after each micro-batch."""

    optimizer: OptimizerName = "adamw"
    """Optimizer, for its state."""

    loss: Literal["disco", "siglip", "fastclip"] = "disco"
    """Contrastive loss."""

    gather: Gather = "all"
    """all: every GPU keeps all features during the loss; ring: they pass by."""

    gradient_reduction: GradientReduction = "scalar_gather"
    """Loss disco: how feature gradients arrive."""

    wire_dtype: WireDtype | None = None
    """Dtype of features on the wire."""

    tile_size: int | None = None
    """Rows and columns of a tile of logits."""

    fastclip_version: Version = "v3"
    """Loss fastclip: its version, for its tables."""

    num_samples: int = 0
    """Loss fastclip: samples of the data set, for its tables."""

    link: str = "25GB/s"
    """Rate between nodes, per GPU."""

    intra: str = "300GB/s"
    """Rate inside a node, per GPU."""

    gpus_per_node: int = 8
    """GPUs that the inside rate joins."""

    flops: str = "312T"
    """Peak operations per second of one GPU in this precision."""

    mfu: float = 0.4
    """Share of the peak that is reached."""

    slack: float = 0.05
    """Allocator slack, as a share of the peak of live tensors (an assumption)."""

    reserved: str = "768MiB"
    """CUDA context and NCCL buffers (an assumption)."""

    solve: bool = False
    """Find the largest global batch, and the cheapest setting for --global_batch_size."""

    compare: bool = False
    """One row per strategy."""

    trace: bool = False
    """Run the real step on fake tensors and compare."""

    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print JSON."""

    plot: Path | None = None
    """Write a plot of memory against batch for ours, DisCo-CLIP's and open_clip's loss."""

    def run(self) -> int:
        """Plan; returns the exit status.

        Raises:
            ValueError: the question makes no sense, naming flag and value.
        """
        self._check_questions()
        if self.plot is not None:
            check_writable(self.plot, "--plot")
        hardware = self._hardware()
        check_model(self.model)
        request = self._request()
        if not self.compare:
            check_engine(request)
        if not self.solve and not self.compare:
            check_card(request, hardware)
        report: dict[str, Any] = {}
        texts: list[str] = []
        fits = True
        if self.solve:
            fits = self._solve(request, hardware, report, texts)
        elif self.compare:
            fits = self._compare(request, hardware, report, texts)
        else:
            fits = self._plan(request, hardware, report, texts)
        if self.plot is not None:
            plot_memory(request, hardware, self.plot)
            texts.append(f"plot: {self.plot}")
            report["plot"] = str(self.plot)
        text = json.dumps(report, indent=2) if self.as_json else "\n\n".join(texts)
        print(text)  # noqa: T201  (a command's output)
        return DONE if fits else DOES_NOT_FIT

    # The three questions.

    def _plan(
        self, request: PlanRequest, hardware: Hardware, report: dict[str, Any], texts: list[str]
    ) -> bool:
        plan = make_plan(request, hardware)
        texts.append(full_table(plan))
        report.update(as_json(plan))
        if not plan.fits and (other := remedy(request, hardware)) is not None:
            texts.append("what fits, changed as little as possible:\n" + rows_table([other]))
            report["remedy"] = as_json(other)
        if self.trace:
            from disco_ds.planner.trace import trace

            traced = trace(request)
            texts.append(trace_table(plan, traced))
            report["trace"] = trace_json(traced)
        return plan.fits

    def _compare(
        self, request: PlanRequest, hardware: Hardware, report: dict[str, Any], texts: list[str]
    ) -> bool:
        names = [name for name in STRATEGIES if (name == "single") == (self.gpus == 1)]
        plans, refused = [], []
        for name in names:
            row = request.with_(strategy=name, ds_config=None)
            try:
                check_engine(row)
            except ValueError as error:
                refused.append(f"{name}: {error}")
                continue
            plans.append(make_plan(row, hardware))
        texts.append("\n".join([rows_table(plans), *refused]))
        report["refused"] = refused
        report["strategies"] = [as_json(plan) for plan in plans]
        return any(plan.fits for plan in plans)

    def _solve(
        self, request: PlanRequest, hardware: Hardware, report: dict[str, Any], texts: list[str]
    ) -> bool:
        largest = largest_batch(request, hardware, micro_batch_size=self.micro_batch_size)
        if largest is None:
            check_card(request, hardware)
        else:
            texts.append(
                f"largest global batch with these settings: {largest.request.global_batch_size}\n"
                + rows_table([largest])
            )
            report["largest"] = as_json(largest)
        if self.global_batch_size is None:
            return largest is not None
        best = cheapest(request, hardware)
        report["cheapest"] = None if best is None else as_json(best)
        if best is None:
            texts.append(f"no setting fits a global batch of {self.global_batch_size}")
            return False
        texts.append(
            f"cheapest setting for a global batch of {self.global_batch_size} (lowest time floor "
            "that fits)\n" + rows_table([best])
        )
        return True

    # From flags.

    def _check_questions(self) -> None:
        """Refuse flags that would be left unanswered."""
        asked = [f"--{name}" for name in ("solve", "compare", "trace") if getattr(self, name)]
        if len(asked) > 1:
            raise ValueError(f"{' and '.join(asked)}: one at a time, leave out the others")
        if asked and asked[0] != "--trace" and self.deepspeed_config is not None:
            raise ValueError(
                f"{asked[0]} looks at several strategies, --deepspeed_config "
                f"{self.deepspeed_config} is for one: leave one of them out"
            )
        disco, fastclip = self.loss == "disco", self.loss == "fastclip"
        conditions = [
            ("gradient_reduction", disco, "--loss disco"),
            ("fastclip_version", fastclip, "--loss fastclip"),
            ("num_samples", fastclip, "--loss fastclip"),
            ("checkpoint_every", self.activation_checkpointing, "--activation_checkpointing"),
        ]
        for name, has_effect, needed in conditions:
            value = getattr(self, name)
            if not has_effect and value != getattr(PlanCommand, name):
                raise ValueError(f"--{name} {value}: has no effect without {needed}")

    def _hardware(self) -> Hardware:
        if not 0 < self.mfu <= 1:
            raise ValueError(f"--mfu {self.mfu:g}: must be above 0 and at most 1")
        if not 0 <= self.slack < 1:
            raise ValueError(f"--slack {self.slack:g}: must be at least 0 and below 1")
        if self.gpus_per_node < 1:
            raise ValueError(f"--gpus_per_node {self.gpus_per_node}: must be at least 1")
        return Hardware(
            memory=parse_bytes(self.gpu_memory, "--gpu_memory"),
            link=parse_rate(self.link, "--link"),
            intra=parse_rate(self.intra, "--intra"),
            gpus_per_node=self.gpus_per_node,
            flops=parse_flops(self.flops, "--flops"),
            mfu=self.mfu,
            slack=self.slack,
            reserved=parse_bytes(self.reserved, "--reserved", lowest=0),
        )

    def _request(self) -> PlanRequest:
        if self.global_batch_size is None and not self.solve:
            raise ValueError("--global_batch_size is missing (or add --solve to find the largest)")
        if self.checkpoint_every < 1:
            raise ValueError(f"--checkpoint_every {self.checkpoint_every}: must be at least 1")
        if self.loss == "fastclip" and self.num_samples < 1:
            raise ValueError(
                f"--num_samples {self.num_samples}: --loss fastclip keeps numbers per sample, "
                "say how many the data set has"
            )
        request = PlanRequest(
            model=ModelConfig(
                self.model,
                activation_checkpointing=self.activation_checkpointing,
                checkpoint_every=self.checkpoint_every,
            ),
            global_batch_size=(
                max(2, self.gpus) if self.global_batch_size is None else self.global_batch_size
            ),
            world_size=self.gpus,
            micro_batch_size=self.micro_batch_size,
            precision=self.precision,
            strategy=self.strategy,
            loss=self._loss(),
            optim=OptimConfig(name=self.optimizer),
            engine=EngineConfig(reduce_every_micro_batch=self.reduce_every_micro_batch),
            num_samples=self.num_samples,
        )
        if self.deepspeed_config is None:
            return request
        given = read_ds_config(self.deepspeed_config)
        check_keys(str(self.deepspeed_config), given)
        stage = given.get("zero_optimization", {}).get("stage", 0)
        name = f"zero{stage}"
        if request.stage is not None and request.with_(ds_config=given).offloads:
            name += "_offload" * (f"{name}_offload" in STRATEGIES)
        if name != self.strategy:
            raise ValueError(
                f"--deepspeed_config {self.deepspeed_config} is one for {name}, but --strategy is "
                f"{self.strategy}: use --strategy {name}"
            )
        read_comm_hook(str(self.deepspeed_config), given)
        return replace(request, ds_config=given, ds_source=str(self.deepspeed_config))

    def _loss(self) -> LossConfig:
        common: dict[str, Any] = {
            "gather": self.gather,
            "tile_size": self.tile_size,
            "wire_dtype": self.wire_dtype,
        }
        if self.tile_size is not None and self.tile_size < 1:
            raise ValueError(f"--tile_size {self.tile_size}: must be at least 1")
        if self.loss == "siglip":
            return SigLIPConfig(**common)
        if self.loss == "fastclip":
            return FastCLIPConfig(version=self.fastclip_version, **common)
        if self.gather == "ring" and self.gradient_reduction != "scalar_gather":
            raise ValueError(
                f"--gather ring: needs --gradient_reduction scalar_gather, not "
                f"{self.gradient_reduction}"
            )
        return DiscoConfig(gradient_reduction=self.gradient_reduction, **common)


def as_json(plan: Plan) -> dict[str, Any]:
    """A plan in plain numbers; bytes and seconds."""
    request = plan.request
    return {
        "simulated": "closed forms from shapes; nothing was measured",
        "model": request.model.name,
        "activation_checkpointing": request.model.activation_checkpointing,
        "strategy": request.strategy,
        "precision": request.precision,
        "gpus": request.world_size,
        "global_batch_size": request.global_batch_size,
        "local_batch_size": request.local_batch_size,
        "micro_batch_size": request.micro_batch,
        "loss": {"name": request.loss.name, "gather": request.loss.gather}
        | {"tile_size": request.loss.tile_size},
        "hardware": asdict(plan.hardware),
        "memory": {
            "at_rest": plan.memory.at_rest,
            "phases": plan.memory.phases,
            "host": plan.memory.host,
            "peak_phase": plan.memory.peak_phase,
            "peak_of_tensors": plan.memory.peak,
            "needed": plan.needed,
        },
        "traffic": [asdict(entry) for entry in plan.traffic],
        "time_floor": {
            "compute": plan.time.compute,
            "link": plan.time.link,
            "link_by_phase": plan.time.by_phase,
            "overlapped": plan.time.overlapped,
            "serial": plan.time.serial,
        },
        "fits": plan.fits,
        "margin": plan.margin,
    }


def trace_json(traced: Trace) -> dict[str, Any]:
    """A trace in plain numbers."""
    return {
        "simulated": "the real step on fake tensors; nothing was measured",
        "peak": traced.step.peak.bytes,
        "parts": traced.step.peak.parts,
        "phases": {name: peak.bytes for name, peak in traced.step.phases.items()},
        "at_rest": traced.step.at_rest,
        "traffic": [asdict(entry) for entry in traced.step.traffic],
        "seconds": traced.seconds,
    }
