"""The arrays of the original algorithm (float64), reproduced by the reference.

``golden/fastclip_golden.npz``: 6 steps (v2: 3) of B = 8 on n = 20 samples from the authors' loss
classes. Its states advance by the released rule; ``math_*`` arrays are the exact gradients on the
same state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from disco_ds.losses.fastclip_reference import FastCLIPReference, Step, TauAdam, gamma_of

GOLDEN = {
    name: torch.from_numpy(array)
    for name, array in np.load(Path(__file__).parent / "golden/fastclip_golden.npz").items()
}
TOLERANCE = 1e-10


def close(found: torch.Tensor, name: str, step: int, **options: Any) -> None:
    expected = GOLDEN[name][step]
    limit = TOLERANCE * float(expected.abs().max())
    torch.testing.assert_close(
        found, expected, rtol=TOLERANCE, atol=limit, msg=lambda text: f"{name}: {text}", **options
    )


def inputs(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return GOLDEN["in_e1"][step], GOLDEN["in_e2"][step], GOLDEN["in_idx"][step]


def reference_pair(version: str) -> tuple[FastCLIPReference, FastCLIPReference]:
    config = GOLDEN[f"{version}_cfg"]
    settings = {"tau": float(config[0]), "rho": float(config[1]), "eps": float(config[2])}
    return tuple(
        FastCLIPReference(version, int(GOLDEN["in_n"]), mode=mode, **settings)
        for mode in ("fastclip_compat", "exact")
    )


@pytest.mark.parametrize("version", ["v0", "v3"])
def test_global_temperature(version: str) -> None:
    compat, exact = reference_pair(version)
    for step in range(6):
        tau = float(GOLDEN[f"{version}_tau_before"][step])
        gamma = float(GOLDEN["in_gamma"][step])
        found: Step = compat.step(*inputs(step), gamma=gamma, tau=tau)
        close(found.value, f"{version}_loss", step)
        close(found.image_gradient, f"{version}_grad_e1", step)
        close(found.text_gradient, f"{version}_grad_e2", step)
        close(-tau * found.tau_gradients[0], f"{version}_grad_s", step)
        close(compat.u[0], f"{version}_u1_all", step)
        close(compat.u[1], f"{version}_u2_all", step)
        found = exact.step(*inputs(step), gamma=gamma, tau=tau)
        close(found.image_gradient, f"{version}_math_grad_e1", step)
        close(found.text_gradient, f"{version}_math_grad_e2", step)
        if version == "v3":
            close(found.tau_gradients[0], "v3_math_grad_tau", step)


def test_individual_temperatures() -> None:
    config = GOLDEN["v2_cfg"]
    adam = TauAdam(*(float(config[k]) for k in (3, 4, 5, 6, 7, 8)))
    compat, exact = reference_pair("v2")
    for step in range(3):
        index = inputs(step)[2]
        gamma = float(GOLDEN["in_gamma"][step])
        exact.tau.copy_(compat.tau)
        found = compat.step(*inputs(step), gamma=gamma)
        close(found.value, "v2_loss", step)
        close(found.image_gradient, "v2_grad_e1", step)
        close(found.text_gradient, "v2_grad_e2", step)
        close(found.tau_gradients[0], "v2_gtau1", step)
        close(found.tau_gradients[1], "v2_gtau2", step)
        compat.adam(index, found.tau_gradients, adam, epoch=int(GOLDEN["in_epoch"][step]))
        for side in (0, 1):
            close(compat.tau[side], f"v2_tau{side + 1}_all", step)
            close(compat.moments[0][side], f"v2_m{side + 1}_all", step)
            close(compat.moments[1][side], f"v2_v{side + 1}_all", step)
            close(compat.u[side].log(), f"v2_logu{side + 1}_all", step)
        found = exact.step(*inputs(step), gamma=gamma)
        close(found.image_gradient, "v2_math_grad_e1", step)
        close(found.text_gradient, "v2_math_grad_e2", step)
        close(found.tau_gradients[0], "v2_math_gtau1", step)
        close(found.tau_gradients[1], "v2_math_gtau2", step)


def test_gamma_schedule_of_the_golden_run() -> None:
    decay, low = float(GOLDEN["in_gamma_decay_epochs"]), float(GOLDEN["in_gamma_min"])
    for epoch, gamma in zip(GOLDEN["in_epoch"], GOLDEN["in_gamma"], strict=True):
        found = gamma_of(float(epoch), schedule="cosine", gamma_min=low, decay_epochs=decay)
        assert found == pytest.approx(float(gamma), rel=1e-12)
