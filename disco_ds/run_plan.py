"""What a run is, checked before anything expensive: the same answer, or error, on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from disco_ds.checkpoint import HF_WEIGHTS, MODEL_FILE, find_checkpoint
from disco_ds.comm_hooks import CommHook
from disco_ds.config import TrainConfig, local_batch_size
from disco_ds.data.index import ShardIndex, configured_index
from disco_ds.data.loader import check_feed
from disco_ds.distributed import World, agreed, broadcast_object, while_main_works
from disco_ds.evaluation.run import check_evaluation
from disco_ds.evaluation.tasks import ZeroShotTask
from disco_ds.models import ModelConfig, check_tokenizer, check_trainable
from disco_ds.strategies.base import Strategy
from disco_ds.strategies.build import build_strategy, choose_comm_hook
from disco_ds.strategies.ds_config import RunNumbers
from disco_ds.weights import find_initial_weights

logger = logging.getLogger(__name__)

INDEX_FILE = "index.json"


@dataclass(frozen=True)
class RunPlan:
    """A run after all checks, before anything is allocated. The same on every rank."""

    config: TrainConfig
    run_dir: Path
    local_batch_size: int
    model: ModelConfig
    """With ``init`` as this run needs it: a file, a known name, or nothing when it resumes."""

    strategy: Strategy
    comm_hook: CommHook | None
    index: ShardIndex
    tasks: tuple[ZeroShotTask, ...]
    checkpoint: Path | None


@dataclass(frozen=True)
class Parts:
    """What follows from the configuration and the number of ranks alone."""

    local_batch_size: int
    strategy: Strategy
    comm_hook: CommHook | None


def choose_parts(config: TrainConfig, world: World) -> Parts:
    """Check the settings against each other; touches no data and no device.

    Raises:
        ValueError: one line naming the flag, key or file and the remedy.
    """
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
    check_trainable(config.model.name)
    if not config.data.shards:
        raise ValueError("--data.shards: no training data given")
    return Parts(local, strategy, comm_hook)


def plan_run(
    config: TrainConfig, world: World, *, run_name: str, tick: Callable[[], None] = lambda: None
) -> RunPlan:
    """Check everything that can be checked before work starts, and agree on the run folder.

    Collective. Reads shard indices on the main rank; ``tick`` is called on all ranks meanwhile.

    Raises:
        AgreedError: on all ranks, one line naming the flag, key or file and the remedy.
    """
    with agreed(world):
        parts = choose_parts(config, world)
        parts.strategy.check_device()
        check_tokenizer(config.model.name)
        tasks = check_evaluation(config.evaluation, world)
    local = parts.local_batch_size
    with agreed(world):
        index = while_main_works(world, lambda beat: _read_index(config, beat), tick=tick)
        if index is not None:
            check_feed(config.data, index, world=world, local_batch_size=local)
    run_dir = Path(broadcast_object(_run_dir(config, run_name), world))
    with agreed(world):
        found = _resume_point(config, run_dir) if world.is_main else None
        if world.is_main:
            _create_run_dir(run_dir, resuming=config.resume is not None)
        if index is not None and config.data.index is None:
            index.save(run_dir / INDEX_FILE)
    checkpoint = Path(name) if (name := broadcast_object(str(found or ""), world)) else None
    with agreed(world):
        _check_seen_by_all(checkpoint)
    with agreed(world):
        # A resumed run has its weights; what it once started from may be gone.
        model = _found_init(config.model, world) if checkpoint is None else _without_init(config)
    shared_index = broadcast_object(index, world)
    return RunPlan(
        config=config,
        run_dir=run_dir,
        local_batch_size=local,
        model=model,
        strategy=parts.strategy,
        comm_hook=parts.comm_hook,
        index=shared_index,
        tasks=tasks,
        checkpoint=checkpoint,
    )


def _check_seen_by_all(checkpoint: Path | None) -> None:
    if checkpoint is not None and not checkpoint.is_dir():
        raise ValueError(
            f"--resume: this rank does not see {checkpoint}, which the main rank found: put the "
            "run folder on a file system that all nodes share"
        )


def _found_init(model: ModelConfig, world: World) -> ModelConfig:
    """``--model.init`` as a file or a name whose weights are on this node."""
    if model.init is None:
        return model
    path = Path(model.init)
    if path.is_dir():
        path = path / HF_WEIGHTS if (path / HF_WEIGHTS).is_file() else _weights_of(path)
        return replace(model, init=str(path))
    if world.local_rank == 0:  # downloads; the others find it in the cache
        find_initial_weights(model.name, model.init)
    return model


def _without_init(config: TrainConfig) -> ModelConfig:
    return replace(config.model, init=None)


def _weights_of(folder: Path) -> Path:
    try:
        found = find_checkpoint(folder, str(folder))
    except ValueError as error:
        raise ValueError(f"--model.init {error}") from error
    assert found is not None
    return found / MODEL_FILE


def _read_index(config: TrainConfig, on_shard: Callable[[], None]) -> ShardIndex:
    """By ``--data.index``, or by the one that the run kept when it began."""
    data = config.data
    if data.index is None and config.resume is not None and config.run_dir is not None:
        kept = Path(config.run_dir) / INDEX_FILE
        data = replace(data, index=kept if kept.is_file() else None)
    return configured_index(data, on_shard=on_shard)


def _run_dir(config: TrainConfig, run_name: str) -> str:
    if config.run_dir is not None:
        return config.run_dir
    return str(Path("runs") / f"{run_name}-{datetime.now():%Y%m%d-%H%M%S}")


def _resume_point(config: TrainConfig, run_dir: Path) -> Path | None:
    if config.resume is None:
        return None
    try:
        found = find_checkpoint(run_dir, config.resume)
    except ValueError as error:
        raise ValueError(f"--resume {error}") from error
    if found is None:
        logger.info("--resume latest: no checkpoint in %s yet, starting fresh", run_dir)
    return found


def _create_run_dir(run_dir: Path, *, resuming: bool) -> None:
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"--run_dir {run_dir}: is a file; choose a folder")
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
