"""Evaluation rows: each exactly once over the ranks, whatever their number."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_shards import colour, make_shards, pair, picture, write_tar

from disco_ds.data.evaluation import evaluation_shards, read_samples
from disco_ds.distributed import World


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_rows_are_shared_out(tmp_path: Path, ranks: int) -> None:
    shards = make_shards(tmp_path, [3, 0, 4])
    rows = {}
    for rank in range(ranks):
        for row, image, captions, label in read_samples(
            shards, world=World(rank, ranks), image_transform=colour
        ):
            assert row % ranks == rank
            assert row not in rows
            rows[row] = (int(image[0, 0, 0]), captions, label)
    assert rows == {n: (n, [str(n)], None) for n in range(7)}


def test_benchmark_folder(tmp_path: Path) -> None:
    for shard in range(11):
        members = [(f"{n}.png", picture(10 * shard + n)) for n in range(2)]
        labels = [(f"{n}.cls", str(n).encode()) for n in range(2)]
        both = [m for pair in zip(members, labels, strict=True) for m in pair]
        write_tar(tmp_path / "test" / f"{shard}.tar", both)
    (tmp_path / "test" / "nshards.txt").write_text("11\n")
    names = [Path(url).name for url in evaluation_shards([str(tmp_path)])]
    assert names == [f"{n}.tar" for n in range(11)]
    rows = list(read_samples([str(tmp_path)], world=World(), image_transform=colour))
    assert [int(image[0, 0, 0]) for _, image, _, _ in rows] == [
        10 * shard + n for shard in range(11) for n in range(2)
    ]
    assert [label for *_, label in rows] == [0, 1] * 11
    assert all(captions == [] for _, _, captions, _ in rows)


def test_several_captions_per_image(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("a.png", picture(1)), ("a.txt", b"one\n two \n\nthree\n")])
    ((_, _, captions, _),) = read_samples([str(tmp_path)], world=World(), image_transform=colour)
    assert captions == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([("a.json", b'{"caption": "one\\ntwo"}')], ["one two"]),
        ([("a.json", b'{"caption": "one"}'), ("a.txt", b"two")], ["two"]),
        ([("a.json", b'{"caption": null}')], []),
        ([("a.json", b"{")], []),
    ],
)
def test_captions_of_img2dataset_without_txt(
    tmp_path: Path, members: list[tuple[str, bytes]], expected: list[str]
) -> None:
    write_tar(tmp_path / "0.tar", [("a.png", picture(1)), *members])
    ((_, _, captions, _),) = read_samples([str(tmp_path)], world=World(), image_transform=colour)
    assert captions == expected


def test_bad_rows_are_left_out_and_keep_their_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    members = [*pair(0), ("x.png", b"?"), ("x.txt", b"x"), *pair(2), *pair(3)[1:]]
    write_tar(tmp_path / "0.tar", [*members, ("y.png", picture(4)), ("y.cls", b"cat")])
    rows = list(read_samples([str(tmp_path)], world=World(), image_transform=colour))
    assert [row for row, *_ in rows] == [0, 2]
    assert "3 rows left out" in caplog.text


def test_damaged_evaluation_data_is_an_error(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "0.tar", [m for n in range(9) for m in pair(n)])
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"0\.tar: .*evaluation needs whole shards"):
        list(read_samples([str(path)], world=World(), image_transform=colour))
    with pytest.raises(ValueError, match="no such shard"):
        list(read_samples([str(tmp_path / "1.tar")], world=World(), image_transform=colour))
