"""Progress of long stages on stderr: a bar with rate and estimate on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Progress:
    """`advance()` after each unit; safe to call from several threads."""

    def __init__(self, bar: Any = None, task: Any = None) -> None:
        self._bar, self._task = bar, task
        self.done = 0

    def advance(self, note: str = "") -> None:
        self.done += 1
        if self._bar is not None:
            self._bar.update(self._task, advance=1, note=note)


@contextmanager
def progress(stage: str, total: int | None) -> Iterator[Progress]:
    """`with progress("validate", 130) as p: ... p.advance()`"""
    started = time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
            meter = Progress(bar, bar.add_task(stage, total=total, note=""))
            yield meter
    else:
        meter = Progress()
        yield meter
    seconds = time.monotonic() - started
    rate = f", {meter.done / seconds:.1f}/s" if meter.done and seconds > 0.5 else ""
    print(f"{stage}: {meter.done} in {seconds:.1f} s{rate}", file=sys.stderr)
