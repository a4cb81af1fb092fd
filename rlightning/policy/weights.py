"""Weights as flat names, as safetensors bytes, and back into a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from rlightning.errors import InvalidRequestError

if TYPE_CHECKING:
    from rlightning.policy.base_policy import BasePolicy

# Lines of a difference that one error message shows.
_SHOWN = 10


class HasWeights(Protocol):
    """A policy, as far as its weights go."""

    def get_trainable_parameters(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns tensors by module and name."""
        ...


def policy_weights(policy: HasWeights) -> dict[str, Tensor]:
    """Returns the published tensors of a policy by flat name, `module.parameter`; they are live."""
    return {
        f"{module}.{name}": tensor
        for module, state in policy.get_trainable_parameters().items()
        for name, tensor in state.items()
    }


def dump_weights(weights: Mapping[str, Tensor]) -> bytes:
    """Returns a safetensors file; tensors are copied to the CPU and made contiguous.

    Tensors that share memory are written once each.
    """
    # clone: safetensors refuses tensors that overlap, as tied weights do.
    cpu = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    data: bytes = safetensors.torch.save(cpu)
    return data


def parse_weights(data: bytes) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, on the CPU.

    Raises:
        InvalidRequestError: The bytes are no safetensors file.
    """
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise InvalidRequestError(f"not a safetensors file: {error}") from error
    return tensors


def check_weights(expected: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> None:
    """Checks that names, shapes and dtypes are those of the network.

    Raises:
        InvalidRequestError: They are not; the message lists what differs.
    """
    lines = [f"{name}: missing" for name in expected if name not in got]
    lines += [f"{name}: not in the network" for name in got if name not in expected]
    for name, tensor in expected.items():
        other = got.get(name)
        if other is not None and (other.shape != tensor.shape or other.dtype != tensor.dtype):
            lines.append(f"{name}: expected {_describe(tensor)}, got {_describe(other)}")
    if lines:
        more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise InvalidRequestError(
            "the weights do not fit the network: " + "; ".join(lines[:_SHOWN] + more)
        )


def check_numbers(weights: Mapping[str, Tensor]) -> None:
    """Checks that nothing is NaN, as the weights of a learner that diverged are.

    Raises:
        InvalidRequestError: Something is; the message names the first.
    """
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.itemsize > 1 and bool(tensor.isnan().any()):
            raise InvalidRequestError(f"weights that are no numbers (NaN): {name}")


def load_weights(policy: BasePolicy, weights: Mapping[str, Tensor]) -> None:
    """Puts weights into a policy, all or none.

    Raises:
        InvalidRequestError: Names, shapes or dtypes differ from the network's; nothing was changed.
    """
    structure = policy.get_trainable_parameters()
    check_weights(policy_weights(policy), weights)
    policy.load_state_dict(
        {
            module: {name: weights[f"{module}.{name}"] for name in state}
            for module, state in structure.items()
        }
    )


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
