"""Options of an adapter, out of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlightning.errors import ConfigError
from rlightning.utils.config import EnvConfig


def adapter_options(config: EnvConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of an adapter: of `env_kwargs`, or, from Python, of the config itself.

    Args:
        config: The section of the config.
        defaults: The options that there are.

    Raises:
        ConfigError: `env_kwargs` holds another one.
    """
    given = config.env_kwargs.to_dict()
    if unknown := sorted(given.keys() - defaults.keys()):
        raise ConfigError(f"env.env_kwargs: {unknown} not known; known: {', '.join(defaults)}")
    own = {name: value for name, value in (config.model_extra or {}).items() if name in defaults}
    return {**defaults, **own, **given}
