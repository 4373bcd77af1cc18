"""Prompts: our defaults, the recipe's templates, and what a mistake in one says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from swe_lightning.errors import RecipeError
from swe_lightning.harness import templates
from swe_lightning.recipe import Harness
from swe_lightning.records import Task

TASK = Task(
    instance_id="demo.1",
    repo="demo",
    problem_statement="Rounding is off by one.",
    FAIL_TO_PASS=["tests/test_a.py::TestA::test_half[1-2]", "tests/test a.py::test_other"],
    bug_file="src/a b.py",
    bug_line=7,
    bug_func="half",
    test_cmd="python -m pytest",
    test_env={"PYTHONPATH": "src"},
)


def test_default_prompts_never_mention_version_control():
    texts = templates.prompts(Harness(), TASK)
    shown = templates.observation(texts.observation, text="x", returncode=0, exception_info="", chars=9)
    error = templates.render(texts.format_error, {"actions": [], "error": ""}, "here")
    cut = templates.render(texts.format_error, {"actions": [], "error": "", "finish_reason": "length"}, "here")
    everything = "\n".join([texts.system, texts.instance, shown, error, cut]).lower()
    assert not re.search(r"git|commit|branch|diff|patch", everything)
    assert "rounding is off by one." in everything
    assert "/testbed" in everything
    assert "echo complete_task_and_submit_final_output" in everything


def test_the_recipes_templates_see_the_task():
    harness = Harness(instance_template="{{ test }} fails. Bug in {{ func }}, F={{ bug_file }} L={{ bug_line }}.")
    assert templates.prompts(harness, TASK).instance == "test_half fails. Bug in half, F=src/a b.py L=7."


def test_environment_is_the_tasks_and_then_the_recipes():
    harness = Harness(agent_env={"F": "{{ bug_file }}", "PYTHONPATH": "lib"})
    assert templates.agent_env(harness, TASK) == {"PYTHONPATH": "lib", "F": "src/a b.py"}


def test_files_keep_their_last_newline_and_quote_for_the_shell(tmp_path: Path):
    harness = Harness(agent_files={"test.sh": "{{ test_cmd }} {{ FAIL_TO_PASS | shell_quote }}\n"})
    made = templates.agent_files(harness, TASK, tmp_path)
    expected = b"python -m pytest 'tests/test_a.py::TestA::test_half[1-2]' 'tests/test a.py::test_other'\n"
    assert made == {"test.sh": expected}


def test_files_can_hold_what_a_file_of_the_tree_holds(tmp_path: Path):
    data = b"caf\xe9\r\nx = 1\n\n"
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a b.py").write_bytes(data)
    harness = Harness(agent_files={"kept": "{{ read(bug_file) }}"})
    assert templates.agent_files(harness, TASK, tmp_path) == {"kept": data}
    with pytest.raises(RecipeError, match="not a file of the task's tree"):
        templates.agent_files(Harness(agent_files={"x": "{{ read('../secret') }}"}), TASK, tmp_path / "src")


def test_observation_speaks_both_dialects():
    for template in ("{{ output[:5] }}", "{{ output.output[:5] }}"):
        shown = templates.observation(template, text="abcdefgh", returncode=0, exception_info="", chars=100)
        assert shown == "abcde"


def test_long_output_loses_its_middle_and_says_how_much():
    text = "h" * 3000 + "m" * 500 + "t" * 3000
    shown = templates.shorten(text, 6000)
    assert shown == "h" * 3000 + "\n[... 500 characters left out ...]\n" + "t" * 3000
    assert templates.shorten("x" * 6000, 6000) == "x" * 6000
    assert templates.shorten("abcdef", 3) == "abc"


def test_default_observation():
    shown = templates.observation(templates.OBSERVATION, text="a\nb", returncode=1, exception_info="", chars=100)
    assert shown == "<returncode>1</returncode>\n<output>\na\nb\n</output>"


def test_a_name_that_does_not_exist_is_named():
    with pytest.raises(RecipeError, match=r"harness\.instance_template.*isue.*problem_statement"):
        templates.prompts(Harness(instance_template="{{ isue }}"), TASK)


def test_a_template_that_is_no_template_is_found_before_the_run():
    with pytest.raises(RecipeError, match=r"harness\.agent_env\.F"):
        templates.check_templates(Harness(agent_env={"F": "{{ bug_file"}))
    templates.check_templates(Harness())


def test_templates_are_compiled_once():
    before = templates._compiled.cache_info().misses
    for n in range(50):
        templates.observation("{{ output }} once", text=str(n), returncode=0, exception_info="", chars=9)
    assert templates._compiled.cache_info().misses <= before + 1
