"""Plans as text: one in full, or several as rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from disco_ds.planner.meter import Traffic
from disco_ds.planner.plan import Plan
from disco_ds.planner.trace import Trace
from disco_ds.planner.units import gib, short_bytes

ORDER = (
    "parameters",
    "gathered weights",
    "master weights",
    "gradients",
    "optimizer",
    "optimizer temporaries",
    "activations, image",
    "activations, text",
    "features",
    "loss tiles",
    "estimator tables",
    "engine buffers",
    "inputs",
    "allocator slack",
    "CUDA context, NCCL",
)


def full_table(plan: Plan) -> str:
    """Memory by part and phase, traffic by phase, time floors, verdict."""
    blocks = [
        heading(plan),
        memory_table(plan),
        host_line(plan),
        traffic_table(plan.traffic, plan),
        time_line(plan),
        verdict(plan),
    ]
    return "\n\n".join(block for block in blocks if block)


def heading(plan: Plan) -> str:
    """What is planned."""
    request = plan.request
    several = f"{request.micro_batches} x {request.micro_batch}" if request.micro_batches > 1 else 1
    checkpointing = "on" if request.model.activation_checkpointing else "off"
    return (
        f"{request.model.name}, {request.strategy}, {request.precision}, "
        f"{request.world_size} GPU(s) of {gib(plan.hardware.memory)} GiB\n"
        f"global batch {request.global_batch_size}, {request.local_batch_size} per GPU, "
        f"micro-batches {several}, activation checkpointing {checkpointing}, "
        f"loss {request.loss.name} ({request.loss.gather})\n"
        "by closed forms: estimated from shapes, nothing was run or measured"
    )


def memory_table(plan: Plan) -> str:
    """GiB per GPU by part: between steps, and at the highest moment of each phase."""
    memory = plan.memory
    columns = {"at rest": memory.at_rest, **memory.phases}
    parts = [name for name in ORDER if any(column.get(name) for column in columns.values())]
    rows = [["GiB per GPU", *columns]]
    rows += [[name, *(gib(column.get(name, 0.0)) for column in columns.values())] for name in parts]
    totals = [sum(column.values()) for column in columns.values()]
    rows.append(["allocator slack", *(gib(plan.hardware.slack * t) for t in totals)])
    rows.append(["CUDA context, NCCL", *(gib(plan.hardware.reserved) for _ in totals)])
    needed = [t * (1 + plan.hardware.slack) + plan.hardware.reserved for t in totals]
    rows.append(["total", *(gib(value) for value in needed)])
    text = aligned(rows)
    return f"{text}\npeak in {memory.peak_phase}: {gib(plan.needed)} GiB"


def host_line(plan: Plan) -> str:
    """What lies in host memory instead."""
    if not plan.memory.host:
        return ""
    parts = ", ".join(f"{name} {gib(size)}" for name, size in plan.memory.host.items())
    return f"host memory per GPU, GiB: {parts}"


def traffic_table(traffic: Sequence[Traffic], plan: Plan) -> str:
    """Collectives of one step by phase: calls, bytes of whole results, time on the link."""
    if not traffic:
        return ""
    rows = [["per step", "collective", "calls", "bytes"]]
    rows += [[t.phase, t.collective, str(t.calls), short_bytes(t.bytes)] for t in traffic]
    return aligned(rows)


def time_line(plan: Plan) -> str:
    """Floors of the step."""
    hardware, time = plan.hardware, plan.time
    batch = plan.request.global_batch_size
    node = plan.request.world_size <= hardware.gpus_per_node
    link = "inside a node" if node else "between nodes"
    rate = hardware.intra if node else hardware.link
    return (
        f"time floor: compute {time.compute:.3f} s ({hardware.flops / 1e12:.0f} TFLOPS at "
        f"{hardware.mfu:.0%}), link {time.link:.3f} s ({short_bytes(rate)}/s {link}); "
        f"{time.overlapped:.3f} s overlapped, {time.serial:.3f} s in turn: at most "
        f"{batch / time.overlapped:,.0f} pairs/s"
    )


def verdict(plan: Plan) -> str:
    """Whether it fits, and by how much."""
    card = gib(plan.hardware.memory)
    if plan.fits:
        return (
            f"fits: {gib(plan.needed)} of {card} GiB, margin {gib(plan.margin)} GiB "
            f"({plan.margin / plan.hardware.memory:.0%})"
        )
    part, size = max(plan.peak_parts.items(), key=lambda item: item[1])
    return (
        f"does not fit: {gib(plan.needed)} of {card} GiB, {gib(-plan.margin)} GiB too much; "
        f"the largest part is {part} with {gib(size)} GiB"
    )


def rows_table(plans: Iterable[Plan]) -> str:
    """One row per plan."""
    rows = [
        [
            *("strategy", "checkpointing", "micro-batch", "gather", "tile"),
            *("at rest", "peak GiB", "bytes/step", "calls", "floor s", "verdict"),
        ]
    ]
    rows += [_row(plan) for plan in plans]
    return aligned(rows)


def _row(plan: Plan) -> list[str]:
    request, loss = plan.request, plan.request.loss
    return [
        request.strategy,
        "on" if request.model.activation_checkpointing else "off",
        f"{request.micro_batches} x {request.micro_batch}",
        loss.gather,
        str(loss.tile_size or "auto"),
        gib(sum(plan.memory.at_rest.values())),
        gib(plan.needed),
        short_bytes(sum(t.bytes for t in plan.traffic)),
        str(sum(t.calls for t in plan.traffic)),
        f"{plan.time.serial:.3f}",
        f"fits, {gib(plan.margin)} left" if plan.fits else f"{gib(-plan.margin)} too much",
    ]


def trace_table(plan: Plan, traced: Trace) -> str:
    """The trace beside the closed forms."""
    rows = [["peak of live tensors, GiB", "closed form", "traced", "difference"]]
    for phase, peak in traced.step.phases.items():
        closed = sum(plan.memory.phases[phase].values())
        rows.append([phase, gib(closed), gib(peak.bytes), f"{closed / peak.bytes - 1:+.1%}"])
    rows.append(
        [
            "whole step",
            gib(plan.memory.peak),
            gib(traced.step.peak.bytes),
            f"{plan.memory.peak / traced.step.peak.bytes - 1:+.1%}",
        ]
    )
    parts = sorted(traced.step.peak.parts.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {gib(size)}" for name, size in parts if size >= 2**20)
    same = plan.traffic == traced.step.traffic
    agreement = (
        "collectives: calls and bytes as predicted"
        if same
        else "collectives traced:\n" + traffic_table(traced.step.traffic, plan)
    )
    return (
        "trace of the real step on fake tensors (simulated: no GPU, no other rank), "
        f"{traced.seconds:.0f} s\n{aligned(rows)}\nat the peak: {listed}\n{agreement}"
    )


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side: words to the left, numbers (and their headings) to the right."""
    columns = list(zip(*rows, strict=True))
    padded = [_column(column) for column in columns]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*padded, strict=True))


def _column(cells: Sequence[str]) -> list[str]:
    width = max(len(cell) for cell in cells)
    is_number = all(cell[:1] in "+-0123456789" for cell in cells[1:])
    return [cell.rjust(width) if is_number else cell.ljust(width) for cell in cells]
