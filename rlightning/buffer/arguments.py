"""Arguments of a buffer in the forms that they may have."""

from __future__ import annotations

from typing import Any


def resolved(data: Any) -> Any:
    """Returns the result of a future, and anything else as it is."""
    kind = type(data)
    if callable(getattr(kind, "result", None)) and callable(getattr(kind, "done", None)):
        return data.result()
    return data


def truncation_flags(truncations: Any, count: int) -> list[bool]:
    """Returns for each of `count` elements whether its episode ends; None: for none.

    Raises:
        TypeError: It is no list.
        ValueError: It has another length.
    """
    if truncations is None:
        return [False] * count
    if not isinstance(truncations, list):
        raise TypeError(f"truncations: expected a list, got {type(truncations).__name__}")
    if len(truncations) != count:
        raise ValueError(f"{len(truncations)} truncations for {count} elements")
    return truncations
