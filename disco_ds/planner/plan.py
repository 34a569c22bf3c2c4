"""A plan: memory, traffic and time of one step, and whether it fits."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cached_property

from disco_ds.models import register_model_configs
from disco_ds.planner.comm import step_traffic
from disco_ds.planner.cost import Hardware, StepTime, step_time
from disco_ds.planner.memory import Memory, Parts, step_memory
from disco_ds.planner.meter import Traffic
from disco_ds.planner.profile import Profile, profile
from disco_ds.planner.request import PlanRequest
from disco_ds.planner.units import GIB


@dataclass(frozen=True)
class Plan:
    """Everything that is known of a step without running it."""

    request: PlanRequest
    hardware: Hardware
    profile: Profile
    memory: Memory

    @cached_property
    def traffic(self) -> list[Traffic]:
        """Collectives of a step."""
        return step_traffic(self.request, self.profile)

    @cached_property
    def time(self) -> StepTime:
        """Floors of a step."""
        return step_time(self.request, self.profile, self.traffic, self.hardware)

    @property
    def peak_parts(self) -> Parts:
        """Parts at the peak, with what is not a tensor."""
        parts = dict(self.memory.phases[self.memory.peak_phase])
        parts["allocator slack"] = self.hardware.slack * self.memory.peak
        parts["CUDA context, NCCL"] = self.hardware.reserved
        return parts

    @property
    def needed(self) -> float:
        """Bytes of the card that the step takes."""
        return sum(self.peak_parts.values())

    @property
    def margin(self) -> float:
        """Bytes left; negative when it does not fit."""
        return self.hardware.memory - self.needed

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.margin >= 0


def make_plan(request: PlanRequest, hardware: Hardware) -> Plan:
    """Plan a step by closed forms.

    Raises:
        ValueError: unknown model.
    """
    known = profile_of(request)
    return Plan(request, hardware, known, step_memory(request, known))


def profile_of(request: PlanRequest, *, like_cuda: bool = True) -> Profile:
    """The profile that a request needs.

    Raises:
        ValueError: the model's text tower needs files that are not here.
    """
    try:
        return profile(
            request.model,
            request.precision,
            autocast=request.autocast,
            module_hooks=request.stage == 3,
            like_cuda=like_cuda,
        )
    except OSError as error:
        said = str(error).strip().splitlines()[0]
        raise ValueError(
            f"--model {request.model.name}: needs files of the Hugging Face hub that are not in "
            f"the cache ({said}); fetch them once where there is a network"
        ) from error


def check_model(name: str) -> None:
    """Refuse a model that open_clip does not know.

    Raises:
        ValueError: with the nearest names.
    """
    import open_clip

    register_model_configs()
    known: list[str] = open_clip.list_models()
    if name not in known:
        folded = {model.casefold(): model for model in known}
        near = difflib.get_close_matches(name.casefold(), list(folded), n=3, cutoff=0.0)
        raise ValueError(
            f"--model {name}: open_clip has no such model; nearest: "
            f"{', '.join(folded[model] for model in near)}"
        )


def check_card(request: PlanRequest, hardware: Hardware) -> None:
    """Refuse a card on which not even one pair per rank fits.

    Raises:
        ValueError: naming the part that is too large.
    """
    least = request.with_(global_batch_size=max(2, request.world_size), micro_batch_size=1)
    plan = make_plan(least, hardware)
    if not plan.fits:
        part, size = max(plan.peak_parts.items(), key=lambda item: item[1])
        raise ValueError(
            f"--gpu_memory {hardware.memory / GIB:.4g} GiB is too small even for one pair per GPU: "
            f"{request.model.name} with {request.strategy} and {request.precision} needs "
            f"{plan.needed / GIB:.2f} GiB, of which {part} {size / GIB:.2f} GiB"
        )
