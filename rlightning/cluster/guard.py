"""Turns errors into one clear line and an exit code."""

from __future__ import annotations

import errno
import importlib.util
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from rlightning.errors import ConfigError, RLightningError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# What the machine refuses; no bug.
_REFUSED = (
    *(errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.EIO, errno.ENOENT),
    *(errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS),
)


@contextmanager
def one_line_errors(*, debug: bool, stop_is_ok: bool = False) -> Iterator[None]:
    """Reports an error of this library on stderr and exits: 2 for a bad config, else 1.

    So it does for a file that cannot be written, such as on a full disk. Bugs keep their traceback;
    with `debug` every error does. Ctrl-C exits with 130, and so does SIGTERM, unless `stop_is_ok`:
    then with 0.
    """
    warnings.formatwarning = _one_line
    try:
        yield
    except KeyboardInterrupt as stopped:
        asked_for = stop_is_ok and signal.SIGTERM in stopped.args
        if debug and not asked_for:
            raise
        typer.echo("interrupted", err=True)
        raise typer.Exit(0 if asked_for else EXIT_INTERRUPTED) from None
    except RLightningError as error:
        if debug:
            raise
        typer.echo(f"error: {error or type(error).__name__}", err=True)
        usage = isinstance(error, ConfigError)
        raise typer.Exit(EXIT_USAGE if usage else EXIT_FAILED) from None
    except OSError as error:
        if debug or error.errno not in _REFUSED:
            raise
        where = f"{error.filename}: " if error.filename else ""
        typer.echo(f"error: {where}{error.strerror}", err=True)
        raise typer.Exit(EXIT_FAILED) from None


def _one_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Formats a warning without the place in the code, which says nothing to who runs a command."""
    return f"warning: {message}\n"


def require_policy_server() -> None:
    """Checks that the libraries of a policy server are installed, without loading them.

    Raises:
        ConfigError: One is not; names the extra of this library that brings it.
    """
    require("the policy server", "policy", "torch", "safetensors")


def require(what: str, extra: str, *modules: str) -> None:
    """Checks that libraries are installed, without loading them.

    Args:
        what: Who needs them.
        extra: Extra of this library that brings them.
        modules: Their names.

    Raises:
        ConfigError: One is not.
    """
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"{what} needs {name}: pip install 'rlightning[{extra}]'")


def put_current_folder_last() -> None:
    """Undoes that `python -m` puts the current folder first, where it would shadow libraries."""
    here = str(Path.cwd())
    if sys.path[:1] == [here]:
        sys.path.append(sys.path.pop(0))


def add_import_paths(paths: list[str]) -> None:
    """Lets `module:Class` names be found in the current folder and in these, after all else."""
    for path in [str(Path.cwd()), *paths]:
        if path not in sys.path:
            sys.path.append(path)
