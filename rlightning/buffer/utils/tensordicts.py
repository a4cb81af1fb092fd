"""What a buffer returns, as TensorDicts over the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlightning.buffer.utils.layout import Array, iter_arrays
from rlightning.utils.conversions import BFloat16Array

if TYPE_CHECKING:
    from tensordict import TensorDict


def tensordict_of(data: Mapping[str, Any]) -> TensorDict:
    """Returns columns, or a single transition, as a TensorDict without copying them.

    Tensors and arrays are the same memory: writing to one changes the other. Arrays that may not
    be written, such as those of a batch that came over the network, are copied. Nested dicts are
    nested TensorDicts, the parts of a tuple have the keys "0", "1" and so on, and text is
    non-tensor data.

    Args:
        data: What `DataBuffer.get`, `get_all`, or one part of `sample` returned.

    Returns:
        Its batch size is the shape of the reward: [B], of sequences and rollouts both of their
        axes, and of a single transition [].

    Raises:
        ImportError: The extra `tensordict` is not installed.
        TypeError: It is no dict of columns: of episodes of several lengths, convert each.
    """
    try:
        from tensordict import TensorDict
    except ImportError as error:
        raise ImportError(
            "TensorDicts need the extra 'tensordict': pip install 'rlightning[tensordict]'"
        ) from error
    if not isinstance(data, Mapping):
        raise TypeError(f"expected columns by name, got {type(data).__name__}")
    first = data.get("reward", next(iter(data.values()), np.zeros(0)))
    lead = tuple(np.shape(next(iter_arrays(first), np.zeros(0))))
    if "reward" not in data:
        lead = lead[:1]
    return TensorDict(_tensors(data, lead), batch_size=lead)


def _tensors(value: Any, lead: tuple[int, ...]) -> Any:
    from tensordict import TensorDict

    if isinstance(value, Mapping):
        parts = {key: _tensors(part, lead) for key, part in value.items()}
        return TensorDict(parts, batch_size=lead) if parts else TensorDict({}, batch_size=lead)
    if isinstance(value, tuple):
        return _tensors({str(i): part for i, part in enumerate(value)}, lead)
    array = np.asanyarray(value)
    if array.dtype.kind in "OU":
        return _texts(array)
    return _tensor(array)


def _tensor(array: Array) -> Any:
    import torch

    bfloat16 = isinstance(array, BFloat16Array)
    plain = array.view(np.ndarray)
    if not plain.flags.writeable or not plain.flags.aligned or any(s < 0 for s in plain.strides):
        plain = plain.copy()
    tensor = torch.from_numpy(plain)
    return tensor.view(torch.bfloat16) if bfloat16 else tensor


def _texts(array: Array) -> Any:
    from tensordict import NonTensorData, NonTensorStack

    if not array.ndim:
        return NonTensorData(array.item())
    return NonTensorStack.from_list(array.tolist())
