from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path

import pytest

from disco_ds.checkpoint import as_plain
from disco_ds.command_line import parse_command_line
from disco_ds.config import (
    TrainConfig,
    leaves,
    local_batch_size,
    options_of,
    read_config,
)
from disco_ds.data.config import DataConfig
from disco_ds.losses.fastclip import FastCLIPConfig
from disco_ds.losses.siglip import SigLIPConfig
from disco_ds.open_clip_flags import HERE, NOT_HERE
from disco_ds.presets import PRESETS

ROOT = Path(__file__).parents[2]


def parse(*arguments: str) -> TrainConfig:
    return parse_command_line(arguments, PRESETS)[0]


def test_precedence_defaults_preset_flags() -> None:
    assert parse("--preset", "demo").model.name == "disco-demo-rn"
    config = parse("--preset=demo", "--optim.lr", "0.5", "--global_batch_size", "32")
    assert (config.optim.lr, config.global_batch_size) == (0.5, 32)
    assert config.optim.weight_decay == PRESETS["demo"]().optim.weight_decay


def test_config_file_then_flags(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"steps": 7, "loss": {"name": "siglip", "gather": "ring"}}))
    config = parse("--config", str(path), "--steps", "9", "--data.shards", "a.tar", "b.tar")
    assert config.steps == 9
    assert config.loss == SigLIPConfig(gather="ring")
    assert config.data.shards == ("a.tar", "b.tar")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_resolved_tree_is_accepted_back(name: str, tmp_path: Path) -> None:
    config = dataclasses.replace(PRESETS[name](), loss=SigLIPConfig(wire_dtype="bf16"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(as_plain(config)))
    assert read_config(path) == config


def test_loss_is_chosen_by_name() -> None:
    config = parse("--preset", "demo", "loss:siglip", "--loss.tile_size", "64", "--steps", "3")
    assert config.loss == SigLIPConfig(tile_size=64)
    assert config.steps == 3


def test_launcher_arguments_are_swallowed() -> None:
    config = parse("--local_rank=1", "--preset", "demo", "--deepspeed", "--seed", "4")
    assert config.seed == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "demoo"], r"^--preset demoo: unknown; did you mean demo\?$"),
        (["--preset"], r"^--preset needs a value$"),
        (["--preset", "demo", "--optim.lrr", "1"], r"^--optim.lrr: .*did you mean --optim.lr\?$"),
        (["--preset", "demo", "--optim.lr", "x"], r"^--optim.lr: could not convert.*'x'$"),
        (["--preset", "demo", "--optim.lr", "-1"], r"^--optim.lr -1 and --optim.min_lr 0: need"),
        (["--preset", "demo", "--precision", "fp8"], r"^invalid choice 'fp8' .*--precision"),
        (["--preset", "demo", "loss:sigli"], r"^loss:sigli: unknown; did you mean loss:siglip\?$"),
        (
            ["--preset", "demo", "--epochs", "1", "--steps", "1"],
            r"^give exactly one of --steps and --epochs$",
        ),
        (["--preset", "demo", "--global_batch_size", "1"], r"^--global_batch_size 1: .*2 pairs"),
        (["--preset", "demo", "--micro_batch_size", "0"], r"^--micro_batch_size 0: must be pos"),
        (["--preset", "demo", "--resume", "latest"], r"^--resume latest needs --run_dir"),
        (["--preset", "demo", "--seed", "-1"], r"^--seed -1: must be from 0 to 4294967295$"),
        (["--preset", "demo", "--seed", "9" * 20], r"^--seed 9+: must be from 0"),
        (["--preset", "demo", "--optim.lr", "nan"], r"^--optim.lr nan: must be a finite number$"),
        (["--preset", "demo", "--timeout_seconds", "nan"], r"^--timeout_seconds nan: must be a f"),
        (["--preset", "demo", "--max_skipped_steps", "-1"], r"^--max_skipped_steps -1: must not"),
        (["--preset", "demo", "--data.retry_seconds", "-1"], r"^--data.retry_seconds -1.*must not"),
        (["--preset", "demo", "--temperature.init", "200"], r"--temperature.init 200: must lie"),
        (["--train-data", "a.tar"], r"^--train-data is open_clip's: here it is --data.shards$"),
        (
            ["--preset", "demo", "--batch_size=64"],
            r"^--batch_size is open_clip's: .*--global_batch",
        ),
        (["--model", "ViT-B-32", "--steps", "1"], r"^--model is .*here it is --model.name$"),
        (["--csv-separator", ","], r"^--csv-separator is open_clip's and has no counterpart: sh"),
        (["--precision", "amp_bf16"], r"^--precision amp_bf16 is .*here it is --precision bf16$"),
        (["--preset", "demo", "--loss.rho", "3"], r"^--loss.rho: name the .*: loss:fastclip, then"),
        (
            ["--preset", "demo", "--loss.name", "siglip"],
            r"^--loss.name: a loss is chosen by one of loss:d",
        ),
        (["--preset", "demo", "--optim.beta2", "1.5"], r"^--optim.beta2 1.5: must be .* below 1$"),
        (["--preset", "demo", "--optim.weight_decay", "-1"], r"^--optim.weight_decay -1: must not"),
        (["--preset", "demo", "--model.lock_image", "maybe"], r"maybe.*--model.lock_image"),
        (["--config", "no.json"], r"^--config no.json: cannot read it \(No such file"),
        (["--config", "x", "--preset", "demo"], r"exclude each other$"),
    ],
)
def test_wrong_arguments_give_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse(*arguments)
    assert "\n" not in str(caught.value)


def test_a_flag_for_the_length_replaces_the_presets() -> None:
    config = parse("--preset", "demo", "--epochs", "2")
    assert (config.epochs, config.steps) == (2, None)
    config = parse("--preset", "vit_b_32", "--steps=100", "--data.shards", "x")
    assert (config.epochs, config.steps) == (None, 100)


@pytest.mark.parametrize("spelt", [[], ["True"], ["true"], ["1"]], ids=str)
def test_switches_are_spelt_as_people_do(spelt: list[str]) -> None:
    base = ("--preset", "demo", "--model.lock_image", *spelt, "--model.lock_text=no")
    assert parse(*base).model.lock_image
    assert parse(*base, "--plan", "loss:siglip", "--seed", "1").plan
    assert not parse(*base, "--plan", "false", "--seed", "1").plan


def test_names_that_look_like_precisions_are_left_alone() -> None:
    config = parse(
        "--preset", "demo", "--data.shards", "amp_1.tar", "pure_2.tar", "--run_dir", "amp"
    )
    assert config.data.shards == ("amp_1.tar", "pure_2.tar")
    with pytest.raises(ValueError, match=r"^--precision pure_fp16 is .*--precision fp16$"):
        parse("--preset", "demo", "--precision=pure_fp16")


def table_of(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line.startswith("| `--")]
    return dict(line.replace("`", "").strip("| ").split(" | ") for line in lines)


def test_every_flag_of_open_clip_has_an_answer() -> None:
    from open_clip_train.params import parse_args

    source = inspect.getsource(inspect.getmodule(parse_args))
    theirs = set(re.findall(r'"(--[a-z][a-z0-9-]+)"', source))
    own = {f"--{name}" for name, _ in leaves(TrainConfig)}
    assert len(theirs) > 80
    # Equal in both, so parsed as ours.
    assert theirs - own - set(HERE) - set(NOT_HERE) == set()
    assert own & (set(HERE) | set(NOT_HERE)) == set()
    hyphens = {flag.replace("_", "-") for flag in own}  # how some people type ours
    assert hyphens & (set(HERE) | set(NOT_HERE)) == set()
    named = {flag for answer in HERE.values() for flag in re.findall(r"--[a-z._0-9]+", answer)}
    assert named <= own, named - own
    assert table_of(ROOT / "docs" / "from_open_clip.md") == HERE | NOT_HERE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"steps": 3', "not JSON: .* at line 1, column"),
        ("[]", r"must be an object"),
        ('{"step": 3}', r"key step: unknown; did you mean steps\?"),
        ('{"steps": 3, "optim": {"lrr": 1}}', r"key optim.lrr: unknown; did you mean lr\?"),
        ('{"steps": "3"}', r"key steps: '3': "),
        ('{"steps": 3, "loss": {"name": "disc"}}', r"key loss.name: 'disc' unknown; .* disco\?"),
        ('{"steps": 3, "optim": 1}', r"optim. must be an object"),
        ('{"steps": 3, "global_batch_size": 1}', r"--global_batch_size 1: "),
    ],
)
def test_wrong_files_name_file_and_key(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"my\.json: .*" + message):
        read_config(path)


def test_batch_is_split_evenly_or_refused() -> None:
    config = TrainConfig(data=DataConfig(), steps=1, global_batch_size=10)
    assert local_batch_size(config, 5) == 2
    with pytest.raises(ValueError, match="10 does not divide by 4 ranks: use 8 or 12"):
        local_batch_size(config, 4)


def test_every_setting_has_help() -> None:
    """A flag without a sentence of help is a flag nobody can use; too many are a maze."""
    import inspect
    import typing

    seen = 0
    queue = [TrainConfig]
    while queue:
        cls = queue.pop()
        source = inspect.getsource(cls)
        for name, hint in typing.get_type_hints(cls).items():
            options = options_of(hint)
            queue += options
            seen += not options
            if not options:
                after = source.split(f"\n    {name}: ", 1)[1].split("\n    ", 1)[1]
                assert after.lstrip().startswith(('"""', "#")), f"{cls.__name__}.{name}"
    assert seen <= 120


def test_demo_starts_from_the_best_constant_temperature_and_stays_near() -> None:
    config = PRESETS["demo"]()
    temperature, steps = config.temperature, config.steps
    assert temperature.lr is not None and steps is not None
    # Adam moves the logarithm by at most its rate a step: by less than a tenth in the whole run.
    assert temperature.init == pytest.approx(1 / 0.1) and temperature.lr * steps < 0.1


def test_demo_with_fastclip_reaches_its_lowest_gamma_halfway() -> None:
    config = PRESETS["demo_fastclip"]()
    assert isinstance(config.loss, FastCLIPConfig) and config.steps is not None
    train_samples = 3544  # what ensure_demo writes
    epochs = config.steps * config.global_batch_size / train_samples
    assert config.loss.gamma_decay_epochs == pytest.approx(epochs / 2, rel=0.02)
    assert config.evaluation == PRESETS["demo"]().evaluation


def test_fastclip_presets_carry_the_published_numbers() -> None:
    expected = {
        "cc3m": ("RN50", 1024, 37, 1e-3, 0.2, 18, 2e-4, 6.5),
        "cc12m": ("ViT-B-32", 2048, 33, 4e-4, 0.2, 16, 1e-4, 8.5),
        "laion": ("ViT-B-16", 5120, 30, 2e-4, 0.8, 10, 5e-5, 16.0),
    }
    for name, (model, batch, epochs, lr, gamma, decay, tau_lr, rho) in expected.items():
        config = PRESETS[f"fastclip_{name}"]()
        loss = config.loss
        assert isinstance(loss, FastCLIPConfig)
        assert (config.model.name, config.global_batch_size, config.epochs) == (
            model,
            batch,
            epochs,
        )
        assert (config.optim.lr, loss.gamma_min, loss.gamma_decay_epochs) == (lr, gamma, decay)
        assert (loss.version, loss.mode, loss.tau_lr, loss.rho) == (
            "v3",
            "fastclip_compat",
            tau_lr,
            rho,
        )
        individual = PRESETS[f"fastclip_{name}_v2"]().loss
        assert isinstance(individual, FastCLIPConfig)
        assert (individual.tau_init, individual.tau_lr, individual.rho) == (0.03, 0.0133, 7.0)
        assert not PRESETS[f"fastclip_{name}_v1"]().loss.temperature["learnable"]
