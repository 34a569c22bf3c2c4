"""Train a CLIP model: parse the configuration, run the Trainer, tear down.

    deepspeed train.py --deepspeed_config ds_configs/zero2.json --preset demo
    python train.py --preset demo

Exit status: 0 done; 1 failed; 2 wrong input, with one line of reason on stderr.
"""

from __future__ import annotations

import sys

from disco_ds.cli import train

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
