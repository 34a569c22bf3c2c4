"""Shards to stable ids: P-12, P-29, P-31, and the forms a user may name shards in."""

from __future__ import annotations

import gzip
import json
import logging
import os
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
import tyro
from make_shards import Member, flat, make_loader, make_shards, pair, take, write_tar

from disco_ds.data.config import DataConfig
from disco_ds.data.index import IndexCommand, ShardIndex, build_index, configured_index
from disco_ds.data.sources import resolve, shard_name


def build(*sources: object, **options: object) -> ShardIndex:
    return build_index([str(s) for s in sources], cache=None, **options)  # type: ignore[arg-type]


def names(index: ShardIndex) -> list[str]:
    return [shard.name for shard in index.shards]


# P-12: identity


@pytest.mark.parametrize("form", ["json", "image and text", "text keys", "same key in two shards"])
def test_every_form_of_shard_gets_dense_ids(tmp_path: Path, form: str) -> None:
    def members(shard: int, row: int) -> list[Member]:
        number = 10 * shard + row
        key = {"text keys": f"abc-{number:02d}", "same key in two shards": f"{row}"}.get(form)
        return pair(number, key, with_json=form == "json")

    for shard in range(2):
        write_tar(tmp_path / f"{shard}.tar", [m for row in range(10) for m in members(shard, row)])
    loader = make_loader([str(tmp_path)], batch=5)
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(4)]
    for batch in batches:
        assert batch.text[:, 0].tolist() == batch.index.tolist()
    assert sorted(i for b in batches for i in b.index.tolist()) == list(range(20))


def test_ids_do_not_depend_on_the_order_of_shards_nor_on_where_they_lie(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "a", [3, 5, 2])
    index = build(*shards)
    assert index.offsets == (0, 3, 8)
    assert build(*reversed(shards)).shards == tuple(
        shard.__class__(**{**vars(shard), "source": 2 - shard.source}) for shard in index.shards
    )
    moved = Path(shutil.move(tmp_path / "a", tmp_path / "b"))
    for other in (build(moved), build(f"pipe:cat {moved}/{{00000..00002}}.tar")):
        assert other.fingerprint == index.fingerprint
        assert other.offsets == index.offsets
        assert names(other) == names(index)


def test_shards_of_one_name_are_ordered_by_content(tmp_path: Path) -> None:
    make_shards(tmp_path / "a", [3])
    make_shards(tmp_path / "b", [4], first=3)
    index = build(tmp_path / "a", tmp_path / "b")
    other = build(tmp_path / "b", tmp_path / "a")
    assert [s.fingerprint for s in index.shards] == [s.fingerprint for s in other.shards]
    assert {s.url: s.source for s in other.shards} == {
        str(tmp_path / "b/00000.tar"): 0,
        str(tmp_path / "a/00000.tar"): 1,
    }


def test_fingerprint_follows_content(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, [3, 5])
    before = build(*shards).fingerprint
    write_tar(Path(shards[1]), [m for n in range(4, 9) for m in pair(n)])
    assert build(*shards).fingerprint != before


# The file


def test_index_is_saved_and_only_changes_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    shards = make_shards(tmp_path / "data", [3, 5, 2])
    cache = tmp_path / "deep" / "index.json"
    index = build_index(shards, cache=cache)
    assert ShardIndex.load(cache) == index
    caplog.clear()
    assert build_index(shards, cache=cache) == index
    assert "reading" not in caplog.text
    write_tar(Path(shards[1]), [m for n in range(4) for m in pair(n)])
    make_shards(tmp_path / "more", [1])
    assert build_index([*shards, str(tmp_path / "more")], cache=cache).num_samples == 10
    assert "reading 2 of 4 shards" in caplog.text
    assert len(ShardIndex.load(cache).shards) == 4


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"format": 99, "shards": []}', "\x00"])
def test_something_else_is_not_taken_for_an_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(ValueError, match=r"index\.json: not an index"):
        ShardIndex.load(tmp_path / "index.json")


def test_workers_count_the_same(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, [1, 2, 3, 4] * 4)
    assert build(*shards, num_workers=2) == build(*shards)


def test_ten_thousand_shards_are_fine(tmp_path: Path) -> None:
    """Links to a few files: what costs is the number of shards. Starting from an index is quick."""
    originals = make_shards(tmp_path / "few", [1, 2])
    (tmp_path / "many").mkdir()
    for number in range(10_000):
        os.link(originals[number % 2], tmp_path / "many" / f"{number:05d}.tar")
    index = build_index([str(tmp_path / "many")], cache=tmp_path / "index.json", counts="read")
    assert index.num_samples == 15_000
    start = time.perf_counter()
    again = build_index([str(tmp_path / "many")], cache=tmp_path / "index.json")
    ids = take(make_loader([str(tmp_path / "many")], index=again, batch=8), 1)
    assert time.perf_counter() - start < 10
    assert len(ids[0]) == 8


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = make_shards(tmp_path, [3, 5])
    arguments = [str(tmp_path), "-o", str(tmp_path / "index.json"), "--num_workers", "0"]
    assert tyro.cli(IndexCommand, args=arguments, use_underscores=True).run() == 0
    assert "8 samples in 2 shards" in capsys.readouterr().out
    assert ShardIndex.load(tmp_path / "index.json").sizes == build(*shards).sizes == (3, 5)


def test_index_of_settings(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, [3])
    config = DataConfig(shards=tuple(shards), index=tmp_path / "index.json")
    assert configured_index(config) == build(*shards) == ShardIndex.load(tmp_path / "index.json")
    with pytest.raises(ValueError, match=r"--data\.max_bad_shards 7: must be from 0 to 1"):
        DataConfig(max_bad_shards=7)


# P-29: number of samples


def test_counts_agree_however_they_are_stated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shards = [Path(s) for s in make_shards(tmp_path, [3, 5])]
    read = build(*shards)
    (tmp_path / "sizes.json").write_text(json.dumps({"00000.tar": 3, "00001.tar": 5}))
    assert build(*shards, counts="trust") == read
    (tmp_path / "sizes.json").write_text(json.dumps({"00000.tar": 3}))
    caplog.clear()
    assert build(*shards, counts="trust") == read
    assert "00001.tar is not in sizes.json" in caplog.text
    (tmp_path / "sizes.json").unlink()
    for shard, size in zip(shards, (3, 5), strict=True):
        stats = {"count": size + 2, "successes": size, "failed_to_download": 2}
        (tmp_path / f"{shard.stem}_stats.json").write_text(json.dumps(stats))
    caplog.clear()
    assert build(*shards, counts="trust") == read == build(*shards)
    assert caplog.text == ""
    loader = make_loader([str(tmp_path)], batch=2, num_samples=8)
    assert loader.steps_per_epoch == 4
    with pytest.raises(ValueError, match=r"--data\.num_samples 9, but the shards hold 8"):
        make_loader([str(tmp_path)], batch=2, num_samples=9)


def test_wrong_counts_are_reported_when_read_and_survived_when_trusted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shards = make_shards(tmp_path, [3, 5])
    (tmp_path / "sizes.json").write_text(json.dumps({"00000.tar": 6, "00001.tar": 4}))
    assert build(*shards).sizes == (3, 5)
    assert "sizes.json says 6 samples, the shard has 3" in caplog.text
    trusted = build(*shards, counts="trust")
    assert trusted.sizes == (6, 4)
    loader = make_loader(shards, index=trusted, batch=2, max_bad_share=1.0)
    ids = take(loader, 5)
    assert loader.epoch_summary()["data/skipped_short_shard"] == 3
    assert set(flat(ids)) == {0, 1, 2, 6, 7, 8, 9}


# P-31 and the forms of sources


def test_folder_as_img2dataset_leaves_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, complete in ((0, True), (2, True), (3, False)):
        write_tar(tmp_path / f"{number:05d}.tar", pair(number))
        (tmp_path / f"{number:05d}.parquet").write_bytes(b"PAR1")
        if complete:
            (tmp_path / f"{number:05d}_stats.json").write_text('{"successes": 1}')
    for leftover in (".00004.tar", "_tmp.tar", "00005.tar.tmp", "00006.json"):
        (tmp_path / leftover).write_bytes(b"?")
    assert names(build(tmp_path)) == ["00000.tar", "00002.tar", "00003.tar"]
    assert "using 1 shards without a stats file" in caplog.text
    assert names(build(tmp_path / "*")) == names(build(tmp_path))
    assert names(build(tmp_path, require_stats=True)) == ["00000.tar", "00002.tar"]
    pattern = tmp_path / "{00000..00003}.tar"
    with pytest.raises(ValueError, match=r"00001\.tar: no such shard \(nearest existing: .*0000"):
        build(pattern)
    caplog.clear()
    assert len(build(pattern, missing="skip").shards) == 3
    assert "1 of 4 shards do not exist" in caplog.text


def test_forms_of_sources(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "d", [1] * 12)
    everything = [Path(s).name for s in shards]
    listing = tmp_path / "list.txt"
    listing.write_text(f"# mine\n{tmp_path}/d/{{00000..00005}}.tar\n\n{tmp_path}/d/0000[6-9].tar\n")
    forms: list[list[str]] = [
        [str(tmp_path / "d")],
        [str(tmp_path / "d/*.tar")],
        [str(tmp_path / "**/*.tar")],
        [f"{tmp_path}/d/{{00000..00011}}.tar"],
        [str(listing), *shards[10:]],
        [f"file://{tmp_path}/d/{{00000..00011}}.tar"],
        [f"pipe:cat {tmp_path}/d/{{00000..00011}}.tar"],
        [f"file://{tmp_path}/d"],
    ]
    for form in forms:
        assert [location.name for location in resolve(form)] == everything, form
    assert [x.source for x in resolve([*shards[:2], str(tmp_path / "d")])] == [0, 1] + [2] * 10


def test_names_in_addresses_and_commands() -> None:
    assert shard_name("https://h/a/00000.tar?sig=x/y") == "00000.tar"
    assert shard_name("pipe:aws s3 cp s3://b/c/00001.tar - | cat") == "00001.tar"
    assert shard_name("pipe:mystery") == "pipe:mystery"


def test_compressed_shards(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for shard in make_shards(tmp_path / "plain", [4]):
            with tarfile.open(shard) as plain:
                for member in plain:
                    tar.addfile(member, plain.extractfile(member))
    for source in (str(tmp_path / "a.tar.gz"), f"pipe:cat {tmp_path}/a.tar.gz"):
        assert sorted(flat(take(make_loader([source], batch=2), 2))) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "empty shard name"),
        ("{dir}/0000?x*.tar", "no such shard .nearest existing: .*00000.tar"),
        ("{dir}/00001.tar", "no such shard .nearest existing: .*00000.tar"),
        ("{dir}/no/such/x.tar", "no such shard .nearest existing folder: {dir}"),
        ("{dir}/empty", "the folder holds no .tar file"),
        ("{dir}/page.tar", "no samples in 1 shards; .*page.tar: not_a_tar"),
        ("{dir}/zero.tar", "no samples in 1 shards; .*zero.tar: empty_shard"),
        ("{dir}/other.parquet", "not a shard; name its folder, or .* in quotes"),
        ("s4://bucket/x.tar", "s4"),
    ],
)
def test_errors_are_one_clear_line(tmp_path: Path, source: str, message: str) -> None:
    make_shards(tmp_path, [1])
    (tmp_path / "empty").mkdir()
    (tmp_path / "page.tar").write_text("<html>404</html>" * 100)
    (tmp_path / "zero.tar").write_bytes(b"")
    (tmp_path / "other.parquet").write_bytes(b"PAR1" * 300)
    with pytest.raises(ValueError, match=message.replace("{dir}", str(tmp_path))) as caught:
        build(source.replace("{dir}", str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_no_sources_and_only_known_ones(tmp_path: Path) -> None:
    shards = make_shards(tmp_path, [1])
    with pytest.raises(ValueError, match="no shards given"):
        build()
    with pytest.raises(ValueError, match="named by an earlier source"):
        build(tmp_path, *shards)


def test_one_file_under_several_names_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_shards(tmp_path / "a", [2, 3])
    (tmp_path / "a" / "latest.tar").symlink_to("00000.tar")
    monkeypatch.chdir(tmp_path)
    assert build("a").num_samples == 5
    assert build("a/00000.tar", f"file://{tmp_path}/a/{{00000..00001}}.tar").num_samples == 5
    assert not caplog.records
    shutil.copy("a/00000.tar", "a/copy.tar")
    assert build("a").num_samples == 7
    assert "1 shards look like copies of others" in caplog.text


def test_lists_that_name_nothing_or_themselves(tmp_path: Path) -> None:
    make_shards(tmp_path, [1])
    listing = tmp_path / "list.txt"
    for content, message in (
        (b"", "lists no shard"),
        (b"# nothing\n\n", "lists no shard"),
        (str(listing).encode(), "leads back to itself"),
        (b"caf\xe9.tar", r"list\.txt: not UTF-8 \(.* at byte 3\)"),
    ):
        listing.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            build(listing)
    listing.write_text("\ufeff" + str(tmp_path / "00000.tar"))  # an editor's mark
    assert build(listing).num_samples == 1


def test_joined_archives_are_damaged(tmp_path: Path) -> None:
    """Every tar reader stops at the first end: half of the samples would be gone in silence."""
    names = make_shards(tmp_path / "a", [2, 3])
    joined = b"".join(Path(name).read_bytes() for name in names)
    (tmp_path / "joined.tar").write_bytes(joined)
    (tmp_path / "joined.tar.gz").write_bytes(gzip.compress(joined))
    for source in (
        *(tmp_path / "joined.tar", tmp_path / "joined.tar.gz"),
        f"pipe:cat {tmp_path}/joined.tar",
    ):
        index = build_index([str(source)], cache=None, max_bad_shards=1.0)
        assert index.num_samples == 2
        assert "damaged_shard: data after the end-of-archive" in index.shards[0].damage
    padded = Path(names[0]).read_bytes() + bytes(100_000)
    (tmp_path / "padded.tar").write_bytes(padded)
    assert not build(tmp_path / "padded.tar").shards[0].damage


@pytest.mark.parametrize("options", [{"num_workers": -3}, {"max_bad_shards": 7.0}], ids=str)
def test_settings_out_of_range(tmp_path: Path, options: dict[str, Any]) -> None:
    make_shards(tmp_path, [1])
    with pytest.raises(ValueError, match=next(iter(options))):
        build_index([str(tmp_path)], cache=None, **options)


def test_many_damaged_shards_are_refused_few_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_shards(tmp_path, [2] * 10)
    (tmp_path / "00003.tar").write_bytes(b"")
    index = build(tmp_path)
    assert index.num_samples == 18
    assert len([r for r in caplog.records if "00003.tar" in r.getMessage()]) == 1
    (tmp_path / "00004.tar").write_bytes(b"")
    with pytest.raises(ValueError, match=r"2 of 10 shards are damaged.*00003\.tar: empty_shard"):
        build(tmp_path)
