"""Which curves a report shows, each with what it is to be compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from disco_ds.report.charts import Chart, Series
from disco_ds.report.record import Point, RunRecord

GIB = 2.0**30


def charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """The curves that the runs have logged."""
    found = [_loss(runs), *_plain(runs), *_memory(runs), *_evaluations(runs)]
    return [chart for chart in found if chart.svg]


def _loss(runs: Sequence[RunRecord]) -> Chart:
    lines = []
    for number, run in enumerate(runs):
        points = run.series("loss")
        lines.append(Series(run.name, points, number))
        if run.chance is not None and points:
            ends: list[Point] = [(points[0][0], run.chance), (points[-1][0], run.chance)]
            lines.append(Series(f"chance {run.chance:.3f}", ends, number, dashed=True))
    return Chart("Loss", lines, note="dashed: chance, ln B, a model that has learnt nothing")


PLAIN = (
    ("logit_scale", "Temperature", "logit scale, 1/\u03c4"),
    ("tau", "Temperature \u03c4", "of FastCLIP's loss"),
    ("tau_q50", "Temperature \u03c4, median", "each sample has its own"),
    ("gamma", "\u03b3", "how much of a running mean is renewed"),
    ("lr", "Learning rate", ""),
    ("samples_per_second", "Throughput", "samples per second, over all ranks"),
    ("grad_norm", "Gradient norm", "before clipping"),
)


def _plain(runs: Sequence[RunRecord]) -> Iterator[Chart]:
    for key, title, note in PLAIN:
        yield Chart(
            title, [Series(r.name, r.series(key), n) for n, r in enumerate(runs)], note=note
        )


def _memory(runs: Sequence[RunRecord]) -> Iterator[Chart]:
    lines = []
    for number, run in enumerate(runs):
        for key, label, dashed in (
            ("memory_bytes", "now", False),
            ("memory_peak_bytes", "peak", True),
        ):
            points: list[Point] = [(x, y if y is None else y / GIB) for x, y in run.series(key)]
            lines.append(Series(f"{run.name}, {label}", points, number, dashed))
    yield Chart("Memory", lines, note="GiB on the main rank; dashed: its peak so far")


def _evaluations(runs: Sequence[RunRecord]) -> Iterator[Chart]:
    for key in headline_keys(runs):
        lines = []
        for number, run in enumerate(runs):
            points = run.series(key)
            lines.append(Series(run.name, points, number))
            chance = chance_of(key, run.evaluation())
            if chance is not None and points:
                ends: list[Point] = [(points[0][0], chance), (points[-1][0], chance)]
                lines.append(Series("chance", ends, number, dashed=True))
        yield Chart(title_of(key), lines, note="dashed: chance", percent=True)


def headline_keys(runs: Sequence[RunRecord]) -> list[str]:
    """R@1 of both directions and top-1 of every classification set, in the order logged."""
    keys = dict.fromkeys(key for run in runs for key in run.evaluation())
    return [key for key in keys if key.endswith(("/top1", "_R@1"))]


def title_of(key: str) -> str:
    """``eval/SET/METRIC`` for people."""
    _, name, metric = key.split("/", 2)
    return f"{set_title(name)}: {metric_title(metric)}"


def set_title(name: str) -> str:
    """Name of an evaluation set for people."""
    if name.startswith("zero_shot_"):
        return "Zero-shot " + name.removeprefix("zero_shot_").replace("_", " ")
    return name.replace("_", " ").capitalize()


def metric_title(metric: str) -> str:
    """Name of a metric for people."""
    fixed = {
        "top1": "top-1",
        "top5": "top-5",
        "mean_per_class": "mean per class",
        "num_images": "images",
        "num_texts": "captions",
    }
    arrows = metric.replace("image_to_text_", "image \u2192 text ")
    arrows = arrows.replace("text_to_image_", "text \u2192 image ").replace("_", " ")
    return fixed.get(metric, arrows)


def chance_of(key: str, values: dict[str, float]) -> float | None:
    """What guessing would reach; None where that is not one simple number."""
    head, _, metric = key.rpartition("/")
    if metric in ("top1", "mean_per_class"):
        return values.get(f"{head}/chance")
    if metric == "top5" and (chance := values.get(f"{head}/chance")):
        return min(1.0, 5 * chance)
    images, texts = values.get(f"{head}/num_images"), values.get(f"{head}/num_texts")
    direction, _, recall = metric.partition("_R@")
    if not (images and texts and recall.isdigit()):
        return None
    if direction == "text_to_image":
        return min(1.0, int(recall) / images)
    # With several captions an image has several right answers.
    return min(1.0, int(recall) / texts) if images == texts else None
