"""Runs a network for acting, without what `nn.Module` and torch add to small layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rlightning.policy.encoder import ObservationEncoder
from rlightning.policy.observation_norm import ObservationNorm

Array = npt.NDArray[np.float32]

# Up to this many multiplications a layer, OpenBLAS, and so numpy, keeps to one thread.
_ONE_THREAD = 2**18


class Forward:
    """Calls a module under `inference_mode` and returns its output as an array.

    On the CPU a small perceptron (Linear, Tanh, ReLU on float vectors, normalised or not) runs in
    numpy: torch spends several microseconds on each of its operations, four times as many when
    other work has emptied the caches since the last call, as between two requests (measured in a
    gRPC handler, one row, 4-64-64: 30 us against 94 us, drawing the action included). Parameters
    are shared, so weights loaded in place are seen. Modules with hooks, and those not known here,
    are called as they are.

    Args:
        module: On `device`.
        device: Where its inputs are.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._steps = _steps(module)
        first = self._steps[0] if self._steps else None
        self._norm = first if isinstance(first, ObservationNorm) else None
        steps = self._steps if self._norm is None else self._steps[1:]
        self._layers = _layers(steps) if device.type == "cpu" else None
        self._max_rows = 0
        if self._layers:
            self._max_rows = _ONE_THREAD // max(weight.size for weight, *_ in self._layers)

    def __call__(self, x: Any) -> Array:
        """Returns the output [B, ...], on the CPU, for an observation of leaves [B, ...]."""
        if self._layers is not None and len(x) <= self._max_rows:
            h: Array = x.numpy()
            if self._norm is not None:
                h = self._norm.apply_to_array(h)
            for weight, bias, activate in self._layers:
                h = h @ weight
                h += bias
                if activate is not None:
                    activate(h)
            return h
        for step in self._steps:
            x = step(x)
        array: Array = x.float().cpu().numpy()
        return array


def _steps(module: nn.Module) -> list[nn.Module]:
    """Returns the modules that a nest of `nn.Sequential` calls, one after the other."""
    if type(module) is nn.Sequential and not (_has_hooks(module) or _is_compiled(module)):
        return [step for child in module.children() for step in _steps(child)]
    if isinstance(module, ObservationEncoder) and module.changes_nothing:
        return [] if module.norm is None else [module.norm]
    return [module]


def _layers(
    steps: list[nn.Module],
) -> list[tuple[Array, Array, Callable[[Array], Any] | None]] | None:
    """Returns weight, bias and activation of each layer; None if there is more to it than that."""
    layers: list[tuple[Array, Array, Callable[[Array], Any] | None]] = []
    activations: dict[type[nn.Module], Callable[[Array], Any]] = {nn.Tanh: _tanh, nn.ReLU: _relu}
    for step in steps:
        if _has_hooks(step):
            return None
        if isinstance(step, nn.Linear) and type(step) is nn.Linear:
            if step.bias is None or step.weight.dtype != torch.float32:
                return None
            layers.append((step.weight.detach().numpy().T, step.bias.detach().numpy(), None))
        elif type(step) in activations and layers and layers[-1][2] is None:
            layers[-1] = (*layers[-1][:2], activations[type(step)])
        else:
            return None
    return layers or None


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _tanh(h: Array) -> None:
    np.tanh(h, out=h)


def _relu(h: Array) -> None:
    np.maximum(h, 0.0, out=h)
