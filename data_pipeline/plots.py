"""Pictures of a filtered set, drawn from its report alone: the funnel, and four histograms.

The same report gives the same bytes under the same version of matplotlib: fixed style and font, nothing of the user's
configuration, no dates. Drawn without a display, and imported late: matplotlib takes a second to load.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

FUNNEL, HISTOGRAMS = "funnel.png", "histograms.png"
KEPT, CAME, VAL, TEXT = "#1f5f8b", "#c9d6df", "#e08e45", "#333333"
REPOSITORIES_SHOWN = 18
LOG_RATIO = 100
"""Counts that differ more than so many times are drawn on a logarithmic axis."""


def draw(report: Mapping[str, Any]) -> dict[str, bytes]:
    """File name -> PNG."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
        return {FUNNEL: _funnel(report), HISTOGRAMS: _histograms(report)}


def load() -> None:
    """Import what drawing needs, ahead of the drawing."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Any) -> bytes:
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine("none")  # else saving lays it out again, after drawing it once to no purpose
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()


def _funnel(report: Mapping[str, Any]) -> bytes:
    stages = report["funnel"]
    names = ["rows in", *(stage["stage"] for stage in stages)]
    after = [report["rows_in"], *(stage["out"] for stage in stages)]
    before = [report["rows_in"], *(stage["in"] for stage in stages)]
    figure = _figure(8, 1.3 + 0.42 * len(names))
    axes = figure.subplots()
    places = range(len(names))
    axes.barh(places, before, color=CAME, label="left at this stage")
    axes.barh(places, after, color=KEPT, label="still in")
    for place, was, now in zip(places, before, after, strict=True):
        text = f"{now:,}" + (f"   \N{MINUS SIGN}{was - now:,}" if was != now else "")
        axes.annotate(text, (was, place), (5, 0), textcoords="offset points", va="center", color=TEXT)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlim(0, report["rows_in"] * 1.22)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("rows")
    axes.set_title(
        f"{report['rows_in']:,} rows in, {report['train']:,} train, {report['val']:,} validation", loc="left"
    )
    axes.legend(loc="lower right", frameon=False)
    return _png(figure)


def _histograms(report: Mapping[str, Any]) -> bytes:
    found = report["histograms"]
    figure = _figure(12, 8)
    # A panel is a figure of its own: the long names of one must not narrow the others.
    tests, lengths, rates, repositories = (panel.subplots() for panel in figure.subfigures(2, 2).flat)
    _bars(tests, found["tests"], "Tests per task", "FAIL_TO_PASS + PASS_TO_PASS")
    _bars(lengths, found["issue_chars"], "Issue text", "characters")
    if "solve_rate" in found:
        label = "% of graded rollouts that solved the task (mixed tasks stop early)"
        _bars(rates, found["solve_rate"], "Solve rate of the probe", label)
    else:
        _empty(rates, "Solve rate of the probe", "no difficulty probe")
    _repositories(repositories, report["repositories"])
    return _png(figure)


def _legend(axes: Any) -> None:
    """On the line of the title, where it hides nothing."""
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, borderaxespad=0.2)


def _bars(axes: Any, bins: Sequence[Sequence[Any]], title: str, label: str) -> None:
    labels, came, stayed = zip(*bins, strict=True)
    places = range(len(labels))
    for offset, counts, color, name in ((-0.2, came, CAME, "came in"), (0.2, stayed, KEPT, "stayed")):
        bars = axes.bar([place + offset for place in places], counts, 0.4, color=color, label=name)
        axes.bar_label(bars, [_short(n) if n else "" for n in counts], fontsize=7, color=TEXT, padding=1)
    axes.set_xticks(places, labels, rotation=40 if len(labels) > 7 else 0, ha="right" if len(labels) > 7 else "center")
    if _wide([*came, *stayed]):
        axes.set_yscale("log")
        axes.set_ylim(0.7, max(came) * 3)
        axes.set_ylabel("tasks (log scale)")
    else:
        axes.set_ylim(0, max([*came, 1]) * 1.12)
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.set_ylabel("tasks")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_title(title, loc="left")
    axes.set_xlabel(label)
    _legend(axes)


def _wide(counts: Sequence[int]) -> bool:
    some = [count for count in counts if count]
    return bool(some) and max(some) > LOG_RATIO * min(some)


def _short(count: int) -> str:
    """At most four characters, so that counts of neighbours do not run into each other."""
    if count < 1000:
        return str(count)
    return f"{count / 1000:.1f}k" if count < 9950 else f"{count / 1000:.0f}k"


def _repositories(axes: Any, table: Mapping[str, Mapping[str, int]]) -> None:
    ordered = sorted(table.items(), key=lambda item: (-item[1]["train"] - item[1]["val"], item[0]))
    shown, rest = ordered[:REPOSITORIES_SHOWN], ordered[REPOSITORIES_SHOWN:]
    if len(rest) == 1:
        shown, rest = ordered, []
    names = [_cut(name) for name, _ in shown]
    train, val = ([sides[side] for _, sides in shown] for side in ("train", "val"))
    places = range(len(names))
    axes.barh(places, train, color=KEPT, label="train")
    axes.barh(places, val, left=train, color=VAL, label="validation")
    for place, one, two in zip(places, train, val, strict=True):
        axes.annotate(f"{one:,} + {two:,}", (one + two, place), (4, 0), textcoords="offset points", va="center", size=7)
    axes.set_yticks(places, names, fontsize=7 if len(names) > 10 else 9)
    axes.set_ylim(max(len(names), 5) - 0.4, -0.6)
    axes.set_xlim(0, max([a + b for a, b in zip(train, val, strict=True)] or [1]) * 1.18)
    axes.xaxis.get_major_locator().set_params(integer=True)
    more = sum(sides["train"] + sides["val"] for _, sides in rest)
    axes.set_xlabel("tasks that stayed" + (f" (the largest; {more:,} more in {len(rest)} others)" if rest else ""))
    axes.set_title(f"Repositories ({len(ordered)})", loc="left")
    _legend(axes)


def _cut(name: str, limit: int = 38) -> str:
    return name if len(name) <= limit else f"{name[: limit // 2 - 1]}\N{HORIZONTAL ELLIPSIS}{name[-limit // 2 :]}"


def _empty(axes: Any, title: str, text: str) -> None:
    axes.set_title(title, loc="left")
    axes.text(0.5, 0.5, text, ha="center", va="center", color="#888888", transform=axes.transAxes)
    axes.set_axis_off()
