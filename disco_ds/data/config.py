"""What a user sets about training data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    """Training data: webdataset shards of image-caption pairs."""

    shards: tuple[str, ...] = ()
    """Shards: files, folders, brace ranges, globs, .txt lists, pipe: commands, s3:// or https://."""
    index: Path | None = None
    """Index of the shards (disco-ds index); made there if missing, brought up to date if not."""
    num_samples: int | None = None
    """How many samples there should be; a run whose index says otherwise is refused."""
    missing_shards: Literal["error", "skip"] = "error"
    """What to do about gaps in a brace range."""
    require_stats: bool = False
    """Leave out shards that img2dataset wrote no _stats.json for (unfinished downloads)."""
    max_bad_shards: float = 0.1
    """Refuse to start when a larger share of the shards than this is damaged (0 to 1)."""
    num_workers: int = 1
    """Worker processes per rank that read and decode; 0 decodes in the training process."""
    prefetch_batches: int = 2
    """Batches that each worker makes ahead."""
    start_method: Literal["fork", "spawn", "forkserver"] = "fork"
    """How workers are started. fork starts at once; workers never touch the GPU. Where InfiniBand's
    driver is not safe to fork from, forkserver."""
    shuffle_buffer: int = 2000
    """Samples per worker that are shuffled among each other, kept undecoded; 0 or 1: no shuffle."""
    mode: Literal["exact", "resampled"] = "exact"
    """exact: every sample once per epoch. resampled: shards drawn with replacement, by weight."""
    weights: tuple[float, ...] = ()
    """resampled only: share of samples from each entry of shards (any positive numbers)."""
    captions: tuple[str, ...] = ("txt",)
    """Where captions come from, by priority: txt, or json.FIELD (a text or a list of texts)."""
    caption_choice: Literal["first", "random"] = "first"
    """first: the first caption that is not empty; random: another pick of all in each epoch."""
    keep_empty_captions: bool = False
    """Train on samples whose caption is empty or blank instead of skipping them."""
    max_image_pixels: int = 89_478_485
    """Images with more pixels than this are skipped without decoding."""
    reduced_decode: float = 1.5
    """Decode JPEGs smaller while this many times the model's image size is left; 0: never."""
    max_bad_share: float = 0.1
    """Stop when a larger share of the samples than this had to be skipped (0 to 1)."""
    read_retries: int = 3
    """How often a shard that fails while it is read is opened again."""
    retry_seconds: float = 1.0
    """Wait before the first retry; doubled for each further one."""
    read_timeout: float = 60.0
    """Seconds without a byte after which reading a remote shard fails."""

    def __post_init__(self) -> None:
        amounts = (
            "num_workers",
            "shuffle_buffer",
            "read_retries",
            "retry_seconds",
            "reduced_decode",
        )
        for name in amounts:
            if getattr(self, name) < 0:
                raise ValueError(f"--data.{name} {getattr(self, name)}: must not be negative")
        for name in ("prefetch_batches", "max_image_pixels", "read_timeout"):
            if getattr(self, name) <= 0:
                raise ValueError(f"--data.{name} {getattr(self, name)}: must be positive")
        for name in ("max_bad_share", "max_bad_shards"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--data.{name} {getattr(self, name)}: must be from 0 to 1")
        self._check_captions()
        self._check_weights()

    def _check_captions(self) -> None:
        if not self.captions:
            raise ValueError("--data.captions is empty: name txt or json.FIELD")
        for name in self.captions:
            if name != "txt" and not (name.startswith("json.") and len(name) > len("json.")):
                raise ValueError(f"--data.captions: {name!r} is neither txt nor json.FIELD")

    def _check_weights(self) -> None:
        if not self.weights:
            return
        if self.mode != "resampled":
            raise ValueError(
                "--data.weights needs --data.mode resampled (exact takes every sample)"
            )
        if len(self.weights) != len(self.shards):
            raise ValueError(
                f"--data.weights has {len(self.weights)} numbers for {len(self.shards)} entries of "
                "--data.shards"
            )
        if min(self.weights) < 0 or sum(self.weights) <= 0:
            raise ValueError(f"--data.weights {self.weights}: must not be negative, nor all 0")
