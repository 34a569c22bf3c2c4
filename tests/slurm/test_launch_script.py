"""The generated job scripts, word for word; profiles and flags, and what is wrong with them.

After a wanted change: ``python tests/slurm/test_launch_script.py`` writes the golden files anew.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from launch_cases import ROOT, train_arguments
from shards import write_shards

from disco_ds.launch.cli import main
from disco_ds.launch.executor import leftovers, overruled, render_job
from disco_ds.launch.resources import Resources, load_profile
from disco_ds.launch.script import Placement

GOLDEN = Path(__file__).parent / "golden"
PROFILES = sorted((ROOT / "launchers" / "profiles").glob("*.yaml"))
HOME = Path("/home/me/project")
ONE = (HOME / "runs/clip",)
TWO = (HOME / "runs/sweep/lr=1e-3-0a1b2c3d", HOME / "runs/sweep/lr=1e-4-4e5f6a7b")


def placement(*runs: Path) -> Placement:
    base = runs[0] / "launch" if len(runs) == 1 else HOME / "runs/sweep/submissions/1"
    return Placement(
        script=base / "script.sh",
        code=base / "code",
        working_folder=HOME,
        runs=runs,
        is_array=len(runs) > 1,
        python="/usr/bin/python3",
    )


def scripts() -> dict[str, str]:
    """One for each profile, one without a profile, one array."""
    found = {
        path.stem: render_job(load_profile(path), placement(*ONE), name="clip") for path in PROFILES
    }
    found["no_profile"] = render_job(Resources(), placement(*ONE), name="clip")
    array = Resources(gpus_per_node=4, max_parallel=1, partition="gpu")
    found["array"] = render_job(array, placement(*TWO), name="sweep")
    return found


@pytest.mark.parametrize("name", sorted(scripts()))
def test_golden_script(name: str) -> None:
    assert scripts()[name] == (GOLDEN / f"{name}.sh").read_text()


@pytest.mark.parametrize("name", sorted(scripts()))
def test_bash_can_read_it(name: str) -> None:
    subprocess.run(["bash", "-n"], input=scripts()[name], text=True, check=True)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which the launcher refuses arguments."""
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_gang_flags_are_always_there() -> None:
    for runner in ("srun", "torchrun"):
        resources = Resources(nodes=2, gpus_per_node=4, cpus_per_gpu=3, runner=runner)  # type: ignore[arg-type]
        script = render_job(resources, placement(*ONE), name="clip")
        start = script.split("start_ranks() {")[1].split("}")[0]
        for flag in ("--kill-on-bad-exit=1", "--wait=", "--cpus-per-task="):
            assert flag in start
        for option in ("--gpus-per-node=4", "--open-mode=append", "--requeue"):
            assert f"#SBATCH {option}" in script
        for never in ("ssh", "hostfile", "--gpus-per-task", "12802", "29500"):
            assert never not in script
        assert "export CUDA_VISIBLE_DEVICES" not in script


def test_dry_run_prints_the_script_and_the_variables_of_each_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--nodes", "2", "--gpus_per_node", "2", "--cpus_per_gpu", "3", "--dry_run"]
    arguments = train_arguments("nowhere.tar", steps=1)
    assert main(["train", *flags, "--env", "NCCL_DEBUG", "INFO", "--", *arguments]) == 0
    said = capsys.readouterr().out
    assert said.startswith("#!/bin/bash\n#SBATCH")
    lines = [line for line in said.splitlines() if line.startswith("# rank ")]
    assert [line.split(":")[0] for line in lines] == [f"# rank {rank}" for rank in range(4)]
    for word in (
        *("RANK=3", "WORLD_SIZE=4", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2", "NODE_RANK=1"),
        *("OMP_NUM_THREADS=3", "NCCL_DEBUG=INFO", "MASTER_ADDR='<node of rank 0>'"),
    ):
        assert word in lines[3]
    assert "--steps 1" in said
    # Nothing was written, nothing submitted.
    assert list(tmp_path.iterdir()) == []


def test_variables_and_options_are_given_as_often_as_needed_and_added_to_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "site.yaml"
    profile.write_text("env: {A: 1, B: 2}\nsbatch: {licenses: x}\n")
    flags = [*("--env", "B", "3", "C", "4", "--env", "D=5", "--env.E", "6", "--env.F=7")]
    flags += [*("--sbatch", "mail-type", "END", "--sbatch", "comment", "-x")]
    own = ["train", "--dry_run", "--profile", str(profile), *flags]
    assert main([*own, "--", *train_arguments("nowhere.tar", steps=1)]) == 0
    said = capsys.readouterr().out
    for name, value in zip("ABCDEF", "134567", strict=True):
        assert f"export {name}={value}\n" in said
    for option in ("licenses=x", "mail-type=END", "comment=-x"):
        assert f"#SBATCH --{option}\n" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.name", "ViT-B32"], "--model.name ViT-B32: open_clip has no such model"),
        (["--deepspeed_config", "missing.json"], "missing.json: cannot read it"),
        (["--data.shards", "gone.tar"], "gone.tar: no such shard"),
        (["--strategy", "single"], "2 (ranks|processes)"),
        (["--evaluation.zero_shot", "gone"], "gone"),
    ],
    ids=str,
)
@pytest.mark.parametrize("command", [["train"], ["array", "--set", "seed=1,2"]], ids=str)
def test_what_ranks_would_refuse_is_refused_before_the_queue(
    command: list[str],
    arguments: list[str],
    message: str,
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = train_arguments(write_shards(here / "shards"), steps=1)
    where = ["--cluster", "local", "--gpus_per_node", "0", "--ranks_per_node", "2", "--detach"]
    where = where[:-1] if command[0] == "array" else where
    said = refused([*command, *where, "--", *base, *arguments], capsys)
    assert re.search(message, said), said
    assert [path.name for path in here.iterdir()] == ["shards"]


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("partitoin: gpu", "key partitoin: unknown; did you mean partition?"),
        ("nodes: 0", "nodes 0: must be at least 1"),
        ("nodes: two", "key nodes: 'two'"),
        ("time: 3 days", "time 3 days: expected minutes, HH:MM:SS or D-HH:MM:SS"),
        ("network: ethernet", "key network: 'ethernet'"),
        ("container: {runtime: pyxis}", "container.runtime pyxis with container.image None"),
        ("limits: {preemption: 1}", "key limits.preemption: unknown; did you mean preemptions?"),
        ("gpus_per_node: 8\nranks_per_node: 4", "there is one rank per GPU"),
        ("env: {1A: x}", "env 1A: not the name of an environment variable"),
        ("{", "not YAML"),
        ("- a", "must be an object"),
    ],
)
def test_a_wrong_profile_is_one_line_with_the_remedy(
    yaml: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "site.yaml"
    profile.write_text(yaml)
    said = refused(["train", "--profile", str(profile), "--", "--steps", "1"], capsys)
    assert said.startswith(f"error: --profile {profile}: ")
    assert message in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--nodess", "2"], "--nodess"),
        (["train", "--nodes", "2", "--preset", "demo"], "arguments of train.py come after --"),
        (["train", "--env", "A"], "--env A needs a value: --env A VALUE"),
        (["train", "--sbatch", "--", "--steps", "1"], "--sbatch needs NAME VALUE"),
        (["train", "--cluster", "debug", "--nodes", "2"], "--cluster debug is one process"),
        (["train", "--profile", "none.yaml"], "--profile none.yaml: cannot read it"),
        (
            ["train", "--", "--steps", "3", "--stepz", "3"],
            "--stepz: unknown; did you mean --steps?",
        ),
        (["train", "--", "--steps", "3", "--global_batch_size", "7"], "divide by 3 ranks"),
        (["train", "--", "--steps", "3", "--resume", "/nope"], "--resume /nope: no complete"),
        (["array", "--", "--steps", "3"], "array needs --sweep FILE or --set"),
        (
            ["array", "--set", "seed=1,2", "--", "--steps", "3", "--run-dir", "x"],
            "--run_dir: every member of an array has a folder of its own; --sweep_dir",
        ),
        (
            ["train", "--dry_run", "--sbatch", "array", "0-1", "--", "--steps", "3"],
            "sbatch: array: the launcher decides it; set a sweep (slurm.py array)",
        ),
        (
            ["train", "--dry_run", "--sbatch", "time", "1", "--", "--steps", "3"],
            "sbatch: time: the",
        ),
        (["array", "--set", "optim.lr", "--", "--steps", "3"], "--set optim.lr: expected"),
        (
            ["array", "--set", "optim.l=1", "--", "--steps", "3"],
            "sweep member optim.l=1: --optim.l",
        ),
        (["status", "nowhere"], "nowhere: no such folder"),
        (["logs", "."], "not the folder of a submitted run"),
        (["stop", "."], "no submitted runs"),
        (["status", "--", "x"], "status takes no arguments of train.py"),
        (["sttaus"], "sttaus"),
        ([], "train"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    arguments: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--global_batch_size" in arguments:
        arguments = ["train", "--gpus_per_node", "3", *arguments[1:]]
    assert message in refused(arguments, capsys)
    assert list(here.iterdir()) == []


def test_without_slurm_it_says_so_and_names_the_local_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    arguments = train_arguments(write_shards(tmp_path / "shards"), steps=1)
    for command in (["train"], ["train", "--check"], ["array", "--set", "seed=1"]):
        assert main([*command, "--", *arguments]) == 2
        assert "no Slurm here (sbatch is not on the PATH): use --cluster local" in (
            capsys.readouterr().err
        )
    assert {path.name for path in tmp_path.iterdir()} == {"shards"}


def test_yaml_times_are_not_numbers_in_base_60(tmp_path: Path) -> None:
    profile = tmp_path / "site.yaml"
    for text, minutes in (("24:00:00", 1440), ("90", 90), ("1-2", 1560), ("0:30:01", 31)):
        profile.write_text(f"time: {text}")
        assert load_profile(profile).time_minutes == minutes


def test_flags_go_over_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profile = tmp_path / "site.yaml"
    profile.write_text("partition: slow\nnodes: 2\nnetwork: infiniband\nenv: {NCCL_IB_TIMEOUT: 9}")
    arguments = train_arguments("nowhere.tar", steps=1)
    command = ["train", "--profile", str(profile), "--partition", "fast", "--dry_run"]
    assert main([*command, "--", *arguments]) == 0
    said = capsys.readouterr().out
    assert "#SBATCH --partition=fast\n" in said
    assert "#SBATCH --nodes=2\n" in said
    assert "export NCCL_IB_TIMEOUT=9\n" in said
    assert "export NCCL_IB_DISABLE=0\n" in said


def test_variables_of_an_outer_job_are_recognised() -> None:
    outer = {
        "SLURM_JOB_ID": "1",
        "SLURM_CPUS_PER_TASK": "3",
        "SBATCH_CPU_BIND": "x",
        "RANK": "1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "DISCO_STOP_FILE": "/x",
        "CUDA_VISIBLE_DEVICES": "1",
        "OMPI_COMM_WORLD_RANK": "1",
    }
    own = {
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_ACCOUNT": "me",
        "PATH": "/bin",
        "HOME": "/home/me",
        "RANKING": "1",
    }
    assert sorted(leftovers({**outer, **own})) == sorted(outer)
    # The user's own default, unless the profile says something else.
    assert overruled(Resources()) == []
    assert overruled(Resources(account="other")) == ["SBATCH_ACCOUNT"]
    # Outside a job a choice of GPUs is the user's.
    assert leftovers({"CUDA_VISIBLE_DEVICES": "1", **own}) == []


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for key, text in scripts().items():
        (GOLDEN / f"{key}.sh").write_text(text)
