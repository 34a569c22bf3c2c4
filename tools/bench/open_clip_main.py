"""open_clip_train in this process; a JSON file has [folder of model configs, argument, ...].

In a file because torchrun takes some of its flags for abbreviations of its own. On a CPU, DDP takes
no ``device_ids``: they are left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import open_clip
import torch


def main(arguments: Path) -> None:
    """Train."""
    configs, *rest = json.loads(arguments.read_text())
    open_clip.add_model_config(configs)
    from open_clip_train.main import main as train

    ddp = torch.nn.parallel.DistributedDataParallel

    def without_devices(model: Any, device_ids: object = None, **options: Any) -> Any:
        return ddp(model, **options)

    torch.nn.parallel.DistributedDataParallel = without_devices  # type: ignore[assignment,misc]
    train(rest)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
