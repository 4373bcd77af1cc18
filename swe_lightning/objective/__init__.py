"""Rewards and rows -> one weight per token, and losses that only sum. Light: losses import torch on first use."""

from swe_lightning.objective.advantages import advantages
from swe_lightning.objective.batch import build_batch, mini_batches
from swe_lightning.objective.weights import token_weights, uniform_weights

__all__ = ["advantages", "build_batch", "mini_batches", "token_weights", "uniform_weights"]
