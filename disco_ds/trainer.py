"""The training loop: assembles what the configuration names and takes optimizer steps."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor

from disco_ds.checkpoint import as_plain, export
from disco_ds.config import TrainConfig
from disco_ds.data.loader import Batch, TrainLoader
from disco_ds.distributed import (
    World,
    agreed,
    broadcast_object,
    gather_objects,
    mean_over_ranks_,
    seed_everything,
    sum_over_ranks,
    use_timeout_everywhere,
)
from disco_ds.evaluation.run import Evaluator, publish, summarize
from disco_ds.grad_cache import NonFiniteLoss, Pairs, RandomState, contrastive_backward
from disco_ds.losses.base import ContrastiveLoss
from disco_ds.metrics import (
    MetricsLog,
    PlateauWatch,
    Progress,
    Stopwatch,
    memory_use,
    pairs_picture,
    read_metrics,
)
from disco_ds.models import (
    ClipParts,
    Temperature,
    TemperatureConfig,
    create_clip,
    decode_captions,
    initial_logit_bias,
)
from disco_ds.nonfinite import broken_gradients
from disco_ds.optim import build_temperature_optimizer, learning_rate, set_learning_rate
from disco_ds.plan_watch import PlanWatch
from disco_ds.refusal import Refusal, TrainingStopped
from disco_ds.report import record_start
from disco_ds.run_plan import RunPlan
from disco_ds.run_state import Counters, RunState
from disco_ds.saves import Saves, is_due
from disco_ds.strategies.base import Strategy
from disco_ds.strategies.loss_scale import LossScaleSpent
from disco_ds.watchdog import Watchdog

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Trainer", "TrainingStopped"]

logger = logging.getLogger(__name__)


class Trainer:
    """One run: builds its parts from a :class:`RunPlan` and takes the optimizer steps.

    Collective throughout: every rank constructs one and calls the same methods.
    """

    def __init__(self, plan: RunPlan, world: World, watchdog: Watchdog | None = None) -> None:
        config = plan.config
        self.plan, self.config, self.world = plan, config, world
        self.watchdog = watchdog or Watchdog(world.rank, config.timeout_seconds)
        self.counters = Counters()
        self.refusal = Refusal(config, world, self.counters)
        self.plateau = PlateauWatch(config.plateau_reports)
        self.plan_watch = PlanWatch(config, plan.run_dir, world)
        self.plan_watch.start(plan.strategy, plan.index.num_samples)
        seed_everything(config.seed, world.rank)
        with agreed(world):
            self.clip: ClipParts = create_clip(plan.model, seed=config.seed)
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
        self.counters.total_steps = self._steps_left() if config.steps is None else config.steps
        self.strategy = plan.strategy
        self.strategy.setup(self.clip.encoders, config.optim)
        use_timeout_everywhere(config.timeout_seconds)
        if plan.checkpoint is not None:
            self._rehearse()
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
        self.state = RunState(
            plan=plan,
            world=world,
            clip=self.clip,
            loader=self.loader,
            strategy=self.strategy,
            loss=self.loss,
            temperature=self.temperature,
            temperature_optimizer=self.temperature_optimizer,
            counters=self.counters,
        )
        if plan.checkpoint is not None:
            self._restore(plan.checkpoint)
        self.saves = Saves(self.state, self.watchdog, last_step=self.total_steps)
        self._write_configuration()

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.counters.total_steps

    def _steps_left(self) -> int:
        """Steps until ``--epochs`` passes over the data, from the present position."""
        left = (self.config.epochs or 0) - self.loader.epoch
        return max(0, math.ceil(round(left * self.loader.steps_per_epoch, 6)))

    def _restore(self, checkpoint: Path) -> None:
        """Continue; the run's end stays, unless it or what a step means has changed."""
        then, config, counters = self.state.restore(checkpoint), self.config, self.counters
        if config.steps is not None:
            counters.total_steps = config.steps
        elif (then["epochs"], then["global_batch_size"]) != (
            config.epochs,
            config.global_batch_size,
        ):
            counters.total_steps = counters.step + self._steps_left()
        if counters.step >= counters.total_steps:
            logger.warning(
                "nothing is left to train: %s was saved after step %d, this run ends after %d; "
                "raise --steps or --epochs to go on",
                *(checkpoint, counters.step, counters.total_steps),
            )

    def _rehearse(self) -> None:
        """With one pair; before anything that counts is loaded."""
        height, width = self.clip.image_size
        image = torch.zeros(1, 3, height, width, device=self.world.device)
        text = self.clip.tokenize(["a"]).to(self.world.device)
        self.strategy.rehearse(image, text)

    def _write_configuration(self) -> None:
        if not self.world.is_main:
            return
        try:
            self._write_settings(self.plan.run_dir)
        except OSError as error:
            raise OSError(f"cannot write in {self.plan.run_dir}: {error}") from error

    def _write_settings(self, folder: Path) -> None:
        record_start(folder, self.world, strategy=self.strategy.name, total_steps=self.total_steps)
        # Without --resume: --config of this file is a run from the start.
        plain = as_plain(replace(self.config, resume=None))
        (folder / "config.json").write_text(json.dumps(plain, indent=2) + "\n")
        if ds_config := getattr(self.strategy, "ds_config", None):
            (folder / "ds_config.json").write_text(json.dumps(ds_config, indent=2) + "\n")

    def fit(self) -> dict[str, float]:
        """Train to the last step, evaluating, logging and saving on the way; final evaluation.

        Raises:
            TrainingStopped: on all ranks, when the loss or a gradient is not finite.
            Preempted: on all ranks, after the step in which any of them was asked to stop.
            SaveFailed: on all ranks, when a checkpoint could not be written.
        """
        log = MetricsLog(
            self.plan.run_dir,
            self.world,
            first_step=self.counters.step,
            tracking=self.config.tracking,
            settings=as_plain(self.config),
        )
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
        clock = Stopwatch()
        results: dict[str, float] = {}
        first_step = self.counters.step
        # A run that was stopped between its save and its evaluation catches up.
        evaluated = first_step if self._was_evaluated() else -1
        self.saves.save_or_stop_if_asked()
        if is_due(first_step, config.evaluation.every_steps) and evaluated != first_step:
            results, evaluated = self._evaluate(log), first_step
        while self.counters.step < self.total_steps:
            self.watchdog.enter("waiting for data", steps_taken=self.counters.step)
            batch = next(batches)
            self.plan_watch.step_begins()
            values = self._train_step(batch)
            self.plan_watch.step_taken()
            clock.pairs += config.global_batch_size
            step = self.counters.step
            is_last = step == self.total_steps
            if values is not None:
                if step == first_step + 1:
                    self._show_pairs(log, batch)
                if step % config.log_every_steps == 0 or is_last:
                    self._report(log, progress, values, clock)
            if is_last or round(self.loader.epoch, 6).is_integer():
                self._log_data(log)  # also where the epoch's last step was skipped
            with clock.paused():
                self.saves.save_or_stop_if_asked()
                is_new = values is not None and step != evaluated
                if is_new and is_due(step, config.evaluation.every_steps):
                    results, evaluated = self._evaluate(log), step
        self.saves.finish()
        self.plan_watch.finish()
        if evaluated != self.counters.step:
            results = self._evaluate(log)
        return results

    def _was_evaluated(self) -> bool:
        """The log has an evaluation of the step that this run resumes from."""
        found = False
        if self.world.is_main and self.counters.step:
            lines = read_metrics(self.plan.run_dir)
            found = any(
                line["step"] == self.counters.step and any(key.startswith("eval/") for key in line)
                for line in lines
            )
        return broadcast_object(found, self.world)

    def _train_step(self, batch: Batch) -> dict[str, float] | None:
        """Forward, backward and update; returns values to log, None when the step was skipped."""
        # The forward pass of a step that is skipped has written to them.
        statistics = self.strategy.own_statistics()
        values = self._take_step(batch)
        if values is None:
            self.strategy.load_own_statistics(statistics)
        return values

    def _take_step(self, batch: Batch) -> dict[str, float] | None:
        config, counters = self.config, self.counters
        self.watchdog.enter("forward and backward")
        pairs = _on_device(batch, self.world.device)
        random = RandomState.capture(self.world.device)
        self.loss.set_progress(self.loader.epoch)
        self.temperature_optimizer.zero_grad(set_to_none=True)
        counters.samples_seen += config.global_batch_size
        try:
            value = contrastive_backward(
                self.strategy,
                self.loss,
                self.temperature,
                pairs,
                **self._micro_batches,
            )
        except NonFiniteLoss as error:
            self.loss.after_step(True)
            self.refusal.of_loss(error)
            return None
        self.watchdog.enter("optimizer step")
        lr = self._learning_rate(config.optim.lr)
        find_broken = partial(self._broken_gradients, pairs, random)
        try:
            result = self.strategy.step(lr)
        except LossScaleSpent as error:
            self.loss.after_step(True)
            self.refusal.of_overflow(error, find_broken)
        self.loss.after_step(result.skipped)
        if result.skipped:
            self.refusal.of_gradients(result.grad_norm, find_broken)
            return None
        self._step_temperature()
        counters.step += 1
        counters.skipped_in_a_row = 0
        # A loss over the whole data set reports the plain one of the batch among its metrics.
        own = {key: float(metric) for key, metric in self.loss.metrics().items()}
        return {"loss": float(value), "lr": lr, "grad_norm": result.grad_norm, **own}

    @property
    def _micro_batches(self) -> _MicroBatches:
        size = self.config.micro_batch_size or self.plan.local_batch_size
        return {"micro_batch_size": size, "equal_ranks": True}

    def _broken_gradients(self, pairs: Pairs, random: RandomState) -> list[str]:
        """Names of this rank's gradients that are not finite. Collective."""
        self.watchdog.enter("looking for the gradient that is not finite")
        found = broken_gradients(
            self.strategy, self.loss, self.temperature, pairs, random, **self._micro_batches
        )
        self.loss.after_step(True)
        return found

    def _learning_rate(self, peak: float) -> float:
        return learning_rate(self.config.optim, self.counters.step, self.total_steps, peak=peak)

    def _step_temperature(self) -> None:
        """The same update on every rank: exact mean of the gradients, then the bounds.

        One all-reduce, in which what ranks ask of each other between two steps travels too.
        """
        named = self.temperature.named_parameters()
        gradients = {name: p.grad for name, p in named if p.grad is not None}
        own = {name: gradient.clone() for name, gradient in gradients.items()}
        requests = self.saves.own_requests()
        mean_over_ranks_([*gradients.values(), requests], self.world)
        self.saves.take_answer(requests)
        if _not_finite(gradients):
            self.refusal.of_temperature(_not_finite(own))
            return
        peak = self.config.temperature.lr or self.config.optim.lr
        lr = self.loss.temperature_lr(self._learning_rate(peak))
        set_learning_rate(self.temperature_optimizer, lr)
        self.temperature_optimizer.step()
        self.temperature.clamp_()

    def _report(
        self, log: MetricsLog, progress: Progress, values: dict[str, float], clock: Stopwatch
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
            **memory_use(self.world.device),
            **self.strategy.hook_metrics(),
        }
        log.write(counters.step, logged)
        self.plan_watch.note(logged)
        left = (self.total_steps - counters.step) * self.config.global_batch_size / rate
        chance = values["chance_level"]
        if counters.step > self.config.optim.warmup_steps:
            self.plateau.watch(values["loss"], chance)
        text = f"loss {values['loss']:.3f} (chance {chance:.3f})  {rate:.0f} samples/s"
        if counters.skipped_steps:
            text += f"  {counters.skipped_steps} skipped"
        progress.update(counters.step, text, seconds_left=left)

    def _log_data(self, log: MetricsLog) -> None:
        """Samples of this epoch seen, repeated, unseen and skipped by reason, over all ranks.

        One gather of names and one small all-reduce; the next batch may start new counts.
        """
        own = self.loader.epoch_summary()
        names = sorted(set().union(*gather_objects(sorted(own), self.world)))
        totals = sum_over_ranks([own.get(name, 0.0) for name in names], self.world)
        found = dict(zip(names, totals, strict=True))
        log.write(self.counters.step, {"epoch": self.loader.epoch, **found})

    def _evaluate(self, log: MetricsLog) -> dict[str, float]:
        with self.watchdog.phase("evaluation"), self.strategy.keeping_statistics():
            found = self.evaluator.evaluate(_Watched(self.strategy, self.watchdog))
        if found.values:
            publish(found, log, self.plan.run_dir, self.counters.step, self.world)
            logger.info("step %d  %s", self.counters.step, summarize(found.values))
        return found.values

    def _show_pairs(self, log: MetricsLog, batch: Batch) -> None:
        """What the model is trained on, in the trackers: once per life of the run."""
        limit, name = log.tracking.pictures, self.config.model.name

        def draw() -> Image.Image:
            captions = decode_captions(name, batch.text[:limit])
            return pairs_picture(batch.image, captions, self.clip.preprocess, limit=limit)

        log.picture(self.counters.step, "train/pairs", draw)

    def save(self) -> None:
        """Ask for a checkpoint after the present step; any rank may, and one is enough."""
        self.saves.ask()

    def export(self) -> Path | None:
        """Write the last checkpoint's weights as an open_clip file; main rank only.

        Raises:
            OSError: disk full ...; says that the training itself is safe, and how to try again.
        """
        if not self.world.is_main:
            return None
        folder = self.plan.run_dir
        try:
            return export(folder, folder / "export" / "model.pt")
        except OSError as error:
            raise OSError(
                f"cannot write the export in {folder / 'export'}: {error}. Training is complete "
                f"and its checkpoint is safe: disco-ds export {folder} -o FILE.pt"
            ) from error

    def close(self) -> None:
        """Release engine and workers."""
        self.loader.close()
        self.strategy.close()


class _MicroBatches(TypedDict):
    micro_batch_size: int
    equal_ranks: bool


def _temperature_config(config: TrainConfig) -> TemperatureConfig:
    """``--temperature``, with what the loss itself says about its temperature."""
    return replace(config.temperature, **getattr(config.loss, "temperature", {}))


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if not tensor.isfinite().all()]


def _on_device(batch: Batch, device: torch.device) -> Pairs:
    moved = batch.to(device)
    return Pairs(moved.image, moved.text, moved.index)


@dataclass(frozen=True)
class _Watched:
    """A strategy that is evaluated; every batch is progress."""

    strategy: Strategy
    watchdog: Watchdog

    @property
    def world(self) -> World:
        return self.strategy.world

    def encode(
        self, image: Tensor | None, text: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        self.watchdog.tick()
        return self.strategy.encode(image, text)

    def evaluating(self) -> AbstractContextManager[None]:
        return self.strategy.evaluating()

    def average_buffers(self) -> None:
        self.strategy.average_buffers()
