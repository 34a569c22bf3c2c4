"""open_clip_train's flags, and what says the same here: for whoever types them from habit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

HERE = {
    "--train-data": "--data.shards",
    "--train-data-upsampling-factors": "--data.weights, with --data.mode resampled",
    "--train-num-samples": "--data.num_samples, which is optional: shards are counted",
    "--dataset-resampled": "--data.mode resampled",
    "--val-data": "--evaluation.retrieval, which is given shards of images and captions",
    "--imagenet-val": "--evaluation.zero_shot FOLDER --evaluation.classes imagenet",
    "--imagenet-v2": "--evaluation.zero_shot FOLDER --evaluation.classes imagenet",
    "--zeroshot-frequency": "--evaluation.every_steps",
    "--val-frequency": "--evaluation.every_steps",
    "--workers": "--data.num_workers, of each rank",
    "--batch-size": "--global_batch_size, of all GPUs together",
    "--accum-freq": "--micro_batch_size, the pairs of one forward pass",
    "--lr": "--optim.lr",
    "--beta1": "--optim.beta1",
    "--beta2": "--optim.beta2",
    "--eps": "--optim.eps",
    "--wd": "--optim.weight_decay",
    "--momentum": "--optim.beta1, with --optim.name sgdm",
    "--warmup": "--optim.warmup_steps",
    "--opt": "--optim.name",
    "--lr-scheduler": "--optim.schedule",
    "--skip-scheduler": "--optim.schedule constant",
    "--grad-clip-norm": "--optim.max_grad_norm",
    "--model": "--model.name",
    "--pretrained": "--model.init, which is given a file, a run, or one of open_clip's names",
    "--lock-image": "--model.lock_image True",
    "--lock-text": "--model.lock_text True",
    "--lock-image-freeze-bn-stats": "--model.lock_image True, which freezes them too",
    "--use-bn-sync": "--model.batch_norm synced",
    "--grad-checkpointing": "--model.activation_checkpointing True",
    "--torchcompile": "--engine.compile True",
    "--siglip": "loss:siglip",
    "--local-loss": "nothing: no loss here makes the whole matrix on one GPU",
    "--gather-with-grad": "nothing: gradients are always those of the whole batch",
    "--loss-dist-impl": "--loss.gather",
    "--name": "--run_dir",
    "--logs": "--run_dir",
    "--save-frequency": "--checkpoint.every_steps or --checkpoint.every_minutes",
    "--save-most-recent": "--checkpoint.keep_last 1",
    "--delete-previous-checkpoint": "--checkpoint.keep_last 1",
    "--report-to": "--tracking.wandb PROJECT; TensorBoard is on",
    "--wandb-project-name": "--tracking.wandb",
    "--wandb-notes": "the environment variable WANDB_NOTES",
    "--log-every-n-steps": "--log_every_steps",
    "--dist-backend": "nothing: NCCL on GPUs, gloo without",
    "--dist-url": "nothing: launchers say where ranks meet",
}
"""Flag of open_clip_train, and what to use."""

NOT_HERE = {
    "--dataset-type": "shards of webdataset are read",
    "--csv-separator": "shards of webdataset are read",
    "--csv-img-key": "shards of webdataset are read",
    "--csv-caption-key": "shards of webdataset are read",
    "--val-num-samples": "evaluation sets are read whole",
    "--epochs-cooldown": "the schedules are cosine, linear and constant",
    "--lr-cooldown-end": "the schedules are cosine, linear and constant",
    "--lr-cooldown-power": "the schedules are cosine, linear and constant",
    "--lock-image-unlocked-groups": "a tower is locked whole",
    "--lock-text-unlocked-layers": "a tower is locked whole",
    "--lock-text-freeze-layer-norm": "a locked tower is locked with its norms",
    "--force-quick-gelu": "choose the model's -quickgelu variant",
    "--force-patch-dropout": "models are as open_clip configures them",
    "--force-custom-text": "models are as open_clip configures them",
    "--pretrained-image": "--model.init is for the whole model",
    "--torchscript": "--engine.compile True is there instead",
    "--trace": "--engine.compile True is there instead",
    "--use-bnb-linear": "products of 8 bits are not offered",
    "--cache-dir": "the environment variables HF_HOME and TORCH_HOME say where downloads go",
    "--ddp-static-graph": "it is not needed",
    "--no-set-device-rank": "launchers that show a rank one GPU are recognised",
    "--debug": "rank and step are in every message",
    "--copy-codebase": "disco_ds.launch keeps a copy of the code with each submission",
    "--log-local": "every rank's log is kept by disco_ds.launch; metrics are global",
    "--coca-caption-loss-weight": "there is no captioning loss",
    "--coca-contrastive-loss-weight": "there is no captioning loss",
    "--distill-model": "there is no distillation",
    "--distill-pretrained": "there is no distillation",
    "--remote-sync": "checkpoints stay on the file system they are written to",
    "--remote-sync-frequency": "checkpoints stay on the file system they are written to",
    "--remote-sync-protocol": "checkpoints stay on the file system they are written to",
    "--horovod": "torch.distributed is used",
}
"""Flags of open_clip_train without a counterpart, and why."""


PRECISIONS = {
    **dict.fromkeys(("amp", "amp_bf16", "amp_bfloat16", "pure_bf16"), "bf16"),
    "pure_fp16": "fp16",
}
"""Value of open_clip_train's ``--precision``, and ours."""


def hint(arguments: Sequence[str]) -> str | None:
    """One line for the first argument that is a flag or a precision of open_clip_train's alone."""
    for argument, following in itertools.pairwise([*arguments, ""]):
        flag, equals, value = argument.partition("=")
        value = value if equals else following
        if flag == "--precision" and value in PRECISIONS:
            return f"--precision {value} is open_clip's: here it is --precision {PRECISIONS[value]}"
        theirs = flag.replace("_", "-")
        if theirs in HERE:
            return f"{flag} is open_clip's: here it is {HERE[theirs]}"
        if theirs in NOT_HERE:
            return f"{flag} is open_clip's and has no counterpart: {NOT_HERE[theirs]}"
    return None
