"""Modules that are imported when a config asks for them: of extras, and of users."""

from __future__ import annotations

import importlib
from typing import Any

from rlightning.errors import ConfigError


def load_extra(module: str, *, extra: str, backend: str) -> Any:
    """Imports a library that only one backend needs.

    Args:
        module: What to import.
        extra: The extra of `rlightning` that installs it.
        backend: The `env.backend` that needs it.

    Returns:
        The module.

    Raises:
        ConfigError: It is not installed, or something that it needs is not.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"env.backend '{backend}' needs {module} (pip install 'rlightning[{extra}]'): {error}"
        ) from error


def load_named(module: str, where: str) -> Any:
    """Imports a module that a config names.

    Args:
        module: What to import.
        where: The key and its value, for the error.

    Returns:
        The module.

    Raises:
        ConfigError: It cannot be imported, whatever it raises, also to end the process; the cause
            is chained.
    """
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: cannot import it: {error}") from error
