"""Communication hooks: how gradients travel between ranks, on DeepSpeed, DDP and FSDP2."""

from disco_ds.comm_hooks.base import CommHook, Reduction, compose
from disco_ds.comm_hooks.compress import CompressedReduction
from disco_ds.comm_hooks.config import CommHookConfig
from disco_ds.comm_hooks.count import CountingHook
from disco_ds.comm_hooks.feature import DiscoReduction, FastCLIPReduction, OpenCLIPReduction
from disco_ds.comm_hooks.register import HookHandle, register_comm_hook

__all__ = [
    "CommHook",
    "CommHookConfig",
    "CompressedReduction",
    "CountingHook",
    "DiscoReduction",
    "FastCLIPReduction",
    "HookHandle",
    "OpenCLIPReduction",
    "Reduction",
    "compose",
    "register_comm_hook",
]
