"""Look around in a task's box as the agent would: the same tree, environment, limits and shell.

Every line is a command of its own, as it is for the agent: a `cd` or a variable does not last. Without a terminal the
whole of standard input is one script, and nothing is ever asked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from swe_lightning.errors import UserError
from swe_lightning.recipe import Harness, SandboxSection
from swe_lightning.records import Task
from swe_lightning.sandbox.base import ExecResult, Limits, Sandbox, TreeDiff


def choose(tasks: list[Task], instance_id: str | None, where: str) -> Task:
    """The named task, or the only one."""
    if instance_id is None and len(tasks) == 1:
        return tasks[0]
    found = [t for t in tasks if t.instance_id == instance_id]
    if found:
        return found[0]
    known = ", ".join(t.instance_id for t in tasks[:3]) + (", ..." if len(tasks) > 3 else "")
    wanted = "name one with --task" if instance_id is None else f"no task {instance_id}"
    raise UserError(f"{where}: {wanted} (it holds {known})")


def open_box(task: Task, section: SandboxSection, harness: Harness) -> Sandbox:
    """A box as a rollout of this recipe would get it."""
    from swe_lightning.harness import templates
    from swe_lightning.sandbox import make_backend
    from swe_lightning.sandbox.image_names import task_image
    from swe_lightning.sandbox.trees import agent_tree

    tree = agent_tree(task, show_tests=section.show_tests)
    files = templates.agent_files(harness, task, tree)
    env = templates.agent_env(harness, task)
    return make_backend(section).create(
        tree, env=env, limits=Limits.of(section), label="shell", files=files, image=task_image(task)
    )


def lines(prompt: str) -> Iterator[str]:
    """What a person types, until end of file."""
    import readline  # noqa: F401  (line editing and history)

    while True:
        try:
            line = input(prompt)
        except EOFError:
            sys.stdout.write("\n")
            return
        if line.strip():
            yield line


def talk(box: Sandbox, commands: Iterator[str], timeout_s: float, show: Callable[[ExecResult], None]) -> int:
    """Run each; the exit code of the last."""
    code = 0
    for command in commands:
        result = box.run(command, timeout_s=timeout_s)
        show(result)
        code = result.exit_code
    return code


def changes(diff: TreeDiff) -> str:
    """One line for a person who leaves."""
    return f"{len(diff)} changed: {', '.join(repr(name) for name in list(diff)[:5])}" if diff else "nothing was changed"
