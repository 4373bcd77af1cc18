"""The training side of the policy: verl's own TrainingWorker in this process, driven over rows.

Invariant: the gradient is the sum over trained tokens of weight x loss, whatever the cut into rows and micro-batches.
One optimizer step per mini-batch of whole groups; rows without any weight cost nothing and change nothing.
Refuses to normalise: weights come folded with the batch (`objective`), and verl only sums.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swe_lightning.errors import DataError, SwelError
from swe_lightning.policy import checkpoint
from swe_lightning.policy.engine_room import start_worker

if TYPE_CHECKING:
    from swe_lightning.recipe import Algorithm, Training
    from swe_lightning.records import Batch, Row

Columns = Mapping[str, Sequence[np.ndarray]]


class TrainWorker:
    """Holds weights, optimizer state and the step count; several may live in one process, one after the other.

    `reference` keeps a frozen copy of `model_dir` for the KL term (needed where algorithm.kl_coef > 0).
    `temperature` is that of the sampler: log-probabilities are those of the distribution that was sampled.
    """

    def __init__(
        self,
        model_dir: Path,
        training: Training,
        algorithm: Algorithm,
        *,
        reference: bool = False,
        temperature: float = 1.0,
    ) -> None:
        self.model_dir, self.training, self.algorithm, self.temperature = model_dir, training, algorithm, temperature
        self.worker = start_worker(model_dir, training)
        import torch

        from swe_lightning.policy.reference import Reference
        from swe_lightning.policy.token_loss import TokenLoss

        torch.set_num_threads(training.threads)
        self.loss = TokenLoss.of(algorithm)
        self.worker.set_loss_fn(self.loss)
        self.optimizer_steps = 0
        self.reference = Reference(model_dir, self.engine, temperature) if reference else None
        if algorithm.kl_coef > 0 and self.reference is None:
            raise DataError("algorithm.kl_coef > 0 needs the reference model: create the worker with reference=True")

    @property
    def engine(self) -> Any:
        return self.worker.engine

    # -- policy gradient ------------------------------------------------------------------------------------------

    def update(self, batch: Batch) -> dict[str, float]:
        """One optimizer step per mini-batch. Metrics are means over trained tokens, except maxima and counts."""
        from swe_lightning.policy.token_loss import summarise

        started, parts, steps = time.monotonic(), _mini_batches(batch, self.training, self.algorithm), 0
        columns = [self._columns(rows, weights) for rows, weights in parts]
        if self.loss.correction != "none" and (len(parts) > 1 or self.algorithm.off_policy.level == "sequence"):
            # The policy before the first step is the reference point of all of them.
            for (rows, _), column in zip(parts, columns, strict=True):
                column |= self._off_policy(rows, self._forward(rows))
        sums: dict[str, list[float]] = {}
        norms, used, tokens = [], 0, 0
        for (rows, _), column in zip(parts, columns, strict=True):
            keep = [i for i in range(len(rows)) if _has_weight(column, i)]
            if not keep:
                continue
            rows = [rows[i] for i in keep]
            found = self._step(rows, {k: [v[i] for i in keep] for k, v in column.items()}, self._learning_rate())
            norms.append(found.pop("grad_norm"))
            for key, values in found.items():
                sums.setdefault(key, []).extend(values)
            steps, used, tokens = steps + 1, used + len(rows), tokens + sum(len(r.ids) for r in rows)
        seconds = time.monotonic() - started
        return summarise(sums) | {
            "grad_norm": max(norms, default=0.0),
            "lr": self._learning_rate(),
            "optimizer_steps": float(steps),
            "rows": float(used),
            "rows_without_weight": float(len(batch.rows) - used),
            "tokens": float(tokens),
            "seconds": seconds,
            "tokens_per_second": tokens / max(seconds, 1e-9),
        }

    def gradients(self, batch: Batch) -> dict[str, np.ndarray]:
        """The gradient of the whole batch as `update` would step on it, by parameter name; weights stay as they are."""
        column = self._columns(batch.rows, batch.weights)
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            self.engine.forward_backward_batch(self._pack(batch.rows, column), self.loss)
            return {
                name: checkpoint.full(parameter.grad).cpu().numpy().copy()
                for name, parameter in self.engine.module.named_parameters()
                if parameter.grad is not None
            }

    def logprobs(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Log-probability of each trained token, aligned to `ids`; 0.0 at position 0 and where mask is 0."""
        return self._forward(rows)

    # -- supervised -----------------------------------------------------------------------------------------------

    def sft(
        self,
        rows: Sequence[Row],
        *,
        steps: int,
        lr: float,
        batch_tokens: int,
        seed: int = 0,
        warmup_steps: int | None = None,
        on_step: Callable[[int, float], None] | None = None,
    ) -> dict[str, Any]:
        """Cross-entropy on mask 1: `steps` batches of about `batch_tokens` tokens, warm-up then linear decay to 0.

        Starts and ends with a fresh optimizer. Returns loss (nats per trained token) of each step, and speed.
        """
        from swe_lightning.policy.sft import token_batches
        from swe_lightning.policy.token_loss import TokenLoss

        warmup = max(1, min(20, steps // 10)) if warmup_steps is None else warmup_steps
        started, history, tokens = time.monotonic(), [], 0
        self.engine.optimizer.state.clear()
        self.worker.set_loss_fn(TokenLoss())
        try:
            for step, batch in zip(range(steps), token_batches(rows, batch_tokens, seed), strict=False):
                trained = sum(row.trained_tokens for row in batch)
                weights = [row.mask.astype(np.float32) / max(trained, 1) for row in batch]
                rate = lr * min((step + 1) / (warmup + 1), (steps - step) / max(steps - warmup, 1))
                found = self._step(batch, {"weights": weights}, rate)
                history.append(sum(found["loss_sum"]))
                tokens += sum(len(row.ids) for row in batch)
                if on_step is not None:
                    on_step(step + 1, history[-1])
        finally:
            self.worker.set_loss_fn(self.loss)
            self.engine.optimizer.state.clear()
        seconds = time.monotonic() - started
        return {
            "loss": history,
            "steps": len(history),
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / max(seconds, 1e-9),
        }

    # -- state ----------------------------------------------------------------------------------------------------

    def save(self, directory: Path, *, state: Mapping[str, Any] | None = None) -> None:
        """A Hugging Face checkpoint that also resumes exactly; whole or absent (`complete` is written last)."""
        checkpoint.save(directory, self.engine, self.model_dir, dict(state or {}), self.optimizer_steps)

    def load(self, directory: Path) -> dict[str, Any]:
        """Weights, optimizer, random state and step count of a checkpoint; returns the caller's own `state`."""
        state, self.optimizer_steps = checkpoint.load(directory, self.engine)
        return state

    def export_weights(self, directory: Path) -> None:
        """`model.safetensors` with Hugging Face names, replaced in one move: for the inference server."""
        checkpoint.export_weights(directory, self.engine)

    # -- one step -------------------------------------------------------------------------------------------------

    def _learning_rate(self) -> float:
        """Constant after a linear warm-up that starts above zero."""
        return self.training.lr * min(1.0, (self.optimizer_steps + 1) / (self.training.lr_warmup_steps + 1))

    def _columns(self, rows: Sequence[Row], weights: Sequence[np.ndarray]) -> dict[str, Sequence[np.ndarray]]:
        columns: dict[str, Sequence[np.ndarray]] = {"weights": weights, "sampler_logprobs": [r.logprobs for r in rows]}
        kl, entropy = self.algorithm.kl_coef, self.algorithm.entropy_coef
        if not rows or not (kl > 0 or entropy > 0):
            return columns
        from swe_lightning.objective import token_weights

        even = token_weights(rows, {row.rollout_id: 1.0 for row in rows}, self.algorithm.normalisation)
        if kl > 0:
            assert self.reference is not None
            columns["kl_weights"] = [kl * w for w in even]
            columns["ref_logprobs"] = self.reference.logprobs(rows)
        if entropy > 0:
            columns["entropy_weights"] = [entropy * w for w in even]
        return columns

    def _off_policy(self, rows: Sequence[Row], old: Sequence[np.ndarray]) -> dict[str, Sequence[np.ndarray]]:
        import torch

        from swe_lightning.policy.token_loss import off_policy_weights

        kind, cap = self.algorithm.off_policy.kind, self.algorithm.off_policy.cap
        ratios = [np.where(r.mask == 1, o - r.logprobs, 0.0) for r, o in zip(rows, old, strict=True)]
        if self.algorithm.off_policy.level == "sequence":
            total: dict[str, float] = {}
            for row, ratio in zip(rows, ratios, strict=True):
                total[row.rollout_id] = total.get(row.rollout_id, 0.0) + float(ratio.sum(dtype=np.float64))
            ratios = [np.full(len(row.ids), total[row.rollout_id], np.float32) for row in rows]
        weights = [off_policy_weights(torch.as_tensor(r, dtype=torch.float32), kind, cap).numpy() for r in ratios]
        return {"old_logprobs": old, "is_weights": weights}

    def _step(self, rows: Sequence[Row], columns: Columns, lr: float) -> dict[str, Any]:
        """Forward, backward, clip, one AdamW step through verl; metrics per micro-batch and the gradient norm."""
        from verl.utils import tensordict_utils as tu

        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        metrics = tu.get(self.worker.train_batch(self._pack(rows, columns)), "metrics")
        norm = float(metrics["grad_norm"])
        if not np.isfinite(norm):
            raise SwelError(
                f"gradient norm is {norm} at optimizer step {self.optimizer_steps + 1}: the update was not applied. "
                "Lower training.lr, or look for weights or log-probabilities that are not finite"
            )
        self.optimizer_steps += 1
        ours = {k: _flat(v) for k, v in metrics.items() if isinstance(v, list)}
        return ours | {"grad_norm": norm}

    def _pack(self, rows: Sequence[Row], columns: Columns) -> Any:
        """Rows as verl's jagged TensorDict. Columns move one place left: position t speaks of token t + 1."""
        import torch
        from verl.utils import tensordict_utils as tu

        lengths = torch.tensor([len(row.ids) for row in rows])
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

        def jagged(values: Sequence[np.ndarray], dtype: Any) -> Any:
            return torch.nested.nested_tensor_from_jagged(
                torch.from_numpy(np.concatenate(values).astype(dtype, copy=False)), offsets
            )

        tensors = {name: jagged([_left(v) for v in values], np.float32) for name, values in columns.items()}
        tensors["input_ids"] = jagged([row.ids for row in rows], np.int64)
        tensors["loss_mask"] = jagged([_left(row.mask) for row in rows], np.int64)
        return tu.get_tensordict(
            tensor_dict=tensors,
            non_tensor_dict={
                "temperature": self.temperature,
                "calculate_entropy": "entropy_weights" in columns,
                "max_token_len_per_gpu": self.worker.engine_config.max_token_len_per_gpu,
            },
        )

    def _forward(self, rows: Sequence[Row]) -> list[np.ndarray]:
        from verl.utils import tensordict_utils as tu

        if not rows:
            return []
        data = self._pack(rows, {})
        tu.assign_non_tensor(data, compute_loss=False)
        flat = self.worker.infer_batch(data)["log_probs"]
        return [_right(values.numpy()) for values in flat.unbind()]


def _mini_batches(
    batch: Batch, training: Training, algorithm: Algorithm
) -> list[tuple[list[Row], Sequence[np.ndarray]]]:
    """Whole groups, in order of appearance, cut into training.mini_batches parts. Several parts: weights are taken anew
    from the advantages, because R (or the token count) of the normalisation is that of the part."""
    groups = list(dict.fromkeys(row.group_id or row.rollout_id for row in batch.rows))
    count = min(training.mini_batches, max(len(groups), 1))
    if count == 1:
        return [(list(batch.rows), batch.weights)]
    from swe_lightning.objective import token_weights

    part_of = {group: index * count // len(groups) for index, group in enumerate(groups)}
    parts: list[list[Row]] = [[] for _ in range(count)]
    for row in batch.rows:
        parts[part_of[row.group_id or row.rollout_id]].append(row)
    found: list[tuple[list[Row], Sequence[np.ndarray]]] = []
    for rows in parts:
        named = {row.rollout_id: batch.advantages.get(row.rollout_id) for row in rows}
        found.append((rows, token_weights(rows, named, algorithm.normalisation)))
    return found


def _has_weight(columns: Columns, row: int) -> bool:
    return any(np.any(columns[name][row]) for name in ("weights", "kl_weights", "entropy_weights") if name in columns)


def _left(values: np.ndarray) -> np.ndarray:
    return np.append(values[1:], values.dtype.type(0))


def _right(values: np.ndarray) -> np.ndarray:
    return np.insert(values[:-1], 0, values.dtype.type(0)).astype(np.float32, copy=False)


def _flat(value: Any) -> list[float]:
    return [x for item in value for x in _flat(item)] if isinstance(value, list) else [float(value)]
