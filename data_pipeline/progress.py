"""Progress of long stages on stderr, with rate and estimate: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

EVERY_S = 10.0
"""Between two lines of one stage where there is no terminal."""


class Progress:
    """`advance()` after each unit; safe to call from several threads."""

    def __init__(self, stage: str, total: int | None, bar: Any = None, *, clock: Any = time.monotonic) -> None:
        self._stage, self.total, self._bar, self._clock = stage, total, bar, clock
        self._task = bar.add_task(stage, total=total, note="") if bar is not None else None
        self._lock = threading.Lock()
        self.started = self._told = clock()
        self.done = 0

    def advance(self, note: str = "") -> None:
        with self._lock:
            self.done += 1
        if self._bar is not None:
            self._bar.update(self._task, advance=1, note=note)
        else:
            self._tell()

    def note(self, text: str) -> None:
        """Something happened that is no unit of its own."""
        if self._bar is not None:
            self._bar.update(self._task, note=text)
        else:
            self._tell(text)

    def _tell(self, note: str = "") -> None:
        now = self._clock()
        if now - self._told < EVERY_S:
            return
        with self._lock:
            if now - self._told < EVERY_S:
                return
            self._told = now
        print(line(self._stage, self.done, self.total, now - self.started, note), file=sys.stderr, flush=True)


def line(stage: str, done: int, total: int | None, seconds: float, note: str = "") -> str:
    """What a log shows while a stage runs: `validate: 40 of 130 in 80 s, 0.50/s, about 3 min left`."""
    of = f" of {total}" if total is not None else ""
    parts = [f"{stage}: {done}{of} in {span(seconds)}"]
    if done and seconds:
        parts.append(rate(done / seconds))
        if total is not None and total > done:
            parts.append(f"about {span((total - done) * seconds / done)} left")
    return ", ".join([*parts, *([note] if note else [])])


def rate(per_second: float) -> str:
    if per_second >= 0.1:
        return f"{per_second:,.0f}/s" if per_second >= 100 else f"{per_second:.2g}/s"
    return f"{per_second * 60:.2g}/min"


def span(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@contextmanager
def progress(stage: str, total: int | None) -> Iterator[Progress]:
    """`with progress("validate", 130) as p: ... p.advance()`"""
    if sys.stderr.isatty():
        with _bar() as bar:
            meter = Progress(stage, total, bar)
            yield meter
    else:
        meter = Progress(stage, total)
        yield meter
    seconds = time.monotonic() - meter.started
    speed = f", {rate(meter.done / seconds)}" if meter.done and seconds > 0.5 else ""
    print(f"{stage}: {meter.done} in {seconds:.1f} s{speed}", file=sys.stderr)


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.progress import Progress as RichProgress
    from rich.progress import TimeRemainingColumn as Left
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text(rate(speed) if speed else "")

    described, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
    columns = (SpinnerColumn(), described, BarColumn(), MofNCompleteColumn(), Rate(), Left(), note)
    return RichProgress(*columns, console=Console(stderr=True), transient=True)
