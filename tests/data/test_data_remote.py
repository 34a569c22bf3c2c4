"""P-24: shards that arrive through commands and addresses, and do not always arrive."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from make_shards import flat, make_loader, make_shards, photo, take, write_tar

import disco_ds.data.reader as reader_module
from disco_ds.data import index as index_module
from disco_ds.data.index import ShardIndex, build_index
from disco_ds.data.loader import TrainLoader
from disco_ds.data.remote import Command, TimedStream, open_shard


def load_through(command: str, folder: Path, **options: Any) -> TrainLoader:
    """A loader whose second shard of two comes through a command."""
    shards = make_shards(folder, [8, 8])
    good = build_index(shards, cache=None)
    url = f"pipe:{command.format(shard=shards[1], folder=folder)}"
    index = ShardIndex((good.shards[0], replace(good.shards[1], url=url)))
    options = {"read_retries": 2, "read_timeout": 0.3, "max_bad_share": 0.6, **options}
    return make_loader([str(folder)], index=index, batch=4, **options)


@pytest.mark.parametrize(
    ("command", "fewest", "most"),
    [
        ("exit 1", 8, 8),
        ("head -c 12000 {shard}; exit 1", 12, 14),
        ("head -c 12000 {shard}", 12, 14),
        ("head -c 12000 {shard}; sleep 60", 12, 14),
        ("sleep 60", 8, 8),
        ("cat {folder}/no.tar | cat", 8, 8),
        ("echo '<html>busy</html>'", 8, 8),
        ("cat {shard}; exit 3", 14, 16),
    ],
)
def test_failing_commands_end_as_skipped_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, command: str, fewest: int, most: int
) -> None:
    """(a), (b), (d) and more: after retries, within the time limits, one line of log."""
    loader = load_through(command, tmp_path)
    start = time.monotonic()
    seen = set(flat(take(loader, 4)))
    assert time.monotonic() - start < 5
    assert fewest <= len(seen) <= most
    summary = loader.epoch_summary()
    assert summary["data/seen"] == len(seen)
    skipped = sum(count for name, count in summary.items() if "skipped" in name)
    assert skipped + summary["data/seen"] + summary["data/unseen"] == 16
    assert len(caplog.records) == (1 if skipped else 0)


FLAKY = (
    "echo try >> {folder}/tries; "
    "if [ $(wc -l < {folder}/tries) -ge 3 ]; then cat {shard}; "
    "else head -c $((6000 * $(wc -l < {folder}/tries))) {shard}; exit 1; fi"
)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_later_success_loses_and_repeats_nothing(tmp_path: Path, workers: int) -> None:
    """(c): two partial reads, then a whole one."""
    loader = load_through(FLAKY, tmp_path, num_workers=workers)
    ids = flat(take(loader, 4))
    assert sorted(ids) == list(range(16))
    expected = {"data/seen": 16.0, "data/repeated": 0.0, "data/unseen": 0.0}
    assert loader.epoch_summary() == expected
    assert (tmp_path / "tries").read_text().count("try") >= 3


def test_waits_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(reader_module.time, "sleep", waits.append)
    take(load_through("exit 1", tmp_path, read_retries=4, retry_seconds=1.0), 4)
    assert waits == [1.0, 2.0, 4.0, 8.0]


def test_closing_early_is_silent_and_ends_the_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """(e): a reader that has enough; the command would complain about a broken pipe."""
    big = write_tar(
        tmp_path / "big.tar",
        [(f"{n}.{s}", photo(n, (640, 640))) for n in range(60) for s in ("jpg", "txt")],
    )
    command = f"cat {big} && echo $$ > {tmp_path}/finished; sleep 60 | cat"
    stream, size = open_shard(f"pipe:{command}", timeout=5)
    assert size is None
    assert len(stream.read(100)) == 100
    threads = threading.active_count()
    stream.close()
    stream.close()
    for _ in range(100):
        if threading.active_count() < threads:
            break
        time.sleep(0.02)
    assert threading.active_count() < threads
    assert not (tmp_path / "finished").exists()
    assert capfd.readouterr() == ("", "")
    assert caplog.text == ""


def test_whole_pipe_epochs_and_resume(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, [10] * 4)
    source = f"pipe:cat {tmp_path}/{{00000..00003}}.tar"
    plain = take(make_loader(shards), 20)
    loader = make_loader([source], num_workers=1)
    assert take(loader, 7) == plain[:7]
    second = make_loader([source], num_workers=1)
    second.load_state_dict(loader.state_dict())
    assert take(second, 13) == plain[7:]


def test_reason_of_a_failing_command_is_its_last_word() -> None:
    stream = TimedStream(Command("echo first >&2; echo 'no such bucket' >&2; exit 4"), 5)
    with pytest.raises(OSError, match="ended with status 4: no such bucket"):
        stream.read(1)
    stream.close()


def test_a_failing_part_of_a_pipeline_counts() -> None:
    stream = TimedStream(Command("(echo data; exit 1) | cat"), 5)
    with pytest.raises(OSError, match="status 1"):
        stream.read()
    stream.close()


# Addresses


def test_a_trusted_remote_shard_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    shards = make_shards(tmp_path, [3, 5])
    memory = fsspec.filesystem("memory")
    for shard in map(Path, shards):
        memory.pipe(f"/trusted/{shard.name}", shard.read_bytes())
    source = ["memory://trusted/*.tar"]
    counted = build_index(source, cache=None)
    memory.pipe("/trusted/00000_stats.json", b'{"successes": 3}')
    memory.pipe("/trusted/00001_stats.json", b'{"successes": "?"}')
    opened: list[str] = []
    real = index_module.open_shard
    monkeypatch.setattr(
        index_module,
        "open_shard",
        lambda url, **options: opened.append(url) or real(url, **options),
    )
    assert build_index(source, cache=None, counts="trust") == counted
    assert [Path(url).name for url in opened] == ["00001.tar"]  # its number makes no sense


def test_fsspec_addresses(tmp_path: Path) -> None:
    import fsspec

    shards = make_shards(tmp_path, [5, 3])
    memory = fsspec.filesystem("memory")
    for shard in shards:
        memory.pipe_file(f"/bucket/{Path(shard).name}", Path(shard).read_bytes())
    for source in ("memory://bucket/{00000..00001}.tar", "memory://bucket/*.tar"):
        index = build_index([source], cache=None)
        assert index.fingerprint == build_index(shards, cache=None).fingerprint
        assert take(make_loader([source], index=index), 4) == take(make_loader(shards), 4)
    with pytest.raises(ValueError, match=r"no samples in 1 shards; .*unreadable_shard"):
        build_index(["memory://bucket/00009.tar"], cache=None)


def test_slow_open_of_an_address_meets_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(MemoryFileSystem, "open", lambda *a, **k: time.sleep(2))
    stream, _ = open_shard("memory://x/y.tar", timeout=0.1)
    with pytest.raises(TimeoutError, match=r"no data for 0\.1 s"):
        stream.read(10)
    stream.close()


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ValueError, match=r"pip install 'disco_ds\[remote\]'"):
        build_index(["s3://bucket/x.tar"], cache=None)
