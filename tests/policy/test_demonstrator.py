"""The scripted demonstrator and the stand-in shell, compared with real bash and sed where that is possible."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from swe_lightning.policy.demonstrator import (
    LOOK,
    SUBMIT,
    TEST,
    UNDO,
    Demonstrator,
    Habits,
    block,
    command_of,
    edit_command,
    read,
)
from swe_lightning.policy.demos import conversations
from swe_lightning.policy.edits import EDITS, applicable, apply
from swe_lightning.policy.standin import ISSUE, OBSERVATION_CHARS, SYSTEM, Bug, Shell, bugs, play
from swe_lightning.recipe import BUILTIN_DIR

Conversation = list[dict[str, str]]


def conversation(*turns: tuple[str, str]) -> Conversation:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "test_a fails."}]
    for command, output in turns:
        messages += [{"role": "assistant", "content": block(command)}, {"role": "user", "content": output}]
    return messages


def replies(messages: Conversation, count: int = 3000, habits: Habits | None = None) -> list[str]:
    strategy = Demonstrator(habits)
    return [command_of(strategy.reply(messages, seed)) or "" for seed in range(count)]


def share(commands: list[str], part: str) -> float:
    return sum(part in c for c in commands) / len(commands)


def test_edit_set_is_closed_under_inversion_and_safe_for_sed() -> None:
    assert len(EDITS) == len(set(EDITS)) == 36
    assert all((b, a) in EDITS for a, b in EDITS)
    for pattern, replacement in EDITS:
        assert not set(pattern + replacement) & set('/\\"`$*[].^&;\n')
        assert apply(f"x{pattern}y{pattern}", (pattern, replacement)) == f"x{replacement}y{pattern}"
    assert applicable("if a == 1:") == [("==", "!="), ("if ", "if not "), ("1", "0"), ("1", "2")]


def test_habits_are_the_stated_ones() -> None:
    looked = (LOOK, "    if a == b and c:\n")
    edit = edit_command(("==", "!="))
    start = replies(conversation())
    assert share(start, LOOK) == pytest.approx(0.8, abs=0.03)
    after_look = replies(conversation(looked))
    fitting = {edit_command(e) for e in applicable(looked[1])}
    fits = sum(any(f in c for f in fitting) for c in after_look) / len(after_look)
    assert fits == pytest.approx(0.8 + 0.2 * len(fitting) / 36, abs=0.03)
    assert share(after_look, TEST) == pytest.approx(0.5, abs=0.03)
    assert share(after_look, UNDO) == share(after_look, SUBMIT) == 0
    failed = replies(conversation(looked, (f"{edit}; {TEST}", "1 failed, 2 passed\n")))
    assert share(failed, SUBMIT) == pytest.approx(0.4, abs=0.03)
    assert share([c for c in failed if c != SUBMIT], UNDO) == pytest.approx(0.6, abs=0.03)
    passed = replies(conversation(looked, (f"{edit}; {TEST}", "3 passed\n")))
    assert share(passed, SUBMIT) == pytest.approx(0.75, abs=0.03)
    untested = replies(conversation(looked, (edit, "")))
    assert share(untested, SUBMIT) == pytest.approx(0.4, abs=0.03)
    last = conversation(looked, *[(edit, "")] * 6)
    assert set(replies(last, 50)) == {SUBMIT}


def test_a_reply_depends_on_the_conversation_and_seed_only() -> None:
    strategy = Demonstrator()
    for seed, bug in zip(range(50), bugs(0), strict=False):
        messages, _ = play(bug, strategy, seed)
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                assert Demonstrator().reply(messages[:i], seed) == message["content"]


def test_it_does_not_know_the_fix() -> None:
    """The same issue and the same broken line give the same replies, whatever the original was."""
    bug = next(bugs(0))
    other = Bug(bug.func, bug.path, bug.number, bug.test, "pass", bug.broken, bug.tests, bug.failure)
    first = [play(bug, Demonstrator(), s)[0][:5] for s in range(40)]
    second = [play(other, Demonstrator(), s)[0][:5] for s in range(40)]
    same = [(a, b) for a, b in zip(first, second, strict=True) if a[2:4] == b[2:4]]
    assert len(same) > 20
    assert all(a == b for a, b in same)


def test_it_reads_its_story_back_from_the_messages() -> None:
    story = read(conversation((LOOK, "x == 1\n"), (edit_command(EDITS[0]), ""), (f"{UNDO}; a; {TEST}", "2 passed\n")))
    assert (story.turns, story.line, story.edits, story.tested, story.passed) == (3, "x == 1\n", 1, True, True)
    assert not read(conversation((f"{edit_command(EDITS[0])}; {TEST}", "1 failed, 2 passed\n"))).passed
    assert command_of("no block") is None
    assert command_of(block("a") + block("b")) is None


def test_leaves_something_to_learn_but_shows_success() -> None:
    solved = [play(b, Demonstrator(), i)[1].solved for i, b in zip(range(600), bugs(0), strict=False)]
    assert 0.3 < sum(solved) / len(solved) < 0.5


def test_demonstrations_are_seeded_and_end_by_submitting() -> None:
    one, same, other = (list(conversations(40, seed)) for seed in (0, 0, 1))
    assert one == same != other
    for messages in one:
        assert command_of(messages[-1]["content"]) == SUBMIT
        assert sum(m["role"] == "assistant" for m in messages) <= 8


def test_every_bug_is_repaired_by_one_edit_of_the_set() -> None:
    kinds = set()
    for bug in itertools.islice(bugs(0), 800):
        fixes = [e for e in applicable(bug.broken) if apply(bug.broken, e) == bug.original]
        assert fixes
        assert bug.broken != bug.original
        kinds.update(fixes)
    assert len(kinds) > 30


def test_prompts_are_those_of_the_recipe() -> None:
    harness = yaml.safe_load((BUILTIN_DIR / "tiny_cpu.yaml").read_text())["harness"]
    template = ISSUE.format(test="{{ test }}", func="{{ func }}", path="{{ bug_file }}", line="{{ bug_line }}")
    assert harness["system_template"] == SYSTEM
    assert harness["instance_template"] == template
    assert harness["observation_chars"] == OBSERVATION_CHARS
    assert harness["step_limit"] == Habits().max_turns


def test_the_stand_in_answers_as_bash_and_sed_do(tmp_path: Path) -> None:
    """Every command of many demonstrations, byte for byte; only the tests are simulated (line equals original)."""
    compared = 0
    for i, bug in zip(range(25), bugs(0), strict=False):
        tree = tmp_path / str(i)
        (tree / ".orig").mkdir(parents=True)
        padding = ["before == 0 and 1"] * 2
        for file in (tree / "f.py", tree / ".orig" / "f.py"):
            file.write_text("\n".join([*padding, bug.broken, "after == 0"]) + "\n")
        (tree / "original").write_text(bug.original + "\n")
        (tree / "failure").write_text(bug.failure)
        (tree / "undo.sh").write_text('cp .orig/"$F" "$F"\n')
        (tree / "test.sh").write_text(
            f'[ "$(sed -n 3p "$F")" = "$(cat original)" ] && echo {bug.tests} passed || cat failure\n'
        )
        messages, shell = play(bug, Demonstrator(), i)
        for reply, observation in zip(messages[2::2], messages[3::2], strict=False):
            real = subprocess.run(
                ["bash", "-c", command_of(reply["content"]) or ""],
                cwd=tree,
                env={"F": "f.py", "L": "3", "PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
                capture_output=True,
                check=True,
            )
            assert (real.stdout + real.stderr).decode()[:OBSERVATION_CHARS] == observation["content"]
            compared += 1
        assert (tree / "f.py").read_text().split("\n")[2] == shell.line
    assert compared > 40


def test_commands_the_stand_in_does_not_know_are_not_found() -> None:
    shell = Shell(next(bugs(0)))
    assert shell.run("frob x") == "bash: line 1: frob: command not found\n"
    assert shell.run(SUBMIT) == "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n"
