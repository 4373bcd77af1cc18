"""`swel eval` and the difficulty probe as processes, with scripted strategies behind the gateway."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def swel(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments], capture_output=True, text=True, timeout=280, check=False
    )


def test_scripts_are_scored_and_compared(task_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "eval"
    arguments = ["eval", str(task_file), "--script", "noop", "--script", "enumerate", "--n", "2", "--out", str(out)]
    arguments += ["--set", "harness.max_tokens=200", "--set", "model.max_context=8192", "--json"]
    done = swel(*arguments)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["results"]["script-noop"]["resolved"] == 0
    assert report["results"]["script-enumerate"]["resolved"] == 2
    (comparison,) = report["comparisons"]
    assert (comparison["before"], comparison["after"]) == ("script-noop", "script-enumerate")
    assert comparison["significant"] is False, "one package cannot give an interval"
    assert (out / "report.md").read_text().startswith("| evaluation |")

    again = swel(*arguments)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["results"] == report["results"], "graded rollouts are kept, not run again"


@pytest.mark.train
def test_a_checkpoint_is_served_and_scored(task_file: Path, tmp_path: Path) -> None:
    """What a real model samples is what the record holds: at temperature 0 the same as plain greedy decoding."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    from swe_lightning.monitor.runs import open_store
    from swe_lightning.policy.demos import bulk_texts
    from swe_lightning.policy.tiny import create_tiny

    model, out = tmp_path / "model", tmp_path / "eval"
    create_tiny(model, texts=bulk_texts(200, 0), vocab=600, layers=2, hidden=64, mlp=96, max_context=512)
    arguments = ["eval", str(task_file), "--ckpt", f"tiny={model}", "--n", "1", "--out", str(out), "--json"]
    done = swel(*arguments, "--set", "evaluation.temperature=0", "--set", "harness.step_limit=1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["results"]["tiny"]
    assert (result["graded"], result["resolved"], result["infra"]) == (1, 0, {})
    with open_store(out) as store:
        (rollout,) = store.graded("val")
        call = store.calls(rollout)[0]
    ids = torch.from_numpy(call.prompt_ids).long()[None]
    with torch.no_grad():
        plain = (
            AutoModelForCausalLM.from_pretrained(model)
            .eval()
            .generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=len(call.response_ids))
        )
    assert plain[0, ids.shape[1] :].tolist() == call.response_ids.tolist()


def test_eval_says_what_it_cannot_find(task_file: Path, tmp_path: Path) -> None:
    for arguments, words in (
        (["--ckpt", "step99"], "no model directory there"),
        ([], "nothing to evaluate"),
        (["--script", "noop", "--script", "noop"], "same label"),
    ):
        done = swel("eval", str(task_file), *arguments, "--out", str(tmp_path / "x"))
        assert done.returncode == 2
        assert words in done.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("script", "kept", "reason"), [("noop", 1, None), ("enumerate", 0, "all_solved")])
def test_the_difficulty_probe_uses_the_rollout_path(
    task_file: Path, tmp_path: Path, script: str, kept: int, reason: str | None
) -> None:
    rows = [json.loads(line) for line in task_file.read_text().splitlines()]
    file = tmp_path / "tasks.jsonl"
    other = {**rows[0], "instance_id": "shop.held_out", "role": "held_out"}
    file.write_text("".join(json.dumps(row) + "\n" for row in [{**rows[0], "role": "train"}, other]))
    out = tmp_path / "data"
    done = swel(
        "data",
        "filter",
        "--input",
        str(file),
        "--out",
        str(out),
        "--probe-model",
        f"script:{script}",
        "--k",
        "2",
        "--set",
        "harness.max_tokens=200",
        "--set",
        "model.max_context=8192",
    )
    if kept:
        assert done.returncode == 0, done.stderr
        assert len((out / "train.jsonl").read_text().splitlines()) == kept
    outcomes = [json.loads(line) for line in (out / "probe.jsonl").read_text().splitlines()]
    assert [o["solved"] for o in outcomes] == [reason == "all_solved"] * 2
    assert {o["instance_id"] for o in outcomes} == {rows[0]["instance_id"]}
