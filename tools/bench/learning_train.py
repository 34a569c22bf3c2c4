"""One run: train on random artists' pictures of every concept, then name unseen artists' pictures.

Losses, estimators, schedules, optimizers and the rules of the temperature are the project's own
(open_clip's loss in open_clip's rows); one process, fp32. An epoch visits every trained concept
once, each time with the picture of a random artist: one sample id per concept.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache

import open_clip
import torch
import torch.nn.functional as F
from learning_models import TESTS, TRAINED, VALIDATION, Heads, Scratch, build, emoji
from learning_rows import Row, Run
from torch import Tensor

from disco_ds.losses import ContrastiveLoss
from disco_ds.losses.disco import DiscoConfig
from disco_ds.models import Temperature
from disco_ds.optim import (
    build_optimizer,
    build_temperature_optimizer,
    learning_rate,
    parameter_groups,
    set_learning_rate,
)


@dataclass(frozen=True)
class Trained:
    """Which pictures may be trained: a table of each concept's, padded, and how many are valid."""

    concepts: Tensor  # int64 [k]
    pictures: Tensor  # int64 [k, artists]
    counts: Tensor  # int64 [k]


@dataclass(frozen=True)
class Outcome:
    """What a run showed; percent."""

    seen: dict[str, float]
    """By artist: R@1 of the right name among those trained."""
    new: dict[str, float]
    """By artist: R@1 among the concepts never trained."""
    tau: float
    loss: float
    """Mean plain or own loss of the last 50 steps."""
    seconds: float
    """Of the CPU."""


@cache
def trained() -> Trained:
    """Pictures for training, from the artists that are trained and no held-out concept."""
    data = emoji()
    rows = data.drawn_by(*TRAINED)
    rows = rows[~data.held_out[data.concepts[rows]]]
    concepts, counts = torch.unique(data.concepts[rows], return_counts=True)
    order = rows[data.concepts[rows].argsort(stable=True)]
    pictures = torch.nn.utils.rnn.pad_sequence(
        list(order.split(counts.tolist())), batch_first=True, padding_value=-1
    )
    return Trained(concepts, pictures, counts)


class Contrast:
    """A row's loss and its temperature, stepped as the trainer steps them."""

    def __init__(self, row: Row, num_samples: int) -> None:
        self.row = row
        self.loss: ContrastiveLoss | None = None
        if isinstance(row.loss, DiscoConfig):
            self.loss = row.loss.build(normalize=True)
        elif row.loss is not None:
            self.loss = row.loss.build(normalize=True, num_samples=num_samples)
        self.theirs = open_clip.loss.ClipLoss()
        rules = getattr(row.loss, "temperature", {})
        self.temperature = Temperature(replace(row.temperature, **rules))
        self.optimizer = build_temperature_optimizer(row.optim, self.temperature.parameters())

    def value(self, images: Tensor, texts: Tensor, index: Tensor, *, epoch: float) -> Tensor:
        """The loss of a batch, 0-D, to differentiate."""
        scale, _ = self.temperature()
        if self.loss is None:
            images, texts = F.normalize(images, dim=-1), F.normalize(texts, dim=-1)
            theirs: Tensor = self.theirs(images, texts, scale)
            return theirs
        self.loss.set_progress(epoch)
        ours: Tensor = self.loss(images, texts, scale, index=index)
        return ours

    def step(self, step: int, total: int) -> None:
        """After the model's optimizer: what the loss estimated, then the temperature."""
        scheduled = learning_rate(
            self.row.optim, step, total, peak=self.row.temperature.lr or self.row.optim.lr
        )
        if self.loss is not None:
            self.loss.after_step(False)
            scheduled = self.loss.temperature_lr(scheduled)
        set_learning_rate(self.optimizer, scheduled)
        self.optimizer.step()
        self.temperature.clamp_()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def tau(self) -> float:
        """Now; of v2 the median over samples of its last batch."""
        found = self.loss.metrics() if self.loss is not None else {}
        return float(found.get("tau_q50", (-self.temperature.logit_scale.detach()).exp()))


def train(run: Run) -> Outcome:
    """Train and evaluate; the same run gives the same numbers on the same machine."""
    torch.manual_seed(run.seed)
    begin = time.process_time()
    model, pairs = build(run.form), trained()
    count = len(pairs.concepts)
    total = run.epochs * count // run.batch
    row = with_warmup(run.row, total)
    contrast = Contrast(row, len(emoji().names))
    optimizer = build_optimizer(row.optim, parameter_groups(model, row.optim))
    order, losses = torch.empty(0, dtype=torch.int64), []
    for step in range(total):
        if len(order) < run.batch:  # the rest is left out: no concept twice in a batch
            order = torch.randperm(count)
        chosen, order = order[: run.batch], order[run.batch :]
        artist = (torch.rand(run.batch) * pairs.counts[chosen]).long()
        concepts = pairs.concepts[chosen]
        images, texts = model.encode(pairs.pictures[chosen, artist], concepts)
        value = contrast.value(images, texts, concepts, epoch=step * run.batch / count)
        value.backward()
        set_learning_rate(optimizer, learning_rate(row.optim, step, total, peak=row.optim.lr))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        contrast.step(step, total)
        losses.append(float(value.detach()))
    seen, new = evaluate(model)
    last = losses[-50:]
    seconds = round(time.process_time() - begin, 1)
    return Outcome(seen, new, contrast.tau, sum(last) / len(last), seconds)


def with_warmup(row: Row, total: int) -> Row:
    """A tenth of the run, at every batch size."""
    return replace(row, optim=replace(row.optim, warmup_steps=total // 10))


@torch.inference_mode()
def evaluate(model: Heads | Scratch) -> tuple[dict[str, float], dict[str, float]]:
    """R@1 in percent by artist: trained concepts among their names, new ones among theirs."""
    model.eval()
    data = emoji()
    found: list[dict[str, float]] = []
    for names in (trained().concepts, data.held_out.nonzero().squeeze(1)):
        recalls = {}
        for artist in (VALIDATION, *TESTS):
            rows = data.drawn_by(artist)
            rows = rows[torch.isin(data.concepts[rows], names)]
            recalls[artist] = _recall(model, rows, names)
        found.append(recalls)
    return found[0], found[1]


def _recall(model: Heads | Scratch, rows: Tensor, names: Tensor) -> float:
    texts = torch.cat([model.encode(rows[:1], part)[1] for part in names.split(256)])
    texts = F.normalize(texts, dim=-1)
    hits = 0
    for part in rows.split(256):
        images, _ = model.encode(part, names[:1])
        best = (F.normalize(images, dim=-1) @ texts.T).argmax(1)
        hits += int((names[best] == emoji().concepts[part]).sum())
    return round(100 * hits / len(rows), 3)
