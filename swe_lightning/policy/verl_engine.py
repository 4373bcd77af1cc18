"""The verl engine that trains our policies: verl's FSDP engine with a head that runs only where it is needed.

About one token in four is trained in agent rollouts, so the language-model head and the log-softmax over the vocabulary
run at those positions alone. Micro-batches are rows of similar length up to a budget of *padded* tokens. Both change
cost, never the sum: the loss is a sum over tokens, so any cut gives the same gradient.

Registered with verl under its own model type (`swe_lightning_lm`), on CPU and accelerators alike; verl's stock engines
stay as they are, except that `language_model` also gets a CPU entry. Rows are padded on the right without an attention
mask: causal layers never let padding reach a token, and padding is never selected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from swe_lightning.objective.balance import micro_batches, split_to

MODEL_TYPE = "swe_lightning_lm"


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
class CpuEngine(FSDPEngineWithLMHead):
    """verl's own engine on the CPU platform, for verl entry points that do not ask for ours."""


@EngineRegistry.register(model_type=MODEL_TYPE, backend="fsdp2", device=["cpu", "cuda", "npu"])
class MaskedHeadEngine(FSDPEngineWithLMHead):
    """FSDP2 engine over a batch with jagged `input_ids` and `loss_mask` (1 where the *next* token is trained)."""

    def __init__(self, model_config: Any, **configs: Any) -> None:
        model_config.model_type = "language_model"
        super().__init__(model_config=model_config, **configs)
        self._positions: torch.Tensor | None = None

    def _build_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> None:
        """The worker sets the learning rate before each step; a second schedule would only disagree."""
        return None

    def _build_optimizer(self, module: Any) -> torch.optim.Optimizer:
        self.module = module
        head = module.get_output_embeddings()
        head.register_forward_pre_hook(self._keep_selected)
        return super()._build_optimizer(module)

    def _keep_selected(self, _: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self._positions is None:
            return None
        hidden = args[0]
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._positions), *args[1:])

    def forward_backward_batch(self, data: TensorDict, loss_function: Callable, forward_only: bool = False) -> Any:
        """Cut into micro-batches, run each through verl's own pass, put the outputs back in order."""
        lengths = data["input_ids"].offsets().diff().tolist()
        cuts = micro_batches(lengths, int(data["max_token_len_per_gpu"]))
        cuts = split_to(cuts, self._passes_of_all_ranks(len(cuts)))
        outputs: list[Any] = []
        try:
            for number, rows in enumerate(cuts):
                part = data if len(cuts) == 1 and rows == list(range(len(lengths))) else take_rows(data, rows)
                tu.assign_non_tensor(part, use_dynamic_bsz=False, micro_batch_size_per_gpu=len(rows))
                if not forward_only:
                    self.module.set_requires_gradient_sync(number == len(cuts) - 1)
                outputs.append(super().forward_backward_batch(part, loss_function, forward_only))
        finally:
            self.module.set_requires_gradient_sync(True)
        return _join(outputs, [row for rows in cuts for row in rows])

    def _passes_of_all_ranks(self, own: int) -> int:
        """The largest number of passes any rank needs: all make as many, or collectives would wait for ever."""
        if self.get_data_parallel_size() == 1:
            return own
        count = torch.tensor(own, device=next(self.module.parameters()).device)
        torch.distributed.all_reduce(count, op=torch.distributed.ReduceOp.MAX, group=self.get_data_parallel_group())
        return int(count)

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        ids, mask = micro_batch["input_ids"], micro_batch["loss_mask"].values()
        offsets = ids.offsets()
        lengths = offsets.diff()
        width = int(lengths.max())
        row = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths)
        selected = mask.nonzero().squeeze(1)
        place = row * width + torch.arange(len(row), device=row.device) - offsets[row]
        padded = ids.values().new_zeros(len(lengths) * width)
        padded[place] = ids.values()
        self._positions = place[selected]
        labels = ids.values().roll(-1)[selected]
        arguments = {"selected": selected, "labels": labels, "temperature": micro_batch["temperature"]}
        return {"input_ids": padded.view(len(lengths), width)}, arguments

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Any]:
        """`log_probs` (and `entropy` if asked), jagged like input_ids: position t speaks of token t + 1; else 0."""
        self._positions = None
        logits = output.logits.float()
        if output_args["temperature"] != 1.0:
            logits = logits / output_args["temperature"]
        ids, selected = micro_batch["input_ids"], output_args["selected"]
        chosen = logits.gather(-1, output_args["labels"].unsqueeze(-1)).squeeze(-1)
        results = {"log_probs": chosen - logits.logsumexp(-1)}
        if tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False):
            from swe_lightning.objective.losses import entropy

            results["entropy"] = entropy(logits)
        zeros = logits.new_zeros(ids.values().shape[0])
        return {
            name: torch.nested.nested_tensor_from_jagged(zeros.index_put((selected,), values), ids.offsets())
            for name, values in results.items()
        }


def take_rows(data: TensorDict, rows: list[int]) -> TensorDict:
    """The given rows of a batch whose tensors are all jagged; everything else is shared."""
    index = torch.tensor(rows)
    offsets = data["input_ids"].offsets().cpu()
    starts, lengths = offsets[:-1][index], offsets.diff()[index]
    shift = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    flat = torch.repeat_interleave(starts - shift[:-1], lengths) + torch.arange(int(shift[-1]))
    tensors: dict[str, torch.Tensor | list[Any]] = {}
    rest: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            values = value.values()
            tensors[key] = torch.nested.nested_tensor_from_jagged(
                values.index_select(0, flat.to(values.device)), shift.to(values.device)
            )
        else:
            rest[key] = value
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=rest)


def _join(outputs: list[Any], order: list[int]) -> dict[str, Any]:
    """Outputs of the micro-batches as verl returns those of one batch, rows in their original order."""
    model_output: dict[str, Any] = {}
    for key in outputs[0]["model_output"]:
        by_row = dict(zip(order, (t for o in outputs for t in o["model_output"][key].unbind()), strict=True))
        model_output[key] = torch.nested.as_nested_tensor([by_row[i] for i in range(len(order))], layout=torch.jagged)
    metrics: dict[str, list[Any]] = {}
    for output in outputs:
        for key, values in output["metrics"].items():
            metrics.setdefault(key, []).extend(values)
    return {"model_output": model_output, "loss": [x for o in outputs for x in o["loss"]], "metrics": metrics}
