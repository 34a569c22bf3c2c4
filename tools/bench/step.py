"""Where the milliseconds of a training step go, ours beside open_clip_train's.

    python tools/bench/step.py [--rounds 2] [--steps 80] [--batch 64] [--engines ddp zero2]

The runs of ``training.py`` (two ranks, same model, shards and batch) once more, with a stopwatch
around the parts of a step. A part's time leaves out the parts inside it; the rest is what no part
claims. Given are medians over the steps of rank 0, after the first 20, of the time that passed or,
with ``--clock cpu``, of the processor time of all its threads, which a busy machine and waiting for
the other rank hardly change.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tables import environment, show, write_csv
from training import RESULTS, WARM, install_theirs, our_command, run, their_command

from disco_ds.data.demo import ensure_demo
from disco_ds.presets import DEMO_DATA

OURS = {
    "wait for data": ("disco_ds.data.loader:TrainLoader.__iter__",),
    "encoders forward": ("disco_ds.grad_cache:_encode",),
    "loss": ("disco_ds.grad_cache:_loss_gradients",),
    "encoders backward, reduction": (
        "disco_ds.grad_cache:contrastive_backward",
        "disco_ds.strategies.plain:PlainStrategy.backward",
        "disco_ds.strategies.zero:ZeroStrategy.backward",
    ),
    "optimizer": (
        "disco_ds.strategies.plain:PlainStrategy.step",
        "disco_ds.strategies.zero:ZeroStrategy.step",
    ),
    "temperature": ("disco_ds.trainer:Trainer._step_temperature",),
    "saves": ("disco_ds.saves:Saves.save_or_stop_if_asked",),
    "reports": ("disco_ds.trainer:Trainer._report",),
}
THEIRS = {
    "wait for data": ("torch.utils.data:DataLoader.__iter__",),
    "encoders forward": ("torch.nn.parallel:DistributedDataParallel.forward",),
    "loss": ("open_clip.loss:ClipLoss.forward",),
    "encoders backward, reduction": ("open_clip_train.train:backward",),
    "optimizer": ("torch.optim:AdamW.step",),
    "reports": ("logging:info",),
}
LAST = {
    "ours": "disco_ds.saves:Saves.save_or_stop_if_asked",
    "theirs": "torch.optim:AdamW.step",
}


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


class Stopwatch:
    """Exclusive seconds per part, cut into steps."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = [{}]
        self._open: list[str] = ["rest"]
        self._clock = CLOCKS[os.environ.get("STEP_CLOCK", "wall")]
        self._since = self._clock()

    def _charge(self) -> None:
        now = self._clock()
        part, current = self._open[-1], self.steps[-1]
        current[part] = current.get(part, 0.0) + now - self._since
        self._since = now

    def around(self, part: str, function: Callable[..., Any], *, ends_step: bool) -> Any:
        """The function, timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._leave()
                if ends_step:
                    self.steps.append({})

        return timed

    def around_each(self, part: str, function: Callable[..., Any]) -> Any:
        """A function that returns an iterator, whose every item is timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Iterator[Any]:
            items = iter(function(*args, **kwargs))
            while True:
                self._enter(part)
                try:
                    item = next(items)
                except StopIteration:
                    return
                finally:
                    self._leave()
                yield item

        return timed

    def _enter(self, part: str) -> None:
        self._charge()
        self._open.append(part)

    def _leave(self) -> None:
        self._charge()
        self._open.pop()


def watch(parts: Mapping[str, tuple[str, ...]], last: str) -> Stopwatch:
    """Put the stopwatch around everything in ``parts`` ("module:attribute.path")."""
    stopwatch = Stopwatch()
    for part, places in parts.items():
        for place in places:
            module, _, path = place.partition(":")
            *owners, name = path.split(".")
            owner: Any = __import__(module, fromlist=["_"])
            for inner in owners:
                owner = getattr(owner, inner)
            function = getattr(owner, name)
            if name == "__iter__":
                timed = stopwatch.around_each(part, function)
            else:
                timed = stopwatch.around(part, function, ends_step=place == last)
            setattr(owner, name, timed)
    return stopwatch


def in_a_rank(kind: str, out: str, arguments: list[str]) -> None:
    """Train with the stopwatch in place; rank 0 leaves its steps in a file."""
    if kind == "theirs":
        from open_clip_main import main as train_theirs

        stopwatch = watch(THEIRS, LAST[kind])
        train_theirs(Path(arguments[0]))
    else:
        from disco_ds.cli import train as train_ours

        stopwatch = watch(OURS, LAST[kind])
        if train_ours(arguments):
            raise SystemExit("training failed")
    if os.environ.get("RANK") == "0":
        Path(out).write_text(json.dumps(stopwatch.steps))


def median_ms(steps: list[dict[str, float]]) -> dict[str, float]:
    """Per part over the steps that count, and the median of whole steps as ``step``."""
    steps = steps[WARM:-1]
    parts = {part for step in steps for part in step}
    found = {part: statistics.median(step.get(part, 0.0) for step in steps) for part in parts}
    found["step"] = statistics.median(sum(step.values()) for step in steps)
    return {part: 1e3 * seconds for part, seconds in found.items()}


def measure(options: argparse.Namespace, folder: Path, name: str) -> dict[str, float]:
    """One run; milliseconds per part."""
    kind = "theirs" if name == "open_clip" else "ours"
    out = folder / "steps.json"
    script = (str(Path(__file__)), "--worker", kind, str(out))
    if kind == "theirs":
        command = their_command(options, folder, script)
    else:
        command = our_command(options, folder, name, script)
    run(command, kind, options.batch)
    return median_ms(json.loads(out.read_text()))


def main() -> None:
    if "--worker" in sys.argv:  # after --local_rank from DeepSpeed's launcher
        kind, out, *arguments = sys.argv[sys.argv.index("--worker") + 1 :]
        in_a_rank(kind, out, arguments)
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="disco-demo-rn")
    parser.add_argument("--batch", type=int, default=64, help="pairs per rank")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--engines", nargs="+", default=["ddp", "zero2"])
    parser.add_argument("--clock", default="wall", choices=CLOCKS)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.set_defaults(seed=0)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, WARM + 10
    os.environ["STEP_CLOCK"] = options.clock
    install_theirs()
    ensure_demo(DEMO_DATA)
    found: dict[str, list[dict[str, float]]] = {n: [] for n in ("open_clip", *options.engines)}
    for _ in range(options.rounds):
        for name, rounds in found.items():
            with tempfile.TemporaryDirectory(prefix="bench-step-") as folder:
                rounds.append(measure(options, Path(folder), name))
    report(found, options)


def report(found: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> None:
    """Print the table; keep it unless it was quick."""
    parts = [*OURS, "rest", "step"]
    rows = [
        {"part": part}
        | {
            name: round(statistics.median(times.get(part, 0.0) for times in rounds), 1)
            for name, rounds in found.items()
        }
        for part in parts
    ]
    show(rows)
    print("in short: a step takes " + ", ".join(f"{n} {rows[-1][n]} ms" for n in found))
    if options.quick:
        return
    note = (
        f"{options.clock} ms per step, {options.model}, 2 x {options.batch} pairs, fp32, median of "
        f"{options.steps - WARM} steps and {options.rounds} rounds in turn, {environment()}; "
        "theirs: the loss is its forward only, its backward counts with the encoders'"
    )
    write_csv(RESULTS / f"step_{options.clock}.csv", rows, note)


if __name__ == "__main__":
    main()
