"""The report on dirty shards agrees with what training skips, and the copies are clean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tyro
from make_shards import (
    Member,
    encode,
    lengths,
    make_loader,
    make_shards,
    pair,
    photo,
    picture,
    take,
    write_tar,
)
from PIL import Image

from disco_ds.data.index import build_index
from disco_ds.data.validate import Report, Rules, ValidateCommand, validate_shards


def dirty_members() -> list[Member]:
    jpeg = photo(1, (160, 160))
    (a_image, a_text), (b_image, b_text) = pair(91, "apart"), pair(92, "between")
    return [
        *pair(0),
        *pair(1, "000000"),
        (pair(2)[0]),
        (pair(3)[1]),
        ("000004.png", picture(4)),
        ("000004.txt", b" "),
        ("000005.png", picture(5)),
        ("000005.txt", b"\xff"),
        ("000006.jpg", jpeg[:1000]),
        ("000006.txt", b"6"),
        ("000007.png", encode(Image.new("1", (3000, 3000)))),
        ("000007.txt", b"7"),
        *(a_image, b_image, a_text, b_text),
        *pair(8),
        ("000008.json", b"{"),
        ("000008.npy", b"extra"),
    ]


EXPECTED = {
    "duplicate_sample": 1,
    "missing_caption": 3,
    "missing_image": 1,
    "empty_caption": 1,
    "bad_caption": 1,
    "bad_image": 1,
    "huge_image": 1,
    "interleaved_sample": 2,
    "odd_json": 1,
}
RULES = Rules(max_image_pixels=1_000_000)


def shard_kinds(report: Report) -> list[list[str]]:
    return [[problem.kind for problem in shard.problems] for shard in report.shards]


def test_every_kind_of_sample_problem(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", dirty_members())
    report = validate_shards([str(path)], rules=RULES)
    assert report.kinds == EXPECTED
    (shard,) = report.shards
    assert (shard.num_samples, shard.num_usable) == (13, 2)
    assert not report.is_clean
    told = {problem.key: problem.kind for problem in shard.problems if problem.position != 10}
    assert told["000007"] == "huge_image"
    loader = make_loader(
        [str(path)], batch=1, max_bad_share=1.0, max_image_pixels=1_000_000, tokenize=lengths
    )
    ids = take(loader, 13)
    assert len({i for batch in ids for i in batch}) == shard.num_usable
    skipped = sum(c for name, c in loader.epoch_summary().items() if "skipped" in name)
    assert skipped == shard.num_skipping


def test_every_kind_of_shard_problem(tmp_path: Path) -> None:
    whole = write_tar(tmp_path / "good.tar", [m for n in range(6) for m in pair(n)]).read_bytes()
    cut_header = whole.index(b"000003.png") + 100
    cut_between = whole.index(b"000003.png")
    cut_inside = whole.index(b"000003.png") + 520
    flipped = bytearray(whole)
    flipped[cut_between + 130] ^= 1
    contents = {
        "a_zero.tar": b"",
        "b_html.tar": b"<html>" * 200,
        "c_header.tar": whole[:cut_header],
        "d_between.tar": whole[:cut_between],
        "e_inside.tar": whole[:cut_inside],
        "f_flipped.tar": bytes(flipped),
        "g_samples.tar": whole,
    }
    folder = tmp_path / "shards"
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    report = validate_shards([str(folder)])
    assert shard_kinds(report) == [
        ["empty_shard"],
        ["not_a_tar"],
        ["truncated_shard"],
        ["truncated_shard"],
        ["truncated_shard"],
        ["damaged_shard"],
        [],
    ]
    assert [shard.num_usable for shard in report.shards] == [0, 0, 3, 3, 3, 3, 6]
    index = build_index([str(folder)], cache=None, max_bad_shards=1.0)
    assert index.sizes == tuple(shard.num_samples for shard in report.shards)


def test_fix_writes_clean_copies_of_the_usable_samples(tmp_path: Path) -> None:
    write_tar(tmp_path / "in" / "a.tar", dirty_members())
    (tmp_path / "in" / "b.tar").write_bytes(b"")
    make_shards(tmp_path / "in", [3], first=20)
    out = tmp_path / "out"
    report = validate_shards([str(tmp_path / "in")], rules=RULES, fix=out, num_workers=2)
    assert not report.is_clean
    assert sorted(path.name for path in out.iterdir()) == ["00000.tar", "a.tar"]
    again = validate_shards([str(out)], rules=RULES)
    assert again.is_clean
    assert again.kinds == {"odd_json": 1}
    assert sum(shard.num_samples for shard in again.shards) == 5
    loader = make_loader([str(out)], batch=1)
    take(loader, 5)
    assert loader.epoch_summary()["data/seen"] == 5
    assert b"extra" in (out / "a.tar").read_bytes()
    assert (out / "00000.tar").stat().st_size == (tmp_path / "in/00000.tar").stat().st_size


def test_fix_refuses_folders_that_would_be_overwritten(tmp_path: Path) -> None:
    make_shards(tmp_path / "a", [1])
    make_shards(tmp_path / "b", [1])
    with pytest.raises(ValueError, match="holds the shards themselves"):
        validate_shards([str(tmp_path / "a")], fix=tmp_path / "a")
    with pytest.raises(ValueError, match=r"2 shards are named 00000\.tar"):
        validate_shards([str(tmp_path / "a"), str(tmp_path / "b")], fix=tmp_path / "c")


def test_fix_never_writes_over_anything(tmp_path: Path) -> None:
    make_shards(tmp_path / "a", [1])
    make_shards(tmp_path / "b", [1], first=5)
    out = tmp_path / "out"
    validate_shards([str(tmp_path / "a")], fix=out)
    before = (out / "00000.tar").read_bytes()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "00000.tar").symlink_to(out / "00000.tar")
    for source in (tmp_path / "b", tmp_path / "links"):
        with pytest.raises(ValueError, match=r"00000\.tar is there already"):
            validate_shards([str(source)], fix=out)
    with pytest.raises(ValueError, match="holds the shards themselves"):
        validate_shards([f"file://{out}/00000.tar"], fix=out)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot make that folder"):
        validate_shards([str(tmp_path / "b")], fix=tmp_path / "file")
    assert (out / "00000.tar").read_bytes() == before


def test_output_that_cannot_be_written_is_told_first(tmp_path: Path) -> None:
    make_shards(tmp_path, [1])
    (tmp_path / "file").write_text("")
    for output in (tmp_path, tmp_path / "file" / "x.json"):
        command = ValidateCommand((str(tmp_path / "nothing.tar"),), num_workers=0, json=output)
        with pytest.raises(ValueError, match=r"--json .*: cannot write there"):
            command.run()


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_shards(tmp_path, [2])
    arguments = [str(tmp_path), "--num_workers", "0"]
    assert tyro.cli(ValidateCommand, args=arguments, use_underscores=True).run() == 0
    assert "1 shards, 2 samples, 2 usable, 0 problems" in capsys.readouterr().out
    write_tar(tmp_path / "x.tar", dirty_members())
    command = ValidateCommand(
        (str(tmp_path),), num_workers=0, json=tmp_path / "r.json", max_image_pixels=1_000_000
    )
    assert command.run() == 1
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["samples", "usable", "problems", "shard"]
    assert "missing_caption 3" in table[1] and table[1].endswith("x.tar")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["kinds"] == EXPECTED
    assert report["clean"] is False
    assert report["shards"][1]["problems"][0]["kind"] == "duplicate_sample"


def test_missing_shards_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such shard"):
        validate_shards([str(tmp_path / "x.tar")])
