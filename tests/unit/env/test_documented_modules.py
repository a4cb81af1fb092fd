"""Every documented module of `rlightning.env` can be imported under its name."""

import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("rlightning.env.base_env", "BaseEnv"),
        ("rlightning.env.env_group", "EnvGroup"),
        ("rlightning.env.remote_env.env_client", "RemoteEnvClient"),
    ],
)
def test_it_has_its_class(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name).__name__ == name
