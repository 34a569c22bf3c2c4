"""Sets on disk: what is found, what open_clip brings, and what is refused before any work."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import open_clip
import pytest
import torch
from PIL import Image

from disco_ds.distributed import World
from disco_ds.evaluation.command import sort_sets
from disco_ds.evaluation.run import EvaluationConfig, check_evaluation
from disco_ds.evaluation.sources import read_task
from disco_ds.evaluation.tasks import ZeroShotTask, read_classes, read_templates

TEMPLATES = "zeroshot_classification_templates.txt"


def png(colour: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (colour, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def benchmark_set(
    folder: Path, labels: list[int], classes: str = "cat\ndog\n", templates: str = "a {c}.\n"
) -> Path:
    (folder / "test").mkdir(parents=True)
    (folder / "classnames.txt").write_text(classes)
    (folder / TEMPLATES).write_text(templates)
    (folder / "test" / "nshards.txt").write_text("1\n")
    with tarfile.open(folder / "test" / "0.tar", "w") as tar:
        for row, label in enumerate(labels):
            for name, data in ((f"{row}.png", png(row)), (f"{row}.cls", str(label).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return folder


def image_folder(folder: Path, classes: dict[str, int]) -> Path:
    for number, (name, count) in enumerate(classes.items()):
        (folder / name).mkdir(parents=True)
        for image in range(count):
            (folder / name / f"{image}.png").write_bytes(png(10 * number + image))
    return folder


def first_pixel(image: Image.Image) -> torch.Tensor:
    return torch.tensor(image.getpixel((0, 0))[0])


def test_benchmark_folder(tmp_path: Path) -> None:
    folder = benchmark_set(tmp_path / "pets", [0, 1, 1])
    (task,) = check_evaluation(EvaluationConfig(zero_shot=(str(folder),)))
    assert (task.name, task.classes, task.templates) == ("pets", ("cat", "dog"), ("a {c}.",))
    rows = read_task(task, world=World(), image_transform=first_pixel)
    assert [(row, int(image), label) for row, image, _, label in rows] == [
        (0, 0, 0),
        (1, 1, 1),
        (2, 2, 1),
    ]


def test_image_folder_is_shared_out_by_row(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "pets", {"big_dog": 3, "a_cat": 2})
    (task,) = check_evaluation(EvaluationConfig(zero_shot=(str(folder),)))
    assert task.classes == ("a cat", "big dog")
    assert len(task.templates) == 80
    rows = {}
    for rank in range(3):
        for row, image, captions, label in read_task(
            task, world=World(rank, 3), image_transform=first_pixel
        ):
            assert row % 3 == rank
            assert captions == []
            rows[row] = (int(image), label)
    assert rows == {0: (10, 0), 1: (11, 0), 2: (0, 1), 3: (1, 1), 4: (2, 1)}


def test_a_users_class_and_template_files(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "pets", {"n01": 1, "n02": 1})
    classes, templates = tmp_path / "names.txt", tmp_path / "templates.txt"
    classes.write_text("tabby\nterrier\n")
    templates.write_text("a photo of a {}.\na {c}\n")
    task = ZeroShotTask.from_folder(folder, classes=str(classes), templates=str(templates))
    captions = [task.caption(t, name) for name in task.classes for t in task.templates]
    assert captions[:2] == ["a photo of a tabby.", "a tabby"]
    (folder / "classnames.txt").write_text("one\ntwo\n")
    assert ZeroShotTask.from_folder(folder).classes == ("one", "two")
    classes.write_text("tabby\n")
    with pytest.raises(ValueError, match=r"pets: 2 class folders, but .*names.txt names 1 classes"):
        ZeroShotTask.from_folder(folder, classes=str(classes))


def test_open_clips_names_and_templates() -> None:
    assert read_classes("imagenet") == tuple(open_clip.IMAGENET_CLASSNAMES)
    for name, templates in (
        ("imagenet", open_clip.OPENAI_IMAGENET_TEMPLATES),
        ("simple", open_clip.SIMPLE_IMAGENET_TEMPLATES),
    ):
        captions = [ZeroShotTask.caption(t, "tench") for t in read_templates(name)]
        assert captions == [template("tench") for template in templates]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*classnames.txt"):
        ZeroShotTask.from_folder(tmp_path)
    with pytest.raises(ValueError, match=r"no folder .*nowhere"):
        ZeroShotTask.from_folder(tmp_path / "nowhere")
    (tmp_path / "classnames.txt").write_text("cat\n\n dog \n")
    (tmp_path / TEMPLATES).write_text("a photo\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "nshards.txt").write_text("2\n")
    with pytest.raises(ValueError, match=r"classnames.txt: line 2 is empty"):
        ZeroShotTask.from_folder(tmp_path)
    (tmp_path / "classnames.txt").write_text("cat\n dog \n\n")
    with pytest.raises(ValueError, match=r"no \{c\} in the template 'a photo'"):
        ZeroShotTask.from_folder(tmp_path)
    (tmp_path / TEMPLATES).write_text("a {c}.\n")
    with pytest.raises(ValueError, match=r"no shard .*0\.tar \(nshards.txt says 2\)"):
        ZeroShotTask.from_folder(tmp_path)
    for number in range(2):
        (tmp_path / "test" / f"{number}.tar").touch()
    task = ZeroShotTask.from_folder(tmp_path)
    assert task.classes == ("cat", "dog")
    assert [Path(shard).name for shard in task.shards] == ["0.tar", "1.tar"]


def test_labels_are_checked_before_any_work(tmp_path: Path) -> None:
    wrong = benchmark_set(tmp_path / "wrong", [0, 1, 2])
    with pytest.raises(ValueError, match=r"set wrong: row 2 has label 2, but there are 2 classes"):
        check_evaluation(EvaluationConfig(zero_shot=(str(wrong),)))
    empty = benchmark_set(tmp_path / "empty", [1, 1])
    with pytest.raises(ValueError, match=r"set empty: no image of class 'cat'"):
        check_evaluation(EvaluationConfig(zero_shot=(str(empty),)))
    folder = image_folder(tmp_path / "pets", {"cat": 1, "dog": 0})
    with pytest.raises(ValueError, match=r"pets: .*dog"):
        check_evaluation(EvaluationConfig(zero_shot=(str(folder),)))


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "pets", {"cat": 1})
    (folder / "cat" / "x.jpg").write_bytes(b"?")
    task = ZeroShotTask.from_folder(folder)
    with pytest.raises(ValueError, match=r"cat/x\.jpg: not an image"):
        list(read_task(task, world=World(), image_transform=first_pixel))


def test_pictures_are_decoded_as_open_clip_does(tmp_path: Path) -> None:
    """Not turned by their EXIF orientation; training does turn them."""
    image = Image.effect_mandelbrot((40, 20), (-2, -1, 1, 1), 50).convert("RGB")
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "pets" / "cat").mkdir(parents=True)
    path = tmp_path / "pets" / "cat" / "0.jpg"
    image.save(path, exif=exif)
    task = ZeroShotTask.from_folder(tmp_path / "pets")
    ((_, found, _, _),) = read_task(task, world=World(), image_transform=Image.Image.copy)
    assert found.tobytes() == Image.open(path).convert("RGB").tobytes()


def test_two_sets_of_one_name_are_refused(tmp_path: Path) -> None:
    folders = [str(benchmark_set(tmp_path / part / "pets", [0, 1])) for part in "ab"]
    with pytest.raises(ValueError, match="two sets are called pets"):
        check_evaluation(EvaluationConfig(zero_shot=tuple(folders)))


def test_kinds_of_sets_are_told_apart(tmp_path: Path) -> None:
    pets = benchmark_set(tmp_path / "pets", [0, 1])
    images = image_folder(tmp_path / "images", {"cat": 1})
    pairs = benchmark_set(tmp_path / "pairs", [0])
    (pairs / "dataset_type.txt").write_text("retrieval\n")
    data = (str(pets), str(images), str(pairs), "shards/{0..3}.tar")
    assert sort_sets(data) == ((str(pairs), "shards/{0..3}.tar"), (str(pets), str(images)))
    (pairs / "dataset_type.txt").write_text("multilabel\n")
    with pytest.raises(ValueError, match=r"'multilabel' is neither classification nor retrieval"):
        sort_sets(data)
