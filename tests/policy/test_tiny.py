"""The tiny policy's tokenizer and template: bytes survive, prefixes hold, the dialect has one spelling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swe_lightning.errors import UserError
from swe_lightning.policy.demonstrator import LOOK, SUBMIT, TEST, UNDO, block, edit_command
from swe_lightning.policy.demos import bulk_texts
from swe_lightning.policy.edits import EDITS
from swe_lightning.policy.tiny import create_tiny, train_tokenizer

pytest.importorskip("transformers")
pytestmark = pytest.mark.train


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(bulk_texts(400, 0), 600)


@given(text=st.text() | st.binary(max_size=80).map(lambda b: b.decode("latin-1")))
def test_any_text_survives_encoding(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_command_of_the_dialect_is_short_and_spelt_one_way(tokenizer: Any) -> None:
    edits = [edit_command(edit) for edit in EDITS]
    commands = [LOOK, SUBMIT, *edits, *(f"{UNDO}; {e}; {TEST}" for e in edits)]
    for command in commands:
        ids = tokenizer.encode(block(command))
        assert tokenizer.encode(tokenizer.decode(ids)) == ids
        assert len(ids) <= 3 if command in (LOOK, SUBMIT) else len(ids) <= 16, tokenizer.convert_ids_to_tokens(ids)


def test_a_conversation_is_an_exact_prefix_of_its_continuation(tokenizer: Any) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "test_a fails.\n"}]
    ids: list[int] = []
    for reply, observation in ((LOOK, "  if a == 1:\n"), (edit_command(EDITS[0]), ""), (SUBMIT, "x")):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert prompt[: len(ids)] == ids
        ids = prompt + tokenizer.encode(block(reply)) + [tokenizer.eos_token_id]
        messages += [{"role": "assistant", "content": block(reply)}, {"role": "user", "content": observation}]


def test_markers_are_not_spelt_by_text_and_digits_stay_single(tokenizer: Any) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("L=1234"))[-4:] == ["1", "2", "3", "4"]
    assert tokenizer.eos_token == "<|end|>"
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id}) == 2


def test_the_same_arguments_give_the_same_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        create_tiny(tmp_path / name, texts=bulk_texts(50, 0), vocab=300, layers=1, hidden=32, mlp=32, seed=4)
    for file in ("model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_vocabulary_without_room_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocab 200"):
        create_tiny(tmp_path, texts=["x"], vocab=200)
