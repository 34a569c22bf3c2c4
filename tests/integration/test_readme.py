"""The README is read here: its commands parse, its files exist, and (slow) they run as written."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from disco_ds.command_line import parse_command_line
from disco_ds.metrics import read_metrics
from disco_ds.presets import PRESETS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "ds_configs/README.md",
    "docs/checkpoints.md",
    "docs/evaluation.md",
    "launchers/README.md",
    "tools/bench/README.md",
]


def code_blocks(language: str) -> list[str]:
    """Contents of the fenced blocks of a language ("" for commands)."""
    blocks, inside, lines = [], None, []
    for line in README.splitlines():
        if not line.startswith("```"):
            lines.append(line)
        elif inside is None:
            inside, lines = line[3:], []
        else:
            if inside == language:
                blocks.append("\n".join(lines) + "\n")
            inside = None
    return blocks


def commands() -> list[str]:
    """Command lines, comments stripped."""
    joined = "".join(code_blocks("")).replace("\\\n", " ")
    return [line.split("  #")[0].strip() for line in joined.splitlines() if line.strip()]


def test_first_screen_has_the_two_commands() -> None:
    first, second = commands()[:2]
    assert README.index(second) < 2000
    assert first.startswith("pip install -e '.[demo]' && deepspeed --num_accelerators 2 train.py ")
    assert second == "pip install -e '.[test]' && pytest"


def test_extras_named_in_the_readme_exist() -> None:
    setup = configparser.RawConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = set(re.findall(r"\.\[(\w+)\]", README))
    assert named <= set(setup["options.extras_require"])


def train_arguments() -> list[str]:
    lines = [line for line in commands() if "train.py" in line and "launchers/" not in line]
    assert len(lines) >= 4
    return [line.split("train.py", 1)[1].split("|")[0] for line in lines]


@pytest.mark.parametrize("arguments", train_arguments())
def test_training_commands_parse(arguments: str) -> None:
    words = [word for word in shlex.split(arguments) if word != "..."]
    config, _ = parse_command_line(words, PRESETS)
    if config.deepspeed_config is not None:
        json.loads((ROOT / config.deepspeed_config).read_text())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_links_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    targets = re.findall(r"\]\(([^)#]+)\)", text)
    for target in targets:
        if not target.startswith("http"):
            assert ((ROOT / document).parent / target).exists(), target


def loops() -> list[str]:
    return [block for block in code_blocks("python") if "contrastive_backward(" in block]


def test_every_kind_of_loop_is_shown() -> None:
    assert any("fully_shard(" in loop for loop in loops())
    assert any("Accelerator(" in loop for loop in loops())


@pytest.mark.slow
@pytest.mark.parametrize("loop", loops(), ids=["fsdp2", "accelerate"])
def test_loops_run_as_written(loop: str, tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(loop)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*command, str(script)], env=environment, capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert len(re.findall(r"^[0-4] [0-9.]+ ", result.stdout, flags=re.MULTILINE)) == 5


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_first_command_learns_and_exports(tmp_path: Path) -> None:
    """As written, in a copy of the tree: loss far under ln B, unseen pictures far above chance."""
    import open_clip

    copy = tmp_path / "disco_ds"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    for name in filter(None, tracked.stdout.split("\0")):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    # An environment of its own for pip to write to, which sees what is installed here.
    own = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(own)], check=True)
    (site,) = own.glob("lib/python*/site-packages")
    (site / "parent.pth").write_text("\n".join(path for path in sys.path if "packages" in path))
    paths = [str(own / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    result = subprocess.run(
        ["bash", "-c", commands()[0]],
        cwd=copy,
        env={**os.environ, "PATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    (run,) = (copy / "runs").iterdir()
    lines = read_metrics(run)
    last = [line for line in lines if "loss" in line][-1]
    assert last["loss"] < 0.3 * last["chance_level"]
    final = [line for line in lines if "eval/retrieval/image_to_text_R@1" in line][-1]
    assert final["eval/retrieval/image_to_text_R@1"] > 0.15
    assert final["eval/zero_shot_skin_tone/top1"] > 0.5
    open_clip.add_model_config(str(run / "export" / "model.json"))
    open_clip.create_model("model", pretrained=str(run / "export" / "model.pt"))
