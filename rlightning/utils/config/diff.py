"""Compares two configs, key by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlightning.utils.config.base import Config

ABSENT = "(absent)"


def diff_configs(left: Config, right: Config) -> list[tuple[str, Any, Any]]:
    """Returns (dotted key, left value, right value) of all that differs, in its order.

    What one side lacks is `ABSENT` there. A section that one side lacks as a whole is one entry, of
    what in it is not a default.
    """
    return list(_differences(left, right, ()))


def _differences(left: Any, right: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any, Any]]:
    before, after = _parts(left), _parts(right)
    if before is None or after is None:
        if left != right:
            yield ".".join(path), _plain(left), _plain(right)
        return
    for key in dict.fromkeys((*before, *after)):
        yield from _differences(before.get(key, ABSENT), after.get(key, ABSENT), (*path, key))


def _parts(value: Any) -> Mapping[str, Any] | None:
    """Returns the parts of a section, a mapping, or a list of such, by key; None for a leaf."""
    if isinstance(value, (Config, Mapping)):
        return {str(key): part for key, part in dict(value).items()}
    if isinstance(value, list) and all(isinstance(part, (Config, Mapping)) for part in value):
        return {str(index): part for index, part in enumerate(value)}
    return None


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_defaults=True) if isinstance(value, Config) else value
