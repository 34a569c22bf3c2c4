"""A user's DeepSpeed JSON works, or is refused with the key and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disco_ds.comm_hooks import CommHookConfig
from disco_ds.distributed import World
from disco_ds.strategies.build import build_strategy, choose_comm_hook
from disco_ds.strategies.config import EngineConfig
from disco_ds.strategies.ds_config import RunNumbers, read_comm_hook, resolve_ds_config

SHIPPED = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))
RUN = RunNumbers(64, 2, 8, "fp32", 1.0)


def resolve(given: dict[str, Any], run: RunNumbers = RUN) -> dict[str, Any]:
    return resolve_ds_config("my.json", given, run)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_shipped_files_fit_every_precision(path: Path, precision: str) -> None:
    run = RunNumbers(64, 2, 8, precision, None)  # type: ignore[arg-type]
    if (path.stem, precision) == ("zero0", "fp16"):
        with pytest.raises(ValueError, match="does not tell of steps it skips"):
            resolve(json.loads(path.read_text()), run)
        return
    found = resolve(json.loads(path.read_text()), run)
    assert '"auto"' not in json.dumps(found)
    assert found["train_batch_size"] == 64 and found["train_micro_batch_size_per_gpu"] == 32
    assert found["gradient_accumulation_steps"] == 1 and found["gradient_clipping"] == 0.0
    low = [k for k in ("bf16", "fp16", "torch_autocast") if found.get(k, {}).get("enabled")]
    assert len(low) == (precision != "fp32")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gradient_cliping": 1.0}, '"gradient_cliping" is no key.*"gradient_clipping"'),
        ({"zero_optimization": {"stge": 2}}, 'zero_optimization: "stge".*"stage"'),
        ({"zero_optimization": {"stage": 4}}, '"stage" is 4'),
        ({"zero_optimization": 2}, "must be an object"),
        ({"train_batch_size": 128}, '"train_batch_size" is 128.*--global_batch_size 64 on 2'),
        ({"train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 4}, "16 x 4 = 64"),
        ({"train_batch_size": "64"}, "must be a whole number"),
        ({"gradient_clipping": 0.5}, '"gradient_clipping" is 0.5.*max_grad_norm is 1'),
        ({"bf16": {"enabled": True}}, '"bf16".*--precision is fp32'),
        ({"torch_autocast": {"enabled": True}}, '"torch_autocast".*--precision is fp32'),
        ({"prescale_gradients": True}, '"prescale_gradients": the gradient scale'),
        ({"gradient_predivide_factor": 2.0}, '"gradient_predivide_factor": the gradient scale'),
        ({"gradient_allreduce_op": "sum"}, '"gradient_allreduce_op"'),
        ({"compile": {"deepcompile": True}}, "DeepCompile.*--engine.compile"),
        ({"optimizer": {"type": "AdamW"}}, "--optim"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"zero_optimization": {"zero_quantized_gradients": True}}, "zero_quantized_gradients"),
        ({"elasticity": {"enabled": True}}, "removed from DeepSpeed"),
        ({"zero_optimization": {"stage": True}}, '"stage" is True'),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "\"reduce_bucket_size\" is 'auto'"),
        ({"zero_optimization": {"reduce_bucket_size": -1}}, '"reduce_bucket_size" is -1'),
        ({"zero_optimization": {"offload_optimizer": True}}, '"offload_optimizer" is True.*object'),
        ({"bf16": True}, '"bf16" is True, must be an object'),
        ({"torch_autocast": True}, '"torch_autocast" is True, must be an object'),
        ({"communication_data_type": "int3"}, "\"communication_data_type\" is 'int3', known are"),
        ({"gradient_clipping": "high"}, "\"gradient_clipping\" is 'high', must be a number"),
    ],
)
def test_what_cannot_hold_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(given)


@pytest.mark.parametrize(
    "given",
    [
        {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4},
        {"train_micro_batch_size_per_gpu": 32},
        {"train_micro_batch_size_per_gpu": 8},  # our micro-batch
        {"prescale_gradients": False, "gradient_predivide_factor": 1.0},
        {"compile": {"deepcompile": False}},
        {"gradient_clipping": 1.0, "bf16": {"enabled": False}},
    ],
)
def test_what_agrees_is_accepted(given: dict[str, Any]) -> None:
    resolve(given)


def test_half_precision_at_stage_0_needs_autocast() -> None:
    run = RunNumbers(64, 2, 8, "bf16", None)
    with pytest.raises(ValueError, match="hidden first step"):
        resolve({"zero_optimization": {"stage": 0}}, run)
    found = resolve({"torch_autocast": {"enabled": "auto"}}, run)
    assert found["torch_autocast"] == {"enabled": True, "dtype": "bfloat16"}
    with pytest.raises(ValueError, match="\"dtype\" is 'float16'"):
        resolve({"torch_autocast": {"enabled": True, "dtype": "float16"}}, run)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"comm_hok": {}}, '"disco" must be'),
        ({"comm_hook": {"nme": "fastclip"}}, '"nme" is unknown; did you mean "name"'),
        ({"comm_hook": {"name": "fastclipp"}}, "disco.comm_hook.name: 'fastclipp'"),
        ({"comm_hook": {"compress": "fp8"}}, "disco.comm_hook.compress: 'fp8'"),
        ({"comm_hook": {"wire_dtype": "bf16"}}, "needs --comm_hook.name"),
    ],
)
def test_a_wrong_hook_section_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_comm_hook("my.json", {"disco": section})


def test_the_hook_is_chosen_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    hook = {"name": "fastclip", "wire_dtype": "bf16", "compress": None}
    path.write_text(json.dumps({"disco": {"comm_hook": hook}}))
    expected = CommHookConfig(name="fastclip", wire_dtype="bf16")
    assert choose_comm_hook(str(path), CommHookConfig()) == expected
    assert choose_comm_hook(str(path), expected) == expected
    with pytest.raises(ValueError, match="give one of them"):
        choose_comm_hook(str(path), CommHookConfig(name="disco"))
    assert "disco" not in resolve(json.loads(path.read_text()))


@pytest.mark.parametrize(
    ("arguments", "world_size", "engine", "message"),
    [
        (("zero", None), 2, {}, "--strategy zero needs --deepspeed_config"),
        (("ddp", "zero2.json"), 2, {}, "--strategy ddp ignores --deepspeed_config"),
        (("single", None), 2, {}, "--strategy single on 2 ranks"),
        (("zero", "zero3.json"), 2, {"compile": True}, "--engine.compile True with stage 3"),
        (("zero", "zero1.json"), 2, {"reduce_every_micro_batch": True}, "with stage 1"),
        (("ddp", None), 2, {"reduce_every_micro_batch": True}, "strategy ddp has no such option"),
        (("auto", "zero2.json"), 2, {"cpu_offload": True}, "--engine.cpu_offload True"),
    ],
)
def test_combinations_that_make_no_sense(
    arguments: tuple[Any, str | None], world_size: int, engine: dict[str, Any], message: str
) -> None:
    name, file = arguments
    path = None if file is None else str(SHIPPED[0].with_name(file))
    world = World(0, world_size, 0)
    with pytest.raises(ValueError, match=message):
        build_strategy(name, path, RUN, world, engine=EngineConfig(**engine))


@pytest.mark.parametrize(
    ("file", "world_size", "expected"),
    [("zero2.json", 2, "zero"), (None, 2, "ddp"), (None, 1, "single")],
)
def test_auto(file: str | None, world_size: int, expected: str) -> None:
    path = None if file is None else str(SHIPPED[0].with_name(file))
    assert build_strategy("auto", path, RUN, World(0, world_size, 0)).name == expected
