"""A stream of torch's random numbers that nothing else in the process draws from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class RandomStream:
    """Lets code that draws from torch's global generator draw from a stream of its own.

    Not for several threads that draw at once.

    Args:
        seed: Where the stream begins.
        device: Also its generator is set, if it is a CUDA device.

    Attributes:
        states: Of the generators: of the CPU, and of the device.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        before = self._get()
        torch.manual_seed(seed)
        self.states = self._get()
        self._set(before)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Continues the stream within the block."""
        before = self._get()
        self._set(self.states)
        try:
            yield
        finally:
            self.states = self._get()
            self._set(before)

    def _get(self) -> list[Tensor]:
        states = [torch.get_rng_state()]
        if self._device is not None:
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def _set(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self._device is not None:
            torch.cuda.set_rng_state(states[-1], self._device)
