"""Export and import: identical token for token, streaming, all or nothing."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from swe_lightning.errors import DataError
from swe_lightning.gateway import compact, schema, transfer
from swe_lightning.gateway.store import Store
from swe_lightning.records import InfraReason, ModelCall, Outcome, Rollout

from .postgres import Postgres, database, server, text  # noqa: F401
from .test_compact import histories

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def opened(folder: str | Path, name: str = "gateway") -> Store:
    return Store(f"sqlite:///{Path(folder) / name}.db", linger_s=0)


def record(store: Store, calls: list[ModelCall], task: Any, data: Any) -> None:
    def everything(tx: Any) -> None:
        store.create_rollouts([Rollout(rollout_id=n, group_id="g", task=task) for n in ("r", "s", "open")])(tx)
        store.claim("r", "w", "")(tx)
        for number, call in enumerate(calls):
            call.call_id, call.attempt = f"c{number}", 1
            call.logprobs = [float("-inf") if number == 2 else -0.1 * (i + 1) for i in range(len(call.response_ids))]
            store.record_call(call)(tx)
            store.add_event("r", 1, "note", {"data": data}, f"e{number}")(tx)
        store.report("r", 1, Outcome(reward=0.5))(tx)
        store.claim("s", "w", "")(tx)
        store.report("s", 1, Outcome(infra_reason=InfraReason.WORKER_LOST))(tx)
        store.save_model({"url": "http://m", "name": "policy", "version": 3, "max_context": None})(tx)
        store.set_meta("paused", "1")(tx)

    store.writer.call(everything)


def lines_of(store: Store) -> list[bytes]:
    return list(transfer.export(store.engine))


@settings(max_examples=20, deadline=None)
@given(histories(), st.dictionaries(st.text(), json_values, max_size=3), json_values)
def test_an_import_is_what_was_exported(calls: list[ModelCall], task: Any, data: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        a, b = opened(folder, "a"), opened(folder, "b")
        record(a, calls, task, data)
        lines = lines_of(a)
        transfer.restore(b.engine, lines, "file")
        assert lines_of(b) == lines
        for before, after in zip(a.call_rows("r", 1), b.call_rows("r", 1), strict=True):
            for column in ("prompt", "response", "logprobs", "parent", "shared", "shared_messages"):
                assert after[column] == before[column]
        made = [(c.prompt_ids.tolist(), c.request) for c in compact.decode(b.call_rows("r", 1))]
        assert made == [(list(c.prompt_ids), c.request) for c in calls]
        assert b.events("r") == a.events("r")
        assert b.terminal(0, 9) == a.terminal(0, 9)
        assert b.list_rollouts(None, None, 9) == a.list_rollouts(None, None, 9)
        a.close()
        b.close()


def some_calls(count: int = 5) -> list[ModelCall]:
    return [
        ModelCall("r", list(range(20 + 2 * i)), [20 + 2 * i], [], sequence=i, request={"messages": []})
        for i in range(count)
    ]


def test_sqlite_to_postgres_and_back_and_then_on(database: str, tmp_path: Path) -> None:  # noqa: F811
    a, b, c = opened(tmp_path, "a"), Store(database, linger_s=0), opened(tmp_path, "c")
    record(a, some_calls(), {"ä": "Z", "B": 1}, None)
    lines = lines_of(a)
    b.writer.call(b.set_meta("paused", "0"))  # as each gateway of a database does before its first call
    transfer.restore(b.engine, lines, "file")
    assert lines_of(b) == lines
    transfer.restore(c.engine, lines_of(b), "file")
    assert lines_of(c) == lines
    new = b.writer.call(b.create_rollouts([Rollout(rollout_id="new", group_id="g")]))[0][0]
    assert [r.rollout_id for r in b.list_rollouts(None, None, 9)] == ["r", "s", "open", new.rollout_id]
    assert b.writer.call(b.claim("open", "w", "")).attempt == 1
    for store in (a, b, c):
        store.close()


def test_the_order_of_lines_is_no_matter_of_the_databases_language(server: Postgres, tmp_path: Path) -> None:  # noqa: F811
    """By English rules a, B, c; by bytes B, a, c."""
    english = text(server.create("TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'en-US'"))
    a, b = opened(tmp_path, "a"), Store(english, linger_s=0)
    for name in ("c", "B", "a"):
        a.writer.call(a.create_rollouts([Rollout(rollout_id=name, group_id="g")]))
        a.writer.call(a.claim(name, "w", "same"))
        a.writer.call(a.save_model({"url": f"http://{name}", "name": "policy", "version": 1, "max_context": None}))
    transfer.restore(b.engine, lines_of(a), "file")
    assert lines_of(b) == lines_of(a)
    a.close()
    b.close()


def test_an_export_is_one_snapshot_and_holds_no_key(database: str, tmp_path: Path) -> None:  # noqa: F811
    for store in (opened(tmp_path, "a"), Store(database, linger_s=0)):
        record(store, some_calls(), {}, None)
        store.belong_to("fingerprint")
        whole = lines_of(store)
        lines = transfer.export(store.engine)
        begun = [next(lines) for _ in range(2)]
        late = [Rollout(rollout_id="late", group_id="g", task={"new": 1})]
        store.writer.call(store.create_rollouts(late))
        store.writer.call(store.set_meta("late", "1"))
        assert [*begun, *lines] == whole
        assert b"fingerprint" not in b"".join(whole)
        assert len(lines_of(store)) == len(whole) + 3
        store.close()


def test_a_file_that_is_cut_or_changed_imports_nothing(tmp_path: Path) -> None:
    a, b = opened(tmp_path, "a"), opened(tmp_path, "b")
    record(a, some_calls(), {"k": "v"}, None)
    lines = lines_of(a)
    last = len(lines)
    broken: dict[str, list[bytes]] = {
        f"ends after line {last - 1}": lines[:-1],
        "ends after line 0": [],
        "line 4 is not complete": [*lines[:3], lines[3][:-5]],
        f"line {last - 1} counts": [*lines[:4], *lines[5:]],
        "this content was changed": [line.replace(b'"v"', b'"w"') for line in lines],
        "this rollout was changed": [line.replace(b'"group_id":"g",', b"") for line in lines],
        "line 3 is not a line": [*lines[:2], b"[]\n", *lines[2:]],
        "schema 99": [b'{"store":"swel","schema":99}\n', *lines[1:]],
        f"line {last + 1} comes after": [*lines, lines[-1]],
    }
    for words, wrong in broken.items():
        with pytest.raises(DataError, match=words):
            transfer.restore(b.engine, wrong, "file")
        assert b.list_rollouts(None, None, 9) == []
        with b.engine.connect() as c:
            assert c.execute(sa.select(schema.contents)).first() is None
    transfer.restore(b.engine, lines, "file")
    with pytest.raises(DataError, match="not empty"):
        transfer.restore(b.engine, lines, "file")
    a.close()
    b.close()


def test_an_import_waits_for_who_writes_and_then_sees_it(database: str, tmp_path: Path) -> None:  # noqa: F811
    a, b = opened(tmp_path, "a"), Store(database, linger_s=0)
    record(a, some_calls(), {}, None)
    lines = lines_of(a)
    with ThreadPoolExecutor(1) as pool:

        def meanwhile(tx: Any) -> Any:
            importing = pool.submit(transfer.restore, b.engine, lines, "file")
            time.sleep(0.3)
            b.create_rollouts([Rollout(rollout_id="first", group_id="g")])(tx)
            return importing, importing.done()

        importing, done = b.writer.call(meanwhile)
        assert not done
        with pytest.raises(DataError, match="not empty"):
            importing.result()
    a.close()
    b.close()


def test_data_that_looks_like_the_files_own_marks_is_data(tmp_path: Path) -> None:
    a, b = opened(tmp_path, "a"), opened(tmp_path, "b")
    marks = {transfer._RAW: "AAAA"}
    record(a, some_calls(), marks, marks)
    a.writer.call(a.create_rollouts([Rollout(rollout_id="marks", group_id="g", task=marks)]))
    transfer.restore(b.engine, lines_of(a), "file")
    assert b.get_rollout("marks").task == marks
    assert lines_of(b) == lines_of(a)
    a.close()
    b.close()


def test_memory_stays_flat(tmp_path: Path) -> None:
    a, b = opened(tmp_path, "a"), opened(tmp_path, "b")
    large = "".join(chr(65 + i * i % 57) for i in range(40_000))
    record(a, [], {}, None)
    new = [Rollout(rollout_id=f"x{i}", group_id="g", task={"i": i, "text": large}) for i in range(500)]
    a.writer.call(a.create_rollouts(new))
    del new
    tracemalloc.start()
    transfer.restore(b.engine, transfer.export(a.engine), "file")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 17 * 2**20  # some copies of a block; the store holds 20 MB
    a.close()
    b.close()


def swel(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", "gateway", *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


def test_the_commands(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    store = opened(run)
    record(store, some_calls(), {}, None)
    expected = b"".join(lines_of(store))
    store.close()
    for name in ("x.jsonl", "x.jsonl.zst"):
        assert swel("export", run, tmp_path / name).returncode == 0
        assert swel("import", tmp_path / name, tmp_path / f"from-{name}").returncode == 0
        again = opened(tmp_path / f"from-{name}")
        assert b"".join(lines_of(again)) == expected
        again.close()
    assert (tmp_path / "x.jsonl").read_bytes() == expected
    data = (tmp_path / "x.jsonl.zst").read_bytes()
    (tmp_path / "cut.jsonl.zst").write_bytes(data[: len(data) // 2])
    (tmp_path / "bad.jsonl.zst").write_bytes(data[:20] + b"\0" * 40 + data[60:])
    for source, target, words in (
        ("cut.jsonl.zst", "new", "cut"),
        ("bad.jsonl.zst", "new", "bad.jsonl.zst"),
        ("x.jsonl", "run", "not empty"),
        ("none.jsonl", "new", "no file"),
    ):
        done = swel("import", tmp_path / source, tmp_path / target)
        assert (done.returncode, len(done.stderr.strip().splitlines())) == (2, 1), done.stderr
        assert words in done.stderr
        assert not (tmp_path / "new").exists()
    assert swel("export", run, tmp_path / "x.jsonl").returncode == 2
