"""Which tables the rows of an env go to."""

from __future__ import annotations

import pytest

from rlightning.buffer.routing import tables_of
from rlightning.errors import ConfigError
from rlightning.utils.config import BufferConfig

SECTION = {"type": "ReplayBuffer", "capacity": 10}


def test_without_tables_there_is_one() -> None:
    config = BufferConfig.from_dict(SECTION)
    assert tables_of(config, "any") == {"default": config}


def test_an_env_goes_to_every_table_that_names_it() -> None:
    tables = {"all": {}, "sim": {"envs": ["sim-*"]}, "real": {"envs": ["robot-*", "attached/*"]}}
    config = BufferConfig.from_dict({**SECTION, "tables": tables})
    assert list(tables_of(config, "sim-0-1")) == ["all", "sim"]
    assert list(tables_of(config, "attached/arm")) == ["all", "real"]
    assert list(tables_of(config, "other")) == ["all"]


def test_an_env_that_no_table_names_is_told_with_the_patterns() -> None:
    config = BufferConfig.from_dict({**SECTION, "tables": {"sim": {"envs": ["sim-*"]}}})
    with pytest.raises(ConfigError, match=r"none has envs that match 'other'; .*sim-\*"):
        tables_of(config, "other")
