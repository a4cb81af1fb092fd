"""Options of an adapter, out of a config."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rlightning.errors import ConfigError
from rlightning.utils.config import Config, EnvConfig

_NO_REASONS: Mapping[str, str] = {}


def adapter_options(
    config: EnvConfig, defaults: Mapping[str, Any], refused: Mapping[str, str] = _NO_REASONS
) -> dict[str, Any]:
    """Returns the options of an adapter: of `env_kwargs`, or, from Python, of the config itself.

    Args:
        config: The section of the config.
        defaults: The options that there are.
        refused: Documented options that there are not, and why.

    Raises:
        ConfigError: One is not known, or refused; the message names the most similar ones, or why.
    """
    given = config.env_kwargs.to_dict()
    own = {
        name: value.to_dict() if isinstance(value, Config) else value
        for name, value in (config.model_extra or {}).items()
        if name in defaults or name in refused
    }
    for name in {**own, **given}:
        if name in refused:
            raise ConfigError(f"env.env_kwargs.{name}: not supported: {refused[name]}")
    check_known(given, defaults, "env.env_kwargs")
    return {**defaults, **own, **given}


def check_auto_reset(config: EnvConfig, options: Mapping[str, Any]) -> None:
    """Refuses the option `auto_reset: false` where it could not be honoured.

    Raises:
        ConfigError: There are several rows, which reset themselves.
    """
    if config.num_envs > 1 and not options["auto_reset"]:
        raise ConfigError(
            "env.env_kwargs.auto_reset: several rows reset themselves in the step that ends their "
            "episode: expected true, or num_envs 1, whose resets are the caller's"
        )


def check_extras(config: EnvConfig, options: Collection[str] | None, who: str) -> None:
    """Checks that a section has no key that nobody reads.

    Args:
        config: The section; files that the command line reads are checked before.
        options: Keys that it may have beside its own; None: any.
        who: Which class reads it, for the error.

    Raises:
        ConfigError: It has one; the message names the most similar ones.
    """
    if options is not None:
        known = [*type(config).model_fields, *options]
        check_known(config.model_extra or {}, known, "env", f"{who} has no such option")


def check_known(
    given: Iterable[str], known: Iterable[str], where: str, what: str = "no such option"
) -> None:
    """Checks that all keys of a mapping are known.

    Raises:
        ConfigError: One is not; the message names the most similar ones, or all.
    """
    names = list(known)
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else ""
            hint = hint or f"known: {', '.join(names) or 'none'}"
            raise ConfigError(f"{where}.{name}: {what}; {hint}")
