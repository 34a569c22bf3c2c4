"""Run training on Slurm, or the same on one machine: submit, sweep, survive preemption, look.

``launchers/slurm.py`` is the command line. In Python::

    from disco_ds.launch import Resources, submit, submit_array

    job = submit(config, Resources(nodes=2, gpus_per_node=8, partition="gpu"))
    job.wait().result()

Names load when used: a rank imports :mod:`disco_ds.launch.worker` before anything heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from disco_ds.launch.api import submit as submit
    from disco_ds.launch.api import submit_array as submit_array
    from disco_ds.launch.job import Job as Job
    from disco_ds.launch.job import JobFailed as JobFailed
    from disco_ds.launch.resources import Resources as Resources
    from disco_ds.launch.resources import load_profile as load_profile

HOMES = {
    "submit": "api",
    "submit_array": "api",
    "Job": "job",
    "JobFailed": "job",
    "Resources": "resources",
    "load_profile": "resources",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
