"""Networks as `policy.model_cfg` describes them."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Collection
from typing import TypeVar

import torch
from torch import nn

from rlightning.errors import ConfigError
from rlightning.policy.convolutions import (
    Convolutions,
    Layer,
    check_layers,
    flattened_size,
    picture_shape,
)
from rlightning.policy.encoder import ObservationEncoder
from rlightning.policy.layout import Space
from rlightning.policy.observation_norm import ObservationNorm
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
# What every policy has.
_KEYS = ("hidden", "activation")

_Layer = TypeVar("_Layer", nn.Linear, nn.Conv2d)
_Module = TypeVar("_Module", bound=nn.Module)


class NetworkMaker:
    """Makes networks with orthogonal weights, drawn from `policy.seed` and nothing else.

    Args:
        config: Section `policy`: `model_cfg.hidden` (sizes of the hidden layers),
            `model_cfg.activation` (tanh, relu, elu, gelu, silu), `seed` and `max_weights_bytes`.
        options: What else of `model_cfg` the policy has: `convolutions` (a list of [channels,
            kernel, stride]) and `features` (units after them, 512), `normalize` (observations, by
            what was learned from), `log_std`, `memory`.
        policy: Its class; one of somebody else's may have more of `model_cfg`.

    Raises:
        ConfigError: `policy.model_cfg` holds something else.
    """

    def __init__(
        self, config: PolicyConfig, options: Collection[str] = (), policy: type | None = None
    ) -> None:
        given = config.model_cfg.to_dict()
        keys = (*_KEYS, *options)
        unknown = [name for name in given if name not in keys]
        if unknown and policy is not None and policy.__module__.startswith("rlightning.policy."):
            near = difflib.get_close_matches(unknown[0], keys, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(keys)}"
            raise ConfigError(
                f"policy.model_cfg.{unknown[0]}: policy.type '{config.type}' does not have it; "
                f"{hint}"
            )
        hidden = given.get("hidden", [64, 64])
        activation = given.get("activation", "tanh")
        if activation not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise ConfigError(f"policy.model_cfg.activation: '{activation}' is none of {known}")
        if not (isinstance(hidden, list) and all(isinstance(n, int) and n > 0 for n in hidden)):
            raise ConfigError(f"policy.model_cfg.hidden: expected a list of sizes, got {hidden!r}")
        features, normalize = given.get("features", 512), given.get("normalize", False)
        if not isinstance(features, int) or features < 1:
            raise ConfigError(
                f"policy.model_cfg.features: expected a number of units, got {features!r}"
            )
        if not isinstance(normalize, bool):
            raise ConfigError(f"policy.model_cfg.normalize: expected a bool, got {normalize!r}")
        layers = given.get("convolutions")
        self._layers = None if layers is None else check_layers(layers)
        self._features, self._normalize = features, normalize
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

    def encoder(self, space: Space) -> ObservationEncoder | Convolutions:
        """Returns what turns an observation into a vector.

        Raises:
            ConfigError: The space does not have what `policy.model_cfg` wants to encode.
        """
        if self._layers is not None:
            if self._normalize:
                raise ConfigError(
                    "policy.model_cfg.normalize: pictures have one scale; leave it out with "
                    "'convolutions'"
                )
            return self._convolutions(space, self._layers)
        encoder = ObservationEncoder(space)
        if self._normalize:
            encoder.norm = ObservationNorm(encoder.size)
        return encoder

    def __call__(
        self, encoder: ObservationEncoder | Convolutions, outputs: int, last_gain: float
    ) -> nn.Module:
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
        cell = _without_values(nn.GRUCell(inputs, units, device="meta"))
        for weight in (cell.weight_ih, cell.weight_hh):
            for gate in weight.data.chunk(3):
                nn.init.orthogonal_(gate, generator=self._generator)
        for bias in (cell.bias_ih, cell.bias_hh):
            nn.init.zeros_(bias)
        return cell

    def _convolutions(self, space: Space, layers: list[Layer]) -> Convolutions:
        channels, height, width, first = picture_shape(space)
        size = flattened_size(height, width, layers)
        weights, before = size * self._features, channels
        for after, kernel, _ in layers:
            weights += before * after * kernel**2
            before = after
        if _BYTES_PER_WEIGHT * weights > self._allowed_bytes:
            raise ConfigError(
                f"policy.model_cfg.convolutions take {_BYTES_PER_WEIGHT * weights} bytes to make; "
                f"policy.max_weights_bytes allows {self._allowed_bytes}"
            )
        modules: list[nn.Module] = []
        for after, kernel, stride in layers:
            layer = _without_values(nn.Conv2d(channels, after, kernel, stride, device="meta"))
            modules += [self._initialise(layer, math.sqrt(2)), self._activation()]
            channels = after
        linear = self._linear(size, self._features, math.sqrt(2))
        return Convolutions(
            nn.Sequential(*modules), linear, self._activation(), channels_first=first
        )

    def _linear(self, inputs: int, outputs: int, gain: float) -> nn.Linear:
        return self._initialise(_without_values(nn.Linear(inputs, outputs, device="meta")), gain)

    def _initialise(self, layer: _Layer, gain: float) -> _Layer:
        assert layer.bias is not None
        nn.init.orthogonal_(layer.weight, gain, generator=self._generator)
        nn.init.zeros_(layer.bias)
        return layer


def _without_values(module: _Module) -> _Module:
    """Gives a module of the meta device memory of its own, whose values are still to be set.

    Its default values would be drawn from torch's global generator. `nn.utils.skip_init` does the
    same, but goes through torch's tracing, which takes a second to import.
    """
    for name, weight in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(torch.empty(weight.shape)))
    return module
