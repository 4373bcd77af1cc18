"""Store -> rows -> tensors, beside a straightforward list-based merge against the previous call only.

    python benchmarks/trajectory.py [--rollouts 128] [--turns 50] [--tokens 30000] [--json]

One synthetic step: every rollout takes `turns` calls and grows to `tokens` tokens; the second case adds two sub-agents
interleaved with the main agent. Both sides read the same calls from SQLite, each in its own form (lists as JSON; packed
ids of which a call stores only what it adds to an earlier one), and end with packed arrays. Each measurement is a
process of its own: seconds of CPU time (best of three for the short ones), peak resident memory above the imports.
A third case keeps the turns and doubles the tokens, a fourth keeps the tokens and doubles the turns: cost is a constant
per unique token plus a constant per call.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from swe_lightning.objective.tensors import packed
from swe_lightning.records import ModelCall
from swe_lightning.trajectory import rows_of
from swe_lightning.trajectory.prefix_tree import Delta

Step = tuple[int, int, np.ndarray, np.ndarray]
"""One call as generated: position of the call it continues (-1 none), tokens of it shared, new prompt ids, response."""


def conversation(rng: np.random.Generator, turns: int, tokens: int, agents: int) -> list[Step]:
    """`agents` interleaved conversations over `turns` calls that together add `tokens` tokens."""
    last, length, steps = [-1] * agents, [0] * agents, []
    per_call = tokens // turns
    for turn in range(turns):
        agent = turn % agents
        ids = rng.integers(0, 150_000, per_call, dtype=np.int32)
        response = ids[: per_call // 3]
        steps.append((last[agent], length[agent], ids[per_call // 3 :], response))
        last[agent], length[agent] = turn, length[agent] + per_call
    return steps


def fill(path: Path, rollouts: int, turns: int, tokens: int, agents: int, form: str) -> None:
    """Write one step's calls in the form the measured side reads."""
    db = sqlite3.connect(path)
    columns = "rollout int, sequence int, base int, shared int, prompt blob, response blob, lp blob"
    db.execute(f"create table calls ({columns}, primary key (rollout, sequence))")
    for rollout in range(rollouts):
        steps = conversation(np.random.default_rng(rollout), turns, tokens, agents)
        whole: list[np.ndarray] = []
        for i, (base, shared, tail, response) in enumerate(steps):
            prompt = np.concatenate((whole[base], tail)) if base >= 0 else tail
            whole.append(np.concatenate((prompt, response)))
            lp = np.full(len(response), -0.5, dtype=np.float32)
            row: tuple = (tail.tobytes(), response.tobytes(), lp.tobytes())
            if form == "full":
                base, shared, row = -1, 0, (prompt.tobytes(), response.tobytes(), lp.tobytes())
            elif form == "lists":
                row = tuple(json.dumps(x.tolist()) for x in (prompt, response, lp))
            db.execute("insert into calls values (?, ?, ?, ?, ?, ?, ?)", (rollout, i, base, shared, *row))
        db.commit()
    db.close()


def read(path: Path) -> Iterator[list[tuple]]:
    """Stored calls, one rollout after the other."""
    db = sqlite3.connect(path)
    for (rollout,) in db.execute("select distinct rollout from calls order by rollout").fetchall():
        yield db.execute("select * from calls where rollout = ? order by sequence", (rollout,)).fetchall()
    db.close()


def ours(path: Path) -> tuple[int, int, int]:
    """(rows, tokens, trained tokens) of the packed step."""
    rows = []
    for stored in read(path):
        calls = [
            ModelCall(str(r), Delta(base, shared, prompt), response, lp, sequence=i)
            for r, i, base, shared, prompt, response, lp in stored
        ]
        rows += rows_of(calls).rows
    arrays = packed(rows)
    return len(rows), len(arrays["ids"]), int(arrays["mask"].sum())


Call = tuple[int, list[int], list[int], list[float]]


def straightforward(path: Path) -> tuple[int, int, int]:
    """Lists all the way: load the step's calls, join each to the row before it if that is a prefix, concatenate."""
    return _merge_lists([call for stored in read(path) for call in _parse(stored)])


def straightforward_streamed(path: Path) -> tuple[int, int, int]:
    """The same, but never more than one rollout's calls in memory."""
    return _merge_lists(call for stored in read(path) for call in _parse(stored))


def _parse(stored: list[tuple]) -> list[Call]:
    return [(r, json.loads(p), json.loads(c), json.loads(lp)) for r, _, _, _, p, c, lp in stored]


def _merge_lists(calls: Iterable[Call]) -> tuple[int, int, int]:
    rows: list[Call] = []
    for rollout, prompt, response, lp in calls:
        if not (rows and rows[-1][0] == rollout and prompt[: len(rows[-1][1])] == rows[-1][1]):
            rows.append((rollout, [], [], []))
        _, ids, mask, logprobs = rows[-1]
        new = prompt[len(ids) :]
        ids += new + response
        mask += [0] * len(new) + [1] * len(response)
        logprobs += [0.0] * len(new) + lp
    flat = [np.array([x for row in rows for x in row[k]]) for k in (1, 2, 3)]
    return len(rows), len(flat[0]), int(flat[1].sum())


def measure(side: str, path: Path) -> dict[str, float]:
    """Run one side in a fresh process."""
    code = (
        "import json, resource, sys, time; from pathlib import Path\n"
        "from benchmarks.trajectory import ours, straightforward, straightforward_streamed\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; s = []\n"
        f"for _ in range({3 if side == 'ours' else 1}):\n"
        f"    t = time.process_time(); rows, tokens, trained = {side}(Path(sys.argv[1]))\n"
        "    s.append(time.process_time() - t)\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "print(json.dumps({'rows': rows, 'tokens': tokens, 'trained': trained, 'seconds': min(s), 'mb': peak / 1024}))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def case(name: str, rollouts: int, turns: int, tokens: int, agents: int, sides: dict[str, tuple[str, str]]) -> dict:
    """Fill a store per side and measure; prints a line as soon as one is known."""
    result = {}
    for label, (side, form) in sides.items():
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "calls.db"
            fill(path, rollouts, turns, tokens, agents, form)
            result[label] = {**measure(side, path), "store_mb": path.stat().st_size / 2**20}
        r = result[label]
        print(
            f"{name:<24} {label:<16} {r['seconds']:8.2f} s {r['mb']:8.0f} MB  {r['rows'] / rollouts:6.2f} rows/rollout"
            f"  {r['tokens']:>12,} tokens  store {r['store_mb']:7.0f} MB",
            file=sys.stderr,
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rollouts", type=int, default=128)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    both = {
        "ours": ("ours", "delta"),
        "ours, full ids": ("ours", "full"),
        "lists": ("straightforward", "lists"),
        "lists, streamed": ("straightforward_streamed", "lists"),
    }
    ours_only = {"ours": ("ours", "delta")}
    found = {
        "one agent": case("one agent", a.rollouts, a.turns, a.tokens, 1, both),
        "two sub-agents": case("two sub-agents", a.rollouts, a.turns, a.tokens, 3, both),
        "twice the tokens": case("twice the tokens", a.rollouts, a.turns, 2 * a.tokens, 1, ours_only),
        "twice the turns": case("twice the turns", a.rollouts, 2 * a.turns, a.tokens, 1, ours_only),
    }
    for name in ("one agent", "two sub-agents"):
        us, lists = found[name]["ours"], found[name]["lists"]
        ratio = f"{lists['seconds'] / us['seconds']:.0f} x faster, {us['mb'] / lists['mb']:.3f} of the memory"
        print(f"{name}: {ratio}", file=sys.stderr)
    for name in ("twice the tokens", "twice the turns"):
        growth = found[name]["ours"]["seconds"] / found["one agent"]["ours"]["seconds"]
        print(f"{name}: {growth:.2f} x the time", file=sys.stderr)
    if a.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
