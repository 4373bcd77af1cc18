"""Prompts: our defaults for real repositories, and the rendering of every Jinja template of the harness section.

Templates see the task's columns plus `task` (the issue text), `test` (short name of the first FAIL_TO_PASS test) and
`func` (`bug_func`). Observations see `output` (cut to `observation_chars`, readable as a string and as
`output.output`), `returncode`, `exception_info`, `observation_chars`. An unknown name is an error, not an empty string.
The defaults speak of files and a shell only: the agent's tree has no version control, so no prompt mentions any.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template, TemplateError

from swe_lightning.errors import RecipeError
from swe_lightning.recipe import Harness
from swe_lightning.records import Task

SUBMIT_MARKER = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

SYSTEM = """\
You are a careful software engineer working through a Linux shell.
In every turn, first write down in a sentence or two what you think and why, then give exactly one bash block:

```bash
the command to run
```

Replies with no bash block, or with more than one, are not executed. Chain steps with && or || where they belong
together; heredocs are fine."""

INSTANCE = """\
A project is checked out in /testbed. Somebody reported this about it:

<issue>
{{ problem_statement }}
</issue>

Change the project's source so that the report is settled, in the way its maintainers would: fix the cause, keep the
style of the surrounding code, and leave existing behaviour alone where the report does not concern it. Tests for the
fix exist elsewhere and will be run on your tree afterwards, so do not edit tests or test configuration; edits there are
thrown away.

How the shell behaves:
- Each command runs in a fresh bash in /testbed. `cd` and variables do not last beyond a command; files do.
- Nothing can ask you for input, there is no network, and a command may take {{ '%g' % command_timeout_s }} seconds.
- Long output is shortened in the middle, so look at files in pieces: `sed -n '40,90p' FILE`, `grep -n WORD -r DIR`.

A way that tends to work: find the code, reproduce the problem with a small script, change the source, run the script
and the tests nearby again, then clean up what you created.

When you are done, hand in by running this command and nothing else:

```bash
echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT
```

You cannot continue after that. You have {{ step_limit }} turns."""

OBSERVATION = """\
{% if exception_info %}{{ exception_info }}
{% endif %}<returncode>{{ returncode }}</returncode>
<output>
{{ output }}{% if output and not output.endswith("\\n") %}
{% endif %}</output>"""

FORMAT_ERROR = """\
{% if finish_reason is defined and finish_reason == "length" -%}
Your reply reached its length limit before a complete bash block, so nothing was run. Be brief and give one command:
{%- else -%}
Nothing was run: a reply needs exactly one bash block, and yours had {{ actions | length }}. Like this:
{%- endif %}

```bash
the command to run
```

To hand in your work, run `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`."""

_MIN_CHARS_FOR_TAIL = 1000


class Output(str):
    """Command output as templates see it: a string that also answers to mini-SWE-agent's field names."""

    output: str
    returncode: int
    exception_info: str

    @classmethod
    def make(cls, text: str, returncode: int, exception_info: str) -> Output:
        made = cls(text)
        made.output, made.returncode, made.exception_info = text, returncode, exception_info
        return made


@dataclass(frozen=True)
class Prompts:
    """Texts of one episode: the first two rendered, the others still templates."""

    system: str
    instance: str
    observation: str
    format_error: str


def prompts(harness: Harness, task: Task) -> Prompts:
    """Raises RecipeError that names the template and what is wrong with it."""
    variables = {**harness.model_dump(include={"step_limit", "command_timeout_s"}), **task_variables(task)}
    return Prompts(
        system=render(harness.system_template or SYSTEM, variables, "harness.system_template"),
        instance=render(harness.instance_template or INSTANCE, variables, "harness.instance_template"),
        observation=harness.observation_template or OBSERVATION,
        format_error=harness.format_error_template or FORMAT_ERROR,
    )


def observation(template: str, *, text: str, returncode: int, exception_info: str, chars: int) -> str:
    output = Output.make(shorten(text, chars), returncode, exception_info)
    variables = {"returncode": returncode, "exception_info": exception_info, "observation_chars": chars}
    return render(template, {"output": output, **variables}, "harness.observation_template")


def shorten(text: str, chars: int) -> str:
    """At most about `chars` characters: head and tail with a notice between; only the head where space is tiny."""
    if len(text) <= chars:
        return text
    if chars < _MIN_CHARS_FOR_TAIL:
        return text[:chars]
    head, tail = text[: chars // 2], text[-(chars - chars // 2) :]
    return f"{head}\n[... {len(text) - chars} characters left out ...]\n{tail}"


def agent_env(harness: Harness, task: Task) -> dict[str, str]:
    """Environment of the agent's shell: the task's test environment, then the recipe's own variables."""
    variables = task_variables(task)
    own = {k: render(v, variables, f"harness.agent_env.{k}") for k, v in harness.agent_env.items()}
    return {**task.test_env, **own}


def agent_files(harness: Harness, task: Task, tree: Path) -> dict[str, bytes]:
    """Files put into the agent's tree, by path. Templates may call `read(path)` for the content of a file of `tree`."""
    if not harness.agent_files:
        return {}
    variables = {**task_variables(task), "read": _reader(tree)}
    rendered = {
        path: render(source, variables, f"harness.agent_files.{path}", keep_newline=True)
        for path, source in harness.agent_files.items()
    }
    return {path: text.encode("utf-8", "surrogateescape") for path, text in rendered.items()}


def _reader(tree: Path) -> Callable[[str], str]:
    """Bytes that are not UTF-8 pass through unharmed."""
    root = tree.resolve()

    def read(path: str) -> str:
        file = (root / path).resolve()
        if not file.is_relative_to(root) or not file.is_file():
            raise RecipeError(f"harness.agent_files: read({path!r}) is not a file of the task's tree")
        return file.read_bytes().decode("utf-8", "surrogateescape")

    return read


def task_variables(task: Task) -> dict[str, Any]:
    first = task.FAIL_TO_PASS[0] if task.FAIL_TO_PASS else ""
    derived = {
        "task": task.problem_statement or "",
        "test": first.rsplit("::", 1)[-1].partition("[")[0],
        "func": task.bug_func or "",
    }
    return {**task.model_dump(), **derived}


def check_templates(harness: Harness) -> None:
    """Compile every template of the section; RecipeError for the first that is not valid Jinja."""
    sources = {f"harness.{k}": getattr(harness, k) for k in type(harness).model_fields if k.endswith("_template")}
    sources |= {f"harness.agent_env.{k}": v for k, v in harness.agent_env.items()}
    sources |= {f"harness.agent_files.{k}": v for k, v in harness.agent_files.items()}
    for where, source in sources.items():
        if source is not None:
            _compile(source, where, False)


def render(source: str, variables: dict[str, Any], where: str, *, keep_newline: bool = False) -> str:
    try:
        return _compile(source, where, keep_newline).render(variables)
    except TemplateError as error:
        raise RecipeError(f"{where}: {error}; names that exist: {', '.join(sorted(variables))}") from error


def _compile(source: str, where: str, keep_newline: bool) -> Template:
    try:
        return _compiled(source, keep_newline)
    except TemplateError as error:
        raise RecipeError(f"{where} is not a valid Jinja template: {error}") from error


def shell_quote(value: str | list[str]) -> str:
    """Filter `shell_quote`: one shell word, or several separated by blanks."""
    return shlex.quote(value) if isinstance(value, str) else shlex.join(value)


@lru_cache(maxsize=512)
def _compiled(source: str, keep_newline: bool) -> Template:
    """Compiling costs 50 times as much as rendering, and a worker renders the same few templates all day."""
    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=keep_newline)
    environment.filters["shell_quote"] = shell_quote
    return environment.from_string(source)
