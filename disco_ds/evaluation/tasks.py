"""Classification sets on disk: what their classes are called and where their images are.

As CLIP_benchmark lays out its webdataset test sets::

    FOLDER/classnames.txt                            one class a line
    FOLDER/zeroshot_classification_templates.txt     one caption a line, {c} is the class
    FOLDER/test/nshards.txt, FOLDER/test/0.tar ...   image and .cls members

or one folder of images per class, in the order of their names; both text files may lie beside
the class folders. Class names and templates can be a file's, or open_clip's (``imagenet``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from disco_ds.data.remote import is_local, open_shard
from disco_ds.data.tar import ShardError, read_groups

CLASS_FILE = "classnames.txt"
TEMPLATE_FILE = "zeroshot_classification_templates.txt"
TYPE_FILE = "dataset_type.txt"
OPEN_CLIP_CLASSES = ("imagenet",)
OPEN_CLIP_TEMPLATES = ("imagenet", "simple")
READ_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class ZeroShotTask:
    """Class names, caption templates and the images of one test set."""

    name: str
    classes: tuple[str, ...]
    templates: tuple[str, ...]
    shards: tuple[str, ...]
    folder: Path | None = None
    """Image folder, in place of shards."""

    @classmethod
    def from_folder(
        cls, folder: Path, *, classes: str | None = None, templates: str | None = None
    ) -> ZeroShotTask:
        """Read a set of either layout.

        Args:
            folder: the set.
            classes: a file or ``imagenet``, in place of the set's own names.
            templates: a file, ``imagenet`` (80 templates) or ``simple`` (7), in place of the set's
                own; sets that bring none get ``imagenet``.

        Raises:
            ValueError: a file of the layout is missing or empty, a class has no name or no
                images, or there are as many names as classes.
        """
        if not folder.is_dir():
            raise ValueError(f"zero-shot set: no folder {folder}")
        if is_image_folder(folder):
            return _image_folder_task(folder, classes, templates)
        names = read_classes(classes or str(folder / CLASS_FILE))
        captions = read_templates(templates or str(folder / TEMPLATE_FILE))
        return cls(folder.resolve().name, names, captions, _benchmark_shards(folder))

    @staticmethod
    def caption(template: str, name: str) -> str:
        """The caption of a class; the place is ``{c}`` or ``{}``."""
        return template.replace("{c}", name).replace("{}", name)


SPLITS = frozenset(("train", "training", "val", "valid", "validation", "test", "dev"))


def is_image_folder(folder: Path) -> bool:
    """Whether a folder holds one folder of images per class rather than shards."""
    if (folder / "test" / "nshards.txt").is_file() or (folder / "nshards.txt").is_file():
        return False
    if (folder / CLASS_FILE).is_file() and (folder / "test").is_dir():
        return False
    return any(_class_folders(folder))


def _class_folders(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _image_folder_task(folder: Path, classes: str | None, templates: str | None) -> ZeroShotTask:
    folders = _class_folders(folder)
    if set(folders) <= SPLITS:
        raise ValueError(
            f"zero-shot set {folder}: {', '.join(folders)} are splits, not classes: name one of "
            f"them, such as {folder / folders[-1]}"
        )
    own_classes, own_templates = folder / CLASS_FILE, folder / TEMPLATE_FILE
    named = classes or (str(own_classes) if own_classes.is_file() else None)
    if named is None and all(re.fullmatch(r"n\d{8}", name) for name in folders):
        named = _named_by_wordnet(folder, folders)
    names = read_classes(named) if named else tuple(name.replace("_", " ") for name in folders)
    if len(names) != len(folders):
        raise ValueError(
            f"zero-shot set {folder}: {len(folders)} class folders, but {named} names "
            f"{len(names)} classes"
        )
    if templates is None and own_templates.is_file():
        templates = str(own_templates)
    captions = read_templates(templates or "imagenet")
    list_images(folder)
    return ZeroShotTask(folder.resolve().name, names, captions, (), folder)


def _named_by_wordnet(folder: Path, folders: Sequence[str]) -> str:
    """Class names for folders called by WordNet's ids: sorted, they are in ImageNet's order."""
    if len(folders) == 1000:
        return "imagenet"
    raise ValueError(
        f"zero-shot set {folder}: its {len(folders)} class folders are called by WordNet's ids, "
        f"such as {folders[0]}: put their names into {folder / CLASS_FILE}, one a line in the "
        "order of the folders"
    )


def list_images(folder: Path) -> list[tuple[Path, int]]:
    """Image files of an image folder with their classes, in a fixed order.

    Raises:
        ValueError: a class folder holds no image.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

    numbers = {name: number for number, name in enumerate(_class_folders(folder))}
    try:
        found = make_dataset(str(folder), numbers, extensions=IMG_EXTENSIONS)
    except FileNotFoundError as error:
        raise ValueError(
            f"zero-shot set {folder}: {error}. A set is one folder of images per class, or as "
            f"CLIP_benchmark lays it out: {CLASS_FILE} and test/0.tar"
        ) from error
    return [(Path(path), number) for path, number in found]


def read_classes(source: str) -> tuple[str, ...]:
    """Class names: of a file, one a line, or open_clip's.

    Raises:
        ValueError: no such file, or a class without a name.
    """
    if source in OPEN_CLIP_CLASSES:
        from open_clip import IMAGENET_CLASSNAMES

        return tuple(IMAGENET_CLASSNAMES)
    return _lines(Path(source), OPEN_CLIP_CLASSES)


def read_templates(source: str) -> tuple[str, ...]:
    """Caption templates: of a file, one a line, or open_clip's.

    Raises:
        ValueError: no such file, or a template without a place for the class.
    """
    if source in OPEN_CLIP_TEMPLATES:
        from open_clip import OPENAI_IMAGENET_TEMPLATES, SIMPLE_IMAGENET_TEMPLATES

        chosen = SIMPLE_IMAGENET_TEMPLATES if source == "simple" else OPENAI_IMAGENET_TEMPLATES
        return tuple(template("{c}") for template in chosen)
    templates = _lines(Path(source), OPEN_CLIP_TEMPLATES)
    if without := [t for t in templates if "{c}" not in t and "{}" not in t]:
        raise ValueError(f"{source}: no {{c}} in the template {without[0]!r}")
    return templates


def _lines(path: Path, known: Sequence[str]) -> tuple[str, ...]:
    try:
        lines = [line.strip() for line in path.read_text().rstrip().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        others = f"; open_clip's own: {', '.join(known)}" if known else ""
        raise ValueError(f"zero-shot set: cannot read {path} ({reason}){others}") from error
    if not lines:
        raise ValueError(f"zero-shot set: {path} is empty")
    if "" in lines:
        number = lines.index("") + 1
        raise ValueError(f"zero-shot set: {path}: line {number} is empty; each line is an entry")
    return tuple(lines)


def _benchmark_shards(folder: Path) -> tuple[str, ...]:
    own = folder if (folder / "nshards.txt").is_file() else folder / "test"
    count = _lines(own / "nshards.txt", ())[0]
    if not count.isdigit():
        raise ValueError(f"{own / 'nshards.txt'}: {count!r} is not a number")
    shards = tuple(str(own / f"{number}.tar") for number in range(int(count)))
    if missing := [shard for shard in shards if not Path(shard).is_file()]:
        raise ValueError(f"zero-shot set: no shard {missing[0]} (nshards.txt says {count})")
    return shards


def check_labels(task: ZeroShotTask) -> None:
    """Read all labels (headers and ``.cls`` members) before any work.

    Raises:
        ValueError: a label lies outside the classes, or a class has no image.
    """
    counts = [0] * len(task.classes)
    row = 0
    for shard in task.shards:
        for label in _labels(shard):
            if label is not None:
                if not 0 <= label < len(counts):
                    raise wrong_label_error(task, row, label)
                counts[label] += 1
            row += 1
    if task.shards and any(counts) and 0 in counts:
        raise empty_classes_error(task, [n for n, count in enumerate(counts) if not count])


def _labels(shard: str) -> list[int | None]:
    """The number of each sample's ``.cls``; None where it has none that can be read."""
    if not is_local(shard):
        return []
    labels: list[int | None] = []
    try:
        stream, num_bytes = open_shard(shard, timeout=READ_TIMEOUT_SECONDS)
        with closing(stream):
            for group in read_groups(
                stream, num_bytes=num_bytes, wanted=lambda _, suffix: suffix == "cls"
            ):
                text = group.members.get("cls", b"").strip()
                labels.append(int(text) if text.lstrip(b"-").isdigit() else None)
    except (ShardError, OSError) as error:
        raise ValueError(f"{shard}: {error}; evaluation needs whole shards") from error
    return labels


def wrong_label_error(task: ZeroShotTask, row: int, label: int | None) -> ValueError:
    """The error of a label that names no class."""
    return ValueError(
        f"zero-shot set {task.name}: row {row} has label {label}, "
        f"but there are {len(task.classes)} classes"
    )


def empty_classes_error(task: ZeroShotTask, empty: Sequence[int]) -> ValueError:
    """The error of classes without images: their accuracy is not defined."""
    names = ", ".join(repr(task.classes[number]) for number in empty[:3])
    more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
    return ValueError(
        f"zero-shot set {task.name}: no image of class {names}{more}: leave such classes out of "
        f"{CLASS_FILE} and number the others anew"
    )
