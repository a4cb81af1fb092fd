"""Libraries that come with an extra of this package."""

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
