"""The training side of the policy: verl's own TrainingWorker in this process, driven over rows.

Invariant: the gradient is the sum over trained tokens of weight x loss, whatever the cut into rows and micro-batches.
One optimizer step per mini-batch of whole groups; rows without any weight cost nothing and change nothing. In a group
of several ranks each computes its share of the rows (sharing.py); who writes checkpoints there is the caller's choice.
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
        from swe_lightning.policy.sharing import Sharing
        from swe_lightning.policy.token_loss import TokenLoss

        self.sharing = Sharing()
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

        started = time.monotonic()
        sums: dict[str, list[float]] = {}
        norms: list[float] = []
        rate, used, tokens = self._learning_rate(), 0, 0
        for rows, columns in self._prepare(batch):
            keep = [i for i in range(len(rows)) if _has_weight(columns, i)]
            if not keep:
                continue
            rows, rate = [rows[i] for i in keep], self._learning_rate()
            found = self._step(rows, {name: [values[i] for i in keep] for name, values in columns.items()}, rate)
            norms.append(found.pop("grad_norm"))
            for key, values in found.items():
                sums.setdefault(key, []).extend(values)
            used, tokens = used + len(rows), tokens + sum(len(row.ids) for row in rows)
        seconds, metrics = time.monotonic() - started, summarise(sums)
        return metrics | {
            "loss": metrics["loss"] / max(len(norms), 1),
            "grad_norm": float(np.mean(norms)) if norms else 0.0,
            "lr": rate,
            "optimizer_steps": len(norms),
            "rows": used,
            "rows_without_weight": len(batch.rows) - used,
            "tokens": tokens,
            "seconds": seconds,
            "tokens_per_second": tokens / max(seconds, 1e-9),
        }

    def gradients(self, batch: Batch) -> dict[str, np.ndarray]:
        """The gradient by parameter name, summed over the mini-batches of `batch`; nothing is stepped or clipped."""
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            for rows, columns in self._prepare(batch):
                if rows:
                    self.engine.forward_backward_batch(self._pack(*self.sharing.take(rows, columns)), self.loss)
            return {
                name: checkpoint.full(parameter.grad).cpu().numpy().copy()
                for name, parameter in self.engine.module.named_parameters()
                if parameter.grad is not None
            }

    def logprobs(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Log-probability of each trained token, aligned to `ids`; 0.0 at position 0 and where mask is 0."""
        return self.sharing.together(rows, self._forward)

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

        Uses an optimizer of its own (muon.py) and leaves the worker's fresh. Returns loss (nats per trained token) of
        each step, and speed.
        """
        from swe_lightning.policy.muon import MuonAdamW
        from swe_lightning.policy.sft import token_batches
        from swe_lightning.policy.token_loss import TokenLoss

        warmup = max(1, min(20, steps // 10)) if warmup_steps is None else warmup_steps
        started, history, tokens = time.monotonic(), [], 0
        own = self.engine.optimizer
        self.engine.optimizer = MuonAdamW(self.engine.module, betas=self.training.betas)
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
            self.engine.optimizer = own
            own.state.clear()
        seconds = time.monotonic() - started
        return {
            "loss": history,
            "loss_first": history[0] if history else 0.0,
            "loss_last": history[-1] if history else 0.0,
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

    def _prepare(self, batch: Batch) -> list[tuple[list[Row], dict[str, Sequence[np.ndarray]]]]:
        """Mini-batches with every column their loss reads. Extra forward passes happen here and only where needed."""
        from swe_lightning.objective import mini_batches
        from swe_lightning.objective.correction import correct

        count, policy = self.training.mini_batches, self.algorithm.off_policy
        parts = mini_batches(batch, self.algorithm, count, seed=self.optimizer_steps) if count > 1 else [batch]
        prepared = [(part.rows, self._columns(part)) for part in parts]
        if self.loss.correction != "none" and (count > 1 or policy.level == "sequence"):
            # The policy before the first step is the reference point of all of them.
            for rows, columns in prepared:
                old = self.sharing.together(rows, self._forward)
                columns |= {"old_logprobs": old, "is_weights": correct(rows, old, policy)[0]}
        return prepared

    def _columns(self, batch: Batch) -> dict[str, Sequence[np.ndarray]]:
        from swe_lightning.objective.tensors import segments

        rows, kl, entropy = batch.rows, self.algorithm.kl_coef, self.algorithm.entropy_coef
        columns: dict[str, Sequence[np.ndarray]] = {
            "weights": batch.weights,
            "sampler_logprobs": [row.logprobs for row in rows],
        }
        if self.algorithm.policy_loss == "gspo":
            columns["segments"] = segments(rows)
        if not rows or not (kl > 0 or entropy > 0):
            return columns
        from swe_lightning.objective import uniform_weights

        even = batch.kl_weights or uniform_weights(
            rows, self.algorithm.normalisation, constant_tokens=self.algorithm.constant_tokens
        )
        if kl > 0:
            assert self.reference is not None
            columns["kl_weights"] = [kl * w for w in even]
            columns["ref_logprobs"] = self.sharing.together(rows, self.reference.logprobs)
        if entropy > 0:
            columns["entropy_weights"] = [entropy * w for w in even]
        return columns

    def _step(self, rows: Sequence[Row], columns: Columns, lr: float) -> dict[str, Any]:
        """Forward, backward, clip, one optimizer step through verl; metrics of every rank's micro-batches (verl gathers
        them) and the gradient norm."""
        from verl.utils import tensordict_utils as tu

        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        metrics = tu.get(self.worker.train_batch(self._pack(*self.sharing.take(rows, columns))), "metrics")
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

        for row in rows:
            if row.mask[0]:
                raise DataError(f"a row of rollout {row.rollout_id} trains its first token, which nothing predicts")

        lengths = torch.tensor([len(row.ids) for row in rows])
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

        def jagged(values: Sequence[np.ndarray], dtype: Any) -> Any:
            return torch.nested.nested_tensor_from_jagged(
                torch.from_numpy(np.concatenate(values).astype(dtype, copy=False)), offsets
            )

        tensors = {
            name: jagged([_left(v) for v in values], np.int64 if name == "segments" else np.float32)
            for name, values in columns.items()
        }
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


def _has_weight(columns: Columns, row: int) -> bool:
    return any(np.any(columns[name][row]) for name in ("weights", "kl_weights", "entropy_weights") if name in columns)


def _left(values: np.ndarray) -> np.ndarray:
    return np.append(values[1:], values.dtype.type(0))


def _right(values: np.ndarray) -> np.ndarray:
    return np.insert(values[:-1], 0, values.dtype.type(0)).astype(np.float32, copy=False)


def _flat(value: Any) -> list[float]:
    return [x for item in value for x in _flat(item)] if isinstance(value, list) else [float(value)]
