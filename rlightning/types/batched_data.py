"""Data of many envs, with the id of each."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rlightning.errors import RLightningError


class UnknownIdError(RLightningError, KeyError, ValueError):
    """A `BatchedData` has nothing under the id that was asked for."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class BatchedData:
    """Pairs of (id, data) in a fixed order; ids may repeat.

    The data may still be on its way: a future of this library, of `concurrent.futures`, of asyncio
    or a `ray.ObjectRef`.

    Args:
        ids: One id per element.
        data: The elements, in the order of `ids`.

    Attributes:
        is_future: Whether any element was a future when this was made.

    Raises:
        ValueError: `ids` and `data` differ in length.
    """

    def __init__(self, ids: Sequence[Any], data: Sequence[Any]) -> None:
        if len(ids) != len(data):
            raise ValueError(
                f"Length of ids and data must be the same. Got {len(ids)} ids, {len(data)} data."
            )
        self._ids = tuple(ids)
        self._data = tuple(data)
        self.is_future = any(map(_is_future, self._data))

    @staticmethod
    def from_dict(data_dict: dict[Any, Any]) -> BatchedData:
        """Returns the items of a dict, in its order."""
        return BatchedData(list(data_dict), list(data_dict.values()))

    def ids(self) -> tuple[Any, ...]:
        """Returns all ids, in order."""
        return self._ids

    def values(self) -> tuple[Any, ...]:
        """Returns all data, in order."""
        return self._data

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Returns a fresh iterator over (id, data)."""
        return zip(self._ids, self._data, strict=True)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return self.items()

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, item_id: Any) -> Any:
        """Returns the first element under an id.

        Raises:
            UnknownIdError: There is none; a KeyError and a ValueError.
        """
        try:
            return self._data[self._ids.index(item_id)]
        except ValueError:
            raise UnknownIdError(f"no data under id {item_id!r}; ids are {self._ids!r}") from None


def _is_future(data: Any) -> bool:
    # Looked up on the class: data that merely has an attribute of that name is no future.
    kind = type(data)
    if callable(getattr(kind, "result", None)) and callable(getattr(kind, "done", None)):
        return True
    ray = sys.modules.get("ray")
    return ray is not None and isinstance(data, ray.ObjectRef)
