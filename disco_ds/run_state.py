"""The state of a run, taken apart for a checkpoint and put together again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disco_ds.checkpoint import MODEL_FILE, Snapshot, as_plain, load_checkpoint
from disco_ds.data.loader import TrainLoader
from disco_ds.distributed import World, agreed, gather_objects
from disco_ds.grad_cache import RandomState
from disco_ds.losses.base import ContrastiveLoss
from disco_ds.models import (
    ClipParts,
    Temperature,
    full_state_dict,
    model_config_json,
    split_state_dict,
)
from disco_ds.optim import step_tensor
from disco_ds.run_plan import RunPlan
from disco_ds.strategies.base import EngineState, Strategy

logger = logging.getLogger(__name__)


@dataclass
class Counters:
    """How far a run is."""

    step: int = 0
    """Optimizer steps taken."""

    samples_seen: int = 0
    """Pairs of taken and skipped steps, over all ranks; each pair counts once."""

    skipped_steps: int = 0
    """Steps that the engine refused."""

    skipped_in_a_row: int = 0
    """Refused since the last step taken."""

    total_steps: int = 0
    """Optimizer steps of the whole run."""


@dataclass(frozen=True)
class RunState:
    """Everything of a run that changes from step to step, by the parts that own it."""

    plan: RunPlan
    world: World
    clip: ClipParts
    loader: TrainLoader
    strategy: Strategy
    loss: ContrastiveLoss
    temperature: Temperature
    temperature_optimizer: torch.optim.Optimizer
    counters: Counters

    def snapshot(self) -> Snapshot:
        """The state after the last step, BatchNorm's statistics averaged over ranks. Collective."""
        with self.strategy.keeping_statistics() as statistics:
            self.strategy.average_buffers()
            engine = self.strategy.state()
        positions = gather_objects(self.loader.state_dict(), self.world)
        model = self.plan.config.model.name
        return Snapshot(
            step=self.counters.step,
            model=full_state_dict(engine.parameters, self.temperature),
            optimizer={**_plain_names(engine.moments), **self._temperature_moments()},
            rank_state={
                "random": RandomState.capture(self.world.device).to_plain(),
                "loss": self.loss.rank_state(),
                "hook": self.strategy.hook_state(),
                "statistics": statistics,
            },
            shared={
                "model": model,
                "model_config": self._model_config(),
                "preprocess": self.clip.preprocess,
                "data_fingerprint": self.plan.index.fingerprint,
                "data": TrainLoader.merge_states(positions),
                "epoch": self.loader.epoch,
                "counters": asdict(self.counters),
                "optimizer_steps": engine.optimizer_steps,
                "loss_scale": engine.loss_scale,
                "loss": self.plan.config.loss.name,
                "config": as_plain(self.plan.config),
            },
        )

    def _model_config(self) -> str:
        has_bias = self.temperature.logit_bias is not None
        return model_config_json(self.plan.config.model.name, logit_bias=has_bias)

    def _temperature_moments(self) -> dict[str, Tensor]:
        return {
            f"{key}/{name}": value.detach().cpu().clone()
            for name, parameter in self.temperature.named_parameters()
            for key, value in self.temperature_optimizer.state.get(parameter, {}).items()
            if key != "step"
        }

    def restore(self, folder: Path) -> Mapping[str, Any]:
        """Continue from a checkpoint; returns the settings of the run that saved. Collective.

        Raises:
            AgreedError: on all ranks: damaged, or of another model, loss, optimizer or data set.
        """
        snapshot = load_checkpoint(folder, self.world)
        shared = snapshot.shared
        with agreed(self.world):
            self._check_fits(folder, shared)
        self._restore_weights(snapshot)
        with agreed(self.world):
            self.loss.load_rank_states([state["loss"] for state in snapshot.rank_states])
            self.loader.load_state_dict(shared["data"])
        for name, value in shared["counters"].items():
            setattr(self.counters, name, value)
        self._restore_own(snapshot)
        logger.info(
            "resumed from %s after step %d%s",
            folder,
            snapshot.step,
            _what_changed(shared["config"], as_plain(self.plan.config)),
        )
        return dict(shared["config"])

    def _check_fits(self, folder: Path, shared: Mapping[str, Any]) -> None:
        config = self.plan.config
        expected = {
            "model": (config.model.name, "--model.name"),
            "loss": (config.loss.name, "loss:NAME"),
            "model_config": (self._model_config(), "--model.name"),
            "data_fingerprint": (self.plan.index.fingerprint, "--data.shards"),
        }
        for key, (own, flag) in expected.items():
            if shared[key] != own:
                raise ValueError(
                    f"--resume {folder}: the checkpoint's {key.replace('_', ' ')} is "
                    f"{shared[key]}, this run's is {own}. Give the former {flag}, or start anew "
                    f"from its weights with --model.init {folder / MODEL_FILE}"
                )
        if (then := shared["config"]["optim"]["name"]) != config.optim.name:
            raise ValueError(
                f"--resume {folder}: the checkpoint holds the moments of {then}; continue with "
                f"--optim.name {then}, or start anew from its weights with --model.init "
                f"{folder / MODEL_FILE}"
            )

    def _restore_weights(self, snapshot: Snapshot) -> None:
        encoders, scalars = split_state_dict(snapshot.model)
        moments = {
            name.replace("/", "/clip.", 1): value
            for name, value in snapshot.optimizer.items()
            if name.split("/", 1)[1] not in scalars
        }
        shared = snapshot.shared
        self.strategy.load_state(
            EngineState(encoders, moments, shared["optimizer_steps"], shared["loss_scale"])
        )
        self.temperature.load_scalars_(scalars)
        for name, parameter in self.temperature.named_parameters():
            state = {
                key: value.to(self.world.device)
                for full_name, value in snapshot.optimizer.items()
                for key, _, owner in [full_name.partition("/")]
                if owner == name
            }
            if state:
                optimizer = self.temperature_optimizer
                state["step"] = step_tensor(optimizer, parameter, shared["optimizer_steps"])
                optimizer.state[parameter] = state

    def _restore_own(self, snapshot: Snapshot) -> None:
        """What belongs to a rank of as many ranks; else it starts anew, from the mean."""
        if len(snapshot.rank_states) != self.world.world_size:
            return
        own = snapshot.rank_states[self.world.rank]
        RandomState.from_plain(own["random"], self.world.device).restore()
        self.strategy.load_hook_state(own["hook"])
        self.strategy.load_own_statistics(own["statistics"])


def _plain_names(moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the name of the wrapper that holds the model inside :class:`Encoders`."""
    return {name.replace("/clip.", "/", 1): value for name, value in moments.items()}


def _what_changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Settings that differ from those of the checkpoint, for the log."""
    before, after = dict(_flat(then)), dict(_flat(now))
    changed = [
        f"{key} {before.get(key)} -> {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in ("resume", "run_dir", "device")
    ]
    return f"; changed settings: {', '.join(changed)}" if changed else ""


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    return [
        pair
        for key, value in tree.items()
        for pair in (
            _flat(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else [(f"{prefix}{key}", value)]
        )
    ]
