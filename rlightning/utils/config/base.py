"""The base of every config section: a pydantic model that also takes keys it does not know."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import Self

from rlightning.errors import ConfigError
from rlightning.utils.config.yaml_io import dump_yaml, load_yaml_file


class Config(BaseModel):
    """Typed fields plus any other keys, reachable as attributes and as items.

    Keys that a class does not declare are kept; a mapping among them becomes a nested `Config`, a
    list of mappings stays as it is. Files that the command line reads are checked more strictly:
    see `load_config`.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    def model_post_init(self, context: Any) -> None:
        """Turns mappings among the undeclared keys into nested configs."""
        for name, value in (self.__pydantic_extra__ or {}).items():
            if isinstance(value, Mapping):
                setattr(self, name, Config(**value))

    def __getitem__(self, name: str) -> Any:
        """Returns the value of a key.

        Raises:
            AttributeError: There is no such key.
        """
        return getattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the value of a key, or `default` if there is no such key."""
        return getattr(self, name, default)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Builds the config from a mapping.

        Raises:
            ConfigError: A value does not fit; one line `field 'a.b': message` for each.
        """
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            lines = (f"field '{_dotted(e['loc'])}': {e['msg']}" for e in error.errors())
            raise ConfigError("\n".join(lines)) from error

    @classmethod
    def load_yaml(cls, path: str | Path | None) -> Self:
        """Reads a YAML file; None gives the defaults.

        Raises:
            ConfigError: The file cannot be read, is not YAML, or holds a value that does not fit.
        """
        return cls() if path is None else cls.from_dict(load_yaml_file(path))

    @classmethod
    def from_omegaconf(cls, config: Any) -> Self:
        """Builds the config from an OmegaConf node, interpolations resolved; needs `omegaconf`."""
        omegaconf = importlib.import_module("omegaconf")
        return cls.from_dict(omegaconf.OmegaConf.to_container(config, resolve=True))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain nested dicts and lists with every key, declared or not."""
        return self.model_dump()

    def to_yaml(self) -> str:
        """Returns YAML text that loads to an equal config."""
        return dump_yaml(self.model_dump(mode="json"))


def _dotted(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)
