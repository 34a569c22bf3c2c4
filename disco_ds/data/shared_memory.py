"""Whether the batches that workers make ahead fit where processes share memory."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from disco_ds.data.config import DataConfig

logger = logging.getLogger(__name__)

SHARED = Path("/dev/shm")
GIB = 2**30


def needed_bytes(config: DataConfig, *, batch_size: int, image_size: int, ranks_here: int) -> int:
    """Images of all batches that the workers of this node may have ready, ``4 x 3 S^2`` each."""
    ahead = config.num_workers * config.prefetch_batches * ranks_here
    return ahead * batch_size * 3 * image_size**2 * 4


def free_bytes() -> int | None:
    """What is left of shared memory; None where there is no such folder."""
    return shutil.disk_usage(SHARED).free if SHARED.is_dir() else None


def warn_if_little(config: DataConfig, *, batch_size: int, image_size: int) -> None:
    """Say so where batches made ahead would fill shared memory: workers die of it ("bus error")."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = needed_bytes(
        config, batch_size=batch_size, image_size=image_size, ranks_here=ranks_here
    )
    free = free_bytes()
    if free is None or needed <= free:
        return
    logger.warning(
        "%d batches made ahead by %d workers on each of %d ranks may take %.1f GiB, %s has %.1f "
        "free: lower --data.prefetch_batches or --data.num_workers, or enlarge it (docker run "
        "--shm-size)",
        *(config.prefetch_batches, config.num_workers, ranks_here),
        *(needed / GIB, SHARED, free / GIB),
    )
