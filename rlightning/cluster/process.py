"""One service as a child process of this one."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlightning.cluster.logs import readable
from rlightning.utils.config.environment import child_environment

# Without these, glibc maps and unmaps every block above 128 KiB, and each message of that size pays
# for fresh pages: an image batch ran 2.6 times slower. 32 MiB is the largest threshold glibc takes.
MALLOC_ENV = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20)}
# `-m` puts the current folder before all else, where a folder `rlightning` or `torch` would shadow
# the real one; the service appends it (on 3.10, which has no such option, it moves it to the end).
_SAFE_PATH = ("-P",) if sys.version_info >= (3, 11) else ()
LABELS = {"env": "env server", "policy": "policy server", "buffer": "buffer server"}


def role_of(section: str) -> str:
    """Returns the section of the config that is a service's: of `buffer-1`, `buffer`."""
    return section.partition("-")[0]


def label_of(section: str) -> str:
    """Returns what to call a service: of `buffer-1`, one of several, "buffer server 1"."""
    role, _, number = section.partition("-")
    return f"{LABELS[role]} {number}".rstrip()


def name_of(section: str) -> str:
    """Returns what to call files of a service: of `buffer-1`, one of several, `buffer_server-1`."""
    role, _, number = section.partition("-")
    return f"{role}_server-{number}".rstrip("-")


@dataclass(frozen=True)
class Announcement:
    """What a service writes once its port is bound.

    Attributes:
        addresses: What it listens on, as HOST:PORT.
        pid: Its process.
    """

    addresses: list[str]
    pid: int


class ServiceProcess:
    """Starts a service and knows its log, its address and its end.

    The child is spawned in a session of its own, so that Ctrl-C reaches only this process, and
    holds the read end of a pipe as stdin: it stops when this process is gone, however that ended.

    Args:
        section: `env`, `policy` or `buffer`; of several buffer servers `buffer-0` and so on.
        config_file: Config that it reads.
        logs: Folder of its log and of its announcement.
        options: Further options of its command line.
    """

    def __init__(
        self, section: str, config_file: Path, logs: Path, *, options: Sequence[str] = ()
    ) -> None:
        self.section = section
        self.label = label_of(section)
        role, name = role_of(section), name_of(section)
        self.log = logs / f"{name}.log"
        self._announcement = logs / f".{name}.json"
        self._command = [
            *(sys.executable, *_SAFE_PATH, "-m", f"rlightning.services.{role}_server"),
            *("--config", str(config_file)),
            *options,
        ]
        self._started = time.monotonic()
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                [*self._command, "--announce", str(self._announcement), "--exit-with-stdin"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=child_environment(MALLOC_ENV),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    @property
    def command(self) -> str:
        """The command line that starts it again by hand."""
        return shlex.join(self._command)

    def announced(self) -> Announcement | None:
        """Returns where it listens; None until its port is bound."""
        try:
            text = self._announcement.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        data = json.loads(text)
        return Announcement(addresses=data["addresses"], pid=data["pid"])

    def poll(self) -> int | None:
        """Returns its exit code, negative for the signal that killed it; None while it runs."""
        return self._child.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits for its end and returns the exit code; None if it still runs after `timeout_s`."""
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Asks it to drain and stop."""
        if self.poll() is None:
            self._child.terminate()

    def kill(self) -> None:
        """Ends it now and releases what this process holds of it."""
        if self.poll() is None:
            self._child.kill()
        self._child.wait()
        self.release()

    def release(self) -> None:
        """Closes the pipe and removes the announcement of a process that has ended."""
        if self._child.stdin is not None:
            self._child.stdin.close()
        self._announcement.unlink(missing_ok=True)

    def tail(self, lines: int = 10) -> list[str]:
        """Returns the last lines of its log, as people read them."""
        with self.log.open(encoding="utf-8", errors="replace") as log:
            return [readable(line.rstrip("\n")) for line in deque(log, maxlen=lines)]

    def obituary(self) -> str:
        """Returns how it ended, for people; only after its end."""
        code = self.poll()
        if code is None:
            raise ValueError(f"the {self.label} still runs")
        age = time.monotonic() - self._started
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"exited with code {code}"
        )
        return f"the {self.label} {how} after {age:.1f} s"
