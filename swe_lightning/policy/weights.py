"""Models and weights of Hugging Face checkpoint directories: load a model for serving, replace its weights in place.

Replacing is all or nothing: names and shapes are checked before the first byte changes. Refuses models whose attention
is not plain causal attention over all positions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swe_lightning.errors import DataError, UserError


def load_model(directory: Path) -> Any:
    """The causal language model in `directory`, fp32, wired to the ragged attention. UserError if it cannot be."""
    import torch
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    from swe_lightning.policy.kvcache import ragged_attention

    AttentionInterface.register("swel_ragged", ragged_attention)  # type: ignore[no-untyped-call, unused-ignore]
    with _reading(directory, "configuration"):
        config = AutoConfig.from_pretrained(directory)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "attn_logit_softcapping", None):
        raise UserError(
            f"{directory}: the embedded server serves plain causal attention only, this model has "
            f"{', '.join(sorted(kinds))}; serve it with vLLM"
        )
    with _reading(directory, "model"):
        model = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=torch.float32, attn_implementation="swel_ragged"
        )
    return model.eval().requires_grad_(False)


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer in `directory`, never the hub's. UserError if there is none."""
    from transformers import AutoTokenizer

    if not directory.is_dir():
        raise UserError(f"no directory {directory}; give the local directory of a model or tokenizer")
    with _reading(directory, "tokenizer"):
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)


@contextmanager
def _reading(directory: Path, what: str) -> Iterator[None]:
    """Loaders fail in many ways on damaged files: whatever they raise becomes one sentence about the directory."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(f"cannot read the {what} in {directory}; check its files ({reason[:300]})") from error


def weight_files(directory: Path) -> list[Path]:
    """The files of a (possibly sharded) Hugging Face checkpoint. DataError if there are none."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [directory / name for name in names]
    single = directory / "model.safetensors"
    if not single.is_file():
        raise DataError(f"{directory} holds no model.safetensors; export the weights there first")
    return [single]


def load_into(model: Any, directory: Path) -> None:
    """Overwrite every parameter of `model`. Names and shapes are checked before the first byte changes: DataError."""
    import torch
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in weight_files(directory):
        try:
            found.update(load_file(file))
        except Exception as error:
            raise DataError(f"{file} cannot be read: {error}") from error
    wanted = dict(model.named_parameters(remove_duplicate=False))
    tied = {id(p) for name, p in wanted.items() if name in found}
    missing = [name for name, p in wanted.items() if name not in found and id(p) not in tied]
    unknown = [name for name in found if name not in wanted]
    shapes = [n for n, t in found.items() if n in wanted and t.shape != wanted[n].shape]
    for what, names in (("lacks", missing), ("has unknown", unknown), ("has other shapes for", shapes)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise DataError(f"weights in {directory}: {what} {', '.join(names[:3])}{more}")
    with torch.no_grad():
        for name, tensor in found.items():
            wanted[name].copy_(tensor)
