"""Parts of nested observations, named by the keys that lead to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym

Path = tuple[str, ...]

WHOLE = "observation"
"""What an observation that has no parts is called."""


def parts_of(space: gym.Space[Any], path: Path = ()) -> Iterator[tuple[Path, gym.Space[Any]]]:
    """Yields the innermost spaces of a space, each with its keys; positions in decimal."""
    if isinstance(space, gym.spaces.Dict):
        for key, child in space.spaces.items():
            yield from parts_of(child, (*path, key))
    elif isinstance(space, gym.spaces.Tuple):
        for index, child in enumerate(space.spaces):
            yield from parts_of(child, (*path, str(index)))
    else:
        yield path, space


def name_of(path: Path) -> str:
    """Returns the name of a part: its keys, joined by dots."""
    return ".".join(path) or WHOLE


def with_parts(value: Any, changes: Mapping[Path, Callable[[Any], Any]], path: Path = ()) -> Any:
    """Returns a nested value with some of its parts changed; what is missing is left out.

    Args:
        value: Dicts, tuples and lists of leaves; not changed.
        changes: What makes the new part of the old one, by its keys.
        path: Where this value is.
    """
    if path in changes:
        return changes[path](value)
    if not any(known[: len(path)] == path for known in changes):
        return value
    if isinstance(value, Mapping):
        return {key: with_parts(child, changes, (*path, key)) for key, child in value.items()}
    if isinstance(value, (tuple, list)):
        return _rebuilt(
            value,
            [with_parts(child, changes, (*path, str(i))) for i, child in enumerate(value)],
        )
    return value


def with_space(space: gym.Space[Any], spaces: Mapping[Path, gym.Space[Any]]) -> gym.Space[Any]:
    """Returns a space with others for some of its parts."""

    def change(space: gym.Space[Any], path: Path) -> gym.Space[Any]:
        if isinstance(space, gym.spaces.Dict):
            items = space.spaces.items()
            # Pairs keep the order of the keys, which gymnasium sorts in a dict.
            return gym.spaces.Dict([(key, change(child, (*path, key))) for key, child in items])
        if isinstance(space, gym.spaces.Tuple):
            parts = enumerate(space.spaces)
            return gym.spaces.Tuple([change(child, (*path, str(i))) for i, child in parts])
        return spaces.get(path, space)

    return change(space, ())


def _rebuilt(old: Sequence[Any], items: list[Any]) -> Any:
    return tuple(items) if isinstance(old, tuple) else items
