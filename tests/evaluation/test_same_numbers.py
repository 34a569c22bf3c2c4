"""A trained model scores the same here, in open_clip's zero-shot code and in CLIP_benchmark."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from clip_benchmark.datasets.builder import build_wds_dataset, image_captions_collate_fn
from clip_benchmark.metrics import zeroshot_classification, zeroshot_retrieval
from demo_run import disco_ds, two_ranks, workplace
from open_clip_train import zero_shot as open_clip_zero_shot
from torch import Tensor, nn
from torch.utils.data import DataLoader

from disco_ds.data.evaluation import read_samples
from disco_ds.distributed import World
from disco_ds.evaluation.command import EvaluateCommand
from disco_ds.evaluation.encode import EvalSample, similarity
from disco_ds.evaluation.frozen import FrozenModel
from disco_ds.evaluation.retrieval import evaluate_retrieval
from disco_ds.evaluation.sources import read_task
from disco_ds.evaluation.tasks import ZeroShotTask
from disco_ds.evaluation.weights import find_weights, load_model
from disco_ds.evaluation.zero_shot import evaluate_zero_shot
from disco_ds.metrics import read_metrics
from disco_ds.models import ClipParts

TASKS = ("skin_tone", "gender")
BATCH = 50


@functools.cache
def ours() -> ClipParts:
    return load_model(find_weights(two_ranks(), None))


@functools.cache
def theirs() -> tuple[nn.Module, Any, Any]:
    """The exported weights as open_clip loads them: model, transform, tokenizer."""
    file = two_ranks() / "export" / "model.pt"
    open_clip.add_model_config(str(file.with_suffix(".json")))
    model, _, transform = open_clip.create_model_and_transforms("model", pretrained=str(file))
    return model.eval(), transform, open_clip.get_tokenizer("model")


def task_folder(name: str) -> Path:
    return workplace_data() / "zero_shot" / name


def workplace_data() -> Path:
    two_ranks()
    return workplace() / "data" / "demo"


@functools.cache
def own_values(name: str) -> dict[str, float]:
    task = ZeroShotTask.from_folder(task_folder(name))
    clip = ours()
    rows = read_task(task, world=World(), image_transform=clip.eval_transform)
    return evaluate_zero_shot(
        FrozenModel(clip.encoders, World()),
        task,
        map(EvalSample._make, rows),
        tokenize=clip.tokenize,
        image_size=clip.image_size,
        batch_size=BATCH,
    ).values


def benchmark_loader(folder: Path, collate: Any = None) -> DataLoader[Any]:
    _, transform, _ = theirs()
    dataset = build_wds_dataset("x", transform, data_dir=str(folder))
    loader = DataLoader(dataset.batched(BATCH, collation_fn=collate), batch_size=None)
    loader.dataset.classes = dataset.classes
    loader.dataset.templates = dataset.templates
    return loader


def stacked(batch: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    return torch.stack([image for image, _ in batch]), torch.tensor([label for _, label in batch])


def hits(output: Tensor, target: Tensor, topk: tuple[int, ...]) -> list[float]:
    """Word for word both projects' ``accuracy``, but for ``float()`` of an array of one number.

    numpy 2.4 refuses that; everything around it runs as they wrote it.
    """
    pred = output.topk(max(topk), 1, True, True)[1].t()
    correct = pred.eq(target.view(1, -1).expand_as(pred))
    return [correct[:k].reshape(-1).float().sum(0, keepdim=True).item() for k in topk]


@pytest.fixture(autouse=True)
def numpy_2_4(monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(output: Tensor, target: Tensor, topk: tuple[int, ...] = (1,)) -> list[float]:
        return [count / len(target) for count in hits(output, target, topk)]

    monkeypatch.setattr(open_clip_zero_shot, "accuracy", hits)
    monkeypatch.setattr(zeroshot_classification, "accuracy", shares)


@pytest.mark.parametrize("name", TASKS)
def test_clip_benchmark_classifies_alike(name: str) -> None:
    model, _, tokenize = theirs()
    loader = benchmark_loader(task_folder(name), stacked)
    expected = zeroshot_classification.evaluate(
        model,
        loader,
        tokenize,
        loader.dataset.classes,
        loader.dataset.templates,
        device="cpu",
        amp=False,
    )
    found = own_values(name)
    assert found["top1"] == expected["acc1"]
    assert found["mean_per_class"] == pytest.approx(expected["mean_per_class_recall"], abs=1e-15)
    if "top5" in found:
        assert found["top5"] == expected["acc5"]
    else:
        assert np.isnan(expected["acc5"])


@pytest.mark.parametrize("name", TASKS)
def test_open_clip_classifies_alike(name: str) -> None:
    """Its class weights, and its loop with five classes (its loop asks for a top-5)."""
    model, _, tokenize = theirs()
    loader = benchmark_loader(task_folder(name), stacked)
    templates = [text.replace("{c}", "{}") for text in loader.dataset.templates]
    classifier = open_clip.build_zero_shot_classifier(
        model, tokenize, loader.dataset.classes, templates
    )
    found = own_values(name)
    if len(loader.dataset.classes) >= 5:
        arguments = argparse.Namespace(device="cpu", precision="fp32", batch_size=BATCH)
        top1, top5 = open_clip_zero_shot.run(model, classifier, loader, arguments)
        assert (found["top1"], found["top5"]) == (top1, top5)
        return
    with torch.no_grad():
        right = [
            (model.encode_image(images, normalize=True) @ classifier).argmax(1) == labels
            for images, labels in loader
        ]
    assert found["top1"] == float(torch.cat(right).double().mean())


def captioned_set(folder: Path) -> Path:
    """The held-out pairs with their aliases as further captions, laid out for CLIP_benchmark."""
    import tarfile

    from disco_ds.data.demo import _write_shard

    members = []
    with tarfile.open(workplace_data() / "heldout" / "00000.tar") as tar:
        for entry in tar:
            content = tar.extractfile(entry)
            assert content is not None
            data = content.read()
            key, _, ending = entry.name.partition(".")
            if ending == "json":
                info = json.loads(data)
                names = dict.fromkeys([info["caption"], *info["aliases"]])
                members.append((f"{key}.txt", "\n".join(names).encode()))
            elif ending != "txt":
                members.append((entry.name, data))
    _write_shard(folder / "test" / "0.tar", members)
    (folder / "test" / "nshards.txt").write_text("1\n")
    (folder / "dataset_type.txt").write_text("retrieval\n")
    return folder


def test_clip_benchmark_retrieves_alike(tmp_path: Path) -> None:
    """Several captions per image; its means are in fp32."""
    folder = captioned_set(tmp_path / "pairs")
    model, _, tokenize = theirs()
    loader = benchmark_loader(folder, image_captions_collate_fn)
    expected = zeroshot_retrieval.evaluate(
        model, loader, tokenize, device="cpu", amp=False, recall_k_list=[1, 5, 10]
    )
    output = tmp_path / "found.json"
    disco_ds("evaluate", str(two_ranks()), "--data", str(folder), "-o", str(output), ranks=2)
    found = json.loads(output.read_text())["values"]
    assert found["eval/retrieval/num_texts"] > 1.5 * found["eval/retrieval/num_images"]
    for direction, name in (("image_to_text", "text"), ("text_to_image", "image")):
        for k in (1, 5, 10):
            value = np.float32(found[f"eval/retrieval/{direction}_R@{k}"])
            assert value == np.float32(expected[f"{name}_retrieval_recall@{k}"])


def test_equal_features_tie_whatever_the_shape() -> None:
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(37, 96, generator=generator)
    keys = torch.randn(8, 96, generator=generator).repeat(9, 1)
    scores = similarity(queries, keys)
    assert torch.equal(scores[:, :8].repeat(1, 9), scores)
    assert torch.equal(similarity(queries[5:6], keys[3:4]), scores[5:6, 3:4])


def test_in_training_and_afterwards_the_same() -> None:
    """Two ranks of DDP while training; afterwards one process on the file, two on the run."""
    run = two_ranks()
    during = [line for line in read_metrics(run) if "eval/retrieval/num_images" in line][-1]
    for source, ranks in ((run, 2), (run / "export" / "model.pt", 1)):
        output = workplace() / f"{source.name}.json"
        if ranks == 1:
            data = (str(workplace_data()),)
            EvaluateCommand(source, data, output=output, device="cpu").run()
        else:
            disco_ds("evaluate", str(source), "-o", str(output), ranks=ranks)
        found = json.loads(output.read_text())
        assert found["values"] == {key: during[key] for key in found["values"]}
        assert found["values"].keys() == {key for key in during if key.startswith("eval/")}
        assert found["retrieval"]["retrieval"]["image_to_text"]["worst"]


def test_results_of_retrieval_do_not_depend_on_the_chunk() -> None:
    clip = ours()
    found = []
    for chunk_size in (7, 64, 4096):
        rows = read_samples(
            [str(workplace_data() / "heldout")], world=World(), image_transform=clip.eval_transform
        )
        found.append(
            evaluate_retrieval(
                FrozenModel(clip.encoders, World()),
                map(EvalSample._make, rows),
                tokenize=clip.tokenize,
                image_size=clip.image_size,
                batch_size=BATCH,
                chunk_size=chunk_size,
            )
        )
    assert found[0] == found[1] == found[2]
