"""Retrieval metrics from given features: time and memory of ours and of CLIP_benchmark's.

    python tools/bench/retrieval.py [--images 5000]

Random features, 5 captions per image, d = 512, one thread; each side in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

CAPTIONS, WIDTH, BATCH = 5, 512, 64


def features(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = F.normalize(torch.randn(count, WIDTH, generator=generator), dim=-1)
    noise = torch.randn(count * CAPTIONS, WIDTH, generator=generator).mul_(0.05)
    return images, F.normalize(noise.add_(images.repeat_interleave(CAPTIONS, 0), alpha=0.2))


def ours(images: Tensor, texts: Tensor) -> dict[str, float]:
    from disco_ds.distributed import World
    from disco_ds.evaluation.ranking import captions_side, images_side, rank_answers

    rows = torch.arange(len(images))
    numbers = torch.arange(CAPTIONS).repeat(len(images))
    left = images_side(images, rows)
    right = captions_side(texts, rows.repeat_interleave(CAPTIONS), numbers)
    to_text = rank_answers(left, right, World(), chunk_size=1024).ranks
    to_image = rank_answers(right, left, World(), chunk_size=1024).ranks
    found = {"text": to_text, "image": to_image}
    return {
        f"{name}@{k}": float((ranks < k).float().mean())
        for name, ranks in found.items()
        for k in (1, 5, 10)
    }


def theirs(images: Tensor, texts: Tensor) -> dict[str, float]:
    from clip_benchmark.metrics import zeroshot_retrieval

    class Model:
        encode_image = staticmethod(images.__getitem__)
        encode_text = staticmethod(texts.__getitem__)

    def batches() -> Iterator[tuple[Tensor, list[list[int]]]]:
        for ids in torch.arange(len(images)).split(BATCH):
            yield ids, [list(range(i * CAPTIONS, (i + 1) * CAPTIONS)) for i in ids.tolist()]

    found = zeroshot_retrieval.evaluate(
        Model(), batches(), torch.tensor, "cpu", amp=False, recall_k_list=[1, 5, 10]
    )
    return {key.replace("_retrieval_recall", ""): value for key, value in found.items()}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--side", choices=("ours", "theirs"))
    options = parser.parse_args()
    if options.side is None:
        seconds: list[float] = []
        for side in ("ours", "theirs"):
            command = [sys.executable, __file__, "--side", side, "--images", str(options.images)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            ended = subprocess.run(
                command,
                env=environment,
                stderr=subprocess.DEVNULL,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            )
            print(ended.stdout, end="")
            seconds.append(float(ended.stdout.split()[1]))
        print(f"in short: {seconds[0] / seconds[1]:.3f} of the CPU time of CLIP_benchmark")
        return
    torch.set_num_threads(1)
    images, texts = features(options.images)
    before, start = peak_mib(), time.process_time()
    found = (ours if options.side == "ours" else theirs)(images, texts)
    elapsed = time.process_time() - start
    shown = "  ".join(f"{key} {100 * value:.2f}" for key, value in sorted(found.items()))
    print(f"{options.side:7} {elapsed:6.2f} CPU s  +{peak_mib() - before:5.0f} MiB  {shown}")


if __name__ == "__main__":
    main()
