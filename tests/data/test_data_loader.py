"""The training stream: P-15 to P-17, P-25 to P-28, P-42, and that it fails well."""

from __future__ import annotations

import collections
import json
import os
import pickle
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from harness import run_distributed
from make_shards import (
    colour,
    flat,
    make_loader,
    make_shards,
    noisy_colour,
    numbers,
    pair,
    picture_numbers,
    take,
    total_summary,
    write_tar,
)
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import disco_ds.data.reader as reader_module
import disco_ds.data.workers as workers_module
from disco_ds.data import shared_memory
from disco_ds.data.batch import DataWorkerError
from disco_ds.data.config import DataConfig
from disco_ds.data.index import build_index
from disco_ds.data.loader import TrainLoader


def epoch_of(loaders: list[TrainLoader]) -> list[int]:
    return [i for loader in loaders for i in flat(take(loader, loader.steps_per_epoch))]


# P-15 to P-17: any number of shards, ranks and workers


@pytest.mark.parametrize(
    ("sizes", "ranks", "workers", "batch"),
    [
        ([5] * 8, 2, 2, 5),  # P-15
        ([4, 4, 4], 2, 2, 2),  # P-16
        ([9], 2, 0, 2),  # P-16
        ([10, 10, 2], 2, 1, 4),  # P-17
        ([40, 3, 3], 2, 2, 3),  # P-17: totals that differ by several batches
        ([0, 7, 0, 5], 3, 1, 1),
    ],
)
def test_epochs_are_exact(
    tmp_path: Path, sizes: list[int], ranks: int, workers: int, batch: int
) -> None:
    make_shards(tmp_path, sizes)
    loaders = [
        make_loader([str(tmp_path)], rank=rank, world_size=ranks, batch=batch, num_workers=workers)
        for rank in range(ranks)
    ]
    total = sum(sizes)
    assert {loader.steps_per_epoch for loader in loaders} == {total // (ranks * batch)}
    epochs = []
    for number in (1, 2):
        ids = epoch_of(loaders)
        assert len(set(ids)) == len(ids) > total - ranks * batch
        summary = total_summary(loaders)
        unseen = {"data/unseen": float(total - len(ids))} if total > len(ids) else {}
        assert summary == {"data/seen": float(len(ids)), **unseen}
        assert [loader.epoch for loader in loaders] == [number] * ranks
        epochs.append(ids)
    assert epochs[0] != epochs[1]


def test_pixels_captions_and_ids_belong_together(tmp_path: Path) -> None:
    loader = make_loader(make_shards(tmp_path, [30, 7, 13]), batch=5, num_workers=2)
    iterator = iter(loader)
    for _ in range(10):
        batch = next(iterator)
        assert batch.image.shape == (5, 3, 4, 4)
        assert batch.image.dtype == torch.float32
        assert batch.text.dtype == batch.index.dtype == torch.int64
        assert picture_numbers(batch) == batch.text[:, 0].tolist() == batch.index.tolist()


def test_each_shard_is_opened_by_one_consumer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-15: 8 shards, 2 ranks x 2 workers; opened once by one of the four in an epoch."""
    shards = make_shards(tmp_path, [6] * 8)
    opened = watch_opens(monkeypatch)
    for rank in range(2):
        loader = make_loader(shards, rank=rank, world_size=2, batch=6, num_workers=0)
        take(loader, loader.steps_per_epoch)
    assert sorted(opened) == shards


def watch_opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    opened: list[str] = []
    original = reader_module.open_shard

    def open_shard(url: str, **options: Any) -> Any:
        opened.append(url)
        return original(url, **options)

    monkeypatch.setattr(reader_module, "open_shard", open_shard)
    return opened


def test_fewer_shards_than_consumers_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_loader(make_shards(tmp_path, [20]), world_size=2, num_workers=2)
    assert "1 shards for 4 consumers (2 ranks x 2 workers)" in caplog.text


def test_batches_that_do_not_fit_into_shared_memory_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "free_bytes", lambda: 2**30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    shards = make_shards(tmp_path, [20])
    options = {"batch": 4, "prefetch_batches": 2, "image_size": 1024}
    make_loader(shards, num_workers=1, **options)
    assert "GiB" not in caplog.text  # 8 x 2 x 4 x 12 MiB = 0.75 GiB
    make_loader(shards, num_workers=2, **options)
    assert "2 workers on each of 8 ranks may take 1.5 GiB" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch": 6, "world_size": 2},
            "10 samples in 2 shards cannot fill one global batch of 12",
        ),
        ({"batch": 0}, "local_batch_size=0"),
        ({"weights": (1.0,)}, "weights needs --data.mode resampled"),
        ({"weights": (1.0, 2.0, 3.0), "mode": "resampled"}, "3 numbers for 2 entries"),
        ({"captions": ("json",)}, "'json' is neither txt nor json.FIELD"),
        ({"num_workers": -1}, "--data.num_workers -1: must not be negative"),
        ({"max_bad_share": 2.0}, "--data.max_bad_share 2.0: must be from 0 to 1"),
    ],
)
def test_impossible_settings_are_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    shards = make_shards(tmp_path, [5, 5])
    with pytest.raises(ValueError, match=message):
        make_loader(shards, **options)


def test_every_setting_has_a_docstring_with_help() -> None:
    source = Path(str(reader_module.__file__)).with_name("config.py").read_text().splitlines()
    for name in DataConfig.__dataclass_fields__:
        line = next(i for i, text in enumerate(source) if text.startswith(f"    {name}:"))
        assert source[line + 1].strip().startswith('"""'), name


def equal_steps_worker(rank: int, world_size: int, folder: str) -> None:
    """Ranks meet in a collective after every batch: it would hang if they took unequal steps."""
    import torch.distributed as dist

    loader = make_loader([folder], rank=rank, world_size=world_size, batch=3, max_bad_share=1.0)
    iterator = iter(loader)
    for _ in range(2 * loader.steps_per_epoch):
        ids = next(iterator).index
        dist.all_reduce(ids)
    summary = loader.epoch_summary()
    seen = summary["data/seen"], summary["data/repeated"], summary.get("data/skipped_bad_image", 0)
    totals = torch.tensor(seen)
    dist.all_reduce(totals)
    assert totals.tolist() == [12.0, 12.0, 12.0]


def test_ranks_take_equal_steps_when_one_has_only_bad_samples(tmp_path: Path) -> None:
    make_shards(tmp_path, [12])
    bad = [(f"x{n}.{s}", b"0") for n in range(12) for s in ("png", "txt")]
    write_tar(tmp_path / "00001.tar", bad)
    run_distributed(equal_steps_worker, str(tmp_path), world_size=2)


# P-25: resume


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_continues_the_stream(tmp_path: Path, workers: int) -> None:
    """40 samples in 4 shards, batch 4: stop after any batch, also at and past the epoch's end."""
    make_shards(tmp_path, [10] * 4)
    shards = [str(tmp_path)]
    options: dict[str, Any] = {"num_workers": workers, "prefetch_batches": 3}
    whole = take(make_loader(shards, **options), 23)
    for stop in (0, 3, 10, 13) if workers else (0, 1, 9, 10, 11, 19, 20, 22):
        first = make_loader(shards, **options)
        assert take(first, stop) == whole[:stop]
        state = json.loads(json.dumps(first.state_dict()))
        second = make_loader(shards, **options)
        second.load_state_dict(state)
        assert second.epoch == first.epoch == stop / 10
        assert take(second, 23 - stop) == whole[stop:]
        expected = {"data/seen": 12.0, "data/repeated": 0.0, "data/unseen": 28.0}
        assert second.epoch_summary() == expected


def test_iterating_again_goes_on_where_the_last_batch_was(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, [10] * 4)
    whole = take(make_loader(shards, num_workers=1), 7)
    loader = make_loader(shards, num_workers=1)
    assert take(loader, 3) + take(loader, 4) == whole


def test_resume_repeats_pixels_bit_for_bit_and_leaves_the_generators_alone(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, [10] * 2)

    def images(workers: int, skip: int) -> torch.Tensor:
        loader = make_loader(shards, image_transform=noisy_colour, num_workers=workers)
        state = make_loader(shards, num_workers=workers)
        take(state, skip)
        loader.load_state_dict(state.state_dict())
        torch.manual_seed(5), np.random.seed(5), random.seed(5)
        iterator = iter(loader)
        batches = [next(iterator).image for _ in range(6 - skip)]
        after = (torch.rand(1).item(), float(np.random.rand()), random.random())
        torch.manual_seed(5), np.random.seed(5), random.seed(5)
        assert after == (torch.rand(1).item(), float(np.random.rand()), random.random())
        return torch.cat(batches)

    whole = images(0, 0)
    assert torch.equal(whole[12:], images(0, 3))
    assert torch.equal(whole, images(1, 0))
    assert not torch.equal(whole[:4], whole[4:8])


def test_resume_opens_no_finished_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = make_shards(tmp_path, [10] * 8)
    loader = make_loader(shards, batch=8)
    done = collections.Counter(i // 10 for i in flat(take(loader, 6)))
    finished = {shards[shard] for shard, count in done.items() if count == 10}
    assert finished
    state = loader.state_dict()
    opened = watch_opens(monkeypatch)
    resumed = make_loader(shards, batch=8)
    resumed.load_state_dict(state)
    take(resumed, 4)
    assert not finished.intersection(opened)
    assert set(opened) == set(shards) - finished


@pytest.mark.parametrize(("ranks", "workers", "batch"), [(1, 1, 4), (3, 0, 2), (4, 2, 1)])
def test_resume_on_another_topology_never_repeats(
    tmp_path: Path, ranks: int, workers: int, batch: int
) -> None:
    shards = make_shards(tmp_path, [10, 30, 5, 15])
    before = [make_loader(shards, rank=r, world_size=2, num_workers=2) for r in range(2)]
    seen = flat(flat(take(loader, 3)) for loader in before)
    state = TrainLoader.merge_states([loader.state_dict() for loader in before])
    after = [
        make_loader(shards, rank=r, world_size=ranks, batch=batch, num_workers=workers)
        for r in range(ranks)
    ]
    for loader in after:
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert loader.epoch == pytest.approx(24 / 60)
    steps = 36 // (ranks * batch)
    rest = flat(flat(take(loader, steps)) for loader in after)
    assert len(set(seen + rest)) == len(seen) + len(rest) > 60 - ranks * batch
    summary = total_summary(after)
    assert summary["data/seen"] == len(seen) + len(rest)
    assert {loader.epoch for loader in after} == {1.0}
    again = TrainLoader.merge_states([loader.state_dict() for loader in after])
    last = make_loader(shards, batch=5)
    last.load_state_dict(again)
    assert len(set(flat(take(last, 12)))) == 60
    assert last.epoch == 2.0


def test_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, [10, 10])
    loader = make_loader(shards, rank=1, world_size=2)
    state = loader.state_dict()
    with pytest.raises(ValueError, match=r"rank 1's of 2 ranks .*merge_states"):
        make_loader(shards).load_state_dict(state)
    with pytest.raises(ValueError, match="--seed was 3, now it is 4"):
        make_loader(shards, rank=1, world_size=2, seed=4).load_state_dict(state)
    with pytest.raises(ValueError, match="fingerprint\\) was"):
        make_loader(shards[:1], rank=1, world_size=2).load_state_dict(state)
    with pytest.raises(ValueError, match="not the states of all ranks"):
        TrainLoader.merge_states([state])
    with pytest.raises(ValueError, match="format None"):
        loader.load_state_dict({})


# P-26: resampling


def test_resampled_epochs(tmp_path: Path) -> None:
    big = make_shards(tmp_path / "big", [6] * 25)
    make_shards(tmp_path / "small", [4] * 25, first=150)
    sources = [str(Path(big[0]).parent), str(tmp_path / "small")]

    def stream(rank: int, seed: int = 3) -> tuple[list[int], dict[str, float]]:
        loader = make_loader(
            sources,
            rank=rank,
            world_size=2,
            batch=5,
            seed=seed,
            mode="resampled",
            weights=(1.0, 3.0),
        )
        assert loader.steps_per_epoch == 25
        ids = flat(take(loader, 75))
        return ids, loader.epoch_summary()

    (one, summary), (other, _), (repeated, _) = stream(0), stream(1), stream(0)
    assert one == repeated
    assert one != other != stream(1, seed=4)[0]
    assert one[:125] != one[125:250]
    assert (
        summary["data/seen"] == 125 == summary["data/source0/seen"] + summary["data/source1/seen"]
    )
    offset = dict(enumerate(build_index(sources, cache=None).shards))
    share = sum(_source(i, offset) for i in one + other) / 750
    assert abs(share - 0.75) < 0.1


def _source(index: int, shards: dict[int, Any]) -> int:
    for shard in shards.values():
        if index < shard.num_samples:
            return int(shard.source)
        index -= shard.num_samples
    raise AssertionError


def test_resampled_resume(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, [6] * 10)
    options: dict[str, Any] = {"mode": "resampled", "num_workers": 2}
    whole = take(make_loader(shards, **options), 20)
    loader = make_loader(shards, **options)
    take(loader, 7)
    second = make_loader(shards, **options)
    second.load_state_dict(loader.state_dict())
    assert take(second, 13) == whole[7:]
    wider = make_loader(shards, world_size=2, mode="resampled")
    wider.load_state_dict(loader.state_dict())
    assert wider.epoch == pytest.approx(7 * 4 / 60)
    take(wider, (60 - 28) // 8)
    assert wider.epoch == 1.0


# P-27: memory


def test_memory_and_open_files_stay_level(tmp_path: Path) -> None:
    """8 shards, 2 persistent workers, 10 short epochs."""
    loader = make_loader(make_shards(tmp_path, [50] * 8), batch=10, num_workers=2)
    iterator = iter(loader)
    usage = []
    for _ in range(10):
        for _ in range(loader.steps_per_epoch):
            next(iterator)
        workers = sorted(psutil.Process().children(), key=lambda process: process.pid)[-2:]
        usage.append([w.memory_info().rss for w in workers])
        assert all(len(_open_shards(w)) <= 1 for w in workers)
    loader.close()
    for early, late in zip(usage[1], usage[9], strict=True):
        assert late <= 1.1 * early


def _open_shards(process: psutil.Process) -> list[str]:
    return [file.path for file in process.open_files() if file.path.endswith(".tar")]


def test_shuffle_buffer_holds_undecoded_bytes_and_no_more_than_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import disco_ds.data.pipeline as pipeline

    alive = 0
    most = 0

    def count(windows: Any, reader: Any) -> Any:
        nonlocal alive, most
        original = reader.read

        def read(segment: Any) -> Any:
            nonlocal alive, most
            for raw in original(segment):
                assert all(isinstance(content, bytes) for content in raw.members.values())
                alive += 1
                most = max(most, alive)
                yield raw

        reader.read = read
        for item in read_shuffled(windows, reader):
            alive -= 1
            yield item

    read_shuffled = pipeline.read_shuffled
    monkeypatch.setattr(pipeline, "read_shuffled", count)
    loader = make_loader(make_shards(tmp_path, [50] * 8), batch=10, shuffle_buffer=64)
    take(loader, 40)
    assert 32 <= most <= 66


# P-28: workers


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_start_methods(tmp_path: Path, method: str) -> None:
    shards = make_shards(tmp_path, [10, 10])
    expected = take(make_loader(shards, num_workers=1), 5)
    loader = make_loader(shards, num_workers=1, start_method=method)
    assert pickle.dumps(loader._recipe)
    assert take(loader, 5) == expected


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


# How many of the next forked children hang before they run any code of their own.
stuck_forks = 0


def _hang_in_child() -> None:
    while stuck_forks:
        signal.pause()


def _one_fork_less() -> None:
    global stuck_forks
    stuck_forks = max(0, stuck_forks - 1)


os.register_at_fork(after_in_child=_hang_in_child, after_in_parent=_one_fork_less)


@pytest.mark.parametrize("num_stuck", [1, 2])
def test_workers_that_get_stuck_in_their_fork_are_started_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_stuck: int,
) -> None:
    """A lock that another thread held at the fork is never released in the child."""
    shards, others = make_shards(tmp_path, [10, 10]), children()
    expected = take(make_loader(shards, num_workers=2), 5)
    monkeypatch.setattr(workers_module, "REPORT_SECONDS", 2.0)
    monkeypatch.setattr(sys.modules[__name__], "stuck_forks", num_stuck)
    loader = make_loader(shards, num_workers=2)
    assert take(loader, 5) == expected
    assert f"{num_stuck} of 2 data workers did not start within 2 s" in caplog.text
    loader.close()
    assert children() <= others


def test_workers_that_always_get_stuck_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "REPORT_SECONDS", 0.5)
    monkeypatch.setattr(sys.modules[__name__], "stuck_forks", 100)
    loader, others = make_loader(make_shards(tmp_path, [10, 10]), num_workers=1), children()
    with pytest.raises(DataWorkerError, match=r"3 times; use --data\.start_method forkserver"):
        next(iter(loader))
    assert children() <= others


def numbers_and_setting(captions: list[str]) -> torch.Tensor:
    setting = {"false": 0, "true": 1}[os.environ["TOKENIZERS_PARALLELISM"]]
    return torch.full((len(captions), 1), setting)


def number_of_modes(captions: list[str]) -> torch.Tensor:
    return torch.full((len(captions), 1), len(_get_current_dispatch_mode_stack()))


class PassOn(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_do_not_inherit_what_watches_the_trainer(tmp_path: Path, method: str) -> None:
    shards = make_shards(tmp_path, [8])
    loader = make_loader(shards, tokenize=number_of_modes, num_workers=1, start_method=method)
    with PassOn():
        assert next(iter(loader)).text.tolist() == [[0]] * 4
        assert len(_get_current_dispatch_mode_stack()) == 1
    loader.close()


@pytest.mark.parametrize(("users", "expected"), [(None, 0), ("true", 1), ("false", 0)])
def test_users_tokenizer_setting_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: str | None, expected: int
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if users is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", users)
    shards = make_shards(tmp_path, [8])
    loader = make_loader(shards, tokenize=numbers_and_setting, num_workers=2)
    assert next(iter(loader)).text.tolist() == [[expected]] * 4
    assert os.environ.get("TOKENIZERS_PARALLELISM") == users
    loader.close()


class FastTokenizer:
    """A Rust tokenizer, with a thread pool that does not survive a fork."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        self._tokenizer = Tokenizer(models.WordLevel({str(n): n for n in range(99)}, unk_token="0"))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()

    def __call__(self, captions: list[str]) -> torch.Tensor:
        return torch.tensor([e.ids for e in self._tokenizer.encode_batch(captions)])


def test_fast_tokenizer_used_before_the_fork(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    tokenize = FastTokenizer()
    tokenize([str(n) for n in range(64)] * 50)
    loader = make_loader(make_shards(tmp_path, [8]), tokenize=tokenize, num_workers=2)
    batch = next(iter(loader))
    loader.close()
    assert batch.text[:, 0].tolist() == batch.index.tolist()
    assert "tokenizers" not in capfd.readouterr().err


def broken_transform(image: Image.Image) -> torch.Tensor:
    raise TypeError("no such size")


def broken_tokenizer(captions: list[str]) -> torch.Tensor:
    raise KeyError("vocabulary")


@pytest.mark.parametrize("workers", [0, 1])
def test_users_code_fails_in_one_line(tmp_path: Path, workers: int) -> None:
    shards = make_shards(tmp_path, [8])
    for options, message in (
        ({"image_transform": broken_transform}, r"image_transform failed on 0000.*no such size$"),
        ({"tokenize": broken_tokenizer}, r"a data worker failed: KeyError: 'vocabulary'$"),
    ):
        loader = make_loader(shards, num_workers=workers, **options)
        with pytest.raises(RuntimeError, match=message) as caught:
            next(iter(loader))
        assert "\n" not in str(caught.value)


def killer(captions: list[str]) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    return numbers(captions)


def test_a_killed_worker_is_an_error_not_a_hang(tmp_path: Path) -> None:
    loader = make_loader(make_shards(tmp_path, [8]), tokenize=killer, num_workers=1)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="a data worker died"):
        next(iter(loader))
    assert time.monotonic() - start < 20


def test_signals_to_the_whole_job_leave_the_workers_alone(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, [40])
    loader = make_loader(shards, num_workers=2)
    before = set(psutil.Process().children())
    iterator = iter(loader)
    ids = [next(iterator).index.tolist() for _ in range(2)]
    for worker in set(psutil.Process().children()) - before:
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            worker.send_signal(number)
    ids += [next(iterator).index.tolist() for _ in range(8)]
    loader.close()
    assert ids == take(make_loader(shards, num_workers=2), 10)


def test_close_ends_the_workers(tmp_path: Path) -> None:
    loader = make_loader(make_shards(tmp_path, [8]), num_workers=2)
    before = set(psutil.Process().children())
    iterator = iter(loader)
    next(iterator)
    workers = set(psutil.Process().children()) - before
    assert len(workers) == 2
    loader.close()
    psutil.wait_procs(workers, timeout=5)
    assert not any(worker.is_running() for worker in workers)
    assert list(iterator) == []


# P-42: accelerate


def accelerate_worker(rank: int, world_size: int, folder: str, workers: int) -> None:
    from accelerate import Accelerator

    plain = make_loader([folder], rank=rank, world_size=world_size, num_workers=workers)
    prepared = Accelerator(cpu=True).prepare(
        make_loader([folder], rank=rank, world_size=world_size, num_workers=workers)
    )
    assert take(prepared, 7) == take(plain, 7)


def test_accelerate_leaves_the_streams_alone(tmp_path: Path) -> None:
    make_shards(tmp_path, [10] * 4)
    run_distributed(accelerate_worker, str(tmp_path), 1, world_size=2)


def test_captions_of_many_fields(tmp_path: Path) -> None:
    """Priority, lists, and another seeded pick in each epoch."""
    members = []
    for n in range(8):
        info = {"caption": None, "aliases": [str(100 + n), str(200 + n), " "]}
        image, text = pair(n)
        members += [image, text, (f"{n:06d}.json", json.dumps(info).encode())]
    write_tar(tmp_path / "a.tar", members)

    def texts(steps: int = 2, **options: Any) -> list[int]:
        loader = make_loader([str(tmp_path)], shuffle_buffer=0, **options)
        iterator = iter(loader)
        batches = [next(iterator) for _ in range(steps)]
        order = [(i, t) for b in batches for i, t in zip(b.index, b.text[:, 0], strict=True)]
        return [int(t) - int(i) for i, t in order]

    assert texts(captions=("txt", "json.aliases")) == [0] * 8
    assert texts(captions=("json.caption", "json.aliases", "txt")) == [100] * 8
    assert texts(captions=("json.caption", "txt")) == [0] * 8
    options = {"captions": ("txt", "json.aliases"), "caption_choice": "random"}
    picks = texts(40, **options)
    assert set(picks) == {0, 100, 200}
    assert picks == texts(40, **options)
    assert picks[:8] != picks[8:16]


def test_colour_helper() -> None:
    assert colour(Image.new("RGB", (2, 2), (1, 2, 3)))[:, 0, 0].tolist() == [1.0, 2.0, 3.0]
