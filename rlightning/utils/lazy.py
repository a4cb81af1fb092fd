"""Names that a package loads on first use, so that importing it stays light (PEP 562)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str,
    modules: Mapping[str, str],
    *,
    extra: str = "",
    libraries: Collection[str] = (),
) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package whose names lie in modules of its own.

    It raises an AttributeError for a name that is not listed, and an ImportError that names the
    extra where one of `libraries` is not installed.

    Args:
        package: `__name__` of the package.
        modules: By name, the module of the package that has it.
        extra: What brings the libraries: an extra of this distribution.
        libraries: What the modules import beyond the base install.
    """

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{package}.{modules[name]}"), name)
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in libraries:
                raise
            raise ImportError(
                f"{package}.{name} needs {missing}: pip install 'rlightning[{extra}]'"
            ) from error

    return load
