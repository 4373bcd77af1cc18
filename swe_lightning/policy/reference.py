"""The frozen policy of the KL term: a second copy of the initial model, forward only, never sharded, never stepped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from swe_lightning.objective.balance import micro_batches

if TYPE_CHECKING:
    from swe_lightning.records import Row


class Reference:
    """Log-probabilities of trained tokens under the model that `model_dir` held when this was created."""

    def __init__(self, model_dir: Path, engine: Any, temperature: float = 1.0) -> None:
        from verl.utils.model import get_hf_auto_model_class

        from swe_lightning.policy.engine_room import quiet

        parameter = next(engine.module.parameters())
        self.device, self.temperature = parameter.device, temperature
        self.budget = int(engine.engine_config.infer_max_token_len_per_gpu)
        config = engine.model_config.hf_config
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        with quiet():
            model = get_hf_auto_model_class(hf_config=config).from_pretrained(
                str(model_dir), dtype=dtype, attn_implementation="sdpa"
            )
        self.model = model.eval().requires_grad_(False).to(self.device)
        self._positions: torch.Tensor | None = None
        self.model.get_output_embeddings().register_forward_pre_hook(self._keep_selected)

    def _keep_selected(self, _: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = args[0]
        assert self._positions is not None
        return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._positions), *args[1:])

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Aligned to `ids`: 0.0 at position 0 and where mask is 0."""
        found = [np.zeros(len(row.ids), np.float32) for row in rows]
        for part in micro_batches([len(row.ids) for row in rows], self.budget):
            width = max(len(rows[i].ids) for i in part)
            ids = np.zeros((len(part), width), np.int64)
            mask = np.zeros((len(part), width), bool)
            for place, i in enumerate(part):
                ids[place, : len(rows[i].ids)] = rows[i].ids
                mask[place, : len(rows[i].ids) - 1] = rows[i].mask[1:] == 1
            row, token = np.nonzero(mask)
            self._positions = torch.from_numpy(row * width + token).to(self.device)
            logits = self.model(input_ids=torch.from_numpy(ids).to(self.device), use_cache=False).logits.float()
            logp = torch.log_softmax(logits / self.temperature, dim=-1)
            chosen = torch.from_numpy(ids[row, token + 1]).to(self.device)
            values = logp.gather(-1, chosen[:, None]).squeeze(-1).cpu().numpy()
            for place, i in enumerate(part):
                found[i][token[row == place] + 1] = values[row == place]
        return found
