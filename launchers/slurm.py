"""Train on Slurm: submit, sweep, survive preemption, see what happened.

    python launchers/slurm.py train --nodes 2 --gpus_per_node 8 -- --preset vit_b_32 ...
    python launchers/slurm.py array --sweep launchers/sweeps/losses.yaml -- --preset demo
    python launchers/slurm.py status | logs -f RUN | stop RUN | cancel RUN | retry RUN

``--help`` after a command lists its flags; launchers/README.md explains them.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Works from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    from disco_ds.launch.cli import main
except ModuleNotFoundError as error:
    if error.name != "submitit":
        raise
    sys.exit("error: the launcher needs submitit: pip install -e '.[launch]'")

if __name__ == "__main__":
    sys.exit(main())
