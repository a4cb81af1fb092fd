"""Multilayer perceptrons as `policy.model_cfg` describes them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import nn

from rlightning.errors import ConfigError
from rlightning.policy.encoder import ObservationEncoder
from rlightning.utils.config import PolicyConfig

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}
# Of a float32 itself, and three times that while orthogonal values for it are made.
_BYTES_PER_WEIGHT = 16


class NetworkMaker:
    """Makes networks with orthogonal weights, drawn from `policy.seed` and nothing else.

    Args:
        config: Section `policy`: `model_cfg.hidden` (sizes of the hidden layers),
            `model_cfg.activation` (tanh, relu, elu, gelu, silu), `seed` and `max_weights_bytes`.

    Raises:
        ConfigError: `policy.model_cfg` holds something else.
    """

    def __init__(self, config: PolicyConfig) -> None:
        hidden = config.model_cfg.get("hidden", [64, 64])
        activation = config.model_cfg.get("activation", "tanh")
        if activation not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise ConfigError(f"policy.model_cfg.activation: '{activation}' is none of {known}")
        if not (isinstance(hidden, list) and all(isinstance(n, int) and n > 0 for n in hidden)):
            raise ConfigError(f"policy.model_cfg.hidden: expected a list of sizes, got {hidden!r}")
        self._hidden = hidden
        self._activation = _ACTIVATIONS[activation]
        self._allowed_bytes = config.max_weights_bytes
        self._generator = torch.Generator()
        if config.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(config.seed)

    def check_size(self, inputs: int, *outputs: int) -> None:
        """Refuses spaces whose networks take too much memory, before they take it.

        Args:
            inputs: Inputs of each network.
            *outputs: Outputs of each.

        Raises:
            ConfigError: They take more than `policy.max_weights_bytes` allows.
        """
        sizes = 0
        for last in outputs:
            layers = itertools.pairwise((inputs, *self._hidden, last))
            sizes += sum(before * after for before, after in layers)
        needed = _BYTES_PER_WEIGHT * sizes
        if needed > self._allowed_bytes:
            raise ConfigError(
                f"the spaces need networks of {inputs} inputs, {self._hidden} hidden units "
                f"(policy.model_cfg.hidden) and {outputs[0]} outputs, which take {needed} bytes to "
                f"make; policy.max_weights_bytes allows {self._allowed_bytes}"
            )

    def __call__(self, encoder: ObservationEncoder, outputs: int, last_gain: float) -> nn.Module:
        """Returns a network from observations [B, ...] to [B, outputs]."""
        return nn.Sequential(encoder, *self.perceptron(encoder.size, outputs, last_gain))

    def perceptron(self, inputs: int, outputs: int, last_gain: float) -> nn.Sequential:
        """Returns a network from vectors [B, inputs] to [B, outputs]."""
        layers: list[nn.Module] = []
        size = inputs
        for width in self._hidden:
            layers += [self._linear(size, width, math.sqrt(2)), self._activation()]
            size = width
        layers.append(self._linear(size, outputs, last_gain))
        return nn.Sequential(*layers)

    def gru(self, inputs: int, units: int) -> nn.GRUCell:
        """Returns a GRU cell from vectors [B, inputs] and state [B, units] to [B, units].

        Raises:
            ConfigError: It takes more than `policy.max_weights_bytes` allows.
        """
        needed = _BYTES_PER_WEIGHT * 3 * units * (inputs + units)
        if needed > self._allowed_bytes:
            raise ConfigError(
                f"the spaces need a GRU of {inputs} inputs and {units} units "
                f"(policy.model_cfg.memory), which takes {needed} bytes to make; "
                f"policy.max_weights_bytes allows {self._allowed_bytes}"
            )
        skip_init: Callable[..., nn.GRUCell] = nn.utils.skip_init
        cell = skip_init(nn.GRUCell, inputs, units)
        for weight in (cell.weight_ih, cell.weight_hh):
            for gate in weight.data.chunk(3):
                nn.init.orthogonal_(gate, generator=self._generator)
        for bias in (cell.bias_ih, cell.bias_hh):
            nn.init.zeros_(bias)
        return cell

    def _linear(self, inputs: int, outputs: int, gain: float) -> nn.Linear:
        # skip_init: the default initialisation would draw from torch's global generator.
        skip_init: Callable[..., nn.Linear] = nn.utils.skip_init
        layer = skip_init(nn.Linear, inputs, outputs)
        nn.init.orthogonal_(layer.weight, gain, generator=self._generator)
        nn.init.zeros_(layer.bias)
        return layer
