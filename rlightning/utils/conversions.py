"""Conversions between numpy arrays and torch tensors in any nesting; torch may be missing."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    Device: TypeAlias = str | int | torch.device

# Element kinds that torch has no tensor for: objects, text, bytes, dates and records.
_NOT_FOR_TORCH = frozenset("OUSMmV")


class BFloat16Array(np.ndarray[Any, np.dtype[np.uint16]]):
    """An array of bfloat16 values where numpy has no such dtype: their bits, as uint16.

    It is an ordinary uint16 array for numpy; the class alone says what the bits mean, so that
    bfloat16 data crosses processes without torch and becomes `torch.bfloat16` again in `to_device`.

    ```python
    bits = np.array([0x3F80], dtype=np.uint16).view(BFloat16Array)  # 1.0
    ```
    """


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """Applies a function to every leaf and rebuilds the containers around them.

    Containers are dict, OrderedDict, defaultdict, list, tuple, namedtuple and deque; everything
    else, subclasses of them included, is a leaf.

    Args:
        function: Called once per leaf.
        data: Any nesting; not changed.

    Returns:
        A new nesting of the same container types.
    """
    kind = type(data)
    if kind is dict:
        return {key: map_leaves(function, value) for key, value in data.items()}
    if kind is list:
        return [map_leaves(function, value) for value in data]
    if kind is tuple:
        return tuple(map_leaves(function, value) for value in data)
    if kind is OrderedDict:
        return OrderedDict((key, map_leaves(function, value)) for key, value in data.items())
    if kind is defaultdict:
        items = ((key, map_leaves(function, value)) for key, value in data.items())
        return defaultdict(data.default_factory, items)
    if kind is deque:
        return deque((map_leaves(function, value) for value in data), maxlen=data.maxlen)
    if isinstance(data, tuple) and hasattr(kind, "_make"):  # a namedtuple
        return kind._make(map_leaves(function, value) for value in data)
    return function(data)


def to_device(data: Any, device: Device) -> Any:
    """Moves tensors to a device and makes tensors of numpy arrays.

    A uint16 array is taken as the bits of bfloat16 (the other half of `to_numpy`). Arrays that
    torch has no dtype for (objects, text, dates) and all other leaves stay as they are. Memory
    is shared with a writable, aligned array on the CPU, and copied otherwise.

    Args:
        data: Any nesting of containers, see `map_leaves`.
        device: Such as `"cpu"`, `"cuda:1"`, an index or a `torch.device`.

    Returns:
        The same nesting with tensors on `device`. Without torch installed, `"cpu"` gives the
        nesting with its arrays as they are.

    Raises:
        ImportError: torch is not installed and `device` is not the CPU.
    """
    try:
        import torch
    except ImportError:
        if str(device) == "cpu":
            return map_leaves(lambda leaf: leaf, data)
        raise ImportError(
            f"device {device!r} needs torch: pip install 'rlightning[policy]'"
        ) from None
    tensordict = sys.modules.get("tensordict")
    movable: tuple[Any, ...] = (torch.Tensor,)
    if tensordict is not None:
        movable = (torch.Tensor, tensordict.TensorDictBase)

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, movable):
            return leaf.to(device)
        if isinstance(leaf, np.ndarray):
            return _tensor_of(leaf, device)
        return leaf

    return map_leaves(convert, data)


def to_numpy(data: Any) -> Any:
    """Makes numpy arrays of torch tensors.

    bfloat16 tensors become a `BFloat16Array` (their bits, as uint16), a TensorDict becomes a dict
    of arrays; arrays and all other leaves stay as they are.

    Args:
        data: Any nesting of containers, see `map_leaves`.

    Returns:
        The same nesting with arrays; they share memory with tensors on the CPU.

    Raises:
        ValueError: A tensor is `torch.uint16`, which `to_device` would take for bfloat16.
    """
    torch = sys.modules.get("torch")
    if torch is None:  # nothing in `data` can be a tensor
        return map_leaves(lambda leaf: leaf, data)
    tensordict = sys.modules.get("tensordict")

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return array_of(leaf, allow_uint16=False)
        if tensordict is not None and isinstance(leaf, tensordict.TensorDictBase):
            return {key: convert(value) for key, value in leaf.items()}
        return leaf

    return map_leaves(convert, data)


def array_of(tensor: torch.Tensor, *, allow_uint16: bool = True) -> npt.NDArray[Any]:
    """Returns the elements of one tensor as an array, on the CPU and outside of autograd.

    Args:
        tensor: A dense tensor on any device.
        allow_uint16: Whether `torch.uint16` may become a plain uint16 array.

    Returns:
        Array of the same shape; a `BFloat16Array` for bfloat16. Shares the memory of a CPU tensor.

    Raises:
        ValueError: The tensor is `torch.uint16` and `allow_uint16` is false.
        TypeError: numpy has no such dtype, or the tensor is not dense.
    """
    import torch

    dense = tensor.detach().cpu().resolve_conj().resolve_neg()
    if dense.dtype == torch.bfloat16:
        bits: npt.NDArray[Any] = dense.view(torch.uint16).numpy()
        return bits.view(BFloat16Array)
    if dense.dtype == torch.uint16 and not allow_uint16:
        raise ValueError(
            "torch.uint16 cannot be told from bfloat16 as an array; use torch.int32 or torch.uint8"
        )
    array: npt.NDArray[Any] = dense.numpy()
    return array


def _tensor_of(array: npt.NDArray[Any], device: Device) -> Any:
    """Returns the tensor of one array, or the array itself where torch has no dtype for it."""
    import torch

    if array.dtype.kind in _NOT_FOR_TORCH or array.dtype.itemsize > 16:
        return array
    native = array.dtype.newbyteorder("=")
    plain = np.asarray(array, dtype=native)
    # torch would warn of read-only memory and refuse negative or odd strides.
    if not (plain.flags.writeable and plain.flags.aligned) or any(
        stride < 0 or stride % native.itemsize for stride in plain.strides
    ):
        plain = np.array(plain, order="C")
    if native == np.uint16:
        return torch.from_numpy(plain.view(np.int16)).view(torch.bfloat16).to(device)
    try:
        tensor = torch.from_numpy(plain)
    except TypeError:  # a dtype of this platform only, such as long double
        return array
    return tensor.to(device)
