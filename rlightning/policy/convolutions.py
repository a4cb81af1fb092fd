"""Turns a picture into a vector, by convolutions that are learned."""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium as gym
import torch
from torch import Tensor, nn

from rlightning.errors import ConfigError
from rlightning.policy.layout import Space

Layer = tuple[int, int, int]
"""Channels, size of the kernel, stride."""


class Convolutions(nn.Module):
    """Convolutions and one linear layer, each with an activation behind it.

    Channels are the first axis of a picture or the last, whichever is shorter. uint8 is scaled to
    [0, 1].

    Args:
        convolutions: Layers of `layout`, each with its activation.
        linear: From what they return, flattened, to `size` numbers.
        activation: Behind it.
        channels_first: Whether pictures are [C, H, W], not [H, W, C].

    Attributes:
        size: Length of the vector.
    """

    def __init__(
        self,
        convolutions: nn.Sequential,
        linear: nn.Linear,
        activation: nn.Module,
        *,
        channels_first: bool,
    ) -> None:
        super().__init__()
        self.size = linear.out_features
        self._channels_first = channels_first
        self.convolutions = convolutions
        self.linear = linear
        self.activation = activation

    def forward(self, picture: Tensor) -> Tensor:
        """Returns float32 [..., size] for pictures [..., *shape]."""
        leading = picture.shape[:-3]
        x = picture.reshape(-1, *picture.shape[-3:])
        if not self._channels_first:
            x = x.permute(0, 3, 1, 2)
        x = x.float() / 255.0 if x.dtype == torch.uint8 else x.float()
        features: Tensor = self.activation(self.linear(self.convolutions(x).flatten(1)))
        return features.reshape(*leading, self.size)


def picture_shape(space: Space) -> tuple[int, int, int, bool]:
    """Returns channels, height and width of the pictures of a space, and whether channels lead.

    Raises:
        ConfigError: It is not a space of pictures.
    """
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 3:
        raise ConfigError(
            "policy.model_cfg.convolutions: expected observations that are one picture, a Box "
            f"[C, H, W] or [H, W, C], got {space}"
        )
    first, middle, last = space.shape
    return (first, middle, last, True) if first <= last else (last, first, middle, False)


def check_layers(value: object) -> list[Layer]:
    """Returns `policy.model_cfg.convolutions`.

    Raises:
        ConfigError: It is not a list of layers.
    """
    if isinstance(value, list) and value:
        layers = [tuple(one) for one in value if isinstance(one, Sequence) and len(one) == 3]
        numbers = [n for layer in layers for n in layer]
        if len(layers) == len(value) and all(isinstance(n, int) and n > 0 for n in numbers):
            return layers
    raise ConfigError(
        "policy.model_cfg.convolutions: expected a list of [channels, kernel, stride], such as "
        f"[32, 8, 4], got {value!r}"
    )


def flattened_size(height: int, width: int, layers: Sequence[Layer]) -> int:
    """Returns how many numbers the last layer gives.

    Raises:
        ConfigError: A kernel is larger than what it is moved over.
    """
    for _, kernel, stride in layers:
        if kernel > min(height, width):
            raise ConfigError(
                f"policy.model_cfg.convolutions: a kernel of {kernel} on {height} x {width}"
            )
        height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
    return layers[-1][0] * height * width
