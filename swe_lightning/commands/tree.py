"""Help for people who look for a command: `swel --help` shows the whole tree, each command with its first sentence."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class TreeGroup(TyperGroup):
    """A group whose help lists the commands of its groups too."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = list(_rows(self, ctx, ()))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _rows(group: Any, ctx: Any, path: tuple[str, ...]) -> Any:
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        if command is None or command.hidden:
            continue
        if hasattr(command, "list_commands"):
            yield from _rows(command, ctx, (*path, name))
        else:
            yield " ".join((*path, name)), command.get_short_help_str(limit=90)
