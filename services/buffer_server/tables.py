"""The tables of a buffer server, as its configuration names them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rlightning.buffer.arguments import check_shards
from rlightning.buffer.buffer_table import BufferTable
from rlightning.buffer.utils.storage import MEMORY_SHARE
from rlightning.errors import ConfigError, NotFoundError
from rlightning.utils.config import BufferConfig, TableConfig
from rlightning.utils.memory import memory_limit

DEFAULT_TABLE = "default"


class Tables(Mapping[str, BufferTable]):
    """The tables by name.

    Args:
        config: Section `buffer` of the configuration.

    Raises:
        ConfigError: The section asks for what no table offers; the message names the key.
    """

    def __init__(self, config: BufferConfig) -> None:
        check_shards(config)
        self._tables: dict[str, BufferTable] = {}
        if not config.tables:
            self._tables[DEFAULT_TABLE] = BufferTable(DEFAULT_TABLE, config)
            return
        for name, section in _with_memory(config).items():
            try:
                self._tables[name] = BufferTable(name, section)
            except ConfigError as error:
                raise ConfigError(f"table '{name}' of buffer.tables: {error}") from error

    def __getitem__(self, name: str) -> BufferTable:
        return self._tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def named(self, name: str) -> BufferTable:
        """Returns a table by the name that a client gave; empty means `default`.

        Raises:
            NotFoundError: There is no such table.
        """
        table = self._tables.get(name or DEFAULT_TABLE)
        if table is None:
            raise NotFoundError(f"no table '{name or DEFAULT_TABLE}'; there are {sorted(self)}")
        return table

    def all_named(self, names: Sequence[str]) -> tuple[BufferTable, ...]:
        """Returns tables by name, each once; `default` if none is named.

        Raises:
            NotFoundError: There is no such table.
        """
        return tuple(dict.fromkeys(map(self.named, names or [""])))


def _with_memory(config: BufferConfig) -> Mapping[str, TableConfig]:
    """Returns the tables with their parts of the memory.

    Raises:
        ConfigError: Those that name theirs leave nothing to the others.
    """
    total = config.max_bytes or memory_limit() // MEMORY_SHARE
    own = {name: table.max_bytes for name, table in config.tables.items() if table.max_bytes}
    rest, sharing = total - sum(own.values()), len(config.tables) - len(own)
    if rest < sharing:
        raise ConfigError(
            f"buffer.max_bytes: its {total} bytes are less than those of {sorted(own)}, "
            f"{sum(own.values())}, and of {sharing} more of buffer.tables"
        )
    part = rest // max(1, sharing)
    return {
        name: table.model_copy(update={"max_bytes": own.get(name, part)})
        for name, table in config.tables.items()
    }
