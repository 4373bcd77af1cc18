"""Store -> rows -> tensors, beside a straightforward list-based merge against the previous call only.

    python benchmarks/trajectory.py [--rollouts 128] [--turns 50] [--tokens 30000] [--json]

One synthetic step: every rollout takes `turns` calls and grows to `tokens` tokens; the second case adds two sub-agents
interleaved with the main agent. Our side reads the gateway's own store, with prompts as stored (`ours`) or rebuilt in
full (`ours_full`). The other side is what one writes first: the same calls as JSON lists in SQLite, all of them loaded,
merged and concatenated; `_streamed` holds one rollout's calls at a time. All end with packed ids, mask and log-probs.
Each measurement is a process of its own: seconds of CPU time (best of three for ours), peak resident memory above the
imports. A third case doubles the tokens, a fourth the turns: cost is a constant per unique token plus one per call.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from swe_lightning.gateway.store import Store
from swe_lightning.monitor.store import open_store
from swe_lightning.objective.tensors import Packer
from swe_lightning.records import ModelCall, Rollout
from swe_lightning.trajectory import rows_of

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


def calls_of(rollout: int, turns: int, tokens: int, agents: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(prompt, response, log-probs) of each call of one rollout."""
    whole: list[np.ndarray] = []
    for base, _, tail, response in conversation(np.random.default_rng(rollout), turns, tokens, agents):
        prompt = np.concatenate((whole[base], tail)) if base >= 0 else tail
        whole.append(np.concatenate((prompt, response)))
        yield prompt, response, np.full(len(response), -0.5, dtype=np.float32)


def fill_store(place: Path, rollouts: int, turns: int, tokens: int, agents: int) -> None:
    """One step's calls in the product's own store."""
    store = Store(f"sqlite:///{place / 'gateway.db'}")
    names = [f"r{i}" for i in range(rollouts)]
    store.writer.call(store.create_rollouts([Rollout(rollout_id=n, group_id="g") for n in names]))
    for number, name in enumerate(names):
        store.writer.call(store.claim(name, "w", ""))
        recorded = [
            store.record_call(ModelCall(name, prompt, response, lp, call_id=str(i)))
            for i, (prompt, response, lp) in enumerate(calls_of(number, turns, tokens, agents))
        ]
        store.writer.call(lambda tx, all_calls=recorded: [record(tx) for record in all_calls][-1])
    store.close()


def fill_lists(place: Path, rollouts: int, turns: int, tokens: int, agents: int) -> None:
    """The same calls as JSON lists."""
    db = sqlite3.connect(place / "calls.db")
    db.execute("create table calls (rollout int, sequence int, prompt text, response text, lp text)")
    for rollout in range(rollouts):
        for i, columns in enumerate(calls_of(rollout, turns, tokens, agents)):
            db.execute(
                "insert into calls values (?, ?, ?, ?, ?)", (rollout, i, *(json.dumps(x.tolist()) for x in columns))
            )
    db.execute("create index one on calls (rollout, sequence)")
    db.commit()
    db.close()


def ours(place: Path, *, deltas: bool = True) -> tuple[int, int, int]:
    """(rows, tokens, trained tokens) of the packed step."""
    packer = Packer()
    with open_store(place) as store:
        for name in [row["rollout_id"] for row in store.outcomes()]:
            packer.add(rows_of(store.calls(name, 1, deltas=deltas)).rows)
    arrays = packer.arrays()
    return len(arrays["cu_seqlens"]) - 1, len(arrays["ids"]), int(arrays["mask"].sum())


def ours_full(place: Path) -> tuple[int, int, int]:
    """The same with every prompt rebuilt in full before merging."""
    return ours(place, deltas=False)


Call = tuple[int, list[int], list[int], list[float]]


def straightforward(place: Path) -> tuple[int, int, int]:
    """Lists all the way: load the step's calls, join each to the row before it if that is a prefix, concatenate."""
    return _merge_lists(list(_read_lists(place)))


def straightforward_streamed(place: Path) -> tuple[int, int, int]:
    """The same, but never more than one rollout's calls in memory."""
    return _merge_lists(_read_lists(place))


def _read_lists(place: Path) -> Iterator[Call]:
    db = sqlite3.connect(place / "calls.db")
    for (rollout,) in db.execute("select distinct rollout from calls order by rollout").fetchall():
        query = "select prompt, response, lp from calls where rollout = ? order by sequence"
        for prompt, response, lp in db.execute(query, (rollout,)):
            yield rollout, json.loads(prompt), json.loads(response), json.loads(lp)
    db.close()


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


def memory_mb(field: str, *, reset: bool = False) -> float:
    """VmRSS (now) or VmHWM (highest since the last reset) of this process; importing has a peak of its own."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    text = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(field))) / 1024


def measure(side: str, place: Path) -> dict[str, float]:
    """Run one side in a fresh process."""
    code = (
        "import json, sys, time; from pathlib import Path\n"
        "from benchmarks import trajectory as t\n"
        "before, s = t.memory_mb('VmRSS', reset=True), []\n"
        f"for _ in range({3 if side.startswith('ours') else 1}):\n"
        f"    start = time.process_time(); rows, tokens, trained = t.{side}(Path(sys.argv[1]))\n"
        "    s.append(time.process_time() - start)\n"
        "mb = t.memory_mb('VmHWM') - before\n"
        "print(json.dumps({'rows': rows, 'tokens': tokens, 'trained': trained, 'seconds': min(s), 'mb': mb}))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(place)], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def case(rollouts: int, turns: int, tokens: int, agents: int, sides: Sequence[str]) -> dict[str, dict[str, float]]:
    """Fill the stores the sides read and measure each side."""
    result = {}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        fill_store(place, rollouts, turns, tokens, agents)
        if any(side.startswith("straight") for side in sides):
            fill_lists(place, rollouts, turns, tokens, agents)
        for side in sides:
            file = place / ("gateway.db" if side.startswith("ours") else "calls.db")
            result[side] = {**measure(side, place), "store_mb": file.stat().st_size / 2**20}
            result[side]["rows_per_rollout"] = result[side]["rows"] / rollouts
    return result


def show(found: dict[str, dict[str, dict[str, float]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    titles = ("case", "side", "CPU s", "peak MB", "rows/rollout", "store MB", "ours is faster", "ours uses")
    table = Table(*titles, title="store -> rows -> packed arrays")
    for name, sides in found.items():
        ours = sides["ours"]
        for side, r in sides.items():
            ratio = ("", "")
            if side.startswith("straight"):
                ratio = (f"{r['seconds'] / ours['seconds']:.0f} x", f"{ours['mb'] / r['mb']:.3f} of it")
            sizes = (f"{r['seconds']:.2f}", f"{r['mb']:.0f}", f"{r['rows_per_rollout']:.2f}", f"{r['store_mb']:.0f}")
            table.add_row(name, side, *sizes, *ratio)
    Console(width=130).print(table)
    one = found["one agent"]["ours"]["seconds"]
    for name in ("twice the tokens", "twice the turns"):
        print(f"{name}: {found[name]['ours']['seconds'] / one:.2f} x the time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rollouts", type=int, default=128)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    sides = ("ours", "ours_full", "straightforward", "straightforward_streamed")
    found = {
        "one agent": case(a.rollouts, a.turns, a.tokens, 1, sides),
        "two sub-agents": case(a.rollouts, a.turns, a.tokens, 3, sides),
        "twice the tokens": case(a.rollouts, a.turns, 2 * a.tokens, 1, ("ours",)),
        "twice the turns": case(a.rollouts, 2 * a.turns, a.tokens, 1, ("ours",)),
    }
    if a.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)


if __name__ == "__main__":
    main()
