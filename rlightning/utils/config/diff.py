"""Compares two configs, key by key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlightning.utils.config.base import Config

ABSENT = "(absent)"


def diff_configs(left: Config, right: Config) -> list[tuple[str, Any, Any]]:
    """Returns (dotted key, left value, right value) of every leaf that differs, in their order.

    A leaf that one side lacks has `ABSENT` there.
    """
    before, after = dict(_leaves(left.to_dict())), dict(_leaves(right.to_dict()))
    keys = [*before, *(key for key in after if key not in before)]
    pairs = ((key, before.get(key, ABSENT), after.get(key, ABSENT)) for key in keys)
    return [(key, old, new) for key, old, new in pairs if old != new]


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, str(index)))
    else:
        yield ".".join(path), value
