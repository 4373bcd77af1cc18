"""The test command of a task, and what has to be set up before it, as the task's benchmark runs it.

swebench 5 keeps no table of commands: each published row carries an `eval_script`. From it we take the set-up and the
command between the markers; what it does with git is left out, because patches and tests are written from outside the
box. Rows published before (no `eval_script`) get the command of their repository from the table below.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from dataclasses import dataclass, field
from functools import lru_cache

from swe_lightning.errors import DataError
from swe_lightning.grading.rules import origin_of
from swe_lightning.grading.saved_log import END, START
from swe_lightning.records import Task

DEFAULT_TEST_CMD = "python -m pytest -q"

SWESMITH_TEST_CMD = "pytest --disable-warnings --color=no --tb=no --verbose"
"""Of SWE-smith's Python profiles."""

ACTIVATE = "[ ! -f /opt/miniconda3/bin/activate ] || { source /opt/miniconda3/bin/activate; conda activate testbed; }"
"""Published images hold the task's Python in a conda environment; elsewhere the box's own Python is the task's."""

_PYTEST = "pytest -rA"
_LOCALE = "export LANG=en_US.UTF-8 LC_ALL=en_US.UTF-8 PYTHONIOENCODING=utf8 LANGUAGE=en_US:en"
COMMANDS: dict[str, str | dict[str, str]] = {
    "astropy/astropy": "pytest -rA -vv -o console_output_style=classic --tb=no",
    "django/django": {
        "1.9": "./tests/runtests.py --verbosity 2",
        "*": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    },
    "matplotlib/matplotlib": _PYTEST,
    "mwaskom/seaborn": "pytest --no-header -rA",
    "pallets/flask": _PYTEST,
    "psf/requests": _PYTEST,
    "pydata/xarray": _PYTEST,
    "pylint-dev/pylint": _PYTEST,
    "pytest-dev/pytest": _PYTEST,
    "scikit-learn/scikit-learn": _PYTEST,
    "sphinx-doc/sphinx": "tox --current-env -epy39 -v --",
    "sympy/sympy": "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
}
"""Repository -> command, or version -> command where it differs between versions ("*": all others)."""

SETUP = {"django/django": [_LOCALE]}

NOT_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
"""Files of a test patch that are data, not something to run."""

_PYTEST_COMMAND = re.compile(
    r"^\s*(?:\w+=\S*\s+)*(?:python[\d.]*\s+(?:-\S+\s+)*-m\s+)?(?:\S*/)?(?:pytest|py\.test)(?:\s|$)"
)
_OPTIONS = r"(?:-[^m\s]\S*\s+)*"
_RUN = re.compile(
    r"(?:^|[;&|(])\s*(?:\w+=(?:'[^']*'|\S*)\s+)*"
    rf"(?:(?:(?:ba|da)?sh|python[\d.]*)\s+{_OPTIONS})?([\w./-]+)(?=\s|$)",
    re.MULTILINE,
)
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")


PUBLISHED_ENV = {
    "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1",
    "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
}  # fmt: skip
"""A box has no network: pip inside a published set-up fails at once instead of trying. A user's site-packages could
only hold what that set-up, which may run the tree's setup.py, put there."""

OWN_ENV = {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""The local box holds pytest alone; a task that needs its plugins says so in its test_env."""


@dataclass
class EvalCommand:
    """`command` runs after `setup`, in one shell."""

    command: str
    setup: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=lambda: dict(OWN_ENV))
    pytest: bool = True
    """A pytest command, which the session recorder is loaded into (`-p`)."""
    takes_ids: bool = True
    """Test files are appended by the caller; False: the command names its tests itself."""


def eval_command(task: Task) -> EvalCommand:
    """How to run a task's tests. DataError where row and tables do not say."""
    if origin_of(task) != "swebench":
        if task.test_cmd:
            return EvalCommand(task.test_cmd)
        if origin_of(task) == "swesmith":
            return EvalCommand(SWESMITH_TEST_CMD, [ACTIVATE], dict(PUBLISHED_ENV))
        return EvalCommand(DEFAULT_TEST_CMD)
    script = getattr(task, "eval_script", None)
    if script:
        setup, command = split_script(task.instance_id, str(script))
    elif task.test_cmd:
        setup, command = [], task.test_cmd
    else:
        setup = [ACTIVATE, *SETUP.get(task.repo, [])]
        command = f"{_of_repository(task)} {shlex.join(directives(task))}"
    # pytest's own tests replace parts of pytest while they run, which is what the recorder takes for cheating.
    recorded = is_pytest(command) and task.repo != "pytest-dev/pytest"
    return EvalCommand(command, setup, dict(PUBLISHED_ENV), pytest=recorded, takes_ids=False)


def is_pytest(command: str) -> bool:
    """One plain pytest command: what the session recorder can be loaded into."""
    lines = [line for line in command.splitlines() if line.strip()]
    return len(lines) == 1 and bool(_PYTEST_COMMAND.match(lines[0])) and not re.search(r"[|;&<>]", lines[0])


def split_script(instance_id: str, script: str) -> tuple[list[str], str]:
    """(set-up lines without git, the lines between the markers) of a published `eval_script`."""
    lines = _without_git(script.splitlines())
    starts = [n for n, line in enumerate(lines) if START in line]
    ends = [n for n, line in enumerate(lines) if END in line]
    if len(starts) != 1 or len(ends) != 1 or starts[0] >= ends[0]:
        raise DataError(f"task {instance_id}: its eval_script has no pair of markers '{START}' and '{END}'")
    setup = [line for line in lines[: starts[0]] if line.strip() and not line.startswith(("#!", "set -"))]
    return setup, "\n".join(lines[starts[0] + 1 : ends[0]]).strip()


def _without_git(lines: list[str]) -> list[str]:
    kept: list[str] = []
    until: str | None = None
    for line in lines:
        if until is not None:
            until = None if line.strip() == until else until
            continue
        if re.match(r"\s*git\s", line):
            match = _HEREDOC.search(line)
            until = match.group(1) if match else None
            continue
        kept.append(line)
    return kept


def _of_repository(task: Task) -> str:
    known = COMMANDS.get(task.repo)
    if known is None:
        raise DataError(
            f"task {task.instance_id}: no test command for {task.repo}; give the row an eval_script or test_cmd column"
        )
    if isinstance(known, str):
        return known
    version = str(getattr(task, "version", None) or "")
    if not version:
        raise DataError(
            f"task {task.instance_id}: the test command of {task.repo} depends on the version, and the row has none; "
            "add a version column, or give a JSON file of instance_id -> version with --versions"
        )
    return known.get(version, known["*"])


def directives(task: Task) -> list[str]:
    """What the command is to run: the test files of the test patch; for django as dotted labels."""
    files = [f for f in _patched(task) if not f.endswith(NOT_TESTS)]
    if task.repo != "django/django":
        return files
    labels = [f.removesuffix(".py").removeprefix("tests/").replace("/", ".") for f in files]
    return list(dict.fromkeys(labels))


@lru_cache(maxsize=256)
def runner_files(commands: str) -> frozenset[str]:
    """Paths that a command line runs out of the tree (`bin/test`, `python runtests.py`): part of the grader, though in
    the tree."""
    found = (posixpath.normpath(path) for path in _RUN.findall(commands))
    return frozenset(path for path in found if not path.startswith(("/", "..")) and ("/" in path or "." in path))


def commands_of(task: Task) -> str:
    """Every line that may run a task's tests, for `runner_files`; nothing is checked."""
    known = COMMANDS.get(task.repo, "") if task.test_patch is not None else ""
    table = known if isinstance(known, str) else "\n".join(known.values())
    script = str(getattr(task, "eval_script", None) or "")
    part = script.split(START, 1)[-1].split(END, 1)[0] if START in script else ""
    return "\n".join([task.test_cmd or "", table, part])


def watched_files(task: Task) -> list[str]:
    """Files that decide the verdict: those of the listed ids, and those of the test patch."""
    ids = [i.split("::", 1)[0].strip() for i in (*task.FAIL_TO_PASS, *task.PASS_TO_PASS) if "::" in i]
    return list(dict.fromkeys(posixpath.normpath(f) for f in [*ids, *_patched(task)]))


def _patched(task: Task) -> list[str]:
    return list(dict.fromkeys(re.findall(r"^diff --git .* b/(.*)$", task.test_patch or "", re.MULTILINE)))
