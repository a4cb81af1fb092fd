"""Nested dicts and lists of tensors and plain values as a safetensors file, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from numbers import Number
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
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"no state of a learner: {type(error).__name__}: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"no state of a learner: expected a dict, got {state!r:.60}")
    return state


def check_alike(state: Any, like: Any, name: str = "") -> None:
    """Checks that the values in a state are of the kinds that they are in another one.

    What only one of them has is not compared, nor are shapes and values: `restore` looks at these.

    Args:
        state: The state to check.
        like: A state of the algorithm that is to go on from it; None in it stands for anything.
        name: What to call `state` in messages.

    Raises:
        ValueError: One is of another kind; the message names it.
    """
    if like is None:
        return
    kind = _kind(like)
    if _kind(state) is not kind:
        raise ValueError(f"{name or 'the state'}: expected {_KINDS[kind]}, got {state!r:.60}")
    if kind is Mapping:
        for key in like:
            if key in state:
                check_alike(state[key], like[key], f"{name}.{key}".lstrip("."))
        if like.keys() >= _OF_OPTIMIZERS:
            _check_moments(state["state"], f"{name}.state".lstrip("."))
    elif kind is Sequence:
        for index, (one, other) in enumerate(zip(state, like, strict=False)):
            check_alike(one, other, f"{name}[{index}]")


def _check_moments(state: Mapping[Any, Any], name: str) -> None:
    """Checks what an optimizer keeps of each parameter, of which a new one has nothing yet."""
    for number, moments in state.items():
        check_alike(moments, {}, f"{name}.{number}")
        for key, value in moments.items():
            if value is not None and _kind(value) not in (Tensor, Number):
                where = f"{name}.{number}.{key}"
                raise ValueError(f"{where}: expected a tensor or a number, got {value!r:.60}")


# The state dict of an optimizer has these.
_OF_OPTIMIZERS = {"state", "param_groups"}
_KINDS: dict[Any, str] = {
    Tensor: "a tensor",
    Mapping: "a dict",
    Sequence: "a list",
    bool: "true or false",
    Number: "a number",
    str: "a string",
    None: "nothing",
}


def _kind(value: Any) -> Any:
    if isinstance(value, str):
        return str
    return next((kind for kind in _KINDS if kind and isinstance(value, kind)), None)


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
