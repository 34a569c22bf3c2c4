"""Where numbers go: ``metrics.jsonl``, trackers, a progress bar. One axis: optimizer steps."""

from disco_ds.metrics.config import TrackingConfig
from disco_ds.metrics.log import METRICS_FILE, MetricsLog, read_metrics
from disco_ds.metrics.memory import memory_use
from disco_ds.metrics.pictures import pairs_picture, retrieval_picture
from disco_ds.metrics.progress import PlateauWatch, Progress, Stopwatch

__all__ = [
    "METRICS_FILE",
    "MetricsLog",
    "PlateauWatch",
    "Progress",
    "Stopwatch",
    "TrackingConfig",
    "memory_use",
    "pairs_picture",
    "read_metrics",
    "retrieval_picture",
]
