"""Named complete configurations for ``--preset``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from disco_ds.checkpoint import CheckpointConfig
from disco_ds.config import TrainConfig
from disco_ds.data.config import DataConfig
from disco_ds.data.demo import NUM_TRAIN_SHARDS
from disco_ds.evaluation.run import EvaluationConfig
from disco_ds.models import ModelConfig
from disco_ds.optim import OptimConfig

DEMO_DATA = Path("data/demo")


def demo() -> TrainConfig:
    """A small CLIP on OpenMoji pictures and their names: minutes on two CPU cores.

    Makes its data (``data/demo``) when needed.
    """
    return TrainConfig(
        data=DataConfig(
            shards=(str(DEMO_DATA / "train" / f"{{00000..{NUM_TRAIN_SHARDS - 1:05d}}}.tar"),),
            num_workers=1,
        ),
        model=ModelConfig(name="disco-demo-vit"),
        steps=800,
        global_batch_size=128,
        optim=OptimConfig(lr=1e-3, warmup_steps=50, weight_decay=0.1),
        evaluation=EvaluationConfig(
            every_steps=200,
            retrieval=(str(DEMO_DATA / "heldout" / "00000.tar"),),
            zero_shot=(
                str(DEMO_DATA / "zero_shot" / "skin_tone"),
                str(DEMO_DATA / "zero_shot" / "gender"),
            ),
        ),
        checkpoint=CheckpointConfig(every_steps=200),
    )


def vit_b_32() -> TrainConfig:
    """ViT-B/32 with the hyper-parameters that open_clip published for LAION-400M.

    Batch 32,768, 32 epochs, bf16. Give ``--data.shards`` and adapt the batch to your GPUs.
    """
    return TrainConfig(
        data=DataConfig(shards=(), num_workers=6),
        model=ModelConfig(name="ViT-B-32", activation_checkpointing=True),
        epochs=32,
        global_batch_size=32768,
        precision="bf16",
        optim=OptimConfig(lr=5e-4, warmup_steps=2000, weight_decay=0.2),
    )


PRESETS: dict[str, Callable[[], TrainConfig]] = {"demo": demo, "vit_b_32": vit_b_32}
