"""What a log without a terminal shows of a long stage."""

from __future__ import annotations

import pytest

from data_pipeline.progress import EVERY_S, Progress, line, progress


@pytest.mark.parametrize(
    ("done", "total", "seconds", "text"),
    [
        (40, 130, 80, "x: 40 of 130 in 80 s, 0.5/s, about 3 min left"),
        (0, 130, 80, "x: 0 of 130 in 80 s"),
        (130, 130, 13, "x: 130 of 130 in 13 s, 10/s"),
        (5000, None, 2, "x: 5000 in 2 s, 2,500/s"),
        (1, 100, 400, "x: 1 of 100 in 7 min, 0.15/min, about 11.0 h left"),
    ],
)
def test_line(done: int, total: int | None, seconds: float, text: str) -> None:
    assert line("x", done, total, seconds) == text


def test_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    meter = Progress("probe", 100, clock=lambda: now[0])
    for _ in range(100):
        now[0] += EVERY_S / 10
        meter.advance()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0] == "probe: 10 of 100 in 10 s, 1/s, about 90 s left"
    now[0] += EVERY_S
    meter.note("3 tried in vain")
    assert capsys.readouterr().err == "probe: 100 of 100 in 2 min, 0.91/s, 3 tried in vain\n"


def test_a_short_stage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("rows", 3) as meter:
        for _ in range(3):
            meter.advance()
    assert capsys.readouterr().err == "rows: 3 in 0.0 s\n"
