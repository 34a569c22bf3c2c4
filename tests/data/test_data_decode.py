"""Pixels: what open_clip's own transform would have got, or close to it and faster."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from make_shards import encode, make_loader, photo, take, write_tar
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from sklearn.datasets import load_sample_images

from disco_ds.data.samples import decode_image

TRANSFORM = image_transform_v2(PreprocessCfg(size=224), is_train=False)
SCALE = torch.tensor(PreprocessCfg().std)[:, None, None] * 255


def photographs() -> list[Image.Image]:
    return [Image.fromarray(pixels) for pixels in load_sample_images().images]


def open_clips(content: bytes) -> torch.Tensor:
    return TRANSFORM(Image.open(io.BytesIO(content)))


def ours(content: bytes, smallest_side: int | None = None) -> torch.Tensor:
    return TRANSFORM(decode_image(content, max_pixels=10**8, smallest_side=smallest_side))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_equal_to_open_clip_when_nothing_is_reduced(format: str) -> None:
    for picture in photographs():
        for content in (encode(picture, format), encode(picture.resize((300, 240)), format)):
            assert torch.equal(ours(content), open_clips(content))
            assert torch.equal(ours(content, 336), open_clips(content))


def test_reduced_photographs_differ_by_little() -> None:
    """Mean absolute difference as the model sees it; 255 is white against black."""
    for picture in photographs():
        large = picture.resize((1224, 816), Image.Resampling.LANCZOS)
        content = encode(large, "JPEG", quality=90)
        reduced = decode_image(content, max_pixels=10**8, smallest_side=336)
        assert reduced.size == (612, 408)
        difference = ((ours(content, 336) - open_clips(content)) * SCALE).abs().mean()
        assert 0 < difference < 2.0


@pytest.mark.parametrize(
    ("size", "smallest_side", "expected"),
    [
        ((1224, 816), 336, (612, 408)),
        ((1224, 816), 448, (1224, 816)),
        ((4000, 3000), 336, (500, 375)),
        ((4000, 300), 336, (4000, 300)),
        ((256, 256), 336, (256, 256)),
    ],
)
def test_reduction_keeps_the_shorter_side(
    size: tuple[int, int], smallest_side: int, expected: tuple[int, int]
) -> None:
    content = photo(0, size)
    image = decode_image(content, max_pixels=10**8, smallest_side=smallest_side)
    assert image.size == expected


def test_orientation_of_reduced_jpegs() -> None:
    image = Image.new("RGB", (1600, 800), (250, 0, 0))
    image.paste((0, 0, 250), (800, 0, 1600, 800))
    exif = Image.Exif()
    exif[0x0112] = 8  # turn by 90 degrees counter-clockwise to view
    content = encode(image, "JPEG", exif=exif)
    upright = decode_image(content, max_pixels=10**8, smallest_side=200)
    assert upright.size == (200, 400)
    red, _, blue = np.asarray(upright)[10, 100]
    assert blue > 200 > red


def image_width(image: Image.Image) -> torch.Tensor:
    return torch.full((3, 1, 1), float(image.width))


def test_loader_reduces_by_the_models_size(tmp_path: Path) -> None:
    content = photo(0, (1600, 1200))
    write_tar(tmp_path / "0.tar", [("0.jpg", content), ("0.txt", b"0")])

    def width(**options: object) -> float:
        loader = make_loader([str(tmp_path)], batch=1, image_transform=image_width, **options)  # type: ignore[arg-type]
        return float(next(iter(loader)).image.max())

    assert width() == 1600
    assert width(image_size=224) == 800
    assert width(image_size=224, reduced_decode=1.0) == 400
    assert width(image_size=224, reduced_decode=0.0) == 1600
    assert take(make_loader([str(tmp_path)], batch=1), 1) == [[0]]
