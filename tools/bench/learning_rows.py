"""The rows of the table: what each one trains with, and what is searched for on the validation
artist before anything is reported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from disco_ds.losses.disco import DiscoConfig
from disco_ds.losses.fastclip import FastCLIPConfig
from disco_ds.losses.fastclip_objective import Version
from disco_ds.models import TemperatureConfig
from disco_ds.optim import OptimConfig, OptimizerName

Form = Literal["heads", "scratch"]
OPTIM = OptimConfig(lr=1e-3, weight_decay=0.1)  # warm-up: a tenth of the run
LEARNT = TemperatureConfig()
TAU_LR = 2e-4  # FastCLIP's for a model's rate of 1e-3
TAUS = (0.03, 0.05, 0.07, 0.1, 0.14, 0.2)
GAMMAS = (0.5, 0.8)
# Variants of other rows; left out where a run takes a minute.
ONLY_HEADS = frozenset(
    {
        "InfoNCE, tau 0.07",
        "FastCLIP-v3, gamma 1 (no memory)",
        "FastCLIP-v3, tau lr of the model",
        "FastCLIP-v3, released rules",
    }
)


@dataclass(frozen=True)
class Row:
    """A loss (None: open_clip's own), its temperature and the optimizer."""

    name: str
    loss: DiscoConfig | FastCLIPConfig | None
    temperature: TemperatureConfig = LEARNT
    optim: OptimConfig = OPTIM


@dataclass(frozen=True)
class Run:
    """One training: everything that its result depends on, with the data set and the code."""

    form: Form
    row: Row
    batch: int
    seed: int
    epochs: int

    @property
    def key(self) -> str:
        """Changes with every setting: a result is found again only under the same ones."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def constant(tau: float) -> TemperatureConfig:
    """A temperature that is not trained."""
    return TemperatureConfig(init=1 / tau, learnable=False)


def fastclip(name: str, version: Version, epochs: int, **settings: Any) -> Row:
    """FastCLIP with gamma falling over half of the run, FastCLIP's advice."""
    optim = settings.pop("optim", OPTIM)
    settings = {"gamma_min": 0.8, "gamma_decay_epochs": epochs / 2, **settings}
    if version == "v3":
        settings.setdefault("tau_lr", TAU_LR)
    if version == "v2":
        settings.setdefault("tau_init", 0.03)
    return Row(name, FastCLIPConfig(version=version, **settings), optim=optim)


def info_nce(tau: float) -> Row:
    """InfoNCE at a constant temperature."""
    return Row(f"InfoNCE, tau {tau:g}", DiscoConfig(), constant(tau))


def first_searches(epochs: int) -> dict[str, list[Row]]:
    """Candidates by what is searched for."""
    return {
        **tau_searches(epochs, TAUS),
        "v0": [fastclip(f"v0, gamma {gamma:g}", "v0", epochs, gamma_min=gamma) for gamma in GAMMAS],
        "v2": [
            fastclip(
                f"v2, rho {rho:g}, tau lr {rate:g}, from tau {start:g}",
                "v2",
                epochs,
                rho=rho,
                tau_lr=rate,
                tau_init=start,
            )
            for rho in (7.0, 3.0)
            for rate, start in ((0.0133, 0.03), (0.001, 0.03), (0.001, 0.07))
        ],
        "v3": [
            fastclip(f"v3, gamma {gamma:g}, rho {rho:g}", "v3", epochs, gamma_min=gamma, rho=rho)
            for gamma in (0.2, *GAMMAS)
            for rho in (6.5, 2.0)
        ],
    }


def tau_searches(epochs: int, taus: Iterable[float]) -> dict[str, list[Row]]:
    """Constant temperatures of InfoNCE and of GCL."""
    taus = tuple(taus)
    gcl = [fastclip(f"GCL, tau {tau:g}", "v1", epochs, gamma_min=1.0, tau_init=tau) for tau in taus]
    return {"InfoNCE": [info_nce(tau) for tau in taus], "GCL": gcl}


def second_searches(epochs: int, found: Mapping[str, Row]) -> dict[str, list[Row]]:
    """Candidates that build on the first choices: the memory at the temperature of GCL."""
    tau = _fastclip_loss(found["GCL"]).tau_init
    return {
        "v1": [
            fastclip(f"v1, gamma {gamma:g}", "v1", epochs, gamma_min=gamma, tau_init=tau)
            for gamma in GAMMAS
        ],
        "SogCLR": [
            _constant_gamma(f"SogCLR, gamma {gamma:g}", found["GCL"], gamma) for gamma in GAMMAS
        ],
        "iSogCLR": [
            _constant_gamma(f"iSogCLR, gamma {gamma:g}", found["v2"], gamma) for gamma in GAMMAS
        ],
    }


def optimizer_searches(v3: Row) -> dict[str, list[Row]]:
    """Rates of each optimizer for FastCLIP-v3; AdamW's is 1e-3 in every other row."""
    return {
        "AdamW": _with_rates(v3, "adamw", (3e-4, 1e-3, 3e-3)),
        "LAMB": _with_rates(v3, "lamb", (1e-3, 3e-3, 1e-2, 3e-2)),
        "Lion": _with_rates(v3, "lion", (3e-5, 1e-4, 3e-4, 1e-3)),
        "SGDM": _with_rates(v3, "sgdm", (0.1, 0.5, 2.0, 8.0)),
    }


def carried_over(found: Mapping[str, Row], taus: Mapping[str, Row], epochs: int) -> dict[str, Row]:
    """The choices of one form for another: its own temperatures, the same gammas and rho.

    The temperatures that are learnt start from the best constant one of GCL.
    """
    tau = _fastclip_loss(taus["GCL"]).tau_init
    rows = {**taus}
    for what in ("v0", "v1", "v2", "v3", "SogCLR", "iSogCLR"):
        loss = replace(_fastclip_loss(found[what]), gamma_decay_epochs=epochs / 2, tau_init=tau)
        rows[what] = replace(found[what], loss=loss)
    return rows


def _fastclip_loss(row: Row) -> FastCLIPConfig:
    assert isinstance(row.loss, FastCLIPConfig)
    return row.loss


def _constant_gamma(name: str, row: Row, gamma: float) -> Row:
    loss = replace(_fastclip_loss(row), gamma_schedule="constant", gamma_min=gamma)
    return replace(row, name=name, loss=loss)


def _with_rates(row: Row, name: OptimizerName, rates: Iterable[float]) -> list[Row]:
    """The same loss under another optimizer; sgdm's decay is coupled, lion's scales inversely."""
    decay = {"lion": 1.0, "sgdm": 1e-4}.get(name, OPTIM.weight_decay)
    return [
        replace(
            row,
            name=f"v3, {name} lr {rate:g}",
            optim=replace(OPTIM, name=name, lr=rate, weight_decay=decay),
        )
        for rate in rates
    ]


def loss_rows(form: Form, found: Mapping[str, Row]) -> list[Row]:
    """The losses, in the order in which they are run and printed."""
    rows = _all_losses(found)
    return [row for row in rows if form == "heads" or row.name not in ONLY_HEADS]


def _all_losses(found: Mapping[str, Row]) -> list[Row]:
    v3 = found["v3"]
    no_memory = replace(_fastclip_loss(v3), gamma_min=1.0)
    fast = replace(_fastclip_loss(v3), tau_lr=None)
    released = replace(_fastclip_loss(v3), mode="fastclip_compat", rho=6.5)
    return [
        Row("open_clip, default", None),
        Row("open_clip, tau lr of v3", None, TemperatureConfig(lr=TAU_LR)),
        replace(info_nce(0.07), name="InfoNCE, tau 0.07"),
        replace(found["InfoNCE"], name="InfoNCE, best constant tau"),
        replace(found["GCL"], name="GCL, gamma 1 (no memory)"),
        *[replace(found[name], name=name) for name in ("SogCLR", "iSogCLR")],
        *[replace(found[name], name=f"FastCLIP-{name}") for name in ("v0", "v1", "v2", "v3")],
        replace(v3, name="FastCLIP-v3, gamma 1 (no memory)", loss=no_memory),
        replace(v3, name="FastCLIP-v3, tau lr of the model", loss=fast),
        replace(v3, name="FastCLIP-v3, released rules", loss=released),
    ]


def optimizer_rows(found: Mapping[str, Row], v3: Row) -> list[Row]:
    """FastCLIP-v3 under each optimizer at its best rate; none that repeats the row of v3."""
    rows = [replace(row, name=f"FastCLIP-v3, {name}") for name, row in found.items()]
    return [row for row in rows if replace(row, name=v3.name) != v3]
