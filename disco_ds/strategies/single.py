"""One process, no engine: the plain PyTorch loop that every other strategy must equal."""

from __future__ import annotations

from torch import nn

from disco_ds.distributed import World
from disco_ds.models import Encoders
from disco_ds.strategies.config import EngineConfig, Precision
from disco_ds.strategies.plain import PlainStrategy


class SingleStrategy(PlainStrategy):
    """Encoders and optimizer on one device."""

    name = "single"

    def __init__(
        self, world: World, *, precision: Precision, engine: EngineConfig | None = None
    ) -> None:
        if world.world_size != 1:
            raise ValueError(f"--strategy single runs on one process, not {world.world_size}")
        super().__init__(world, precision=precision, engine=engine)

    def _wrap(self, encoders: Encoders) -> nn.Module:
        return encoders

    @property
    def hookable(self) -> None:
        """No gradients travel."""
        return None
