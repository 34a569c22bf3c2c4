"""FastCLIPLoss: contrastive losses over the whole data set, from running means of normalisers.

FastCLIP (Wei et al., arXiv 2407.01445) measures, for every image and every text as an anchor, the
mean of ``exp(h/tau)`` over the batch's negatives (``h_ij = s_ij - s_ii``), keeps a running mean
``u`` of it for each sample of the data set, and weights the negatives by ``exp(h/tau)/(eps + u)``.
A small batch then acts like a large one. Objectives, with ``u`` for the mean over the data set:

    v0   mean_i [L1_i + L2_i]                                    one learnable tau
    v1   tau mean_i [L1_i + L2_i]                                constant tau (SogCLR)
    v2   mean_i [tau1_i (L1_i + rho) + tau2_i (L2_i + rho)]      tau per sample (iSogCLR)
    v3   tau mean_i [L1_i + L2_i] + 2 rho tau                    one learnable tau

with ``L = log(eps + u)`` of image (1) and text (2) anchors.

(SogCLR and iSogCLR are v1 and v2 with ``gamma_schedule="constant"``.) Everything about ``u`` is
kept as its logarithm, so nothing overflows at any temperature. The gradient needs only scalars of
the other ranks: no feature gradient travels, and the backward call communicates nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from disco_ds.losses.base import WIRE_DTYPES, Call, ContrastiveLoss, Gather, Result, WireDtype
from disco_ds.losses.fastclip_objective import OBJECTIVES, Batch, Mode, Version
from disco_ds.losses.fastclip_passes import (
    Anchors,
    GlobalTemperature,
    IndividualTemperatures,
    Products,
    own_rows,
)
from disco_ds.losses.fastclip_tau import TAU_COLUMNS, TauAdam
from disco_ds.losses.gamma import Gamma, GammaSchedule
from disco_ds.losses.info_nce import InfoNCE
from disco_ds.losses.inputs import duplicate_rate
from disco_ds.losses.kernels import Kernel, softmax_passes
from disco_ds.losses.normaliser import LOG_U, MovingAverage, max_over_equal, mean_over_equal
from disco_ds.losses.pairwise import row_dots
from disco_ds.sample_state import VISITS, SampleState

logger = logging.getLogger(__name__)

BOUNDS = ("bound_image", "bound_text")

Duplicates = Literal["mask", "position"]


class FastCLIPLoss(ContrastiveLoss):
    """FastCLIP v0 to v3 over the features of all ranks; called as the other losses, with ``index``.

    ``logit_scale`` is ``1/tau`` (v2 keeps its own temperatures and gives it a zero gradient, as v1
    does). The value is the objective above on this batch (``fastclip_compat``: the surrogate that
    the released code reports); :meth:`metrics` has the plain mini-batch InfoNCE as ``loss``.

    ``mode="exact"`` differentiates the objective. ``"fastclip_compat"`` follows the released code:
    half the feature gradient, a v3 temperature gradient whose data term counts twice, v2 without
    the factor tau, with a clamped temperature gradient and an eps that grows with the largest
    ``h/tau``; published values of ``rho`` belong to it.

    Communication, all in forward (bytes received per rank times ``(W - 1)/W``, ``s`` bytes per
    feature element): features ``2 s B d`` (``gather="ring"`` sends them again for every use: ``3 s
    B d``, v2 ``6 s B d``, its fastclip_compat ``8 s B d``); ids ``8 B``; three fp32 scalars per
    sample ``12 B`` (and the columns' parts, ``4 B``); an all-reduce of the table's values,
    ``2 * 4 (k + 1) B`` with k = 2 columns (v2: 8, and ``8 B`` for its temperature gradients).

    Call :meth:`after_step` after every optimizer step: only then ``u``, the temperatures and the
    visits of the batch are stored, and not after a skipped step.

    Args:
        version: "v0" to "v3".
        num_samples: size of the data set; None lets the tables grow.
        gamma_min, gamma_schedule, gamma_decay_epochs: weight of the new estimate: "cosine" from 1
            to gamma_min over so many (fractional) epochs, "constant" gamma_min, or "visits": the
            cosine over the sample's own visits. The first visit of a sample always takes g itself.
        rho, eps: as in the objectives.
        tau_init, tau_min, tau_max, tau_lr: v2's individual temperatures and their Adam; for v0
            and v3 ``tau_lr`` is the learning rate of ``log(1/tau)`` (None: the model's).
        tau_lr_drop: v3: ``tau_lr`` is divided by 3 for good once tau is at most this.
        duplicates: "mask": pairs of equal id are not each other's negatives; "position": they are.
        process_group, gather, tile_size, kernel, wire_dtype, normalize: see ``ContrastiveLoss``.
    """

    def __init__(
        self,
        version: Version = "v3",
        *,
        num_samples: int | None = None,
        gamma_min: float = 0.2,
        gamma_schedule: GammaSchedule = "cosine",
        gamma_decay_epochs: float = 10.0,
        rho: float = 6.5,
        eps: float = 1e-14,
        tau_init: float = 0.07,
        tau_min: float = 0.01,
        tau_max: float = 1.0,
        tau_lr: float | None = None,
        tau_lr_drop: float = 0.03,
        mode: Mode = "exact",
        duplicates: Duplicates = "mask",
        process_group: dist.ProcessGroup | None = None,
        gather: Gather = "all",
        tile_size: int | None = None,
        kernel: Kernel = "auto",
        wire_dtype: torch.dtype | None = None,
        normalize: bool = False,
        table_device: torch.device | str = "cpu",
        table_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(
            process_group=process_group,
            gather=gather,
            tile_size=tile_size,
            kernel=kernel,
            wire_dtype=wire_dtype,
            normalize=normalize,
        )
        _check_options(version, mode, duplicates, kernel)
        if not 0 < tau_min <= tau_init <= tau_max:
            raise ValueError(
                "need 0 < tau_min <= tau_init <= tau_max, got "
                f"{tau_min:g}, {tau_init:g}, {tau_max:g}"
            )
        if eps < 0:
            raise ValueError(f"eps {eps:g}: must not be negative")
        self.version: Version = version
        self.mode: Mode = mode
        self.duplicates: Duplicates = duplicates
        self.objective = OBJECTIVES[version, mode](rho)
        released = mode == "fastclip_compat"
        self._gamma = Gamma(gamma_min, gamma_schedule, gamma_decay_epochs, by_epoch=released)
        self.eps = eps
        self.tau_lr, self.tau_lr_drop = tau_lr, tau_lr_drop
        self.tau_adam = TauAdam(
            lr=tau_lr if tau_lr is not None else 0.0133,
            tau_min=tau_min,
            tau_max=tau_max,
            by_epoch=released,
        )
        self.table = SampleState(
            self._columns(tau_init),
            num_samples=num_samples,
            process_group=process_group,
            device=table_device,
            dtype=table_dtype,
        )
        self.normaliser = MovingAverage(self.table)
        logger.info("per-sample tables: %s", self.table.describe())
        self._epoch = 0.0
        self._lr_dropped = False
        self._lr_drops = False  # what the last call asks for, latched by after_step

    def _columns(self, tau_init: float) -> dict[str, float]:
        """Names of the table's columns and their starting values."""
        columns = dict.fromkeys(LOG_U, 0.0)
        if self.version == "v2":
            columns |= TAU_COLUMNS | {"tau_image": tau_init, "tau_text": tau_init}
        if self.objective.eps_grows:
            columns |= dict.fromkeys(BOUNDS, 0.0)
        return columns

    # What the trainer calls.

    def set_progress(self, epoch: float) -> None:
        """Move gamma: ``epoch`` counts passes over the data, fractional."""
        self._epoch = epoch

    def after_step(self, skipped: bool) -> None:
        """Store what the last call estimated, or forget it when the step was skipped."""
        if skipped:
            self.normaliser.discard()
        else:
            self.normaliser.commit()
            self._lr_dropped |= self._lr_drops
        self._lr_drops = False

    def temperature_lr(self, scheduled: float) -> float:
        """``tau_lr`` without a schedule (a third of it after the drop); the model's when None."""
        if self.tau_lr is None:
            return scheduled
        return self.tau_lr / 3 if self._lr_dropped else self.tau_lr

    def rank_state(self) -> dict[str, Tensor]:
        """This rank's part of the tables, and whether tau's learning rate has dropped."""
        return {**self.table.state_dict(), "lr_dropped": torch.tensor(self._lr_dropped)}

    def load_rank_states(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Take over tables saved by any number of ranks.

        Raises:
            ValueError: tables with other columns (v2 has more than the others), or of another
                number of samples.
        """
        self.table.share(self.process_group)
        parts = [{k: v for k, v in state.items() if k != "lr_dropped"} for state in states]
        self.table.load_parts(parts)
        self._lr_dropped = bool(states[0]["lr_dropped"])

    def gamma(self, visits: Tensor) -> Tensor:
        """Weight of the new estimate per sample, ``[B]``, from visits before this step."""
        return self._gamma.at(self._epoch, visits)

    # One call.

    def _compute(self, call: Call) -> Result:
        if call.index is None:
            raise ValueError("FastCLIPLoss needs index: one int64 sample id per pair")
        if call.agreed.scale <= 0:
            raise ValueError(f"logit_scale {call.agreed.scale:g}: FastCLIP needs a positive 1/tau")
        self.table.share(self.process_group)
        indices = call.exchange.gather_vectors(call.index.long(), list(call.agreed.sizes))
        index = torch.cat(indices)
        rate = duplicate_rate(index)
        self._metrics["duplicate_rate"] = rate
        masked = self.duplicates == "mask" and rate > 0
        old = self.normaliser.read(index)
        taus = self._taus(call, old, len(index))
        passes = self._passes(call, taus, indices if masked else None)
        batch = self._measure(call, passes, index, taus, old)
        self._report(batch, old)
        value = self.objective.value(batch).to(call.agreed.compute_dtype)
        if not _wanted(call):
            return Result(value, 1.0, None, None)
        products = passes.gradients(self._anchors(batch))
        if products.moved is not None:
            self._move_taus(call, batch, old, products.moved)
        self._lr_drops = self.version == "v3" and 1 / call.agreed.scale <= self.tau_lr_drop
        return Result(
            value=value,
            coefficient=self._common_factor(call) / len(index) / call.agreed.scale,
            dx=products.dx,
            dy=products.dy,
            scale_gradient=self._scale_gradient(call, batch, products),
        )

    def _passes(
        self, call: Call, taus: Tensor, indices: list[Tensor] | None
    ) -> GlobalTemperature | IndividualTemperatures:
        if self.version == "v2":
            return IndividualTemperatures(call, taus, indices)
        pairs = softmax_passes(self.kernel, call.engine, scale=call.agreed.scale, kept_bytes=0)
        return GlobalTemperature(call, InfoNCE(call, pairs, indices))

    def _taus(self, call: Call, old: Mapping[str, Tensor], size: int) -> Tensor:
        if self.version == "v2":
            return torch.stack([old["tau_image"], old["tau_text"]]).double()
        tau = 1 / call.agreed.scale
        return torch.full((2, size), tau, dtype=torch.float64, device=call.x.device)

    def _anchors(self, batch: Batch) -> Anchors:
        """What the second pass needs; ``a = c/tau`` is 1 where the objective has the factor tau."""
        base = batch.positives / batch.taus + batch.log_counts + batch.log_eps_u
        a = torch.ones_like(batch.taus) if self.objective.times_tau else 1 / batch.taus
        return Anchors(base[0], base[1], batch.sums, a)

    def _common_factor(self, call: Call) -> float:
        """Of all feature gradients: with one temperature, ``a`` is taken out of the products."""
        taken_care_of = self.version == "v2" or self.objective.times_tau
        return self.objective.feature_weight * (1.0 if taken_care_of else call.agreed.scale)

    def _measure(
        self,
        call: Call,
        passes: GlobalTemperature | IndividualTemperatures,
        index: Tensor,
        taus: Tensor,
        old: Mapping[str, Tensor],
    ) -> Batch:
        """First pass: ``g`` of own anchors, then everybody's scalars and the updated ``u``."""
        own = own_rows(call)
        counts = _negatives_of(index, self.duplicates)
        log_counts = counts.clamp(min=1).double().log()  # without negatives lse is log 0
        positives = row_dots(call.x, call.y)
        lse = torch.stack(passes.negatives())
        measured = {
            "positives": positives,
            "log_g": lse - positives / taus[:, own] - log_counts[own],
        }
        if self.objective.eps_grows:
            assert isinstance(passes, IndividualTemperatures)
            highest = torch.stack(passes.maxima()) - positives / taus[:, own]
            measured["highest"] = highest.clamp_(min=0.0)
        every = _gather_columns(call, measured)
        gamma, keep = self.gamma(old[VISITS]), _wanted(call)
        log_g = mean_over_equal(index, every["log_g"])
        log_u = self.normaliser.estimate(index, log_g, gamma, keep=keep)
        log_eps = torch.full_like(log_u, math.log(self.eps) if self.eps else -math.inf)
        if self.objective.eps_grows:
            bounds = torch.stack([old[name] for name in BOUNDS]).to(log_eps)
            bounds = torch.maximum(bounds, every["highest"])
            log_eps += bounds
            if keep:
                stored = max_over_equal(index, bounds)
                self.normaliser.also_store(dict(zip(BOUNDS, stored, strict=True)))
        return Batch(index, taus, log_counts, every["positives"], every["log_g"], log_u, log_eps)

    def _scale_gradient(self, call: Call, batch: Batch, products: Products) -> Tensor:
        """This rank's share of ``d/d(logit_scale) = -tau^2 d/d(tau)``; 0-D.

        ``sum_i <x_i, (M Y)_i>`` over all ranks is ``sum p h`` over both kinds of anchors.
        """
        tau = 1 / call.agreed.scale
        side = (call.x, products.dx) if products.dx is not None else (call.y, products.dy)
        assert side[1] is not None
        energy = row_dots(side[0], side[1]).sum() / tau / len(batch.index)
        return -(tau**2) * self.objective.tau_slope(batch, own_rows(call), energy)

    def _move_taus(
        self, call: Call, batch: Batch, old: Mapping[str, Tensor], moved: Tensor
    ) -> None:
        """v2: one Adam step on the temperatures of the batch, stored with ``u``."""
        slopes = self.objective.tau_slopes(batch, own_rows(call), moved)
        every = _gather_columns(call, {"slopes": slopes})["slopes"]
        every = _mean_of_equal(batch.index, every)
        changes = self.tau_adam.step(old, every, epoch=int(self._epoch))
        self.normaliser.also_store(changes)

    def _report(self, batch: Batch, old: Mapping[str, Tensor]) -> None:
        """Scalars of this call, equal on all ranks."""
        zero = torch.zeros_like(batch.log_g)
        negatives = batch.log_g + batch.log_counts
        self._metrics |= {
            "loss": float(torch.logaddexp(negatives, zero).mean()),
            "surrogate_loss": float(self.objective.value(batch)),
            "gamma": float(self.gamma(old[VISITS]).mean()),
            **self.normaliser.metrics,
        }
        for name, values in (("log_u", batch.log_u), ("tau", batch.taus)):
            if name == "tau" and self.version != "v2":
                self._metrics["tau"] = float(values[0, 0])
                continue
            quantiles = torch.quantile(
                values.double().flatten(), values.new_tensor([0.1, 0.5, 0.9]).double()
            )
            self._metrics |= dict(
                zip([f"{name}_q10", f"{name}_q50", f"{name}_q90"], quantiles.tolist(), strict=True)
            )

    def extra_repr(self) -> str:
        """Show the options that differ between instances."""
        return f"version={self.version!r}, mode={self.mode!r}, {super().extra_repr()}"


def _check_options(version: str, mode: str, duplicates: str, kernel: Kernel) -> None:
    if version not in ("v0", "v1", "v2", "v3"):
        raise ValueError(f"version must be v0, v1, v2 or v3, got {version!r}")
    if mode not in ("exact", "fastclip_compat"):
        raise ValueError(f'mode must be "exact" or "fastclip_compat", got {mode!r}')
    if duplicates not in ("mask", "position"):
        raise ValueError(f'duplicates must be "mask" or "position", got {duplicates!r}')
    if version == "v2" and kernel == "triton":
        raise ValueError(
            'kernel="triton": v2, with a temperature per sample, has no Triton kernel; use '
            'kernel="auto" or "torch"'
        )


def _wanted(call: Call) -> bool:
    return call.want_image_side or call.want_text_side


def _negatives_of(index: Tensor, duplicates: Duplicates) -> Tensor:
    """How many negatives each sample has, ``[B]``."""
    if duplicates == "position":
        return torch.full_like(index, len(index) - 1)
    _, place, counts = torch.unique(index, return_inverse=True, return_counts=True)
    negatives: Tensor = len(index) - counts[place]
    return negatives


def _gather_columns(call: Call, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every rank's ``[b]`` or ``[k, b]`` side by side, float64; one all-gather of ``4 B`` a row.

    A sample's values keep their name and their leading dimension.
    """
    rows = {name: values.view(-1, values.shape[-1]) for name, values in own.items()}
    packed = torch.cat([part.to(call.agreed.compute_dtype) for part in rows.values()])
    lengths = [len(packed) * size for size in call.agreed.sizes]
    parts = call.exchange.gather_vectors(packed.flatten(), lengths)
    every = torch.cat([part.view(len(packed), -1) for part in parts], dim=1).double()
    split = every.split([len(part) for part in rows.values()])
    named = zip(own.items(), split, strict=True)
    return {name: part.view(*values.shape[:-1], -1) for (name, values), part in named}


def _mean_of_equal(index: Tensor, values: Tensor) -> Tensor:
    """Replace ``[2, B]`` values by the mean over positions of equal ``index``."""
    ids, place, counts = torch.unique(index, return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(values), len(ids)).index_add_(1, place, values)
    means: Tensor = sums / counts
    return means[:, place]


@dataclass(frozen=True)
class FastCLIPConfig:
    """Settings of :class:`FastCLIPLoss`."""

    name: Literal["fastclip"] = "fastclip"
    """Contrastive loss over the whole data set, from running means of softmax normalisers."""
    version: Version = "v3"
    """v0 and v3: one learnable temperature (v3 with rho); v1: constant; v2: one per sample."""
    gamma_min: float = 0.2
    """Lowest weight of a new estimate; 1 has no memory. Short runs do better with 0.5 to 0.8."""
    gamma_schedule: GammaSchedule = "cosine"
    """cosine over epochs, constant, or visits: the cosine over each sample's own visits."""
    gamma_decay_epochs: float = 10.0
    """Epochs (visits) until gamma is lowest; half the run is FastCLIP's advice."""
    rho: float = 6.5
    """v2, v3: the larger, the smaller the temperature. Published values need fastclip_compat."""
    eps: float = 1e-14
    """Added to the running means: anchors far below it are not pushed any more."""
    tau_init: float = 0.07
    """Starting temperature (replaces --temperature.init)."""
    tau_min: float = 0.01
    """Lower bound of a learnable temperature."""
    tau_max: float = 1.0
    """Upper bound of a learnable temperature."""
    tau_lr: float | None = None
    """Learning rate of the temperature, unscheduled; the model's when not given (v2: 0.0133)."""
    tau_lr_drop: float = 0.03
    """v3: a third of tau_lr, for good, once the temperature is at most this."""
    mode: Mode = "exact"
    """exact: the gradient of the objective; fastclip_compat: the released code's rules."""
    duplicates: Duplicates = "mask"
    """mask: equal ids in a batch are not each other's negatives; position: they are."""
    tables: Literal["cpu", "device"] = "cpu"
    """Where the per-sample tables lie: host memory, or the GPU (faster, if there is room)."""
    gather: Gather = "all"
    """all: gather the features once and keep them; ring: stream them, memory O(b d)."""
    tile_size: int | None = None
    """Rows and columns of a tile of similarities; None picks one."""
    kernel: Kernel = "auto"
    """torch, triton (GPU), or auto: triton where it can run."""
    wire_dtype: WireDtype | None = None
    """Dtype of features on the wire; None sends them as they are."""

    @property
    def temperature(self) -> dict[str, float | bool]:
        """What the loss decides about the learnable ``logit_scale = 1/tau``."""
        return {
            "init": 1 / self.tau_init,
            "minimum": 1 / self.tau_max,
            "maximum": 1 / self.tau_min,
            "learnable": self.version in ("v0", "v3"),
        }

    def build(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        normalize: bool = False,
        num_samples: int | None = None,
    ) -> FastCLIPLoss:
        """Make the loss for a process group and a data set."""
        settings = {
            name: getattr(self, name)
            for name in self.__dataclass_fields__
            if name not in ("name", "version", "wire_dtype", "tables")
        }
        return FastCLIPLoss(
            self.version,
            num_samples=num_samples,
            process_group=process_group,
            normalize=normalize,
            wire_dtype=None if self.wire_dtype is None else WIRE_DTYPES[self.wire_dtype],
            table_device="cuda" if self.tables == "device" and torch.cuda.is_available() else "cpu",
            **settings,
        )
