"""The version of this library, for its own modules.

They import it from here, not from the package: an editable install that is shadowed by a folder
called `rlightning` in the current one still finds its modules, but not its `__init__.py`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("rlightning")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"
