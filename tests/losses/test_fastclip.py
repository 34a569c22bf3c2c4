"""FastCLIPLoss equals the reference: versions, modes, ranks, duplicates, skips, states."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_distributed
from torch import Tensor
from torch.nn.functional import normalize

from disco_ds.losses.fastclip import FastCLIPLoss
from disco_ds.losses.fastclip_reference import FastCLIPReference, TauAdam

B, D, N, STEPS = 12, 6, 30, 5
RHO, EPS, TAU = 2.0, 1e-3, 0.2
LR = 0.05
VERSIONS = tuple(itertools.product(("v0", "v1", "v2", "v3"), ("exact", "fastclip_compat")))
SPLITS = {1: (12,), 2: (5, 7), 3: (1, 6, 5), 4: (3, 3, 3, 3)}


def batch(step: int, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(2, B, D, generator=generator, dtype=torch.float64)
    index = torch.randperm(N, generator=generator)[:B]
    return (*normalize(features, dim=2).to(dtype), index)


def make(version: str, mode: str, **options: Any) -> FastCLIPLoss:
    settings = {
        "num_samples": N,
        "rho": RHO,
        "eps": EPS,
        "tau_init": TAU,
        "table_dtype": torch.float64,
    }
    settings |= {"gamma_min": 0.4, "gamma_decay_epochs": 3.0, "tau_lr": LR, "mode": mode}
    return FastCLIPLoss(version, **(settings | options))


def expected_run(version: str, mode: str) -> list[dict[str, Tensor]]:
    """Value and gradients of every step of the reference, and its tables at the end."""
    reference = FastCLIPReference(version, N, tau=TAU, rho=RHO, eps=EPS, mode=mode)
    loss = make(version, mode)
    steps = []
    for step in range(STEPS):
        images, texts, index = batch(step)
        loss.set_progress(step * 0.7)
        gamma = float(loss.gamma(torch.zeros(1))[0])
        tau = None if version == "v2" else tau_of(step)
        found = reference.step(images, texts, index, gamma=gamma, tau=tau)
        if version == "v2":
            adam = TauAdam(lr=LR)
            reference.adam(index, found.tau_gradients, adam, epoch=int(step * 0.7))
        learns = version in ("v0", "v3")
        slope = found.tau_gradients[0] if learns else torch.zeros((), dtype=torch.float64)
        steps.append(
            {
                "value": found.value,
                "image": found.image_gradient,
                "text": found.text_gradient,
                "scale": -(tau_of(step) ** 2) * slope,
            }
        )
    tables = {"log_u_image": reference.u[0].log(), "log_u_text": reference.u[1].log()}
    if version == "v2":
        tables |= {"tau_image": reference.tau[0], "tau_text": reference.tau[1]}
    steps.append(tables)
    return steps


def tau_of(step: int) -> float:
    return TAU * 0.9**step


def run_step(loss: FastCLIPLoss, step: int, rows: slice, **options: Any) -> dict[str, Tensor]:
    images, texts, index = batch(step, **options)
    leaves = [part[rows].clone().requires_grad_() for part in (images, texts)]
    scale = torch.tensor(1 / tau_of(step), dtype=images.dtype, requires_grad=True)
    loss.set_progress(step * 0.7)
    value = loss(*leaves, scale, index=index[rows])
    value.backward()
    return {
        "value": value.detach(),
        "image": leaves[0].grad,
        "text": leaves[1].grad,
        "scale": scale.grad,
    }


def whole_tables(loss: FastCLIPLoss) -> dict[str, Tensor]:
    ids = torch.arange(N)
    return loss.table.read(ids)


def _check(rank: int, world_size: int, all_expected: dict[Any, list[dict[str, Tensor]]]) -> None:
    sizes = SPLITS[world_size]
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    problems = []
    for (version, mode), expected in all_expected.items():
        for options in ({}, {"gather": "ring", "tile_size": 4}):
            loss = make(version, mode, **options)
            for step in range(STEPS):
                found = run_step(loss, step, rows)
                loss.after_step(skipped=False)
                want = dict(expected[step])
                for name in ("image", "text"):
                    want[name] = world_size * want[name][rows]
                scale = found["scale"].clone()
                if world_size > 1:
                    dist.all_reduce(scale)
                found["scale"] = scale / world_size
                problems += compare(f"{version} {mode} {options} step {step}", found, want)
            tables = whole_tables(loss)
            seen = tables["visits"] > 0
            want = {name: value[seen] for name, value in expected[-1].items()}
            have = {name: tables[name][seen] for name in want}
            problems += compare(f"{version} {mode} tables", have, want)
    assert not problems, "\n".join(problems[:10])


def compare(case: str, found: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    """Rounding of float64 through a handful of exponentials; 1e-10 of the largest entry."""
    problems = []
    for name, value in want.items():
        limit = 1e-10 * max(1e-3, float(value.abs().max()))
        error = float((found[name] - value).abs().max())
        if not error <= limit:
            problems.append(f"{case}: {name} differs by {error:.2e} (limit {limit:.2e})")
    return problems


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_the_reference(world_size: int) -> None:
    expected = {key: expected_run(*key) for key in VERSIONS}
    run_distributed(_check, expected, world_size=world_size)


def test_skipped_step_changes_nothing() -> None:
    for version in ("v1", "v2", "v3"):
        once, twice = make(version, "exact"), make(version, "exact")
        for step in range(3):
            run_step(once, step, slice(None))
            once.after_step(skipped=False)
            if step == 1:
                run_step(twice, 7, slice(None))
                twice.after_step(skipped=True)
            run_step(twice, step, slice(None))
            twice.after_step(skipped=False)
        for name, column in whole_tables(once).items():
            assert torch.equal(column, whole_tables(twice)[name]), f"{version} {name}"


@pytest.mark.parametrize("version", ["v0", "v1", "v2", "v3"])
@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_broken_features_show_in_the_value(version: str, broken: float) -> None:
    loss = make(version, "exact")
    images, texts, index = batch(0)
    images[3, 2] = broken
    assert not torch.isfinite(loss(images.requires_grad_(), texts, 5.0, index=index))
    loss.after_step(skipped=True)
    assert not loss.table.visits.any()


@pytest.mark.parametrize(("version", "mode"), VERSIONS)
def test_a_broken_batch_leaves_its_samples_as_they_were(version: str, mode: str) -> None:
    """Also where the step was taken: a loop of somebody's own may not look."""
    clean, loss = make(version, mode), make(version, mode)
    for candidate in (clean, loss):
        run_step(candidate, 0, slice(None))
        candidate.after_step(skipped=False)
    images, texts, index = batch(1)
    images[3, 2] = math.nan
    loss(images.requires_grad_(), texts, 5.0, index=index)
    loss.after_step(skipped=False)
    for name, column in whole_tables(loss).items():
        assert torch.isfinite(column).all(), name
        assert torch.equal(column[index[3]], whole_tables(clean)[name][index[3]]), name


def test_evaluation_changes_nothing() -> None:
    """Before a step, and between backward and step."""
    loss, other = make("v3", "exact"), make("v3", "exact")
    images, texts, index = batch(0)
    with torch.no_grad():
        loss(images, texts, 5.0, index=index)
    loss.after_step(skipped=False)
    assert not loss.table.visits.any()
    for candidate in (loss, other):
        run_step(candidate, 1, slice(None))
        if candidate is loss:
            with torch.no_grad():
                loss(images, texts, 5.0, index=index)
        candidate.after_step(skipped=False)
    for name, column in whole_tables(loss).items():
        assert torch.equal(column, whole_tables(other)[name]), name


def test_a_step_that_was_never_reported_is_warned_about() -> None:
    loss = make("v3", "exact")
    run_step(loss, 0, slice(None))
    with pytest.warns(UserWarning, match="called again before after_step"):
        run_step(loss, 1, slice(None))


@pytest.mark.parametrize(("version", "mode"), VERSIONS)
def test_a_batch_of_one_sample_has_no_negatives(version: str, mode: str) -> None:
    loss = make(version, mode)
    images, texts, index = batch(0)
    value = loss(images.requires_grad_(), texts, 5.0, index=index * 0 + 4)
    value.backward()
    assert torch.isfinite(value) and torch.isfinite(images.grad).all()
    loss.after_step(skipped=False)
    assert all(torch.isfinite(column).all() for column in whole_tables(loss).values())


def test_bounds_of_duplicates_do_not_depend_on_their_order() -> None:
    images, texts, index = batch(0)
    index = torch.where(index == index[0], index[1], index)
    stored = []
    for rows in (torch.arange(B), torch.arange(B).flip(0)):
        loss = make("v2", "fastclip_compat")
        loss(images[rows].requires_grad_(), texts[rows], 5.0, index=index[rows])
        loss.after_step(skipped=False)
        stored.append(whole_tables(loss)["bound_image"])
    torch.testing.assert_close(stored[0], stored[1], rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [0.0, -10.0])
def test_a_temperature_must_be_positive(scale: float) -> None:
    images, texts, index = batch(0)
    with pytest.raises(ValueError, match=r"logit_scale .*: FastCLIP needs a positive 1/tau"):
        make("v3", "exact")(images, texts, scale, index=index)


@pytest.mark.parametrize(
    "options", [{"duplicates": "masked"}, {"gamma_schedule": "const"}, {"mode": "fast"}], ids=str
)
def test_options_that_do_not_exist_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be .*got '"):
        make("v3", options.pop("mode", "exact"), **options)


def test_first_visit_takes_the_present_estimate() -> None:
    loss = make("v1", "exact", gamma_schedule="constant", gamma_min=0.3)
    run_step(loss, 0, slice(None))
    loss.after_step(skipped=False)
    index = batch(0)[2]
    other = make("v1", "exact", gamma_schedule="constant", gamma_min=1.0)
    run_step(other, 0, slice(None))
    other.after_step(skipped=False)
    assert torch.equal(
        loss.table.columns["log_u_image"][index], other.table.columns["log_u_image"][index]
    )


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_broken_entries_are_repaired_and_counted(broken: float) -> None:
    clean, loss = make("v3", "exact"), make("v3", "exact")
    for candidate in (clean, loss):
        run_step(candidate, 0, slice(None))
        candidate.after_step(skipped=False)
    ids = batch(1)[2][:3]
    loss.table.columns["log_u_text"][ids] = broken
    loss.table.visits[ids] = 1
    clean.table.visits[ids] = 0
    for candidate in (clean, loss):
        found = run_step(candidate, 1, slice(None))
        assert torch.isfinite(found["image"]).all()
        candidate.after_step(skipped=False)
    assert loss.metrics()["repaired"] == 3
    assert torch.equal(loss.table.columns["log_u_text"], clean.table.columns["log_u_text"])


def test_stress_at_the_smallest_temperature() -> None:
    """A negative that leads its positive by 1.9, all negatives at -1: finite, right in fp32."""
    images = torch.zeros(6, 8, dtype=torch.float64)
    images[:, 0] = 1
    texts = -images.clone()
    texts[1, 0], images[0, 0] = 1, 0.95
    images[0, 1] = math.sqrt(1 - 0.95**2)
    index = torch.arange(6)
    for version in ("v1", "v3"):
        reference = FastCLIPReference(version, 6, tau=0.01, rho=8.0, eps=1e-14, mode="exact")
        # The linear reference overflows fp32 but not float64: exp(190) is a double.
        want = reference.step(images, texts, index, gamma=1.0, tau=0.01)
        for dtype in (torch.float32, torch.bfloat16):
            leaves = [t.to(dtype).requires_grad_() for t in (images, texts)]
            loss = FastCLIPLoss(version, num_samples=6, gamma_min=1.0, rho=8.0, eps=1e-14)
            scale = torch.tensor(100.0, requires_grad=True)
            value = loss(*leaves, scale, index=index)
            value.backward()
            assert torch.isfinite(value)
            assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)
            if dtype == torch.float32:
                for leaf, gradient in zip(
                    leaves, (want.image_gradient, want.text_gradient), strict=True
                ):
                    torch.testing.assert_close(leaf.grad.double(), gradient, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(value.double(), want.value, rtol=1e-5, atol=1e-5)


def _duplicates(rank: int, world_size: int) -> None:
    """Samples 3 and 4 occur twice: no pair is its own negative, one update, equal for any W."""
    images, texts, index = batch(0)
    index = torch.arange(B)
    index[8], index[9] = 3, 4
    mask = index[:, None] == index[None, :]
    similarity = images @ texts.T
    h = (similarity - similarity.diagonal()[:, None]) / TAU
    weights = h.exp().masked_fill(mask, 0.0)
    g = weights.sum(1) / (~mask).sum(1)
    for size in {1, world_size}:
        rows = slice(0, B) if size == 1 else slice(rank * B // size, (rank + 1) * B // size)
        group = dist.new_subgroups(1)[0] if size == 1 and world_size > 1 else None
        loss = make("v1", "exact", process_group=group)
        loss(images[rows].requires_grad_(), texts[rows], 1 / TAU, index=index[rows])
        loss.after_step(skipped=False)
        u = loss.table.read(torch.arange(N))["log_u_image"].exp()
        for sample in range(8):
            own = g[index == sample].mean()
            torch.testing.assert_close(u[sample], own, rtol=1e-12, atol=0)
        assert loss.metrics()["duplicate_rate"] == pytest.approx(4 / B)


@pytest.mark.parametrize("world_size", [1, 2])
def test_duplicates_have_one_defined_result(world_size: int) -> None:
    run_distributed(_duplicates, world_size=world_size)


def test_unknown_size_grows_and_bad_ids_are_refused() -> None:
    loss = make("v3", "exact", num_samples=None)
    images, texts, index = batch(0)
    loss(images.requires_grad_(), texts, 5.0, index=index + 100_000)
    loss.after_step(skipped=False)
    assert len(loss.table.visits) > 100_000
    rows = len(loss.table.visits)
    with torch.inference_mode():
        loss(images, texts, 5.0, index=index + 10**9)
    assert len(loss.table.visits) == rows  # looking does not make room
    with pytest.raises(ValueError, match="too large for a table that grows"):
        loss(images, texts, 5.0, index=index + 2**42)
    loss(images, texts, 5.0, index=index + rows)
    loss.after_step(skipped=False)  # not a table of inference tensors
    with pytest.raises(ValueError, match="sample id -1 is negative"):
        loss(images, texts, 5.0, index=index - index.min() - 1)
    fixed = make("v3", "exact")
    with pytest.raises(ValueError, match=f"does not fit a table of {N} samples"):
        fixed(images, texts, 5.0, index=index + N)
    with pytest.raises(ValueError, match="needs index"):
        fixed(images, texts, 5.0)


def _reshard(
    rank: int, world_size: int, parts: list[dict[str, Tensor]], want: dict[str, Tensor]
) -> None:
    loss = make("v2", "exact")
    loss.load_rank_states(parts)
    for name, column in whole_tables(loss).items():
        assert torch.equal(column, want[name]), name
    assert loss.table.num_bytes <= -(-N // world_size) * (8 * 8 + 4)


def _collect(rank: int, world_size: int, path: str) -> None:
    loss = make("v2", "exact")
    sizes = SPLITS[world_size]
    for step in range(3):
        run_step(loss, step, slice(sum(sizes[:rank]), sum(sizes[: rank + 1])))
        loss.after_step(skipped=False)
    torch.save(loss.rank_state(), f"{path}/{rank}.pt")
    tables = whole_tables(loss)
    if rank == 0:
        torch.save(tables, f"{path}/whole.pt")


def test_tables_move_to_any_number_of_ranks(tmp_path: Any) -> None:
    run_distributed(_collect, str(tmp_path), world_size=3)
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(3)]
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    for world_size in (1, 2, 4):
        run_distributed(_reshard, parts, whole, world_size=world_size)
    with pytest.raises(ValueError, match="hold 30 samples, this data set has 31"):
        make("v2", "exact", num_samples=31).load_rank_states(parts)
    with pytest.raises(ValueError, match="saved tables have columns"):
        make("v3", "exact").load_rank_states(parts)


def test_loading_empties_a_table_that_has_grown() -> None:
    small, large = (make("v3", "exact", num_samples=None) for _ in range(2))
    run_step(small, 0, slice(None))
    small.after_step(skipped=False)
    images, texts, index = batch(0)
    large(images.requires_grad_(), texts, 5.0, index=index + 50_000)
    large.after_step(skipped=False)
    large.load_rank_states([small.rank_state()])
    assert int(large.table.visits.sum()) == B


def _late_and_halved(rank: int, world_size: int, early: FastCLIPLoss) -> None:
    """Made before the group, or for other ranks: the table follows the ranks of the call."""
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    for late, group in ((early, None), (make("v3", "exact"), half)):
        ranks = world_size if group is None else 2
        sizes = SPLITS[ranks]
        late.process_group = group
        given = make("v3", "exact", process_group=group)
        for step in range(3):
            own = rank % ranks
            rows = slice(sum(sizes[:own]), sum(sizes[: own + 1]))
            found, expected = (run_step(loss, step, rows) for loss in (late, given))
            assert torch.equal(found["value"], expected["value"]), step
            for loss in (late, given):
                loss.after_step(skipped=False)
        assert late.table.world_size == ranks
    late.process_group = None
    with pytest.raises(ValueError, match=r"split over ranks ., ., the loss is called on ranks 0,"):
        run_step(late, 0, slice(rank * 3, rank * 3 + 3))


def test_tables_follow_the_ranks_of_the_loss() -> None:
    run_distributed(_late_and_halved, make("v3", "exact"), world_size=4)


def test_gamma_schedules() -> None:
    fresh = torch.tensor([0, 1, 5, 9])
    loss = make("v1", "exact", gamma_decay_epochs=18.0, gamma_min=0.2)
    for epoch, gamma in (
        (0, 1),
        (1, 0.9939),
        (5, 0.8571),
        (9, 0.6),
        (12, 0.4),
        (17, 0.2061),
        (18, 0.2),
    ):
        loss.set_progress(epoch)
        assert loss.gamma(fresh)[0].item() == pytest.approx(gamma, abs=5e-5)
    loss.set_progress(0.5)
    assert 0.99 < loss.gamma(fresh)[0] < 1
    visits = make("v1", "exact", gamma_schedule="visits", gamma_decay_epochs=18.0, gamma_min=0.2)
    assert visits.gamma(fresh).tolist() == pytest.approx([1, 0.9939, 0.8571, 0.6], abs=5e-5)
    released = make("v1", "fastclip_compat", gamma_schedule="constant", gamma_min=0.2)
    released.set_progress(0.9)
    assert released.gamma(fresh)[0] == 1
    released.set_progress(1.2)
    assert released.gamma(fresh)[0].item() == pytest.approx(0.2)


def test_tau_learning_rate_drops_once_and_stays() -> None:
    loss = make("v3", "exact", tau_lr=0.3, tau_lr_drop=0.05)
    images, texts, index = batch(0)
    rates = []
    for tau in (0.1, 0.04, 0.1):
        loss(images.requires_grad_(), texts, 1 / tau, index=index)
        loss.after_step(skipped=False)
        rates.append(loss.temperature_lr(1.0))
    assert rates == pytest.approx([0.3, 0.1, 0.1])
    skipped = make("v3", "exact", tau_lr=0.3, tau_lr_drop=0.05)
    skipped(images, texts, 1 / 0.04, index=index)
    skipped.after_step(skipped=True)
    assert skipped.temperature_lr(1.0) == pytest.approx(0.3)
    again = make("v3", "exact", tau_lr=0.3, tau_lr_drop=0.05)
    again.load_rank_states([loss.rank_state()])
    assert again.temperature_lr(1.0) == pytest.approx(0.1)


def test_metrics_name_the_normal_loss_and_the_surrogate() -> None:
    from disco_ds.losses import DiscoLoss

    images, texts, index = batch(0)
    for version in ("v0", "v1", "v2", "v3"):
        loss = make(version, "exact")
        value = loss(images.clone().requires_grad_(), texts, 1 / TAU, index=index)
        plain = DiscoLoss()(images, texts, 1 / TAU)
        metrics = loss.metrics()
        assert float(metrics["loss"]) == pytest.approx(float(plain))
        assert float(metrics["surrogate_loss"]) == pytest.approx(float(value))
        assert {
            "gamma",
            "log_u_q50",
            "first_visits",
            "duplicate_rate",
            "chance_level",
        } <= metrics.keys()
