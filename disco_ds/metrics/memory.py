"""How much memory the main rank uses: of its GPU, or of the machine without one."""

from __future__ import annotations

import resource
import sys

import torch

# Linux counts in KiB, macOS in bytes.
PEAK_UNIT = 1 if sys.platform == "darwin" else 1024


def memory_use(device: torch.device) -> dict[str, float]:
    """``memory_bytes`` now and ``memory_peak_bytes`` so far.

    Allocated tensors on CUDA; the resident set of the process on CPU, where the first is left
    out if the system does not say.
    """
    if device.type == "cuda":
        return {
            "memory_bytes": float(torch.cuda.memory_allocated(device)),
            "memory_peak_bytes": float(torch.cuda.max_memory_allocated(device)),
        }
    peak = {"memory_peak_bytes": float(_peak_resident())}
    try:
        with open("/proc/self/statm") as file:  # noqa: PTH123
            pages = int(file.read().split()[1])
    except OSError:
        return peak
    return {"memory_bytes": float(pages * resource.getpagesize()), **peak}


def _peak_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * PEAK_UNIT
