"""DeepSpeed ZeRO, stages 0 to 3: the engine does everything but see the batch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from disco_ds.blocks import compile_blocks_, transformer_blocks
from disco_ds.distributed import World
from disco_ds.models import Encoders
from disco_ds.optim import (
    OptimConfig,
    build_optimizer,
    parameter_groups,
    set_learning_rate,
    set_step_count,
    step_tensor,
)
from disco_ds.strategies.base import (
    EngineState,
    StepResult,
    Strategy,
    copy_into,
    ensure_process_group,
    local_rank_of_device,
    persistent_buffers,
)
from disco_ds.strategies.config import EngineConfig
from disco_ds.strategies.gather import Held, gather_on_main
from disco_ds.strategies.loss_scale import LossScaleSpent


class ZeroStrategy(Strategy):
    """A DeepSpeed engine around the encoders, with torch's AdamW.

    Args:
        world: this process.
        ds_config: a configuration resolved by :func:`..ds_config.resolve_ds_config`.
    """

    name = "zero"

    def __init__(
        self, world: World, *, ds_config: Mapping[str, Any], engine: EngineConfig | None = None
    ) -> None:
        super().__init__(world, engine)
        self.ds_config = dict(ds_config)
        self.stage: int = self.ds_config["zero_optimization"].get("stage", 0)

    def check_optimizer(self, optim: OptimConfig) -> None:
        """LAMB needs whole tensors; stages 1 to 3 hand the optimizer flat slices."""
        if optim.name == "lamb" and self.stage > 0:
            raise ValueError(
                f"--optim.name lamb: ZeRO stage {self.stage} splits tensors, so the trust ratios "
                "would be wrong; use ds_configs/zero0.json, --strategy fsdp2 or ddp, or adamw"
            )

    def check_device(self) -> None:
        """DeepSpeed wants fp16 instructions, also from a CPU."""
        import_deepspeed(self.world)
        from deepspeed.accelerator import get_accelerator

        wants_fp16 = bool(self.ds_config.get("fp16", {}).get("enabled"))
        if wants_fp16 and not get_accelerator().is_fp16_supported():
            raise ValueError(
                "--precision fp16: DeepSpeed finds no fp16 arithmetic on this device; "
                "use --precision bf16"
            )

    def setup(self, encoders: Encoders, optim: OptimConfig) -> None:
        """``deepspeed.initialize``: broadcasts the weights of rank 0, shards as the stage says."""
        import_deepspeed(self.world)
        ensure_process_group(self.world)
        if any(hasattr(parameter, "ds_id") for parameter in encoders.parameters()):
            raise ValueError(
                "the model was made under zero.Init, which discards its initialisation"
            )
        encoders = encoders.to(self.world.device)
        if self.config.compile:
            compile_blocks_(transformer_blocks(encoders))
        optimizer = build_optimizer(optim, parameter_groups(encoders, optim))
        self.module = encoders
        with local_rank_of_device(self.world):
            self.engine = self._initialize(encoders, optimizer)
        self._refuse_nonfinite_gradients()
        self.optimizer_steps = 0

    def _initialize(self, encoders: Encoders, optimizer: torch.optim.Optimizer) -> Any:
        import deepspeed

        engine, *_ = deepspeed.initialize(
            model=encoders, optimizer=optimizer, config=self.ds_config, dist_init_required=False
        )
        return engine

    def _refuse_nonfinite_gradients(self) -> None:
        """Stages 1 and 2 look at the gradients before a step with fp16 only, unless told to."""
        if hasattr(self.engine.optimizer, "check_grad_overflow"):
            self.engine.optimizer.check_grad_overflow = True

    def encode(
        self, image: Tensor | None, text: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Features ``[b, d]``, not normalised, through ``engine.forward``."""
        features: tuple[Tensor | None, Tensor | None] = self.engine(image, text)
        return features

    def computing(self) -> AbstractContextManager[object]:
        """torch's autocast, where the configuration has ``torch_autocast``."""
        if not self.engine.torch_autocast_enabled():
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=self.engine.torch_autocast_dtype())

    @contextmanager
    def leaves(self) -> Iterator[dict[str, Tensor]]:
        """The parameters. Stage 3 fills them where they are used, and is told to let go of all."""
        with super().leaves() as found:
            yield found
        self.engine.empty_partition_cache()

    @property
    def hookable(self) -> Any:
        """The engine."""
        return self.engine

    @property
    def _coalesces(self) -> bool:
        """Gradients of several backwards can be reduced together (stages 1 to 3)."""
        return hasattr(self.engine.optimizer, "_coalesce_grad_reduction")

    def accumulate(self) -> AbstractContextManager[None]:
        """Reduce once: coalesced at stages 1 to 3, by hand-set boundaries at stage 0."""
        if not self._coalesces or self.config.reduce_every_micro_batch:
            return nullcontext()
        coalesced: AbstractContextManager[None] = self.engine.coalesce_grad_reduction()
        return coalesced

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Mark the boundary where the engine does not coalesce."""
        if not self._coalesces or self.config.reduce_every_micro_batch:
            self.engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, surrogate: Tensor) -> None:
        """``engine.backward`` without DeepSpeed's division by accumulation steps."""
        self.engine.backward(surrogate, scale_wrt_gas=False)

    def step(self, lr: float) -> StepResult:
        """``engine.step``: clips by the fp32 global norm, updates the master weights."""
        set_learning_rate(self.engine.optimizer, lr)
        # Stage 0 computes no norm unless it clips, and then returns it too late to be trusted.
        norm = _gradient_norm(self.module) if self.stage == 0 else None
        if norm is not None and not math.isfinite(norm) and self._loss_scaler is None:
            self.engine.zero_grad()
            self.engine.optimizer.zero_grad(set_to_none=True)
            return StepResult(grad_norm=norm, skipped=True)
        self._step_engine()
        if not self.engine.was_step_applied():
            return StepResult(grad_norm=float("inf"), skipped=True)
        self.optimizer_steps += 1
        if norm is None:
            norm = float(self.engine.get_global_grad_norm())
        return StepResult(grad_norm=norm, skipped=False)

    def _step_engine(self) -> None:
        try:
            self.engine.step()
        except Exception as error:  # DeepSpeed raises nothing more specific
            if "loss scale already at minimum" not in str(error):
                raise
            raise LossScaleSpent from error

    def state(self) -> EngineState:
        """Gather fp32 masters and moments, see :func:`~disco_ds.strategies.gather.gather_on_main`.

        Frozen parameters of stage 3: one all-gather each.
        """
        keys = self._moment_keys()
        self._link_moments()
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        weights = [self._held(name, parameter) for name, parameter in trained.items()]
        moments = [
            self._held(f"{key}/{name}", parameter, key)
            for name, parameter in trained.items()
            for key in keys
        ]
        parameters = gather_on_main(weights, self.world) | self._untrained()
        return EngineState(
            parameters,
            gather_on_main(moments, self.world),
            self.optimizer_steps,
            self._scale_state(),
        )

    def _untrained(self) -> dict[str, Tensor]:
        """Frozen parameters and buffers, on the main rank."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                continue
            with self._gathered([parameter]):
                if self.world.is_main:
                    tensors[name] = _on_cpu(parameter)
        if self.world.is_main:
            buffers = persistent_buffers(self.module).items()
            tensors |= {name: buffer.detach().cpu().clone() for name, buffer in buffers}
        return tensors

    def load_state(self, state: EngineState) -> None:
        """Write weights, fp32 masters and moments of every rank's own partition."""
        self._load_weights(state.parameters)
        keys = sorted({name.split("/", 1)[0] for name in state.moments})
        self._prepare_moments(keys, state.optimizer_steps)
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            self._set_partition(parameter, state.parameters[name], None)
            for key in keys:
                self._set_partition(parameter, state.moments[f"{key}/{name}"], key)
        self.optimizer_steps = state.optimizer_steps
        self._load_scale(state.loss_scale)

    @property
    def _loss_scaler(self) -> Any:
        """What holds fp16's dynamic loss scale; None with another precision."""
        for name in ("loss_scaler", "loss_scale_config"):  # stages 1 to 3; stage 0
            holder = getattr(self.engine.optimizer, name, None)
            if getattr(holder, "last_overflow_iter", None) is not None:
                return holder
        return None

    def _scale_state(self) -> dict[str, float] | None:
        if (scaler := self._loss_scaler) is None:
            return None
        good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
        return {"value": float(scaler.cur_scale), "good_steps": good_steps}

    def _load_scale(self, state: Mapping[str, float] | None) -> None:
        if (scaler := self._loss_scaler) is None or state is None:
            return
        scaler.cur_scale = state["value"]
        scaler.cur_iter, scaler.last_overflow_iter = int(state["good_steps"]), -1

    def close(self) -> None:
        """Destroy the engine and its hooks."""
        super().close()
        self.engine.destroy()

    # How DeepSpeed lays out its state. Stage 0 in fp32 hands back the plain torch optimizer;
    # the other stages keep flat fp32 partitions that its tensor-fragment functions address.

    @property
    def _torch_optimizer(self) -> torch.optim.Optimizer:
        inner: torch.optim.Optimizer = getattr(
            self.engine.optimizer, "optimizer", self.engine.optimizer
        )
        return inner

    def _is_flat(self, parameter: nn.Parameter) -> bool:
        return hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")

    def _moment_keys(self) -> list[str]:
        states = self._torch_optimizer.state.values()
        return sorted({key for state in states for key in state if key != "step"})

    def _held(self, name: str, parameter: nn.Parameter, key: str | None = None) -> Held:
        """This rank's part of a trainable parameter's master, or of its moment ``key``."""
        read: Callable[[], Tensor]
        if hasattr(parameter, "ds_id"):
            shape, size = _whole_shape(parameter), _partition(parameter).numel()
            start = min(self.world.rank * size, math.prod(shape))
            count = min(size, math.prod(shape) - start)
            read = partial(_local_part, parameter, key)
        elif not self._is_flat(parameter):
            shape, start, count = parameter.shape, 0, parameter.numel() * self.world.is_main
            whole = parameter if key is None else self._torch_optimizer.state[parameter][key]
            read = whole.detach
        else:
            shape, mapping = parameter.shape, parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:  # all of it is on other ranks
                return Held(name, tuple(shape), torch.float32, 0, 0, torch.Tensor)
            start, count = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
            read = partial(mapping.get_hp_fragment, key)
        return Held(name, tuple(shape), torch.float32, start, count, read)

    @contextmanager
    def _gathered(self, parameters: list[nn.Parameter], *, modify: bool = False) -> Iterator[None]:
        """Whole parameters at stage 3; at the other stages they are whole anyway."""
        if self.stage < 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if modify else None):
            yield

    def _load_weights(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.module.named_parameters():
            with self._gathered([parameter], modify=True):
                copy_into({name: parameter}, values)
        copy_into(persistent_buffers(self.module), values)

    def _prepare_moments(self, keys: list[str], steps: int) -> None:
        """Create the optimizer's (lazily made) state, so that it can be written to."""
        optimizer = self._torch_optimizer
        set_step_count(optimizer, steps)
        for group in optimizer.param_groups:
            for parameter in self._optimizer_parameters(group):
                optimizer.state[parameter] = (
                    {
                        "step": step_tensor(optimizer, parameter, steps),
                        **{key: torch.zeros_like(parameter) for key in keys},
                    }
                    if keys
                    else {}
                )
        self._link_moments()

    def _link_moments(self) -> None:
        """Point each parameter at its part of the flat moments.

        DeepSpeed links them once, after the first group's first step, when the other groups
        have none yet.
        """
        optimizer = self._torch_optimizer
        for parameter in self.module.parameters():
            if (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
                flat = optimizer.param_groups[mapping.param_group_index]["params"][0]
                mapping.set_optim_state_fragment(flat, optimizer.state[flat])

    def _optimizer_parameters(self, group: Mapping[str, Any]) -> list[Tensor]:
        if self.stage == 3:
            # Stage 3 shows its sub-groups to the optimizer one at a time.
            flat: list[Tensor] = self.engine.optimizer.fp32_partitioned_groups_flat
            return flat
        return list(group["params"])

    def _set_partition(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        from deepspeed import utils

        value = value.to(device=self.world.device, dtype=torch.float32)
        if hasattr(parameter, "ds_id"):
            part = _own_part(value, _partition(parameter).numel(), self.world)
            if key is None:
                utils.safe_set_local_fp32_param(parameter, part)
            else:
                utils.safe_set_local_optimizer_state(parameter, part, key)
        elif self._is_flat(parameter):
            if key is None:
                utils.safe_set_full_fp32_param(parameter, value)
            else:
                utils.safe_set_full_optimizer_state(parameter, value, key)
        elif key is not None:
            self._torch_optimizer.state[parameter][key].copy_(value)


def import_deepspeed(world: World) -> Any:
    """Import DeepSpeed without its start-up compilation.

    On CPU hosts it would compile a shared-memory operator (minutes on two cores) that only
    inference uses. Its table of usable operators is asked before compiling: an empty one says no.
    """
    if world.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # Asked for even where no launcher was used.
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    import deepspeed
    import deepspeed.ops

    if "__compatible_ops__" not in vars(deepspeed.ops):
        deepspeed.ops.__compatible_ops__ = {}
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not hasattr(deepspeed.DeepSpeedEngine, "coalesce_grad_reduction"):
        raise ValueError(
            f"deepspeed {deepspeed.__version__} cannot reduce several micro-batches at once: "
            "install deepspeed>=0.19.6"
        )
    return deepspeed


def _gradient_norm(module: nn.Module) -> float:
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients])))


def _partition(parameter: nn.Parameter) -> Tensor:
    part: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
    return part


def _local_part(parameter: nn.Parameter, key: str | None) -> Tensor:
    from deepspeed import utils

    part: Tensor = (
        utils.safe_get_local_fp32_param(parameter)
        if key is None
        else utils.safe_get_local_optimizer_state(parameter, key)
    )
    return part


def _whole_shape(parameter: nn.Parameter) -> torch.Size:
    shape: torch.Size = parameter.ds_shape  # type: ignore[attr-defined]
    return shape


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to(device="cpu", dtype=torch.float32, copy=True)


def _own_part(value: Tensor, numel: int, world: World) -> Tensor:
    """This rank's slice of a flattened tensor, zero-padded: stage 3's layout."""
    padded = torch.zeros(numel * world.world_size, dtype=value.dtype, device=value.device)
    padded[: value.numel()] = value.flatten()
    return padded[world.rank * numel : (world.rank + 1) * numel]
