"""A run directory keeps what it was told, refuses what would mix two runs, and survives torn writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from swe_lightning.errors import BusyError, DataError, RecipeError
from swe_lightning.recipe import load_recipe
from swe_lightning.rundir import RunDir, write_atomic


def test_resume_with_the_same_recipe_and_more_steps(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    assert run.open(load_recipe("tiny_cpu.yaml")) is False
    assert run.open(load_recipe("tiny_cpu.yaml", ["training.steps=50"])) is True
    assert yaml.safe_load(run.recipe_file.read_text())["training"]["steps"] == 50


def test_resume_with_another_recipe_names_the_key(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.open(load_recipe("tiny_cpu.yaml"))
    before = run.recipe_file.read_bytes()
    with pytest.raises(RecipeError, match=r"changed: algorithm\.clip_high, training\.lr\."):
        run.open(load_recipe("tiny_cpu.yaml", ["training.lr=1e-3", "algorithm.clip_high=0.3"]))
    assert run.recipe_file.read_bytes() == before


def test_keys_that_came_after_the_run_was_started_have_their_defaults(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.open(load_recipe("tiny_cpu.yaml"))
    saved = yaml.safe_load(run.recipe_file.read_text())
    del saved["reward"], saved["sandbox"]["start_limit"]
    run.recipe_file.write_text(yaml.safe_dump(saved))
    with pytest.raises(RecipeError, match=r"changed: sandbox\.start_limit\."):
        run.open(load_recipe("tiny_cpu.yaml", ["sandbox.start_limit=3"]))
    assert run.open(load_recipe("tiny_cpu.yaml")) is True
    assert "start_limit" in yaml.safe_load(run.recipe_file.read_text())["sandbox"]


def test_a_key_that_this_version_no_longer_knows_is_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    run.open(load_recipe("tiny_cpu.yaml"))
    saved = yaml.safe_load(run.recipe_file.read_text())
    saved["training"]["left_behind"] = 1
    run.recipe_file.write_text(yaml.safe_dump(saved))
    with pytest.raises(RecipeError, match=r"changed: training\.left_behind\."):
        run.open(load_recipe("tiny_cpu.yaml"))


@pytest.mark.parametrize("text", ["", "- a list", "a: [torn"])
def test_a_damaged_recipe_is_named(tmp_path: Path, text: str) -> None:
    run = RunDir(tmp_path / "r")
    run.open(load_recipe("tiny_cpu.yaml"))
    run.recipe_file.write_text(text)
    with pytest.raises(DataError, match=r"recipe\.yaml is damaged"):
        run.open(load_recipe("tiny_cpu.yaml"))


def test_a_full_directory_without_recipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"holds a run without recipe\.yaml"):
        RunDir(tmp_path).open(load_recipe("tiny_cpu.yaml"))


def test_a_path_that_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot create run directory"):
        RunDir(tmp_path / "file" / "run").open(load_recipe("tiny_cpu.yaml"))


def test_two_trainers_cannot_share_a_run(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; from swe_lightning.rundir import RunDir; r = RunDir(pathlib.Path(sys.argv[1])); "
        "r.lock(); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BusyError, match=f"in use by process {other.pid}"):
            RunDir(tmp_path).lock()
        other.kill()
        other.wait()
    RunDir(tmp_path).lock()


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.append_metrics({"step": 0})
    run.append_metrics({"step": 1})
    with run.metrics_file.open("ab") as f:
        f.write(b'{"step": 2, "rew')
    assert [m["step"] for m in run.metrics()] == [0, 1]
    run.append_metrics({"step": 2})
    run.append_metrics({"step": 3})
    assert [m["step"] for m in run.metrics()] == [0, 1, 2, 3]


def test_a_checkpoint_counts_once_it_is_complete(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (5, 10, 20):
        run.checkpoint(step).mkdir(parents=True)
    for step in (5, 10):
        (run.checkpoint(step) / "complete").touch()
    assert run.saved_steps() == [5, 10]


def test_atomic_write_leaves_no_trace_of_a_failure(tmp_path: Path) -> None:
    target = tmp_path / "f"
    write_atomic(target, "old")
    with pytest.raises(TypeError):
        write_atomic(target, 7)  # type: ignore[arg-type]
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
