"""Input pipeline side by side with open_clip's own, on the same shards, in one run.

    python tools/bench/data.py

What ``open_clip_train`` needs and this project does not (it pins an old webdataset) is installed
into a folder of its own, or found where ``--open_clip_path`` says.

Every measurement is a process of its own, with the same transform, tokenizer and batch size:
samples/s and processor time after two batches of warm-up; peak memory is the sum of proportional
set sizes of the process and its workers. Pictures: crops of the two photographs that scikit-learn
ships, enlarged and with sensor noise, so that the JPEGs (quality 90) have the entropy of
photographs. Results go to ``results/data.json``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "data.json"
BATCH_SIZE = 64
NUM_SHARDS = 8
WARM_UP_BATCHES = 2
# name: width, height, samples on disk, batches measured
DATA_SETS = {"1 MP": (1224, 816, 512, 12), "256 px": (384, 256, 2048, 32)}
PROVIDERS = ("open_clip", "disco_ds", "disco_ds full decode")
WORKERS = (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--open_clip_path", help="packages for open_clip_train; installed if absent"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each; the best is kept")
    parser.add_argument("--parts", nargs="*", help="throughput, start_up, reduced_decode; all")
    parser.add_argument("--quick", action="store_true", help="small pictures, one worker, once")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        provider, data_set, folder, workers = options.measure
        print(json.dumps(measure(provider, data_set, folder, int(workers))))
        return
    sys.path.insert(0, str(ROOT))
    if options.quick:
        options.repeats, options.parts = 1, ["throughput"]
    if options.open_clip_path is None:
        from training import THEIR_FOLDER, install_theirs

        install_theirs()
        options.open_clip_path = str(THEIR_FOLDER)
    parts: dict[str, Callable[[Path], Any]] = {
        "throughput": lambda folder: compare(folder, options),
        "start_up": start_up,
        "reduced_decode": lambda folder: pixel_difference(),
    }
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    for part in options.parts or parts:
        with tempfile.TemporaryDirectory(prefix="disco-bench-") as folder:
            found = parts[part](Path(folder))
        results[part] = {"machine": describe_machine(), "found": found}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written to {options.output}")
    if "throughput" in results:
        found = [row for row in results["throughput"]["found"] if row["provider"] == "disco_ds"]
        print(f"in short: samples/s over open_clip's: {[row.get('ratio') for row in found]}")


def describe_machine() -> dict[str, Any]:
    packages = ("torch", "torchvision", "pillow", "webdataset", "open_clip_torch")
    return {
        "cpu_count": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


# Data


def photographs() -> list[np.ndarray]:
    from sklearn.datasets import load_sample_images

    return list(load_sample_images().images)


def make_jpeg(pictures: list[np.ndarray], seed: int, width: int, height: int) -> bytes:
    from PIL import Image

    rng = np.random.default_rng(seed)
    source = Image.fromarray(pictures[seed % len(pictures)])
    left, top = (int(rng.integers(0, 80)) for _ in range(2))
    box = (left, top, source.width - 80 + left, source.height - 80 + top)
    enlarged = source.resize((width, height), Image.Resampling.LANCZOS, box=box)
    noisy = np.asarray(enlarged) + rng.normal(0, 5, (height, width, 1))
    buffer = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def make_data_set(folder: Path, width: int, height: int, num_samples: int) -> str:
    pictures = photographs()
    folder.mkdir(parents=True)
    for shard in range(NUM_SHARDS):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number in range(shard, num_samples, NUM_SHARDS):
                jpeg = make_jpeg(pictures, number, width, height)
                text = f"a photograph, number {number}".encode()
                for name, content in ((f"{number:08d}.jpg", jpeg), (f"{number:08d}.txt", text)):
                    header = tarfile.TarInfo(name)
                    header.size = len(content)
                    tar.addfile(header, io.BytesIO(content))
    return str(folder / f"{{00000..{NUM_SHARDS - 1:05d}}}.tar")


# Providers: each gives an endless or long enough iterator of batches


def open_clip_batches(
    pattern: str, workers: int, batches: int, transform: Any, tokenizer: Any
) -> Iterator[Any]:
    from open_clip_train.data import get_wds_dataset

    arguments = SimpleNamespace(
        train_data=pattern,
        train_num_samples=(batches + WARM_UP_BATCHES + 2 * max(1, workers)) * BATCH_SIZE,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        seed=0,
        batch_size=BATCH_SIZE,
        workers=workers,
        world_size=1,
    )
    info = get_wds_dataset(arguments, transform, is_train=True, tokenizer=tokenizer)
    return iter(info.dataloader)


def disco_batches(
    pattern: str, workers: int, transform: Any, tokenizer: Any, reduced_decode: float
) -> Iterator[Any]:
    from disco_ds.data.index import build_index
    from disco_ds.data.loader import DataConfig, TrainLoader
    from disco_ds.distributed import World

    loader = TrainLoader(
        DataConfig(shards=(pattern,), num_workers=workers, reduced_decode=reduced_decode),
        build_index([pattern], cache=None),
        world=World(),
        local_batch_size=BATCH_SIZE,
        image_transform=transform,
        tokenize=tokenizer,
        seed=0,
        image_size=224,
    )
    return iter(loader)


def measure(provider: str, data_set: str, pattern: str, workers: int) -> dict[str, float]:
    """Samples/s, seconds to the first batch and peak memory of one provider, in this process."""
    import open_clip
    import torch
    from open_clip.transform import AugmentationCfg, PreprocessCfg, image_transform_v2

    torch.set_num_threads(1)
    transform = image_transform_v2(
        PreprocessCfg(size=224), is_train=True, aug_cfg=AugmentationCfg()
    )
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    num_batches = DATA_SETS[data_set][3]
    with peak_memory() as peak:
        start = time.perf_counter()
        if provider == "open_clip":
            batches = open_clip_batches(pattern, workers, num_batches, transform, tokenizer)
        else:
            reduced = 0.0 if provider.endswith("full decode") else 1.5
            batches = disco_batches(pattern, workers, transform, tokenizer, reduced)
        next(batches)
        first = time.perf_counter() - start
        for _ in range(WARM_UP_BATCHES - 1):
            next(batches)
        start, cpu_start = time.perf_counter(), cpu_seconds()
        for _ in range(num_batches):
            next(batches)
        elapsed, cpu = time.perf_counter() - start, cpu_seconds() - cpu_start
    return {
        "samples_per_second": round(num_batches * BATCH_SIZE / elapsed, 1),
        "cpu_ms_per_sample": round(1e3 * cpu / (num_batches * BATCH_SIZE), 2),
        "first_batch_seconds": round(first, 2),
        "peak_memory_mb": round(peak() / 1e6),
    }


def cpu_seconds() -> float:
    """Processor time of this process and its workers: a busy neighbour hardly changes it."""
    import psutil

    me = psutil.Process()
    times = [process.cpu_times() for process in [me, *me.children(recursive=True)]]
    return float(sum(t.user + t.system for t in times))


class peak_memory:  # noqa: N801  (a context manager, used like a function)
    """Watches the memory of this process and its children; gives a function that tells the peak."""

    def __enter__(self) -> Callable[[], float]:
        self._done = threading.Event()
        self._peak = 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return lambda: self._peak

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        import psutil

        me = psutil.Process()
        while not self._done.wait(0.2):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self._peak = max(self._peak, total)


# Comparison


def compare(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    data_sets = {"256 px": DATA_SETS["256 px"]} if options.quick else DATA_SETS
    for data_set, (width, height, num_samples, _) in data_sets.items():
        pattern = make_data_set(folder / data_set.replace(" ", ""), width, height, num_samples)
        for workers in (1,) if options.quick else WORKERS:
            best: dict[str, dict[str, Any]] = {}
            for _ in range(options.repeats):  # interleaved: a busy neighbour hits all alike
                for provider in PROVIDERS:
                    found = run_measure(provider, data_set, pattern, workers, options)
                    speed = best.get(provider, {}).get("samples_per_second", -1)
                    if found.get("samples_per_second", 0) > speed:
                        best[provider] = found
            for provider in PROVIDERS:
                row = {"data": data_set, "workers": workers, "provider": provider}
                rows.append({**row, **best[provider], **ratios(best[provider], best["open_clip"])})
                print(rows[-1], flush=True)
    return rows


def ratios(found: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    """How many times open_clip's speed, by the clock and by processor time."""
    if "error" in found or "error" in base:
        return {}
    return {
        "ratio": round(found["samples_per_second"] / base["samples_per_second"], 2),
        "cpu_ratio": round(base["cpu_ms_per_sample"] / found["cpu_ms_per_sample"], 2),
    }


def run_measure(
    provider: str, data_set: str, pattern: str, workers: int, options: argparse.Namespace
) -> dict[str, Any]:
    extra = options.open_clip_path if provider == "open_clip" else ""
    path = os.pathsep.join(part for part in (extra, str(ROOT)) if part)
    finished = subprocess.run(
        [sys.executable, __file__, "--measure", provider, data_set, pattern, str(workers)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if finished.returncode != 0:
        return {"error": finished.stderr.strip().splitlines()[-1]}
    result: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return result


def start_up(folder: Path, num_shards: int = 10_000) -> dict[str, Any]:
    """Seconds to read a new index, to check it again, and from there to the first batch.

    Shards of 32 samples: the number of shards is what is measured here.
    """
    import torch

    from disco_ds.data.index import build_index
    from disco_ds.data.loader import DataConfig, TrainLoader
    from disco_ds.distributed import World

    target = folder / "many"
    target.mkdir()
    make_data_set(folder / "few", 384, 256, 32 * NUM_SHARDS)
    originals = sorted((folder / "few").glob("*.tar"))
    for number in range(num_shards):
        os.link(originals[number % NUM_SHARDS], target / f"{number:05d}.tar")
    cache = folder / "index.json"
    start = time.perf_counter()
    build_index([str(target)], cache=cache, num_workers=os.cpu_count() or 1)
    built = time.perf_counter()
    index = build_index([str(target)], cache=cache)
    loaded = time.perf_counter()
    loader = TrainLoader(
        DataConfig(shards=(str(target),)),
        index,
        world=World(),
        local_batch_size=BATCH_SIZE,
        image_transform=lambda image: torch.zeros(3, 1, 1),
        tokenize=lambda captions: torch.zeros(len(captions), 1),
        seed=0,
    )
    next(iter(loader))
    first = time.perf_counter()
    loader.close()
    result = {
        "num_shards": num_shards,
        "num_samples": index.num_samples,
        "index_mb": round(cache.stat().st_size / 1e6, 2),
        "build_index_seconds": round(built - start, 2),
        "check_index_seconds": round(loaded - built, 2),
        "first_batch_seconds": round(first - loaded, 2),
    }
    print(result, flush=True)
    return result


def pixel_difference() -> dict[str, float]:
    """Mean absolute difference (of 255) between reduced and full decoding, as the model sees it."""
    import torch
    from open_clip.transform import PreprocessCfg, image_transform_v2

    from disco_ds.data.samples import decode_image

    transform = image_transform_v2(PreprocessCfg(size=224), is_train=False)
    scale = torch.tensor(PreprocessCfg().std)[:, None, None] * 255
    pictures = photographs()
    differences = {}
    for data_set, (width, height, _, _) in DATA_SETS.items():
        total = 0.0
        for seed in range(8):
            jpeg = make_jpeg(pictures, seed, width, height)
            full = decode_image(jpeg, max_pixels=10**8)
            small = decode_image(jpeg, max_pixels=10**8, smallest_side=336)
            total += float(((transform(full) - transform(small)) * scale).abs().mean())
        differences[data_set] = round(total / 8, 3)
    print("mean absolute pixel difference of 255:", differences, flush=True)
    return differences


if __name__ == "__main__":
    main()
