"""Finds every problem of every shard, before a training run does, and can write clean copies."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro
import webdataset
from tqdm import tqdm

from disco_ds.data.index import DEFAULT_TIMEOUT_SECONDS, check_workers, ordered_map
from disco_ds.data.remote import local_path, open_shard
from disco_ds.data.samples import (
    SkipSampleError,
    choose_caption,
    decode_image,
    find_image,
    parse_json,
)
from disco_ds.data.sources import Location, resolve
from disco_ds.data.tar import IMAGE_SUFFIXES, TEXT_SUFFIXES, Group, ShardError, read_groups
from disco_ds.output import check_writable

ODD_JSON = "odd_json"
"""The one kind of problem that training does not skip a sample for: its caption is elsewhere."""


@dataclass(frozen=True)
class Rules:
    """What makes a sample usable; as in :class:`disco_ds.data.config.DataConfig`."""

    captions: tuple[str, ...] = ("txt",)
    keep_empty_captions: bool = False
    max_image_pixels: int = 89_478_485


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    kind: str
    """The word that training counts it under, ``interleaved_sample`` or ``odd_json``."""
    detail: str = ""
    key: str = ""
    """Of the sample; empty when it is the shard itself."""
    position: int = -1


@dataclass
class ShardReport:
    """What was found in one shard."""

    url: str
    num_samples: int = 0
    num_usable: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def num_skipping(self) -> int:
        """Problems that make training skip something."""
        return sum(problem.kind != ODD_JSON for problem in self.problems)


@dataclass(frozen=True)
class Report:
    """What was found in all shards."""

    shards: tuple[ShardReport, ...]

    @property
    def is_clean(self) -> bool:
        """Training would skip nothing."""
        return not any(shard.num_skipping for shard in self.shards)

    @property
    def kinds(self) -> dict[str, int]:
        """Problems by kind, most frequent first."""
        counts = Counter(problem.kind for shard in self.shards for problem in shard.problems)
        return dict(counts.most_common())

    def to_json(self) -> str:
        """Everything, as one JSON object."""
        summary = {
            "clean": self.is_clean,
            "num_samples": sum(shard.num_samples for shard in self.shards),
            "num_usable": sum(shard.num_usable for shard in self.shards),
            "kinds": self.kinds,
        }
        return json.dumps({**summary, "shards": [asdict(s) for s in self.shards]}, indent=1)

    def to_table(self) -> str:
        """One line per shard with problems, and the totals."""
        rows = [("samples", "usable", "problems", "shard")]
        for shard in self.shards:
            if shard.problems:
                kinds = Counter(problem.kind for problem in shard.problems)
                told = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())
                rows.append((str(shard.num_samples), str(shard.num_usable), told, shard.url))
        total = sum(shard.num_samples for shard in self.shards)
        usable = sum(shard.num_usable for shard in self.shards)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(
            [
                *([line.rstrip() for line in lines] if len(rows) > 1 else []),
                f"{len(self.shards)} shards, {total} samples, {usable} usable, "
                f"{sum(self.kinds.values())} problems",
            ]
        )


def validate_shards(
    sources: Sequence[str],
    *,
    rules: Rules | None = None,
    fix: Path | None = None,
    missing: Literal["error", "skip"] = "error",
    num_workers: int = 0,
    progress: bool = False,
    timeout: float = DEFAULT_TIMEOUT_SECONDS,
) -> Report:
    """Read and decode every sample of every shard.

    Args:
        sources: see :mod:`disco_ds.data.sources`.
        rules: what makes a sample usable.
        fix: folder for clean copies of all shards: usable samples only, their bytes unchanged.
        missing: brace ranges with gaps: "error" or "skip".
        num_workers: processes that read; 0: this one.
        progress: show a progress bar.
        timeout: seconds without a byte after which a remote read fails.

    Raises:
        ValueError: no such shard; or two shards would get the same name in ``fix``.
    """
    check_workers(num_workers)
    locations = resolve(sources, missing=missing)
    if fix is not None:
        _prepare_folder(fix, locations)
    check = partial(validate_shard, rules=rules or Rules(), fix=fix, timeout=timeout)
    with ordered_map(min(num_workers, len(locations))) as mapper:
        reports = mapper(check, locations)
        bar = tqdm(
            reports, total=len(locations), unit="shard", disable=not progress, file=sys.stderr
        )
        return Report(tuple(bar))


def validate_shard(
    location: Location, *, rules: Rules, fix: Path | None, timeout: float
) -> ShardReport:
    """Read and decode every sample of one shard, and copy the usable ones if asked to."""
    report = ShardReport(location.url)
    seen: set[str] = set()
    with _copy_to(None if fix is None else fix / location.name) as copy:
        try:
            for group in _read(location.url, timeout, everything=fix is not None):
                problem = _check(group, rules, seen)
                seen.add(group.key)
                report.num_samples += 1
                if problem is None or problem.kind == ODD_JSON:
                    report.num_usable += 1
                    copy(group)
                if problem is not None:
                    report.problems.append(problem)
        except ShardError as error:
            report.problems.append(Problem(error.reason, str(error)))
        except OSError as error:
            report.problems.append(Problem("unreadable_shard", str(error)))
    return report


def _read(url: str, timeout: float, *, everything: bool) -> Iterator[Group]:
    def wanted(position: int, suffix: str) -> bool:
        return everything or suffix in IMAGE_SUFFIXES or suffix in TEXT_SUFFIXES

    stream, num_bytes = open_shard(url, timeout=timeout)
    with closing(stream):
        yield from read_groups(stream, num_bytes=num_bytes, wanted=wanted)


def _check(group: Group, rules: Rules, seen: set[str]) -> Problem | None:
    problem = partial(Problem, key=group.key, position=group.position)
    names = ", ".join(group.suffixes)
    if group.duplicate:
        return problem("duplicate_sample", f"members: {names}")
    if group.key in seen and not group.complete:
        detail = f"members of one sample lie apart: {names}"
        return problem("interleaved_sample", detail)
    try:
        content = find_image(group.members)
        choose_caption(group.members, rules.captions, keep_empty=rules.keep_empty_captions)
        decode_image(content, max_pixels=rules.max_image_pixels)
    except SkipSampleError as skip:
        detail = f"members: {names}" if str(skip) == skip.reason else str(skip)
        return problem(skip.reason, detail)
    try:
        parse_json(group.members.get("json", b"{}"))
    except SkipSampleError as skip:
        return problem(ODD_JSON, str(skip))
    return None


def _prepare_folder(folder: Path, locations: Sequence[Location]) -> None:
    names = Counter(location.name for location in locations)
    name, count = names.most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"{count} shards are named {name}: fix one folder at a time, each into its own"
        )
    if any(local_path(location.url).parent.resolve() == folder.resolve() for location in locations):
        raise ValueError(f"{folder} holds the shards themselves: choose another folder to fix into")
    for location in locations:
        if os.path.lexists(folder / location.name):
            raise ValueError(
                f"--fix {folder}: {location.name} is there already and would be overwritten: "
                "choose another folder, or remove it"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--fix {folder}: cannot make that folder ({error.strerror})") from error


@contextmanager
def _copy_to(path: Path | None) -> Iterator[Any]:
    """A function that adds a sample to the shard ``path``; the file appears when complete."""
    if path is None:
        yield lambda group: None
        return
    partial_path = path.with_name(f".{path.name}.{os.getpid()}")
    num_written = 0
    zipped = path.suffix in (".gz", ".tgz")

    def write(group: Group) -> None:
        nonlocal num_written
        num_written += 1
        try:
            writer.write({"__key__": group.key, **group.members})
        except OSError as error:
            raise _cannot_write(path, error) from error

    try:
        # mtime: by default webdataset stamps a fraction, which costs a header per member.
        with webdataset.TarWriter(
            str(partial_path), encoder=False, mtime=0, compress=zipped
        ) as writer:
            yield write
        if num_written:
            partial_path.replace(path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        partial_path.unlink(missing_ok=True)


def _cannot_write(path: Path, error: OSError) -> ValueError:
    """Not an OSError: those are the shard's that is read."""
    return ValueError(f"--fix: cannot write {path}: {error.strerror or error}")


@dataclass(frozen=True)
class ValidateCommand:
    """Find all problems of shards; exit with 1 if training would skip anything."""

    shards: tyro.conf.Positional[tuple[str, ...]]
    """Shards: files, folders, brace ranges, globs, .txt lists, pipe: commands, s3:// or https://."""
    captions: tuple[str, ...] = ("txt",)
    """Where captions come from, by priority: txt, or json.FIELD."""
    keep_empty_captions: bool = False
    """Empty and blank captions are no problem."""
    max_image_pixels: int = 89_478_485
    """Images with more pixels than this are a problem."""
    missing: Literal["error", "skip"] = "error"
    """What to do about gaps in a brace range."""
    json: Path | None = None
    """File for the complete report; without it only the table is printed."""
    fix: Path | None = None
    """Folder for clean copies: the usable samples of all shards."""
    num_workers: int = min(8, os.cpu_count() or 1)
    """Processes that read and decode."""
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    """Seconds without a byte after which a remote read fails."""

    def run(self) -> int:
        """Print the table. Returns the exit status: 1 if training would skip anything."""
        if self.json is not None:
            check_writable(self.json, "--json")
        report = validate_shards(
            self.shards,
            rules=Rules(self.captions, self.keep_empty_captions, self.max_image_pixels),
            fix=self.fix,
            missing=self.missing,
            num_workers=self.num_workers,
            progress=sys.stderr.isatty(),
            timeout=self.timeout,
        )
        print(report.to_table())  # noqa: T201  (a command's output)
        if self.json is not None:
            self.json.write_text(report.to_json() + "\n")
        return 0 if report.is_clean else 1
