"""Starts verl's TrainingWorker inside this process: quietly, without Ray, ports or environment variables of the user.

One process group of world size 1 (gloo, plus the accelerator's own backend where there is one) serves every worker of
the process; it is opened once and left open. A process that already takes part in a larger group is refused, unless the
recipe says training.engine verl: then its members train together, each on its share of the rows.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import difflib
import io
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swe_lightning.errors import DataError, MissingPart, RecipeError, UserError

if TYPE_CHECKING:
    from swe_lightning.recipe import Training

log = logging.getLogger(__name__)

INSTALL = "pip install 'swe-lightning[train]'"
CPU_MICRO_BATCH_TOKENS = 4096
"""On a CPU small micro-batches are the fast ones: activations stay in cache. The recipe's number remains the limit."""


def import_verl() -> Any:
    """The platform in use, with verl imported and our engine registered. MissingPart if the extra is absent."""
    with quiet():
        try:
            import torch
            import verl  # noqa: F401
            from verl.plugin.platform import get_platform, set_platform

            from swe_lightning.policy import verl_platform

            if get_platform().device_name == "cuda" and not torch.cuda.is_available():
                # nvidia-smi is there but this torch cannot use the card (CPU build, hidden device). Settled before
                # verl's engine modules are imported, because they read the device name once.
                set_platform(verl_platform.CpuPlatform())
            from swe_lightning.policy import verl_engine  # noqa: F401
        except ModuleNotFoundError as error:
            raise MissingPart(f"training needs {error.name}, which is not installed: {INSTALL}") from error
        # A deprecation note of torch about torch itself, once per process on the first forward pass of FSDP2.
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
        platform = get_platform()
    return platform


def start_worker(model_dir: Path, training: Training) -> Any:
    """verl's TrainingWorker over the model in `model_dir`, ready to train; fp32 on a CPU, bf16 compute elsewhere."""
    if not (model_dir / "config.json").is_file():
        raise DataError(f"{model_dir} holds no model (config.json is missing); give a Hugging Face model directory")
    platform = import_verl()
    device = platform.device_name
    cpu = device == "cpu"
    _join_process_group(device, platform.communication_backend_name(), alone=training.engine == "embedded")
    with quiet(), _place():
        import torch
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
        from verl.workers.engine_workers import TrainingWorker

        from swe_lightning.policy.verl_engine import MODEL_TYPE

        torch.manual_seed(training.seed)
        budget = training.micro_batch_tokens if not cpu else min(training.micro_batch_tokens, CPU_MICRO_BATCH_TOKENS)
        worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type=MODEL_TYPE,
                model_config=HFModelConfig(
                    path=str(model_dir),
                    load_tokenizer=False,
                    use_remove_padding=False,
                    enable_gradient_checkpointing=not cpu,
                    override_config={"attn_implementation": "sdpa"},
                ),
                engine_config=_config(
                    FSDPEngineConfig,
                    "engine",
                    training,
                    strategy="fsdp2",
                    use_torch_compile=False,
                    reshard_after_forward=not cpu,
                    model_dtype="fp32",
                    mixed_precision={"param_dtype": "fp32" if cpu else "bf16"},
                    max_token_len_per_gpu=budget,
                    infer_max_token_len_per_gpu=budget,
                    seed=training.seed,
                ),
                optimizer_config=_config(
                    FSDPOptimizerConfig,
                    "optimizer",
                    training,
                    lr=training.lr,
                    betas=training.betas,
                    weight_decay=training.weight_decay,
                    clip_grad=training.grad_clip,
                    total_training_steps=training.steps,
                ),
                checkpoint_config=CheckpointConfig(),
            )
        )
        worker.reset()
    return worker


def _config(kind: Any, section: str, training: Training, **ours: Any) -> Any:
    """A configuration dataclass of verl from our values and the recipe's further options of that section."""
    asked = {k.partition(".")[2]: v for k, v in training.engine_options.items() if k.startswith(f"{section}.")}
    known = {field.name for field in dataclasses.fields(kind)}
    for name in sorted(asked.keys() - known):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f", did you mean {section}.{close[0]}?" if close else ""
        raise RecipeError(f"training.engine_options: verl has no option {section}.{name}{hint}")
    return kind(**ours | asked)


def _join_process_group(device: str, backend: str, *, alone: bool = True) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        if alone and dist.get_world_size() != 1:
            raise UserError(
                f"this process belongs to a torch.distributed group of {dist.get_world_size()}; "
                "the embedded training worker needs a process of its own (training.engine embedded is world size 1)"
            )
        return
    backends = "cpu:gloo" if device == "cpu" else f"cpu:gloo,{device}:{backend}"
    with _environment({"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}):
        dist.init_process_group(backends, store=dist.HashStore(), rank=0, world_size=1)
    if device != "cpu":  # gloo alone needs no farewell, and torch warns about one
        atexit.register(_leave_process_group)


def _leave_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _place() -> contextlib.AbstractContextManager[None]:
    """verl's Worker reads its place from the environment; it is set while the worker is built and put back after."""
    import torch.distributed as dist

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    place = {"RANK": rank, "WORLD_SIZE": size}
    if size == "1":
        place |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    else:
        place |= {"LOCAL_RANK": os.environ.get("LOCAL_RANK", rank)}
        place |= {"LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE", size)}
    return _environment(place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "REDIS_STORE_SERVER_HOST": ""})


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What verl, Ray and transformers print while they start goes to our debug log; the root logger stays untouched."""
    import warnings

    root, guard, printed = logging.getLogger(), logging.NullHandler(), io.StringIO()
    root.addHandler(guard)  # verl calls logging.basicConfig at import, which leaves a configured root alone
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed), silent_transformers():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.removeHandler(guard)
        for line in printed.getvalue().splitlines():
            log.debug("%s", line)


@contextlib.contextmanager
def silent_transformers() -> Iterator[None]:
    try:
        from transformers.utils import logging as hf_logging
    except ModuleNotFoundError:
        yield
        return
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
