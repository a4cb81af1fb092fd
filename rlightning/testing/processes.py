"""Server processes that a test starts, kills, stops and continues."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from typing_extensions import Self

from rlightning.testing.waiting import wait_until
from rlightning.utils.config.environment import child_environment


class ServerProcess:
    """A child process that runs a server and announces its address; killed at the end of a `with`.

    Args:
        arguments: Command line after `python`; `--announce FILE` is added.
        folder: Where its log and announcement go; one process at a time.
        environment: Variables in addition to those of this process.
        announces: Whether it understands `--announce`.
        prefix: Command that becomes it, such as `nsenter` with its options.

    Attributes:
        environment: Those variables; what is changed here counts from the next start on.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        announces: bool = True,
        prefix: Sequence[str] = (),
    ) -> None:
        self._arguments = [*prefix, sys.executable, *arguments]
        self._folder = folder
        self.environment = dict(environment or {})
        self._announcement = folder / "announced.json"
        if announces:
            self._arguments += ["--announce", str(self._announcement)]
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Starts the process; again, after it has ended.

        Raises:
            RuntimeError: It still runs, and nothing would end it any more.
        """
        if self._child is not None and self._child.poll() is None:
            raise RuntimeError(f"process {self._child.pid} still runs")
        self._announcement.unlink(missing_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._child = subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(self.environment),
            )
        return self

    @property
    def child(self) -> subprocess.Popen[bytes]:
        """The process.

        Raises:
            RuntimeError: It was not started.
        """
        if self._child is None:
            raise RuntimeError("not started")
        return self._child

    @property
    def log(self) -> str:
        """What it has written to stdout and stderr."""
        return (self._folder / "log").read_text(errors="replace")

    def address(self, timeout_s: float = 30.0) -> str:
        """Waits for the announcement and returns the address in it.

        Raises:
            AssertionError: It does not come in time, or the process ended before.
        """
        wait_until(
            lambda: self._announcement.exists() or self.child.poll() is not None,
            timeout_s,
            "the server did not announce its address",
        )
        if not self._announcement.exists():
            raise AssertionError(f"the server exited with {self.child.poll()}:\n{self.log}")
        address: str = json.loads(self._announcement.read_text())["address"]
        return address

    def kill(self) -> None:
        """Ends it at once, as a crash would; returns when it has ended."""
        self.child.kill()
        self.child.wait()

    def freeze(self) -> None:
        """Stops it where it is; its connections stay open."""
        self.child.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets it go on."""
        self.child.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Asks it to stop in order."""
        self.child.terminate()

    def wait(self, timeout_s: float = 30.0) -> int:
        """Waits for its end and returns the exit status.

        Raises:
            AssertionError: It still runs after `timeout_s` seconds.
        """
        try:
            return self.child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s:g} s:\n{self.log}") from None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.kill()
