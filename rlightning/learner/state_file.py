"""Nested dicts and lists of tensors and plain values as a safetensors file, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

_TENSOR, _PAIRS = "tensor", "pairs"


def dump_state(state: Mapping[str, Any]) -> bytes:
    """Returns a safetensors file that holds a state.

    Args:
        state: Dicts (of string or int keys), lists and tuples of tensors, numbers, strings, None.

    Raises:
        TypeError: Something in it is of another type.
    """
    tensors: dict[str, Tensor] = {}
    tree = _pack(state, tensors)
    data: bytes = safetensors.torch.save(tensors, metadata={"tree": json.dumps(tree)})
    return data


def load_state(data: bytes) -> dict[str, Any]:
    """Returns the state that a file holds, tensors on the CPU; tuples are lists then.

    Raises:
        ValueError: It is no such file.
    """
    try:
        tensors = safetensors.torch.load(data)
        header = int.from_bytes(data[:8], "little")
        tree = json.loads(json.loads(data[8 : 8 + header])["__metadata__"]["tree"])
        state: dict[str, Any] = _unpack(tree, tensors)
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"no state of a learner: {type(error).__name__}: {error}") from error
    return state


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        # clone: safetensors refuses tensors that share memory.
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {_PAIRS: [[key, _pack(item, tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_pack(item, tensors) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a state cannot hold a {type(value).__name__}: {value!r}")


def _unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        if _TENSOR in tree:
            return tensors[tree[_TENSOR]]
        return {key: _unpack(item, tensors) for key, item in tree[_PAIRS]}
    if isinstance(tree, list):
        return [_unpack(item, tensors) for item in tree]
    return tree
