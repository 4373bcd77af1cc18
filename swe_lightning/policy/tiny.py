"""A policy small enough to learn on one CPU core: Qwen3 architecture, byte-level BPE, prefix-preserving chat template.

Invariant: text survives `decode(encode(text))` byte for byte, and a conversation renders as an exact prefix of its own
continuation, so that `prompt_j` starts with `prompt_i + response_i`. The commands of the policy's shell dialect are
single tokens: there is only one way to spell them, hence re-tokenising a sampled reply gives the sampled ids back.
Refuses to bring text of its own: whoever creates a model supplies the lines its tokenizer learns from.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from swe_lightning.errors import UserError

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant")
BOILERPLATE = (
    "```bash\n",
    "\n```",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    'sed -i "${L}s/',
    "sed -n ${L}p $F",
    '/" $F',
    "; sh test.sh",
    "sh undo.sh; ",
)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '" + END + "' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_PIECES = r" ?(?:==|!=|<=|>=|\+=|-=)| ?[A-Za-z]+|\d| ?[^A-Za-z\d\s]|\s+"
"""Pre-tokens: operators, words, single digits, single marks, blanks. Merges never cross them."""


def create_tiny(
    out: Path,
    *,
    texts: Iterable[str],
    vocab: int = 1024,
    layers: int = 3,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    mlp: int = 384,
    max_context: int = 512,
    seed: int = 0,
) -> None:
    """Write an untrained model with its tokenizer to `out`, in the Hugging Face layout (`save_pretrained`).

    Deterministic in its arguments. Raises UserError where the sizes do not fit each other.
    """
    if hidden % heads or heads % kv_heads:
        raise UserError(f"tiny policy: hidden {hidden}, heads {heads}, kv_heads {kv_heads} must divide each other")
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    tokenizer = train_tokenizer(texts, vocab, max_context=max_context)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=max_context,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    from swe_lightning.policy.engine_room import silent_transformers

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    with silent_transformers():
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def train_tokenizer(texts: Iterable[str], vocab: int, *, max_context: int = 512) -> Any:
    """A `PreTrainedTokenizerFast` of at most `vocab` ids, learnt from `texts`. UserError if `vocab` is too small."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, END, *(f"<|{role}|>" for role in ROLES)]
    learnt = vocab - len(BOILERPLATE)
    if learnt < 256 + len(special):
        raise UserError(
            f"tiny policy: vocab {vocab} is too small; it needs {256 + len(special) + len(BOILERPLATE)} ids or more"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=learnt,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_without_boilerplate(texts), trainer)
    backend.add_tokens([AddedToken(text, normalized=False) for text in BOILERPLATE])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        model_max_length=max_context,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _without_boilerplate(texts: Iterable[str]) -> Iterable[str]:
    """What the merges are learnt from: boilerplate and special tokens never reach them, so they must not be counted."""
    import re

    fixed = "|".join(re.escape(t) for t in (*BOILERPLATE, PAD, END, *(f"<|{r}|>" for r in ROLES)))
    splitter = re.compile(fixed)
    for text in texts:
        yield from (piece for piece in splitter.split(text) if piece)
