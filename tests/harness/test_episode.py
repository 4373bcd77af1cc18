"""Episodes of the real DefaultAgent: how they run and every way they end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swe_lightning.errors import SandboxLost
from swe_lightning.harness.environment import submits
from swe_lightning.harness.episode_log import read_trajectory
from swe_lightning.records import InfraReason


def test_an_episode_from_issue_to_submission(play, box, scripted):
    result, gateway = play([scripted.bash("echo hello > new.txt; cat new.txt"), scripted.SUBMIT])
    assert (result.exit_status, result.n_calls, result.infra_reason) == ("submitted", 2, None)
    assert result.submitted
    assert (box.directory / "new.txt").read_text() == "hello\n"
    assert [m["role"] for m in result.messages] == ["system", "user", "assistant", "user", "assistant", "exit"]
    assert "hello" in result.messages[3]["content"]
    assert "It breaks." in gateway.requests[0]["messages"][1]["content"]
    # Later requests continue earlier ones, and only roles and texts are sent.
    first, second = (r["messages"] for r in gateway.requests)
    assert second[: len(first)] == first
    assert second[len(first)] == {"role": "assistant", "content": scripted.bash("echo hello > new.txt; cat new.txt")}


def test_requests_carry_the_token_and_nothing_that_was_not_given(play, scripted):
    _, gateway = play([scripted.SUBMIT], max_tokens=77)
    assert set(gateway.requests[0]) == {"model", "messages", "max_tokens"}
    assert gateway.requests[0]["max_tokens"] == 77
    assert gateway.headers[0]["Authorization"] == "Bearer secret"


def test_a_trailing_slash_in_the_url_does_not_double(play, scripted):
    _, gateway = play([scripted.SUBMIT], url=lambda u: u + "/")
    assert gateway.paths == ["/openai/v1/chat/completions"]


def test_the_connection_is_kept_over_the_turns(play, scripted):
    _, gateway = play([scripted.bash("true")] * 4 + [scripted.SUBMIT])
    assert len(gateway.requests) == 5
    assert gateway.connections == 1


def test_no_litellm_and_no_torch_in_the_process():
    code = (
        "import sys, swe_lightning.harness.mini_swe_agent as m\n"
        "m.run_episode\n"
        "print([x for x in ('litellm', 'openai', 'torch', 'httpx') if x in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"  # the library's banner would show here, too


def test_the_agent_is_the_librarys_own_class():
    from minisweagent.agents.default import DefaultAgent

    from swe_lightning.harness import mini_swe_agent

    assert mini_swe_agent.DefaultAgent is DefaultAgent


def test_step_limit(play, scripted):
    result, gateway = play([scripted.bash("true")] * 9, step_limit=3)
    assert (result.exit_status, result.n_calls, result.infra_reason) == ("step_limit", 3, None)
    assert len(gateway.requests) == 3


def test_format_errors_end_the_episode_and_the_model_sees_them(play, scripted):
    result, gateway = play(["no command", "still none", "never"], format_error_limit=3)
    assert (result.exit_status, result.n_calls) == ("format_errors", 3)
    roles = [m["role"] for m in gateway.requests[2]["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert gateway.requests[2]["messages"][2]["content"] == "no command"


def test_a_good_turn_resets_the_count_of_format_errors(play, scripted):
    script = ["none", scripted.bash("true"), "none", scripted.SUBMIT]
    result, _ = play(script, format_error_limit=2)
    assert result.exit_status == "submitted"


def test_two_blocks_are_not_executed(play, box, scripted):
    result, _ = play([scripted.bash("touch a") + "\n" + scripted.bash("touch b")], format_error_limit=1)
    assert result.exit_status == "format_errors"
    assert box.commands == []


def test_a_reply_cut_at_its_length_is_told_so(play, scripted):
    result, _ = play([("```bash\nsed -i", "length"), scripted.SUBMIT])
    assert "length limit" in result.messages[3]["content"]


def test_wall_time_ends_a_running_command(play, scripted):
    start = time.monotonic()
    result, _ = play([scripted.bash("sleep 20")], seconds=0.8)
    assert (result.exit_status, result.infra_reason) == ("wall_time", None)
    assert time.monotonic() - start < 5


def test_a_command_that_times_out_is_an_observation(play, scripted):
    script = [scripted.bash("echo before; sleep 20"), scripted.SUBMIT]
    result, gateway = play(script, command_timeout_s=0.5)
    assert result.exit_status == "submitted"
    seen = gateway.requests[1]["messages"][-1]["content"]
    assert "timed out after 0.5 seconds" in seen
    assert "before" in seen


def test_output_that_is_not_utf8(play, scripted):
    _, gateway = play([scripted.bash(r"printf 'ok\xff'"), scripted.SUBMIT])
    assert "ok\ufffd" in gateway.requests[1]["messages"][-1]["content"]


@pytest.mark.parametrize("command", ["echo 'a\0b'", "true " + "x" * 200_000], ids=["nul", "too long"])
def test_commands_the_kernel_cannot_take_are_the_agents_mistake(play, box, scripted, command):
    result, gateway = play([scripted.bash(command), scripted.SUBMIT])
    assert result.exit_status == "submitted"
    assert "bash:" in gateway.requests[1]["messages"][-1]["content"]
    assert len(box.commands) == 1


def test_a_lost_box_is_infrastructure(play, scripted):
    class Lost:
        def run(self, command: str, *, timeout_s: float):
            raise SandboxLost("the box is gone")

    result, _ = play([scripted.bash("ls")], the_box=Lost())
    assert result.infra_reason is InfraReason.SANDBOX_LOST
    assert "gone" in result.message


MARKER = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


@pytest.mark.parametrize(
    ("command", "output", "expected"),
    [
        (f"echo {MARKER}", f"{MARKER}\n", True),
        ("sh submit.sh", f"\n  {MARKER}\npatch", True),
        (f"echo {MARKER}", f"bash: /x: No such file\n{MARKER}\ndiff", True),
        ("cat notes", f"remember to\n{MARKER}\n", False),
        (f"grep -r {MARKER} .", f"a: {MARKER}\n", False),
        ("ls", "", False),
    ],
)
def test_what_counts_as_submission(command, output, expected):
    assert submits(command, output) is expected


def test_a_failed_command_does_not_submit(play, scripted):
    result, _ = play([scripted.bash(f"echo {MARKER}; false"), scripted.bash("true")], step_limit=2)
    assert result.exit_status == "step_limit"


def test_the_log_holds_the_episode_in_the_librarys_layout(play, scripted, tmp_path):
    result, _ = play([scripted.bash("echo 1"), scripted.SUBMIT])
    trajectory = read_trajectory(tmp_path / "attempt1.jsonl")
    assert trajectory["trajectory_format"] == "mini-swe-agent-1.1"
    assert [m["content"] for m in trajectory["messages"]] == [m["content"] for m in result.messages]
    assert trajectory["info"]["exit_status"] == "submitted"
    assert trajectory["info"]["mini_version"].startswith("2.")
    assert len(trajectory["info"]["config"]["hash"]) == 16


def test_a_killed_episode_leaves_its_steps(scripted, tmp_path):
    gateway = scripted.ScriptedGateway([scripted.bash(f"echo step {n}") for n in (1, 2)] + [scripted.bash("sleep 60")])
    code = f"""
import sys, time, importlib.util
from pathlib import Path
spec = importlib.util.spec_from_file_location("fakes", {str(Path(__file__).parent / "conftest.py")!r})
fakes = importlib.util.module_from_spec(spec); sys.modules["fakes"] = fakes; spec.loader.exec_module(fakes)
from swe_lightning.harness.mini_swe_agent import run_episode
from swe_lightning.recipe import Harness
from swe_lightning.records import Task
run_episode(Task(instance_id="d", repo="d"), Harness(), fakes.BashBox(Path({str(tmp_path)!r})), {gateway.url!r}, "t",
            deadline=time.monotonic() + 60, log_file=Path({str(tmp_path / "log.jsonl")!r}))
"""
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        end = time.monotonic() + 20
        while len(gateway.requests) < 3 or (tmp_path / "log.jsonl").read_text().count("assistant") < 3:
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        gateway.close()
    messages = read_trajectory(tmp_path / "log.jsonl")["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert "step 2" in messages[5]["content"]
