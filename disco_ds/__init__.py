"""disco_ds: exact large-batch contrastive training on DeepSpeed ZeRO.

``import disco_ds`` needs torch alone; engines, models and data load where they are used.
"""

__version__ = "0.1.0"
