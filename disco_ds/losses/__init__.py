"""Contrastive losses over the global batch, exact and in tiles. Needs torch alone."""

from disco_ds.losses.base import ContrastiveLoss
from disco_ds.losses.disco import DiscoConfig, DiscoLoss
from disco_ds.losses.fastclip import FastCLIPConfig, FastCLIPLoss
from disco_ds.losses.siglip import SigLIPConfig, SigLIPLoss

__all__ = [
    "ContrastiveLoss",
    "DiscoConfig",
    "DiscoLoss",
    "FastCLIPConfig",
    "FastCLIPLoss",
    "SigLIPConfig",
    "SigLIPLoss",
]
