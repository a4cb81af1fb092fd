"""Loads a config: files from left to right, then the environment, then overrides, all checked."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rlightning.errors import ConfigError
from rlightning.utils.config.config import MainConfig
from rlightning.utils.config.environment import ENVIRONMENT_PREFIX, process_environment
from rlightning.utils.config.strict import nearest_key, unknown_keys
from rlightning.utils.config.yaml_io import load_yaml_file, parse_yaml

# Where each value came from, by its dotted path: the file, the variable or the option.
_Sources = dict[str, str]


def load_config(
    paths: str | Path | Sequence[str | Path],
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> MainConfig:
    """Loads and checks the config of a run.

    Later sources win: the files from left to right, then variables such as
    `RLIGHTNING__TRAIN__LR=1e-3`, then overrides such as `train.lr=1e-3`. Mappings are merged,
    anything else is replaced. A mapping, or a key of one, meant for a list with one element goes to
    that element, so `env.num_envs=8` works for the list `env` too; `env.1.num_envs=8` names one of
    several.

    Args:
        paths: YAML files.
        overrides: `dotted.key=value`; the value is read as YAML.
        environ: Environment to read; None: that of the process.

    Raises:
        ConfigError: A file that cannot be read, an unknown key (with the nearest known one), or a
            value that does not fit; one line each.
    """
    files = [paths] if isinstance(paths, (str, Path)) else list(paths)
    settings = [_split(override) for override in overrides]
    data: dict[str, Any] = {}
    sources: _Sources = {}
    for file in files:
        _apply(data, sources, load_yaml_file(file), str(file))
    variables = process_environment() if environ is None else environ
    for name, value in sorted(variables.items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            keys = name[len(ENVIRONMENT_PREFIX) :].lower().split("__")
            _apply(data, sources, _nest(data, keys, parse_yaml(value, name), name), name)
    for source, keys, value in settings:
        _apply(data, sources, _nest(data, keys, parse_yaml(value, source), source), source)
    try:
        with warnings.catch_warnings():
            # An unknown backend: who hosts the envs knows which there are, and says so.
            warnings.simplefilter("ignore", UserWarning)
            return MainConfig.model_validate(data)
    except ValidationError as error:
        lines = (_explain(details, sources, files) for details in error.errors())
        raise ConfigError("\n".join(lines)) from error


def _split(override: str) -> tuple[str, list[str], str]:
    """Returns the source of an override, for errors, its keys and its value."""
    source = f"--set {override}"
    dotted, equals, value = override.partition("=")
    if not equals or not dotted.strip():
        raise ConfigError(f"{source}: expected key=value, such as train.lr=1e-3")
    return source, dotted.strip().split("."), value


def _apply(data: dict[str, Any], sources: _Sources, update: dict[str, Any], source: str) -> None:
    """Checks one source's keys and merges it into what came before."""
    lines = []
    for path, model in unknown_keys(MainConfig, update):
        near = nearest_key(MainConfig, path, model)
        hint = f"did you mean '{near}'?" if near else "`rlightning config schema` lists all"
        lines.append(f"{source}: unknown key '{'.'.join(path)}'; {hint}")
    if lines:
        raise ConfigError("\n".join(lines))
    # A section whose every line is commented out reads as null.
    sections = {key: value for key, value in update.items() if value is not None}
    if isinstance(sections.get("env"), Mapping) and "env" not in data:
        sections["env"] = [sections["env"]]  # as the config will have it, so that keys find it
    _merge(data, sections, (), sources, source)


def _merge(
    base: dict[str, Any],
    update: Mapping[str, Any],
    path: tuple[str, ...],
    sources: _Sources,
    source: str,
) -> None:
    for key, value in update.items():
        here = (*path, str(key))
        target = base.get(key)
        if isinstance(value, Mapping) and _is_single(target):
            _merge(target[0], value, (*here, "0"), sources, source)
        elif isinstance(value, Mapping) and isinstance(target, dict):
            _merge(target, value, here, sources, source)
        else:
            base[key] = value
            sources[".".join(here)] = source


def _is_single(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict)


def _nest(data: Mapping[str, Any], keys: Sequence[str], value: Any, source: str) -> dict[str, Any]:
    """Returns the nested mapping that sets one value; a number picks an element of a list."""
    if len(keys) == 1:
        return {keys[0]: value}
    target = data.get(keys[0])
    if isinstance(target, list) and keys[1].isdecimal():
        index = int(keys[1])
        if index >= len(target):
            raise ConfigError(
                f"{source}: '{keys[0]}' has {len(target)} elements; there is no {index}"
            )
        element = target[index]
        if len(keys) == 2:
            element = value
        elif isinstance(element, dict):
            copied: dict[str, Any] = dict(element)
            _merge(copied, _nest(element, keys[2:], value, source), (), {}, source)
            element = copied
        else:
            raise ConfigError(f"{source}: '{keys[0]}.{index}' is not a mapping")
        return {keys[0]: [*target[:index], element, *target[index + 1 :]]}
    if _is_single(target):
        target = target[0]
    inner = target if isinstance(target, dict) else {}
    return {keys[0]: _nest(inner, keys[1:], value, source)}


def _explain(details: ErrorDetails, sources: _Sources, files: Sequence[str | Path]) -> str:
    """Returns one line: where the value came from, which field, what was expected and what came."""
    keys = [str(part) for part in details["loc"]]
    source = next(
        (
            sources[known]
            for n in range(len(keys), 0, -1)
            if (known := ".".join(keys[:n])) in sources
        ),
        ", ".join(str(file) for file in files) or "config",
    )
    field = ".".join(keys) or "config"
    message = details["msg"]
    if details["type"] == "missing":
        return f"{source}: '{field}' is required"
    if details["type"] == "value_error":
        return f"{source}: '{field}': {message.removeprefix('Value error, ')}"
    if details["type"] in {"model_type", "model_attributes_type", "dict_type"}:
        message = "a mapping"
    expected = message.removeprefix("Input should be ").partition(", unable to parse")[0]
    return f"{source}: '{field}': expected {expected}, got {details['input']!r}"
