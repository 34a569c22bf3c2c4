"""Where FastCLIP's softmax normalisers come from: a table with one running mean per sample.

The loss measures ``log g``, the log of a sample's normaliser over the present batch, and asks for
``log u``, an estimate over the whole data set. :class:`MovingAverage` keeps a table. A learned
normaliser is another class with the methods of :class:`Normaliser`.
"""

from __future__ import annotations

import warnings
from typing import Protocol

import torch
from torch import Tensor

from disco_ds.sample_state import VISITS, SampleState

LOG_U = ("log_u_image", "log_u_text")


class Normaliser(Protocol):
    """What the loss asks for; arguments and results are the same on all ranks."""

    metrics: dict[str, float]
    """Scalars of the last estimate, to log."""

    def read(self, index: Tensor) -> dict[str, Tensor]:
        """What is known of the global batch, each ``[B]``; "visits" is among it. Collective."""
        ...

    def estimate(
        self, index: Tensor, log_g: Tensor, gamma: Tensor | float, *, keep: bool = True
    ) -> Tensor:
        """``log u`` of the global batch from its ``log g``, ``[2, B]`` (image, text anchors).

        Nothing is stored before :meth:`commit`, nor then unless ``keep``: an evaluation between
        backward and step forgets nothing. May communicate ``O(B)`` values.
        """
        ...

    def also_store(self, changes: dict[str, Tensor]) -> None:
        """More of the same samples to store at :meth:`commit`, each ``[B]``."""
        ...

    def commit(self) -> None:
        """Store what the last call estimated: the optimizer step was taken."""
        ...

    def discard(self) -> None:
        """Forget what the last call estimated: the optimizer step was skipped."""
        ...


class MovingAverage:
    """``u <- (1 - gamma) u + gamma g`` per sample and modality, in the log domain.

    The first visit takes ``g`` itself, and so does an entry that is not finite. Samples for which a
    call found something that is not finite are left as they were. ``u`` never
    overflows: ``log u`` is stored, and ``log u >= log gamma + log g`` bounds the weights of the
    gradient by ``1/gamma``. Samples that occur several times in one batch are updated once, with
    the mean of their ``g``.
    """

    def __init__(self, table: SampleState) -> None:
        self.table = table
        self.metrics: dict[str, float] = {}
        self.values: dict[str, Tensor] = {}
        self._pending: tuple[Tensor, dict[str, Tensor]] | None = None

    def read(self, index: Tensor) -> dict[str, Tensor]:
        """Values of the global batch before this step. Collective: see ``SampleState.read``."""
        self.values = self.table.read(index)
        return self.values

    def estimate(
        self, index: Tensor, log_g: Tensor, gamma: Tensor | float, *, keep: bool = True
    ) -> Tensor:
        """See :class:`Normaliser`; call :meth:`read` with the same ``index`` before."""
        old = torch.stack([self.values[name] for name in LOG_U]).to(log_g)
        visits = self.values[VISITS]
        broken = ~torch.isfinite(old) & (visits > 0)
        first = (visits == 0) | broken.any(0)
        new = torch.where(first, log_g, log_blend(old, log_g, gamma))
        # A sample without negatives (log 0) says nothing about its normaliser. NaN stays NaN:
        # broken features must show in the value.
        new = torch.where(log_g == -torch.inf, old, new)
        self.metrics = {
            "first_visits": float(first.double().mean()),
            "repaired": float(broken.any(0).sum()),
        }
        if keep:
            self._warn_of_a_lost_one()
            changes = {LOG_U[0]: new[0], LOG_U[1]: new[1], VISITS: visits + 1}
            self._pending = (index, changes)
        return new

    def _warn_of_a_lost_one(self) -> None:
        if self._pending is not None:
            warnings.warn(
                "FastCLIPLoss: called again before after_step: what the call before estimated is "
                "lost. Call loss.after_step(skipped=False) after every optimizer step; to "
                "accumulate gradients, give the loss the whole batch (contrastive_backward does)",
                stacklevel=2,
            )

    def also_store(self, changes: dict[str, Tensor]) -> None:
        """See :class:`Normaliser`."""
        assert self._pending is not None
        self._pending[1].update(changes)

    def commit(self) -> None:
        """See :class:`Normaliser`. No communication."""
        if self._pending is not None:
            index, changes = self._pending
            finite = torch.stack([value.double() for value in changes.values()]).isfinite().all(0)
            kept = {name: value[finite] for name, value in changes.items()}
            self.table.write(index[finite], kept)
            self._pending = None

    def discard(self) -> None:
        """See :class:`Normaliser`."""
        self._pending = None


def log_blend(old: Tensor, new: Tensor, gamma: Tensor | float) -> Tensor:
    """``log((1 - gamma) exp(old) + gamma exp(new))`` without leaving the log domain."""
    weight = torch.as_tensor(gamma, dtype=new.dtype, device=new.device)
    kept = torch.log1p(-weight) + old
    # gamma = 1: log 0 + old is -inf, or NaN where old itself is infinite.
    kept = torch.where(weight < 1, kept, torch.full_like(kept, -torch.inf))
    return torch.logaddexp(kept, torch.log(weight) + new)


def max_over_equal(index: Tensor, values: Tensor) -> Tensor:
    """Replace ``[2, B]`` values by the largest over positions of equal ``index``."""
    ids, place = torch.unique(index, return_inverse=True)
    highest = values.new_full((len(values), len(ids)), -torch.inf)
    highest.scatter_reduce_(1, place.expand_as(values), values, "amax")
    return highest[:, place]


def mean_over_equal(index: Tensor, log_values: Tensor) -> Tensor:
    """Replace ``[2, B]`` logs by the log of the mean over positions of equal ``index``."""
    ids, place = torch.unique(index, return_inverse=True)
    if len(ids) == len(index):
        return log_values
    places = place.expand_as(log_values)
    highest = log_values.new_full((len(log_values), len(ids)), -torch.inf)
    highest.scatter_reduce_(1, places, log_values, "amax")
    highest.masked_fill_(~torch.isfinite(highest), 0.0)
    sums = torch.zeros_like(highest)
    sums.scatter_add_(1, places, (log_values - highest[:, place]).exp())
    counts = torch.bincount(place, minlength=len(ids))
    return ((sums / counts).log() + highest)[:, place]
