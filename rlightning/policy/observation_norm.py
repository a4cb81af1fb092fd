"""Brings observations to one scale, whatever their units."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

_EPSILON = 1e-8
_CLIP = 10.0
"""Deviations beyond which an outlier counts no more."""


class ObservationNorm(nn.Module):
    """Subtracts the mean of all observations learned from, and divides by their deviation.

    What it returns is at most 10 deviations from 0. Mean and variance are buffers, so they are
    published and saved with the weights: whoever acts with these sees what they were trained on.
    Until `update` was called it changes nothing but that limit.

    Args:
        size: Length of the vectors.

    Attributes:
        mean: float32 [size].
        variance: float32 [size].
        count: Vectors seen, float64 [].
    """

    mean: Tensor
    variance: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("variance", torch.ones(size))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Takes vectors [B, size] into account, by the formula of Chan et al. (1983) for parts."""
        if not len(x):
            return
        variance, mean = torch.var_mean(x.double(), 0, correction=0)
        total = self.count + len(x)
        share = len(x) / total
        difference = mean - self.mean
        spread = self.variance * (1 - share) + variance * share
        self.variance.copy_(spread + difference**2 * share * (1 - share))
        self.mean += (difference * share).float()
        self.count.copy_(total)

    def forward(self, x: Tensor) -> Tensor:
        """Returns float32 [..., size]."""
        scaled = (x - self.mean) * (self.variance + _EPSILON).rsqrt()
        return scaled.clamp(-_CLIP, _CLIP)

    def apply_to_array(self, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Returns what `forward` returns, in numpy; for a module on the CPU."""
        deviation = np.sqrt(self.variance.numpy() + np.float32(_EPSILON))
        scaled: npt.NDArray[np.float32] = (x - self.mean.numpy()) / deviation
        return scaled.clip(-_CLIP, _CLIP)
