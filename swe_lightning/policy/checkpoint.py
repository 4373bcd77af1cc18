"""Checkpoints of the training worker: a Hugging Face directory that also resumes bit for bit.

    config.json, generation_config.json, tokenizer files    copied from the model the run began with
    model.safetensors        weights, Hugging Face names, the trainer's precision (fp32)
    optimizer.safetensors    optimizer state by parameter name, and the random state
    state.json               step count, settings of the optimizer, the caller's own state
    complete                 written last

A checkpoint is whole or absent: it is written beside its place, synced, and renamed. An existing one is never replaced.
Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from swe_lightning.errors import DataError

WEIGHTS, OPTIMIZER, STATE, COMPLETE = "model.safetensors", "optimizer.safetensors", "state.json", "complete"
NOT_COPIED = {OPTIMIZER, STATE, COMPLETE}
COPIED_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
SEPARATOR = "|"
"""Between parameter name and optimizer slot; parameter names have dots, never this."""


def save(directory: Path, engine: Any, model_dir: Path, state: dict[str, Any], optimizer_steps: int) -> None:
    """Write the checkpoint `directory`. DataError if one is there already or the disk refuses."""
    if (directory / COMPLETE).exists():
        raise DataError(f"{directory} already holds a complete checkpoint; choose another directory")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}."))
    except OSError as error:
        raise DataError(f"cannot write checkpoint {directory}: {error.strerror}") from error
    try:
        _copy_model_files(model_dir, staging)
        _save_tensors(staging / WEIGHTS, weights(engine))
        _save_tensors(staging / OPTIMIZER, _optimizer_tensors(engine) | _random_tensors())
        document = {"optimizer_steps": optimizer_steps, "python_random": random.getstate(), "state": state}
        _write(staging / STATE, json.dumps(document).encode())
        _write(staging / COMPLETE, b"")
        os.chmod(staging, 0o755)
        _sync_directory(staging)
        if directory.exists():
            shutil.rmtree(directory)  # left by a run that died before atomic checkpoints; it was never complete
        os.rename(staging, directory)
        _sync_directory(directory.parent)
    except OSError as error:
        raise DataError(f"cannot write checkpoint {directory}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def load(directory: Path, engine: Any) -> tuple[dict[str, Any], int]:
    """Put everything `save` wrote back into the engine and this process; returns (caller's state, optimizer steps)."""
    from safetensors.torch import load_file

    if not (directory / COMPLETE).exists():
        raise DataError(f"{directory} is not a complete checkpoint (no file `{COMPLETE}`)")
    document = json.loads((directory / STATE).read_text())
    _load_weights(engine, load_file(directory / WEIGHTS))
    tensors = load_file(directory / OPTIMIZER)
    _restore_random(tensors, document["python_random"])
    _load_optimizer(engine, tensors)
    return document["state"], document["optimizer_steps"]


def export_weights(directory: Path, engine: Any) -> None:
    """`directory/model.safetensors`, replaced atomically. No fsync: a lost export is simply made again."""
    directory.mkdir(parents=True, exist_ok=True)
    staging = directory / f".{WEIGHTS}.{os.getpid()}"
    try:
        _save_tensors(staging, weights(engine), sync=False)
        os.replace(staging, directory / WEIGHTS)
    finally:
        staging.unlink(missing_ok=True)


def weights(engine: Any) -> dict[str, Any]:
    """Full tensors on the CPU by Hugging Face name; tied copies of one tensor appear once."""
    parameters, _ = engine.get_per_tensor_param()
    tied = getattr(engine.module, "_tied_weights_keys", None) or {}
    skipped = set(tied) if engine.model_config.hf_config.tie_word_embeddings else set()
    return {name: tensor.detach().cpu().contiguous() for name, tensor in parameters if name not in skipped}


def full(tensor: Any) -> Any:
    """A DTensor gathered, any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _load_weights(engine: Any, tensors: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    for tied, source in (getattr(engine.module, "_tied_weights_keys", None) or {}).items():
        if tied not in tensors and source in tensors:
            tensors[tied] = tensors[source]
    set_model_state_dict(engine.module, tensors, options=StateDictOptions(full_state_dict=True))


def _optimizer_tensors(engine: Any) -> dict[str, Any]:
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    return {
        f"{names[parameter]}{SEPARATOR}{slot}": full(value).detach().cpu().contiguous()
        for parameter, slots in engine.optimizer.state.items()
        for slot, value in slots.items()
    }


def _load_optimizer(engine: Any, tensors: dict[str, Any]) -> None:
    """Slots shaped like their parameter are laid out (sharded, placed) like it; others, the step count, are copied."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    parameters = dict(engine.module.named_parameters())
    engine.optimizer.state.clear()
    for key, tensor in tensors.items():
        name, separator, slot = key.rpartition(SEPARATOR)
        if not separator:
            continue
        parameter = parameters[name]
        if tensor.shape == parameter.shape:
            tensor = tensor.to(parameter.device)
            if isinstance(parameter, DTensor):
                tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
        engine.optimizer.state[parameter][slot] = tensor


def _random_tensors() -> dict[str, Any]:
    import torch

    kind, keys, *rest = np.random.get_state(legacy=True)
    assert kind == "MT19937"
    found = {"torch_random": torch.get_rng_state()}
    found["numpy_random"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    found["numpy_random_rest"] = torch.tensor([float(x) for x in rest], dtype=torch.float64)
    if torch.cuda.is_available():
        found["cuda_random"] = torch.cuda.get_rng_state()
    return found


def _restore_random(tensors: dict[str, Any], python: list[Any]) -> None:
    import torch

    version, internal, gauss = python
    random.setstate((version, tuple(internal), gauss))
    place, has_gauss, cached = tensors["numpy_random_rest"].tolist()
    keys = tensors["numpy_random"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(place), int(has_gauss), cached))
    torch.set_rng_state(tensors["torch_random"])
    if torch.cuda.is_available() and "cuda_random" in tensors:
        torch.cuda.set_rng_state(tensors["cuda_random"])


def _copy_model_files(source: Path, target: Path) -> None:
    """Configuration, tokenizer and templates; not weights, their index, or another checkpoint's training state."""
    for file in sorted(source.iterdir()):
        index = file.name.endswith(".index.json")
        if file.is_file() and file.suffix in COPIED_SUFFIXES and file.name not in NOT_COPIED and not index:
            shutil.copyfile(file, target / file.name)


def _save_tensors(path: Path, tensors: dict[str, Any], sync: bool = True) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    if sync:
        with path.open("rb") as f:
            os.fsync(f.fileno())


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
