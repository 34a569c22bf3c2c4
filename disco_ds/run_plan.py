"""What a run is, checked before anything expensive: the same answer, or error, on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from disco_ds.checkpoint import find_checkpoint
from disco_ds.comm_hooks import CommHook
from disco_ds.config import TrainConfig, local_batch_size
from disco_ds.data.index import ShardIndex, configured_index
from disco_ds.data.loader import check_feed
from disco_ds.distributed import World, agreed, broadcast_object
from disco_ds.evaluation.run import check_evaluation
from disco_ds.evaluation.zero_shot import ZeroShotTask
from disco_ds.models import check_model_name
from disco_ds.strategies.base import Strategy
from disco_ds.strategies.build import build_strategy, choose_comm_hook
from disco_ds.strategies.ds_config import RunNumbers


@dataclass(frozen=True)
class RunPlan:
    """A run after all checks, before anything is allocated. The same on every rank."""

    config: TrainConfig
    run_dir: Path
    local_batch_size: int
    strategy: Strategy
    comm_hook: CommHook | None
    index: ShardIndex
    tasks: tuple[ZeroShotTask, ...]
    checkpoint: Path | None


def plan_run(config: TrainConfig, world: World, *, run_name: str) -> RunPlan:
    """Check everything that can be checked before work starts, and agree on the run folder.

    Collective. Reads shard indices on the main rank.

    Raises:
        AgreedError: on all ranks, one line naming the flag, key or file and the remedy.
    """
    with agreed(world):
        local = local_batch_size(config, world.world_size)
        numbers = RunNumbers(
            global_batch_size=config.global_batch_size,
            world_size=world.world_size,
            micro_batch_size=min(local, config.micro_batch_size or local),
            precision=config.precision,
            max_grad_norm=config.optim.max_grad_norm,
        )
        strategy = build_strategy(
            config.strategy, config.deepspeed_config, numbers, world, engine=config.engine
        )
        strategy.check_optimizer(config.optim)
        comm_hook = choose_comm_hook(config.deepspeed_config, config.comm_hook).build()
        check_model_name(config.model.name)
        tasks = check_evaluation(config.evaluation)
        index = _read_index(config) if world.is_main else None
        if index is not None:
            check_feed(config.data, index, world=world, local_batch_size=local)
    run_dir = Path(broadcast_object(_run_dir(config, run_name), world))
    with agreed(world):
        checkpoint = _resume_point(config, run_dir)
        if world.is_main:
            _create_run_dir(run_dir, resuming=config.resume is not None)
    shared_index = broadcast_object(index, world)
    return RunPlan(config, run_dir, local, strategy, comm_hook, shared_index, tasks, checkpoint)


def _read_index(config: TrainConfig) -> ShardIndex:
    if not config.data.shards:
        raise ValueError("--data.shards: no training data given")
    return configured_index(config.data)


def _run_dir(config: TrainConfig, run_name: str) -> str:
    if config.run_dir is not None:
        return config.run_dir
    return str(Path("runs") / f"{run_name}-{datetime.now():%Y%m%d-%H%M%S}")


def _resume_point(config: TrainConfig, run_dir: Path) -> Path | None:
    if config.resume is None:
        return None
    try:
        return find_checkpoint(run_dir, config.resume)
    except ValueError as error:
        raise ValueError(f"--resume {error}") from error


def _create_run_dir(run_dir: Path, *, resuming: bool) -> None:
    if run_dir.exists() and not resuming and any(run_dir.iterdir()):
        raise ValueError(
            f"--run_dir {run_dir} exists: add --resume latest to continue it, or choose another"
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--run_dir {run_dir}: cannot write there ({error.strerror})") from error
