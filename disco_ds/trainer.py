"""The training loop: assembles what the configuration names and takes optimizer steps."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disco_ds.checkpoint import (
    Snapshot,
    as_plain,
    export,
    load_checkpoint,
    save_checkpoint,
)
from disco_ds.config import TrainConfig
from disco_ds.data.loader import Batch, TrainLoader
from disco_ds.distributed import (
    World,
    agreed,
    gather_objects,
    mean_over_ranks_,
    seed_everything,
    sum_over_ranks,
)
from disco_ds.evaluation.run import Evaluator
from disco_ds.grad_cache import NonFiniteLoss, Pairs, RandomState, contrastive_backward
from disco_ds.losses.base import ContrastiveLoss
from disco_ds.metrics import MetricsLog, PlateauWatch, Progress
from disco_ds.models import (
    ClipParts,
    Temperature,
    TemperatureConfig,
    create_clip,
    full_state_dict,
    initial_logit_bias,
    model_config_json,
    split_state_dict,
)
from disco_ds.optim import build_temperature_optimizer, learning_rate, set_learning_rate
from disco_ds.run_plan import RunPlan
from disco_ds.strategies.base import EngineState

logger = logging.getLogger(__name__)

KEEP_GOING = (
    "Nothing was saved from this step; continue from the last checkpoint with --resume latest and "
    "a lower --optim.lr, a longer --optim.warmup_steps, --optim.max_grad_norm 1"
)


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


class TrainingStopped(RuntimeError):
    """Training cannot go on; the same decision on every rank."""


class Trainer:
    """One run: builds its parts from a :class:`RunPlan` and takes the optimizer steps.

    Collective throughout: every rank constructs one and calls the same methods.
    """

    def __init__(self, plan: RunPlan, world: World) -> None:
        config = plan.config
        self.plan, self.config, self.world = plan, config, world
        self.counters = Counters()
        self.plateau = PlateauWatch(config.plateau_reports)
        seed_everything(config.seed, world.rank)
        self.clip: ClipParts = create_clip(config.model, seed=config.seed)
        with agreed(world):
            self.loader = TrainLoader(
                config.data,
                plan.index,
                world=world,
                local_batch_size=plan.local_batch_size,
                image_transform=self.clip.train_transform,
                tokenize=self.clip.tokenize,
                seed=config.seed,
                image_size=self.clip.image_size[0],
            )
        self.total_steps = config.steps or math.ceil(
            (config.epochs or 0) * self.loader.steps_per_epoch
        )
        self.strategy = plan.strategy
        self.strategy.setup(self.clip.encoders, config.optim)
        self.loss: ContrastiveLoss = config.loss.build(
            self.strategy.process_group, normalize=True, num_samples=plan.index.num_samples
        ).to(world.device)
        if plan.comm_hook is not None:
            with agreed(world):
                self.strategy.attach_hook(plan.comm_hook, self.loss)
        self.temperature = Temperature(
            _temperature_config(config),
            bias=initial_logit_bias(config.loss.name, config.global_batch_size),
        ).to(world.device)
        self.temperature.load_scalars_(self.clip.scalars)
        self.temperature_optimizer = build_temperature_optimizer(
            config.optim, self.temperature.parameters()
        )
        self.evaluator = Evaluator(
            config.evaluation,
            plan.tasks,
            self.clip.eval_transform,
            self.clip.tokenize,
            self.clip.image_size,
        )
        if plan.checkpoint is not None:
            self._restore(plan.checkpoint)
        self._write_configuration()

    def _write_configuration(self) -> None:
        if not self.world.is_main:
            return
        folder = self.plan.run_dir
        (folder / "config.json").write_text(json.dumps(as_plain(self.config), indent=2) + "\n")
        if ds_config := getattr(self.strategy, "ds_config", None):
            (folder / "ds_config.json").write_text(json.dumps(ds_config, indent=2) + "\n")

    def fit(self) -> dict[str, float]:
        """Train to the last step, evaluating, logging and saving on the way; final evaluation.

        Raises:
            TrainingStopped: on all ranks, when the loss or a gradient is not finite.
        """
        log = MetricsLog(self.plan.run_dir, self.world, first_step=self.counters.step)
        progress = Progress(self.world, first_step=self.counters.step, total_steps=self.total_steps)
        try:
            results = self._loop(log, progress)
        finally:
            progress.close()
            log.close()
            self.loader.close()
        return results

    def _loop(self, log: MetricsLog, progress: Progress) -> dict[str, float]:
        config = self.config
        batches = iter(self.loader)
        clock = _Stopwatch()
        results: dict[str, float] = {}
        saved = evaluated = self.counters.step if self.counters.step else -1
        while self.counters.step < self.total_steps:
            values = self._train_step(next(batches))
            clock.pairs += config.global_batch_size
            if values is None:
                continue
            step = self.counters.step
            is_last = step == self.total_steps
            if step % config.log_every_steps == 0 or is_last:
                self._report(log, progress, values, clock)
            if is_last or round(self.loader.epoch, 6).is_integer():
                log.write(step, {"epoch": self.loader.epoch, **self._data_summary()})
            with clock.paused():
                if _is_due(step, config.evaluation.every_steps) and step != evaluated:
                    results = self._evaluate(log)
                    evaluated = step
                if (_is_due(step, config.checkpoint.every_steps) or is_last) and step != saved:
                    self.save()
                    saved = step
        if evaluated != self.counters.step:
            results = self._evaluate(log)
        return results

    def _train_step(self, batch: Batch) -> dict[str, float] | None:
        """Forward, backward and update; returns values to log, None when the step was skipped."""
        config, counters = self.config, self.counters
        pairs = _on_device(batch, self.world.device)
        self.loss.set_progress(self.loader.epoch)
        self.temperature_optimizer.zero_grad(set_to_none=True)
        counters.samples_seen += config.global_batch_size
        try:
            value = contrastive_backward(
                self.strategy,
                self.loss,
                self.temperature,
                pairs,
                micro_batch_size=config.micro_batch_size or self.plan.local_batch_size,
            )
        except NonFiniteLoss as error:
            self._give_up_step(error)
            return None
        lr = self._learning_rate(config.optim.lr)
        result = self.strategy.step(lr)
        self.loss.after_step(result.skipped)
        if result.skipped:
            self._count_skipped("gradients overflowed")
            return None
        self._check_finite("gradient norm", result.grad_norm)
        self._step_temperature()
        counters.step += 1
        counters.skipped_in_a_row = 0
        # A loss over the whole data set reports the plain one of the batch among its metrics.
        own = {key: float(metric) for key, metric in self.loss.metrics().items()}
        return {"loss": float(value), "lr": lr, "grad_norm": result.grad_norm, **own}

    def _give_up_step(self, error: NonFiniteLoss) -> None:
        """Stop, or leave everything as it was before this batch: all ranks alike."""
        broken = gather_objects(error.tensors, self.world)
        where = [f"rank {rank}: {', '.join(found)}" for rank, found in enumerate(broken) if found]
        reason = f"{error} ({'; '.join(where) or 'all features are finite'})"
        if self.config.nonfinite == "stop":
            raise TrainingStopped(
                f"step {self.counters.step + 1}: {reason}. {KEEP_GOING}, or --nonfinite skip"
            )
        self.loss.after_step(True)
        logger.warning("step %d skipped: %s", self.counters.step + 1, reason)
        self._count_skipped("the loss was not finite")

    def _count_skipped(self, reason: str) -> None:
        self.counters.skipped_steps += 1
        self.counters.skipped_in_a_row += 1
        if self.counters.skipped_in_a_row > self.config.max_skipped_steps:
            raise TrainingStopped(
                f"step {self.counters.step + 1}: {self.counters.skipped_in_a_row} optimizer steps "
                f"in a row were skipped because {reason}; use --precision bf16, or a lower "
                "--optim.lr"
            )

    def _check_finite(self, what: str, value: float) -> None:
        """Stop before anything is saved; the value is global, so all ranks stop together."""
        if not math.isfinite(value):
            raise TrainingStopped(
                f"step {self.counters.step + 1}: the {what} is {value}. {KEEP_GOING}"
            )

    def _learning_rate(self, peak: float) -> float:
        return learning_rate(self.config.optim, self.counters.step, self.total_steps, peak=peak)

    def _step_temperature(self) -> None:
        """The same update on every rank: exact mean of the gradients, then the bounds."""
        gradients = [p.grad for p in self.temperature.parameters() if p.grad is not None]
        mean_over_ranks_(gradients, self.world)
        peak = self.config.temperature.lr or self.config.optim.lr
        lr = self.loss.temperature_lr(self._learning_rate(peak))
        set_learning_rate(self.temperature_optimizer, lr)
        self.temperature_optimizer.step()
        self.temperature.clamp_()

    def _report(
        self, log: MetricsLog, progress: Progress, values: dict[str, float], clock: _Stopwatch
    ) -> None:
        counters = self.counters
        rate = clock.lap()
        logged = {
            "samples_seen": counters.samples_seen,
            "epoch": self.loader.epoch,
            **values,
            "logit_scale": self.temperature.logit_scale.detach().exp().item(),
            "samples_per_second": rate,
            "skipped_steps": counters.skipped_steps,
            **self.strategy.hook_metrics(),
        }
        log.write(counters.step, logged)
        left = (self.total_steps - counters.step) * self.config.global_batch_size / rate
        chance = math.log(self.config.global_batch_size)
        if counters.step > self.config.optim.warmup_steps:
            self.plateau.watch(values["loss"], chance)
        text = f"loss {values['loss']:.3f} (chance {chance:.3f})  {rate:.0f} samples/s"
        if counters.skipped_steps:
            text += f"  {counters.skipped_steps} skipped"
        progress.update(counters.step, text, seconds_left=left)

    def _data_summary(self) -> dict[str, float]:
        """Samples of this epoch seen, repeated, unseen and skipped by reason, over all ranks.

        One gather of names and one small all-reduce; the next batch may start new counts.
        """
        own = self.loader.epoch_summary()
        names = sorted(set().union(*gather_objects(sorted(own), self.world)))
        totals = sum_over_ranks([own.get(name, 0.0) for name in names], self.world)
        return dict(zip(names, totals, strict=True))

    def _evaluate(self, log: MetricsLog) -> dict[str, float]:
        results = self.evaluator.run(self.strategy)
        if results:
            log.write(self.counters.step, results)
            logger.info("step %d  %s", self.counters.step, summarize(results))
        return results

    def save(self) -> Path:
        """Write a checkpoint of the state after the last step. Collective."""
        self.strategy.average_buffers()
        engine = self.strategy.state()
        moments = {_plain_name(name): value for name, value in engine.moments.items()}
        for name, parameter in self.temperature.named_parameters():
            for key, value in self.temperature_optimizer.state.get(parameter, {}).items():
                if key != "step":
                    moments[f"{key}/{name}"] = value.detach().cpu().clone()
        positions = gather_objects(self.loader.state_dict(), self.world)
        snapshot = Snapshot(
            step=self.counters.step,
            model=full_state_dict(engine.parameters, self.temperature),
            optimizer=moments,
            rank_state={"random": self._random_state(), "loss": self.loss.rank_state()},
            shared={
                "model": self.config.model.name,
                "model_config": model_config_json(self.config.model.name),
                "data_fingerprint": self.plan.index.fingerprint,
                "data": TrainLoader.merge_states(positions),
                "epoch": self.loader.epoch,
                "samples_seen": self.counters.samples_seen,
                "skipped_steps": self.counters.skipped_steps,
                "optimizer_steps": engine.optimizer_steps,
                "config": as_plain(self.config),
            },
        )
        checkpoints = self.plan.run_dir / "checkpoints"
        keep = self.config.checkpoint.keep_last
        return save_checkpoint(checkpoints, snapshot, self.world, keep=keep)

    def _random_state(self) -> dict[str, Tensor]:
        state = RandomState.capture(self.world.device)
        return {"cpu": state.cpu} | ({} if state.cuda is None else {"cuda": state.cuda})

    def _restore(self, folder: Path) -> None:
        """Continue from a checkpoint.

        Raises:
            AgreedError: on all ranks: damaged, or of another model or data set.
        """
        snapshot = load_checkpoint(folder, self.world)
        shared = snapshot.shared
        with agreed(self.world):
            self._check_fits(folder, shared)
        encoders, scalars = split_state_dict(snapshot.model)
        moments = {
            name: value
            for name, value in snapshot.optimizer.items()
            if name.split("/", 1)[1] not in scalars
        }
        prefixed = {name.replace("/", "/clip.", 1): value for name, value in moments.items()}
        self.strategy.load_state(EngineState(encoders, prefixed, shared["optimizer_steps"]))
        self.temperature.load_scalars_(scalars)
        self._restore_temperature_optimizer(snapshot)
        with agreed(self.world):
            self.loss.load_rank_states([state["loss"] for state in snapshot.rank_states])
        self.counters = Counters(snapshot.step, shared["samples_seen"], shared["skipped_steps"])
        with agreed(self.world):
            self.loader.load_state_dict(shared["data"])
        if len(snapshot.rank_states) == self.world.world_size:
            random = snapshot.rank_states[self.world.rank]["random"]
            RandomState(random["cpu"], random.get("cuda"), self.world.device).restore()
        logger.info("resumed from %s after step %d", folder, snapshot.step)

    def _check_fits(self, folder: Path, shared: dict[str, Any]) -> None:
        expected = {
            "model": self.config.model.name,
            "data_fingerprint": self.plan.index.fingerprint,
        }
        for key, own in expected.items():
            if shared[key] != own:
                raise ValueError(
                    f"--resume {folder}: the checkpoint's {key.replace('_', ' ')} is "
                    f"{shared[key]}, this run's is {own}"
                )

    def _restore_temperature_optimizer(self, snapshot: Snapshot) -> None:
        for name, parameter in self.temperature.named_parameters():
            state = {
                key: value.to(self.world.device)
                for full_name, value in snapshot.optimizer.items()
                for key, _, owner in [full_name.partition("/")]
                if owner == name
            }
            if state:
                steps = float(snapshot.shared["optimizer_steps"])
                state["step"] = torch.tensor(steps)
                self.temperature_optimizer.state[parameter] = state

    def export(self) -> Path | None:
        """Write the last checkpoint's weights as an open_clip file; main rank only."""
        if not self.world.is_main:
            return None
        return export(self.plan.run_dir, self.plan.run_dir / "export" / "model.pt")

    def close(self) -> None:
        """Release engine and workers."""
        self.loader.close()
        self.strategy.close()


def _temperature_config(config: TrainConfig) -> TemperatureConfig:
    """``--temperature``, with what the loss itself says about its temperature."""
    return replace(config.temperature, **getattr(config.loss, "temperature", {}))


def _plain_name(moment: str) -> str:
    return moment.replace("/clip.", "/", 1)


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step > 0 and step % every == 0


def _on_device(batch: Batch, device: torch.device) -> Pairs:
    moved = batch.to(device)
    return Pairs(moved.image, moved.text, moved.index)


class _Stopwatch:
    """Samples per second between two laps, pauses left out."""

    def __init__(self) -> None:
        self.pairs = 0
        self._start = time.perf_counter()

    def lap(self) -> float:
        """Samples per second since the last lap."""
        now = time.perf_counter()
        rate = self.pairs / max(now - self._start, 1e-9)
        self.pairs, self._start = 0, now
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count."""
        begin = time.perf_counter()
        yield
        self._start += time.perf_counter() - begin


def summarize(results: dict[str, float]) -> str:
    """Evaluation results in one line, chance beside what was reached."""
    parts = []
    for direction in ("image_to_text", "text_to_image"):
        if (recall := results.get(f"eval/retrieval/{direction}_R@1")) is not None:
            chance = 1 / max(results["eval/retrieval/num_texts"], 1)
            parts.append(f"{direction} R@1 {recall:.1%} (chance {chance:.1%})")
    for key, value in results.items():
        if key.endswith("/top1"):
            task = key.removeprefix("eval/zero_shot_").removesuffix("/top1")
            chance = results[key.replace("/top1", "/chance")]
            parts.append(f"zero-shot {task} {value:.1%} (chance {chance:.1%})")
    return "  ".join(parts)
