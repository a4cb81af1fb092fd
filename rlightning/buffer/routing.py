"""Which tables of a buffer server the rows of an env go to."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from rlightning.errors import ConfigError
from rlightning.utils.config import BufferConfig


def tables_of(config: BufferConfig, env_id: str) -> Mapping[str, BufferConfig]:
    """Returns the tables whose `envs` name an env, by name; `default` alone if none is configured.

    Args:
        config: Section `buffer` of the configuration.
        env_id: Id of the env.

    Raises:
        ConfigError: No table names it.
    """
    if not config.tables:
        return {"default": config}
    tables = {
        name: table
        for name, table in config.tables.items()
        if any(fnmatchcase(env_id, pattern) for pattern in table.envs)
    }
    if not tables:
        patterns = {name: table.envs for name, table in config.tables.items()}
        raise ConfigError(
            f"buffer.tables: none has envs that match {env_id!r}; there are {patterns}"
        )
    return tables
