"""The command line as a newcomer meets it: a real process, quick help, one sentence for a mistake."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml


def swel(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments], capture_output=True, text=True, cwd=cwd, timeout=120, check=False
    )


def test_help_lists_the_whole_tree() -> None:
    out = swel("--help").stdout
    for command in ("data synth", "data filter", "train", "eval", "runs show", "serve gateway", "sft", "model tiny"):
        assert command in out, command


def test_help_imports_nothing_heavy() -> None:
    probe = (
        "import sys, cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'verl', 'ray', 'transformers', 'swebench', 'litellm', 'pydantic', 'numpy', 'sqlalchemy'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"


def test_light_rooms_import_without_torch() -> None:
    rooms = [
        "records",
        "errors",
        "recipe",
        "rundir",
        "trajectory",
        "objective",
        "sandbox",
        "grading",
        "gateway",
        "evaluation",
    ]
    probe = "import sys\n" + "".join(f"import swe_lightning.{room}\n" for room in rooms)
    probe += "print(sorted({'torch', 'verl', 'ray', 'transformers', 'litellm', 'docker'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "nowhere.yaml"), "no recipe nowhere.yaml"),
        (("train", "tiny_cpu.yaml", "--set", "training.lrr=3"), "did you mean lr?"),
        (("train", "qwen35_9b.yaml"), "is not part of this version"),
        (("train", "tiny_cpu.yaml", "--bogus"), "No such option"),
        (("nonsense",), "No such command"),
        (("runs", "show", "nowhere"), "nowhere"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    done = swel(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_dry_run_prints_the_resolved_recipe_and_runs_nothing(tmp_path: Path) -> None:
    done = swel("train", "recipes/qwen35_9b.yaml", "--dry-run", "--set", "training.steps=3", cwd=tmp_path)
    assert done.returncode == 0
    assert yaml.safe_load(done.stdout)["training"]["steps"] == 3
    assert "(built in)" in done.stderr
    assert "not runnable yet" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_schema_is_json(tmp_path: Path) -> None:
    assert "properties" in json.loads(swel("recipe", "schema").stdout)
