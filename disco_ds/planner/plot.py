"""Memory of the loss against the batch, ours beside the peers'."""

from __future__ import annotations

from pathlib import Path

from disco_ds.planner.cost import Hardware
from disco_ds.planner.memory import loss_memory, peer_loss_memory
from disco_ds.planner.plan import profile_of
from disco_ds.planner.request import PlanRequest
from disco_ds.planner.units import GIB

PEERS = {
    "disco_clip": "DisCo-CLIP, open_clip --local-loss",
    "open_clip": "open_clip's default",
}
LARGEST_LOCAL_BATCH = 2**15


def plot_memory(request: PlanRequest, hardware: Hardware, path: Path) -> None:
    """Write the plot; its format is the file's suffix.

    Raises:
        ValueError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    dim = profile_of(request).dim
    sizes = [2**power for power in range(5, LARGEST_LOCAL_BATCH.bit_length())]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    ranks = request.world_size
    batches = [size * ranks for size in sizes]
    ours = [request.with_(global_batch_size=batch, micro_batch_size=None) for batch in batches]
    own = [loss_memory(one, dim, like_cuda=True) / GIB for one in ours]
    axes.plot(batches, own, label="disco_ds")
    for kind, label in PEERS.items():
        values = [peer_loss_memory(kind, size, ranks, dim) / GIB for size in sizes]
        axes.plot(batches, values, label=label)
    axes.axhline(hardware.memory / GIB, color="black", linestyle=":", label="one card")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel=f"global batch on {ranks} GPUs",
        ylabel="GiB per GPU, loss alone",
        title=f"Memory of the loss, d = {dim} (computed; peers from published peaks)",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot {path}: cannot write it ({error})") from error
    pyplot.close(figure)
