"""Rich views of the data in runs.py, for a terminal. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text


def runs_table(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    if not rows:
        return Text("no runs here")
    table = Table(title="runs")
    table.add_column("run", overflow="fold", min_width=20)  # a path cut off names no run
    for column in ("name", "state", "step", "reward", "val rate", "succeeded", "failed", "open"):
        table.add_column(column)
    for row in rows:
        counts = row["rollouts"]
        unfinished = counts.get("queuing", 0) + counts.get("running", 0)
        states = (counts.get("succeeded", 0), counts.get("failed", 0), unfinished)
        numbers = (_number(row["reward_mean"]), _number(row["val_rate"]), *map(str, states))
        table.add_row(row["path"], row["name"], row["state"], _step(row), *numbers)
    return table


def run_view(data: Mapping[str, Any]) -> RenderableType:
    counts = ", ".join(f"{n} {state}" for state, n in data["rollouts"].items() if n) or "none"
    head = Table.grid(padding=(0, 2))
    for key, value in (
        ("run", data["path"]),
        ("name", data["name"]),
        ("state", f"{data['state']}, step {_step(data)}"),
        ("rollouts", f"{counts}; {data['calls']} model calls"),
        ("no verdict", _counts(data["infra"]) or "none"),
        ("network", f"open to {', '.join(data['whitelist'])}" if data["whitelist"] else "none in any sandbox"),
        ("checkpoints", ", ".join(f"step{s}" for s in data["checkpoints"]) or "none"),
    ):
        head.add_row(Text(key, style="bold"), Text(str(value)))
    parts: list[RenderableType] = [head]
    for mode, outcomes in data["outcomes"].items():
        parts.append(Text(f"{mode} outcomes: {_counts(outcomes)}"))
    if data["history"]:
        parts.append(_history(data["history"]))
    if data["evaluations"]:
        parts.append(_evaluations(data["evaluations"]))
    if data["recent"]:
        parts.append(_recent(data["recent"]))
    return Group(*parts)


def rollout_view(data: Mapping[str, Any]) -> RenderableType:
    rollout, outcome, task = data["rollout"], data["outcome"], data["task"]
    title = f"{rollout['rollout_id']}  {rollout['mode']}  {rollout['state']}  attempt {rollout['attempt']}"
    where = f"{task['instance_id']}" + (f", bug in {task['bug_file']}:{task['bug_line']}" if task["bug_file"] else "")
    parts: list[RenderableType] = [Text(title, style="bold"), Text(where)]
    parts.append(
        Panel(Text(data["issue"].strip() or "(the task has no issue text)"), title="issue", title_align="left")
    )
    parts += [_turn(turn) for turn in data["turns"]]
    parts.append(Panel(Text(_verdict(outcome)), title="outcome", title_align="left"))
    parts += [_row_panel(n, row) for n, row in enumerate(data["rows"])]
    if data["dropped"]:
        parts.append(Text(f"not in a row: {_counts(data['dropped'])}"))
    if data["log_files"]:
        parts.append(Text("files: " + ", ".join(data["log_files"]), style="dim"))
    return Group(*parts)


def _turn(turn: Mapping[str, Any]) -> RenderableType:
    low, high = turn["weight_versions"]
    versions = f"weights {low}" if low == high else f"weights {low} to {high}"
    tokens = f"{turn['prompt_tokens']} + {turn['response_tokens']} tokens, {turn['trained_tokens']} trained"
    facts = [f"call {turn['sequence']}", tokens, versions, f"{turn['seconds']:.2f} s"]
    if turn["logprob_mean"] is not None:
        facts.append(f"log-prob mean {turn['logprob_mean']:.3f}, lowest {turn['logprob_min']:.3f}")
    if not turn["trainable"] or turn["superseded"]:
        facts.append(f"not trained: {turn['reason'] or 'superseded'}")
    body = Text(turn["reply"], style="cyan")
    if turn["observation"] is not None:
        body.append("\n" + turn["observation"], style="default")
    return Panel(body, title=Text(", ".join(facts)), title_align="left")


def _verdict(outcome: Mapping[str, Any]) -> str:
    if not outcome:
        return "not finished"
    if outcome.get("infra_reason"):
        return f"no verdict: {outcome['infra_reason']}: {outcome.get('message', '')}"
    verdict = outcome.get("verdict") or {}
    lines = [f"reward {outcome.get('reward')}  ({outcome.get('exit_status')})  {outcome.get('message', '')}".rstrip()]
    lines += [f"  {'passes' if passed else 'fails '} {test}" for test, passed in (verdict.get("f2p") or {}).items()]
    lines += [f"  broken {test}" for test in (verdict.get("p2p_failed") or [])[:20]]
    tampering = verdict.get("tampering") or {}
    lines += [f"  filtered as tampering: {path} ({why})" for path, why in list(tampering.items())[:20]]
    others = [path for path in verdict.get("dropped_paths") or [] if path not in tampering]
    if others:
        lines.append(f"  dropped before grading: {', '.join(others)}")
    if outcome.get("shaped_reward") is not None:
        lines.append(f"  training uses {outcome['shaped_reward']:.3g} (shaped)")
    return "\n".join(lines)


def _row_panel(number: int, row: Mapping[str, Any]) -> RenderableType:
    title = f"row {number}: {row['tokens']} tokens, {row['trained']} trained, calls {row['calls']}"
    text = Text()
    for segment in row["segments"]:
        ids = f"[{segment['end'] - segment['start']} tokens]"
        text.append(segment["text"] or ids, style="bold green" if segment["trained"] else "dim")
    return Panel(text, title=Text(title), title_align="left")


def _history(history: Sequence[Mapping[str, Any]]) -> Table:
    keys = [k for k in ("step", "reward_mean", "val_rate", "loss", "grad_norm", "graded", "rollouts", "seconds")]
    keys = [k for k in keys if any(m.get(k) is not None for m in history)]
    table = Table(title="last steps")
    for key in keys:
        table.add_column(key)
    for record in history:
        table.add_row(*(_number(record.get(key)) for key in keys))
    return table


def _evaluations(evaluations: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="evaluations")
    for column in ("label", "resolved", "rate", "95 % interval", "no verdict"):
        table.add_column(column)
    for e in evaluations:
        interval = f"{e['low']:.3f} to {e['high']:.3f}"
        cells = (f"{e['resolved']}/{e['graded']}", _number(e["rate"]), interval, _counts(e["infra"]) or "0")
        table.add_row(e["label"], *cells)
    return table


def _recent(recent: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="newest rollouts (swel runs show RUN ROLLOUT follows one)")
    for column in ("rollout", "mode", "state", "attempt", "reward", "why"):
        table.add_column(column)
    for r in recent:
        cells = (r["mode"], r["state"], str(r["attempt"]), _number(r["reward"]), r["message"])
        table.add_row(Text(r["rollout_id"]), *map(Text, cells))
    return table


def _step(row: Mapping[str, Any]) -> str:
    return str(row["step"]) if row["steps"] is None else f"{row['step']}/{row['steps']}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(counts.items(), key=lambda item: -item[1]))


def _number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
