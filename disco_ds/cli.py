"""Entry points: ``train.py`` and the ``disco-ds`` command."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from disco_ds.checkpoint import ExportCommand, SaveFailed
from disco_ds.command_line import parse_command_line
from disco_ds.config import TrainConfig
from disco_ds.data.batch import DataWorkerError
from disco_ds.data.demo import ensure_demo
from disco_ds.data.index import IndexCommand
from disco_ds.data.validate import ValidateCommand
from disco_ds.distributed import (
    AgreedError,
    World,
    agreed,
    any_rank,
    destroy_process_group,
    exit_alone,
    init_process_group,
    is_lost_contact,
    setup_logging,
)
from disco_ds.evaluation.command import EvaluateCommand
from disco_ds.planner.command import PlanCommand
from disco_ds.preemption import (
    EXIT_PREEMPTED,
    ignore_stop_signals,
    listen_for_stop,
    stop_reason,
)
from disco_ds.presets import DEMO_DATA, DEMO_PRESETS, PRESETS
from disco_ds.ranks import resolve_ranks
from disco_ds.report.command import ReportCommand
from disco_ds.watchdog import Watchdog

logger = logging.getLogger(__name__)

DONE, FAILED, WRONG_INPUT = 0, 1, 2
# How long a rank that does not speak waits to be ended by the launcher.
QUIET_SECONDS = 15


def train(arguments: Sequence[str]) -> int:
    """Run train.py on this rank; returns the exit status, the same on all ranks."""
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        is_main = resolve_ranks(os.environ).rank == 0
        config, preset = parse_command_line(arguments, PRESETS)
        world = World.from_environment(config.device)
    except ValueError as error:
        return _fail(str(error), WRONG_INPUT, speaks=is_main)
    listen_for_stop()
    setup_logging(world)
    _use_few_threads(world)
    _choose_products(config, world)
    watchdog = Watchdog(world.rank, config.timeout_seconds).start()
    from disco_ds.saves import Preempted
    from disco_ds.trainer import TrainingStopped

    try:
        init_process_group(world, timeout_seconds=config.timeout_seconds)
        return _run(config, preset, world, watchdog)
    except AgreedError as error:
        return _fail_together(str(error), WRONG_INPUT, world)
    except Preempted as error:
        return _leave(str(error), world)
    except (TrainingStopped, SaveFailed) as error:
        return _fail_together(str(error), FAILED, world)
    except BaseException as error:
        if (reason := _in_words(error, world, watchdog)) is None:
            exit_alone(FAILED, world, error)
            raise
        logger.debug("details", exc_info=True)
        is_own = not isinstance(error, KeyboardInterrupt)
        status = _fail(reason, FAILED, speaks=is_own or world.is_main)
        exit_alone(status, world)
        return status
    finally:
        destroy_process_group()
        watchdog.stop()


def _in_words(error: BaseException, world: World, watchdog: Watchdog) -> str | None:
    """One line for an error of this rank alone; None where its traceback says more."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, RuntimeError) and is_lost_contact(error):
        return _lost_contact(error, watchdog)
    if isinstance(error, (ValueError, DataWorkerError, OSError)):  # OSError: a full disk, ...
        return f"rank {world.rank}: {error}"
    return None


def _leave(reason: str, world: World) -> int:
    """Preempted: every rank leaves at the same time, with the same status."""
    ignore_stop_signals()
    logger.info("%s", reason)
    any_rank([True], world)  # a launcher ends the others when the first one is gone
    return EXIT_PREEMPTED


def _lost_contact(error: RuntimeError, watchdog: Watchdog) -> str:
    return (
        f"{watchdog.place}: lost contact with another rank, which died or took longer than "
        f"--timeout_seconds {watchdog.timeout_seconds:g}: {str(error).splitlines()[0]}"
    )


def _run(config: TrainConfig, preset: str | None, world: World, watchdog: Watchdog) -> int:
    from disco_ds.evaluation.run import summarize
    from disco_ds.report import reported
    from disco_ds.run_plan import plan_run
    from disco_ds.saves import Preempted
    from disco_ds.trainer import Trainer

    if preset in DEMO_PRESETS:
        with agreed(world):
            if world.is_main:
                ensure_demo(DEMO_DATA)
    name = preset or config.model.name
    plan = plan_run(config, world, run_name=name, tick=watchdog.tick)
    logger.info(
        "%s on %d rank(s), %s: %d samples, global batch %d (%d per rank), run folder %s",
        config.model.name,
        world.world_size,
        plan.strategy.name,
        plan.index.num_samples,
        config.global_batch_size,
        plan.local_batch_size,
        plan.run_dir,
    )
    with reported(plan.run_dir, world, stopped=(Preempted, KeyboardInterrupt)):
        trainer = Trainer(plan, world, watchdog)
        results = trainer.fit()
        exported = trainer.export()
        trainer.close()
        logger.info(
            "done: step %d, %s; open_clip weights %s, everything else in %s",
            trainer.counters.step,
            summarize(results) or "nothing evaluated",
            exported,
            plan.run_dir,
        )
    return DONE


def _use_few_threads(world: World) -> None:
    """One CPU rank must not use the cores of its neighbours: oversubscribed OpenMP collapses."""
    if world.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))


def _choose_products(config: TrainConfig, world: World) -> None:
    """TF32 on a GPU, or not: the same for matrices and convolutions."""
    if world.device.type != "cuda":
        return
    torch.set_float32_matmul_precision(config.matmul_precision)
    torch.backends.cudnn.allow_tf32 = config.matmul_precision == "high"
    if config.precision == "fp32" and config.matmul_precision == "highest":
        logger.info(
            "fp32 without TF32: --precision bf16 or --matmul_precision high is several times faster"
        )


def _fail(reason: str, status: int, *, speaks: bool) -> int:
    if speaks:
        sys.stderr.write(f"error: {reason}\n")
        sys.stderr.flush()
    else:
        # The launcher ends all ranks when the first one exits: let the one that speaks be first.
        deadline = time.monotonic() + QUIET_SECONDS
        while time.monotonic() < deadline and stop_reason() is None:
            time.sleep(0.1)
    return status


def _fail_together(reason: str, status: int, world: World) -> int:
    """An error that all ranks have: one speaks, then all leave."""
    if world.is_main:
        _fail(reason, status, speaks=True)
    any_rank([True], world)
    return status


@dataclass(frozen=True)
class DemoDataCommand:
    """Write the demo data: OpenMoji pictures and names as webdataset shards."""

    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = DEMO_DATA
    """Folder to write."""

    def run(self) -> int:
        """Write it; returns the exit status."""
        print(ensure_demo(self.output))
        return DONE


Command = (
    Annotated[DemoDataCommand, tyro.conf.subcommand("demo-data")]
    | Annotated[IndexCommand, tyro.conf.subcommand("index")]
    | Annotated[ValidateCommand, tyro.conf.subcommand("validate")]
    | Annotated[ExportCommand, tyro.conf.subcommand("export")]
    | Annotated[PlanCommand, tyro.conf.subcommand("plan")]
    | Annotated[EvaluateCommand, tyro.conf.subcommand("evaluate")]
    | Annotated[ReportCommand, tyro.conf.subcommand("report")]
)


def main() -> None:
    """The ``disco-ds`` command."""
    setup_logging(World())
    command = tyro.cli(Command, prog="disco-ds", use_underscores=True)
    try:
        status = command.run()
    except (ValueError, OSError) as error:
        status = _fail(str(error), WRONG_INPUT, speaks=True)
    sys.exit(status)
