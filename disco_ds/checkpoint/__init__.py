"""Save, find, resume and export training states. The same form for every strategy and any W.

A checkpoint is a folder that is complete or absent::

    checkpoints/step_00000100/
        model.safetensors        fp32 weights and temperature under open_clip's names: an export
        optimizer.safetensors    moments, "exp_avg/NAME" ...
        rank_00000.pt            random states of each rank, its part of per-sample tables
        state.json               step, counters, data position, configuration, versions
        manifest.json            name, size and SHA-256 of each file; written last
    checkpoints/latest           name of the newest complete folder

It is written under a temporary name, flushed to disk and renamed; then ``latest`` moves.
Everything loads without pickle (``weights_only``).
"""

from disco_ds.checkpoint.config import CheckpointConfig
from disco_ds.checkpoint.export import HF_CONFIG, HF_WEIGHTS, ExportCommand, export
from disco_ds.checkpoint.find import find_checkpoint
from disco_ds.checkpoint.folder import (
    MANIFEST_FILE,
    MODEL_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    Snapshot,
    as_plain,
    step_folder,
    versions,
)
from disco_ds.checkpoint.read import load_checkpoint, verify_checkpoint
from disco_ds.checkpoint.write import CheckpointWriter, SaveFailed

__all__ = [
    "HF_CONFIG",
    "HF_WEIGHTS",
    "MANIFEST_FILE",
    "MODEL_FILE",
    "OPTIMIZER_FILE",
    "STATE_FILE",
    "CheckpointConfig",
    "CheckpointWriter",
    "ExportCommand",
    "SaveFailed",
    "Snapshot",
    "as_plain",
    "export",
    "find_checkpoint",
    "load_checkpoint",
    "step_folder",
    "verify_checkpoint",
    "versions",
]
