"""The `rlightning` command."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Runs the command line of this process; exits the process."""
    from rlightning.cli.app import app

    app(prog_name="rlightning")
