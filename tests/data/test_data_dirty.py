"""Dirty shards: P-18 to P-23, and three hundred seeded corruptions of a good one."""

from __future__ import annotations

import io
import json
import logging
import random
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from make_shards import (
    Member,
    encode,
    flat,
    lengths,
    make_loader,
    make_shards,
    pair,
    photo,
    picture,
    picture_numbers,
    take,
    write_tar,
)
from PIL import Image, ImageOps

from disco_ds.data.index import build_index
from disco_ds.data.loader import TrainLoader
from disco_ds.data.samples import SkipSampleError, decode_image


def one_pass(folder: Path, **options: object) -> tuple[set[int], dict[str, int]]:
    """Ids that come out of a whole pass, and what was skipped; image and caption agree."""
    index = build_index([str(folder)], cache=None, max_bad_shards=1.0)
    loader = make_loader([str(folder)], index=index, batch=1, max_bad_share=1.0, **options)  # type: ignore[arg-type]
    iterator = iter(loader)
    seen: set[int] = set()
    for _ in range(loader.steps_per_epoch):
        batch = next(iterator)
        if options.get("tokenize") is None:
            assert picture_numbers(batch) == batch.text[:, 0].tolist()
        seen.update(batch.index.tolist())
    loader.close()
    return seen, skipped(loader)


def skipped(loader: TrainLoader) -> dict[str, int]:
    prefix = "data/skipped_"
    return {
        name.removeprefix(prefix): int(count)
        for name, count in loader.epoch_summary().items()
        if name.startswith(prefix)
    }


# P-18: broken shards


def test_broken_shards_among_good_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_shards(tmp_path, [6, 6])
    (tmp_path / "a.tar").write_bytes(b"")
    (tmp_path / "b.tar").write_text("<html>not found</html>" * 100)
    whole = write_tar(tmp_path / "c.tar", [m for n in range(12, 18) for m in pair(n)]).read_bytes()
    (tmp_path / "c.tar").write_bytes(whole[: cut_inside(tmp_path / "c.tar", "000015.png")])
    caplog.set_level(logging.WARNING)
    seen, reasons = one_pass(tmp_path)
    assert seen == set(range(15))  # 12, 13 and 14 lie before the damage
    assert sum(reasons.values()) <= 1
    for name in ("a.tar: empty_shard", "b.tar: not_a_tar", "c.tar: truncated_shard"):
        path = f"{tmp_path}/{name}"
        assert sum(path in record.getMessage() for record in caplog.records) >= 1, name
    for name in ("a.tar", "b.tar"):
        assert sum(name in record.getMessage() for record in caplog.records) == 1


def cut_inside(path: Path, name: str) -> int:
    with tarfile.open(path) as tar:
        return tar.getmember(name).offset_data + 20


def test_shard_damaged_after_it_was_indexed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole samples before the damage are used, the others counted; one line of log."""
    shards = [Path(s) for s in make_shards(tmp_path, [10, 10])]
    index = build_index([str(tmp_path)], cache=None)
    shards[1].write_bytes(shards[1].read_bytes()[: cut_inside(shards[1], "000014.png")])
    loader = make_loader([str(tmp_path)], index=index, max_bad_share=0.5)
    seen = set(flat(take(loader, 5)))
    assert seen == set(range(14))
    assert loader.epoch_summary() == {
        "data/seen": 14.0,
        "data/repeated": 6.0,
        "data/unseen": 0.0,
        "data/skipped_truncated_shard": 6.0,
    }
    assert sum("00001.tar" in record.getMessage() for record in caplog.records) == 1


def test_shard_gone_after_it_was_indexed(tmp_path: Path) -> None:
    make_shards(tmp_path, [10, 10])
    index = build_index([str(tmp_path)], cache=None)
    (tmp_path / "00000.tar").unlink()
    loader = make_loader([str(tmp_path)], index=index, max_bad_share=0.5, num_workers=2)
    assert set(flat(take(loader, 5))) == set(range(10, 20))
    assert skipped(loader) == {"unreadable_shard": 10}


@pytest.mark.parametrize("workers", [0, 2])
def test_too_much_bad_data_stops_the_run(tmp_path: Path, workers: int) -> None:
    members = [m for n in range(20) for m in pair(n)]
    members += [m for n in range(20, 30) for m in pair(n)[1:]]
    write_tar(tmp_path / "a.tar", members)
    loader = make_loader([str(tmp_path)], batch=10, max_bad_share=0.2, num_workers=workers)
    with pytest.raises(ValueError, match=r"had to be skipped \(missing_image \d+\), more than"):
        take(loader, 6)
    make_loader([str(tmp_path)], batch=10, max_bad_share=0.4, num_workers=workers)


# P-19: repeated names


def test_repeated_member_names(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [*pair(0, "a"), *pair(1, "a"), *pair(2, "b")])
    write_tar(tmp_path / "1.tar", [*pair(3, "b"), *pair(4, "c"), *pair(5, "b")])
    seen, reasons = one_pass(tmp_path)
    assert seen == {0, 2, 3, 4}
    assert reasons == {"duplicate_sample": 2}


def test_the_first_complete_sample_of_a_key_is_kept(tmp_path: Path) -> None:
    image, text = pair(1, "a")
    write_tar(tmp_path / "0.tar", [pair(0, "a")[0], image, text, *pair(2, "a"), *pair(3, "b")])
    seen, reasons = one_pass(tmp_path)
    assert seen == {1, 3}
    assert reasons == {"missing_caption": 1, "duplicate_sample": 1}


def test_interleaved_members_are_never_joined(tmp_path: Path) -> None:
    (a_image, a_text), (b_image, b_text) = pair(0, "a"), pair(1, "b")
    write_tar(tmp_path / "0.tar", [a_image, b_image, a_text, b_text, *pair(4, "c")])
    seen, reasons = one_pass(tmp_path)
    assert seen == {4}
    assert reasons == {"missing_caption": 2, "missing_image": 2}


# P-20: missing members


def test_missing_members(tmp_path: Path) -> None:
    members = [m for n in range(5) for m in pair(n)]
    members += [pair(n)[0] for n in (5, 6, 7)] + [pair(n)[1] for n in (8, 9)]
    write_tar(tmp_path / "0.tar", members)
    seen, reasons = one_pass(tmp_path)
    assert seen == {0, 1, 2, 3, 4}
    assert reasons == {"missing_caption": 3, "missing_image": 2}


@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_usable_stops_with_the_names_that_were_found(tmp_path: Path, workers: int) -> None:
    members = [(f"{n}.{suffix}", b"1") for n in range(20) for suffix in ("mp4", "srt")]
    write_tar(tmp_path / "0.tar", members)
    loader = make_loader([str(tmp_path)], max_bad_share=1.0, num_workers=workers)
    with pytest.raises(ValueError, match=r"none of 20 samples .* found: mp4 20, srt 20"):
        take(loader, 1)


# P-21: captions


def test_empty_captions(tmp_path: Path) -> None:
    def info(caption: str | None) -> bytes:
        return json.dumps({"caption": caption, "alt": "fallback"}).encode()

    captions: list[str | None] = ["", " \t\n ", None, "None", "normal"]
    members: list[Member] = []
    for n, caption in enumerate(captions):
        text = (caption or "").encode()
        members += [(f"{n}.png", picture(n)), (f"{n}.txt", text), (f"{n}.json", info(caption))]
    write_tar(tmp_path / "0.tar", members)
    for fields in (("txt",), ("json.caption",), ("txt", "json.caption")):
        seen, reasons = one_pass(tmp_path, captions=fields, tokenize=lengths)
        assert seen == {3, 4}, fields
        assert reasons == {"empty_caption": 3}
    for options in ({"keep_empty_captions": True}, {"captions": ("json.caption", "json.alt")}):
        seen, reasons = one_pass(tmp_path, tokenize=lengths, **options)
        assert (seen, reasons) == ({0, 1, 2, 3, 4}, {}), options


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe{", b'"text"', b"[" * 100_000])
def test_odd_json(tmp_path: Path, content: bytes) -> None:
    members = [*pair(0), ("000000.json", content), *pair(1), ("000001.json", b'{"caption": "1"}')]
    write_tar(tmp_path / "0.tar", members)
    assert one_pass(tmp_path) == ({0, 1}, {})
    assert one_pass(tmp_path, captions=("json.caption",)) == ({1}, {"bad_caption": 1})


def test_captions_that_are_not_utf8_or_not_text(tmp_path: Path) -> None:
    members = [(f"{n}.png", picture(n)) for n in range(3)]
    texts = [("0.txt", b"\xff\xfe"), ("1.txt", b"1"), ("2.json", b'{"caption": 7}')]
    write_tar(tmp_path / "0.tar", [m for both in zip(members, texts, strict=True) for m in both])
    seen, reasons = one_pass(tmp_path, captions=("txt", "json.caption"))
    assert seen == {1}
    assert reasons == {"bad_caption": 1, "empty_caption": 1}


# P-22: formats and modes


def sixteen_bit() -> bytes:
    ramp = np.linspace(0, 65535, 32 * 32).reshape(32, 32).astype(np.uint16)
    return encode(Image.fromarray(ramp))


def transparent_palette() -> bytes:
    return encode(Image.new("RGBA", (32, 32), (9, 200, 3, 90)).quantize(4), transparency=b"\0\x80")


MODES: dict[str, Callable[[], bytes]] = {
    "L.jpg": lambda: encode(Image.new("L", (32, 32), 90), "JPEG"),
    "LA.png": lambda: encode(Image.new("LA", (32, 32), (90, 10))),
    "P.PNG": transparent_palette,
    "RGBA.webp": lambda: encode(Image.new("RGBA", (32, 32), (1, 2, 3, 4)), "WEBP"),
    "CMYK.JPEG": lambda: encode(Image.new("CMYK", (32, 32), (1, 2, 3, 4)), "JPEG"),
    "I16.png": sixteen_bit,
    "bit.png": lambda: encode(Image.new("1", (32, 32), 1)),
    "RGB.WebP": lambda: encode(Image.new("RGB", (32, 32), 1), "WEBP"),
    "RGB.gif": lambda: encode(Image.new("RGB", (32, 32), 1), "GIF"),
    "RGB.bmp": lambda: encode(Image.new("RGB", (32, 32), 1), "BMP"),
    "one.jpg": lambda: encode(Image.new("RGB", (1, 1)), "JPEG"),
}


def to_tensor(image: Image.Image) -> torch.Tensor:
    pixels = np.array(image.resize((16, 16)), dtype=np.float32)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def test_every_format_and_mode_becomes_three_channels(tmp_path: Path) -> None:
    members: list[Member] = []
    for name, make in MODES.items():
        members += [(name, make()), (f"{name.split('.')[0]}.txt", b"x")]
    # Every name is a key of its own only if no two share the part before the dot.
    members = [(f"{n // 2}{name}", content) for n, (name, content) in enumerate(members)]
    write_tar(tmp_path / "0.tar", members)
    loader = make_loader([str(tmp_path)], batch=len(MODES), image_transform=to_tensor)
    batch = next(iter(loader))
    assert batch.image.shape == (len(MODES), 3, 16, 16)
    assert batch.image.isfinite().all()
    assert skipped(loader) == {}


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    pixels = np.asarray(decode_image(sixteen_bit(), max_pixels=10_000))
    assert pixels.min() == 0 and pixels.max() == 255
    assert abs(float(pixels.mean()) - 127.5) < 2


# P-23: undecodable and huge


def test_undecodable_images(tmp_path: Path) -> None:
    jpeg = photo(0, (160, 160))
    contents = [jpeg[: len(jpeg) // 2], b"a text named jpg", b"", encode(Image.new("RGB", (1, 1)))]
    members = [(f"{n}.jpg", content) for n, content in enumerate(contents)]
    texts = [(f"{n}.txt", b"x") for n in range(4)]
    write_tar(tmp_path / "0.tar", [m for both in zip(members, texts, strict=True) for m in both])
    seen, reasons = one_pass(tmp_path, tokenize=lengths)
    assert seen == {3}
    assert reasons == {"bad_image": 3}


def test_huge_image_is_refused_from_its_header() -> None:
    content = encode(Image.new("1", (20_000, 20_000)), compress_level=1)
    process = psutil.Process()
    peak = before = process.memory_info().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.raises(SkipSampleError, match=r"exceeds limit|20000 x 20000"):
        decode_image(content, max_pixels=89_478_485)
    done.set()
    watcher.join()
    assert peak - before < 50e6


def test_pixel_limit_is_configurable(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [m for n in range(4) for m in pair(n)])
    with pytest.raises(ValueError, match="huge_image 4"):
        one_pass(tmp_path, max_image_pixels=63)
    assert one_pass(tmp_path, max_image_pixels=64)[0] == {0, 1, 2, 3}


# Fuzz


def corrupt(content: bytes, rng: random.Random) -> bytes:
    """A bit flip, a cut, a splice of the shard with itself, zeros, or noise."""
    kind = rng.randrange(5)
    place, other = sorted(rng.randrange(len(content)) for _ in range(2))
    if kind == 0:
        flipped = bytearray(content)
        for _ in range(rng.randrange(1, 6)):
            flipped[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == 1:
        return content[:place]
    if kind == 2:
        return content[:place] + content[other:]
    if kind == 3:
        return content[:other] + content[place:]
    length = min(700, len(content) - place)
    filling = rng.randbytes(length) if rng.random() < 0.5 else bytes(length)
    return content[:place] + filling + content[place + length :]


def check_reading(source: str) -> None:
    """Everything that comes out is a whole sample of the original, and the sums agree."""
    index = build_index([source], cache=None, max_bad_shards=1.0)
    loader = make_loader([source], index=index, batch=1, max_bad_share=1.0, read_retries=0)
    iterator = iter(loader)
    for _ in range(loader.steps_per_epoch):
        batch = next(iterator)
        caption, colour = int(batch.text[0, 0]), picture_numbers(batch)[0]
        # A flip may fall into a caption or a pixel; it may not pair two samples.
        if 0 <= caption < NUM_FUZZED and colour < NUM_FUZZED:
            assert caption == colour or _one_digit_differs(caption, colour)
    summary = loader.epoch_summary()
    total = summary["data/seen"] + summary["data/unseen"] + sum(skipped(loader).values())
    assert total == index.num_samples


NUM_FUZZED = 12


def _one_digit_differs(caption: int, colour: int) -> bool:
    return bin(caption ^ colour).count("1") == 1


def test_three_hundred_corruptions(tmp_path: Path) -> None:
    rng = random.Random(6)
    path = write_tar(
        tmp_path / "good" / "0.tar", [m for n in range(NUM_FUZZED) for m in pair(n, with_json=True)]
    )
    good = path.read_bytes()
    broken = tmp_path / "broken.tar"
    outcomes = {"read": 0, "nothing usable": 0}
    for number in range(300):
        broken.write_bytes(corrupt(good, rng))
        source = f"pipe:cat {broken}" if number % 10 == 0 else str(broken)
        try:
            check_reading(source)
            outcomes["read"] += 1
        except ValueError as error:
            assert "\n" not in str(error)
            outcomes["nothing usable"] += 1
    assert outcomes["read"] > 150, outcomes


def test_reader_survives_what_the_index_did_not_know(tmp_path: Path) -> None:
    """The same corruptions, made after the shard was indexed."""
    rng = random.Random(7)
    path = write_tar(tmp_path / "0.tar", [m for n in range(NUM_FUZZED) for m in pair(n)])
    good = path.read_bytes()
    index = build_index([str(path)], cache=None)
    for _ in range(100):
        path.write_bytes(corrupt(good, rng))
        loader = make_loader([str(path)], index=index, batch=1, max_bad_share=1.0)
        try:
            seen = flat(take(loader, loader.steps_per_epoch))
        except ValueError as error:
            assert "none of 12 samples can be used" in str(error)
            continue
        assert set(seen) <= set(range(NUM_FUZZED))
        summary = loader.epoch_summary()
        total = summary["data/seen"] + summary["data/unseen"] + sum(skipped(loader).values())
        assert total == NUM_FUZZED


@pytest.mark.parametrize("turn", range(1, 9))
def test_odd_exif_costs_no_picture(turn: int) -> None:
    """The orientation counts; no other tag matters, however wrong it is."""
    image = Image.effect_noise((20, 10), 50).convert("RGB")
    for tag, value in ((0x0112, turn), (0x829A, "x"), (0x9204, b"\xff"), (1, 1e30)):
        exif = Image.Exif()
        exif[0x0112] = turn
        exif[tag] = value
        buffer = io.BytesIO()
        image.save(buffer, "PNG", exif=exif.tobytes())
        found = decode_image(buffer.getvalue(), max_pixels=1000)
        plain = Image.Exif()
        plain[0x0112] = turn
        buffer = io.BytesIO()
        image.save(buffer, "PNG", exif=plain)
        expected = ImageOps.exif_transpose(Image.open(buffer))
        assert found.tobytes() == expected.tobytes(), (turn, tag)


def test_exif_that_cannot_be_read_costs_no_picture() -> None:
    image = Image.new("RGB", (20, 10), (255, 0, 0))
    for tail in (b"II*\0\xff\xff\xff\xff", b"MM", b"II*\0\x08\0\0\0\xff\xff"):
        exif = b"Exif\0\0" + tail
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", exif=exif)
        assert decode_image(buffer.getvalue(), max_pixels=1000).size == (20, 10)


def test_exif_orientation_is_applied() -> None:
    image = Image.new("RGB", (20, 10), (255, 0, 0))
    image.paste((0, 0, 255), (10, 0, 20, 10))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to view
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    upright = decode_image(buffer.getvalue(), max_pixels=1000)
    assert upright.size == (10, 20)
    assert upright.getpixel((5, 2)) == (255, 0, 0)
