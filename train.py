"""Train a CLIP model: parse the configuration, run the Trainer, tear down.

    deepspeed train.py --deepspeed_config ds_configs/zero2.json --preset demo
    python train.py --preset demo

Exit status: 0 done; 1 failed; 2 wrong input, with one line of reason on stderr; 75 asked to stop
(SIGTERM, SIGUSR1, SIGUSR2 or the file named by DISCO_STOP_FILE) and saved: start again with
``--resume latest``.
"""

from __future__ import annotations

import sys

from disco_ds.preemption import listen_for_stop

if __name__ == "__main__":
    listen_for_stop()  # before the heavy imports: a signal meanwhile must not be lost
    from disco_ds.cli import train

    sys.exit(train(sys.argv[1:]))
