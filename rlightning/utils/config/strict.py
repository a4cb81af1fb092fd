"""Which keys a section takes: finds those that none declares, and names the nearest that exists."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from rlightning.utils.config.base import Config
from rlightning.utils.config.env import EnvConfig

# A field of these names, or that ends in `_kwargs`, takes any key: its reader is not this library.
_OPEN_FIELDS = frozenset({"init_params", "model_cfg", "optim_cfg", "resource_pool"})
# These hold values for the fields of another section.
_OVERRIDES = {"evaluate_cfg": EnvConfig}


def unknown_keys(
    model: type[Config], data: Mapping[Any, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], type[Config]]]:
    """Yields the path of every undeclared key, and the model it was looked for in."""
    for key, value in data.items():
        here = (*path, str(key))
        field = model.model_fields.get(key) if isinstance(key, str) else None
        if field is None:
            yield here, model
        elif not is_open(key):
            child = _OVERRIDES.get(key) or section_model(field.annotation)
            if child is None:
                continue
            if is_by_name(field.annotation) and isinstance(value, Mapping):
                for name, section in value.items():
                    yield from _unknown_in_value(child, section, (*here, str(name)))
            else:
                yield from _unknown_in_value(child, value, here)


def _unknown_in_value(
    model: type[Config], value: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], type[Config]]]:
    if isinstance(value, Mapping):
        yield from unknown_keys(model, value, path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, Mapping):
                yield from unknown_keys(model, item, (*path, str(index)))


def strict_schema(model: type[Config]) -> dict[str, Any]:
    """Returns the JSON schema of a config file, in which an undeclared key is an error.

    What `is_open` takes any key, as in files. No key is required: another file may have it. One
    section may stand for a list of one.
    """
    schema = model.model_json_schema()
    for name, section in {model.__name__: schema, **schema["$defs"]}.items():
        section["additionalProperties"] = name == Config.__name__  # the type of what is open
        section.pop("required", None)
        for key, field in section.get("properties", {}).items():
            short = [{"type": "string"}] if key == "listen" else []  # its address
            if "$ref" in field.get("items", {}):
                short.append(field["items"])
            if short:
                section["properties"][key] = {"anyOf": [*short, field]}
    return schema


def is_open(field: str) -> bool:
    """Whether a field of this name takes any key."""
    return field in _OPEN_FIELDS or field.endswith("_kwargs")


def is_by_name(annotation: Any) -> bool:
    """Whether an annotation is that of sections by names that the user chooses."""
    return typing.get_origin(annotation) is dict


def section_model(annotation: Any) -> type[Config] | None:
    """Returns the config model inside an annotation such as `list[EnvConfig]` or `X | None`."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, Config) else None
    for argument in typing.get_args(annotation):
        model = section_model(argument)
        if model is not None:
            return model
    return None


def nearest_key(root: type[Config], path: tuple[str, ...], model: type[Config]) -> str | None:
    """Returns the dotted path of the declared key that looks most like an unknown one.

    The same name or its initials (`learning_rate` for `lr`) come first, wherever they are; then a
    similar key of the same section, then one anywhere. None if nothing is similar.
    """
    name = path[-1].lower()
    here = {key: ".".join((*path[:-1], key)) for key in model.model_fields}
    everywhere = dict(here)
    for dotted in declared_keys(root):
        everywhere.setdefault(dotted.rpartition(".")[2], dotted)
    for key, dotted in everywhere.items():
        if name == key or name == _initials(key) or _initials(name) == key:
            return dotted
    for keys in (here, everywhere):
        matches = difflib.get_close_matches(name, keys, n=1)
        if matches:
            return keys[matches[0]]
    return None


def _initials(name: str) -> str | None:
    """Returns `lr` for `learning_rate`; None for a single word."""
    words = name.split("_")
    return "".join(word[:1] for word in words) if len(words) > 1 else None


def declared_keys(model: type[Config], prefix: str = "") -> Iterator[str]:
    """Yields the dotted path of every declared key, sections before what is in them."""
    nested = []
    for name, field in model.model_fields.items():
        yield prefix + name
        chosen = is_open(name) or name in _OVERRIDES or is_by_name(field.annotation)
        child = None if chosen else section_model(field.annotation)
        if child is not None:
            nested.append((child, f"{prefix}{name}."))
    for child, child_prefix in nested:
        yield from declared_keys(child, child_prefix)
