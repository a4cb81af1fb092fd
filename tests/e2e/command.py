"""Runs the `rlightning` command as people do: in a process of its own."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlightning.testing import wait_until

ROOT = Path(__file__).parents[2]
CARTPOLE = ROOT / "configs" / "cartpole.yaml"
RLIGHTNING = Path(sys.executable).parent / "rlightning"
LABELS = ("policy server", "buffer server", "env server")

# Little work: a test that does not learn need not wait.
SMALL = (
    "env.num_envs=4",
    "buffer.rollout_length=8",
    "train.batch_size=16",
    "train.target_return=null",
    "train.max_env_steps=256",
)


def settings(*overrides):
    """Options for `--set`."""
    return [word for override in overrides for word in ("--set", override)]


def run(*arguments, cwd, timeout_s=60.0, command=(RLIGHTNING,)):
    """Runs a command to its end; returns (exit code, stdout, stderr)."""
    with Command(*arguments, cwd=cwd, command=command) as running:
        code = running.wait(timeout_s)
        return code, running.stdout, running.stderr


class Command:
    """A running command; ended, with what it started, when the test leaves the block."""

    def __init__(self, *arguments, cwd, command=(RLIGHTNING,)):
        self._files = [cwd / f".{time.monotonic_ns()}.{name}" for name in ("out", "err")]
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            self.process = subprocess.Popen(
                [*map(str, command), *map(str, arguments)],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=self._stdout(out),
                stderr=err,
                env={**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "50"},
            )

    def _stdout(self, file):
        return file

    @property
    def stdout(self):
        return self._files[0].read_text()

    @property
    def stderr(self):
        return self._files[1].read_text()

    def wait(self, timeout_s=60.0):
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running:\n{self.stdout}\n{self.stderr}") from None

    def wait_for(self, pattern, timeout_s=30.0):
        """Waits for a line that matches; returns the match."""

        def search():
            return re.search(pattern, self.stdout + self.stderr, re.MULTILINE)

        wait_until(
            lambda: search() is not None or self.process.poll() is not None,
            timeout_s,
            f"no line matches {pattern}",
        )
        found = search()
        assert found is not None, f"{pattern} never came:\n{self.stdout}\n{self.stderr}"
        return found

    def wait_serving(self):
        """Waits until all services are up; returns their addresses in the order of LABELS."""
        return [self.wait_for(rf"^{label} +SERVING +(\S+)$")[1] for label in LABELS]

    def services(self):
        """Process ids of the services that it started, by name."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                words = (folder / "cmdline").read_bytes().decode().split("\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(parent) == self.process.pid:
                found |= {
                    word.rpartition(".")[2]: int(folder.name)
                    for word in words
                    if word.startswith("rlightning.services.")
                }
        return found

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            # Its services stop by themselves once it is gone.
            self.process.kill()
            self.process.wait()
        for file in self._files:
            file.unlink()


class TerminalCommand(Command):
    """A command whose stdout is a terminal, where it shows live what it does elsewhere line by line."""

    def _stdout(self, file):
        self._screen, self._terminal = pty.openpty()
        self._seen = bytearray()
        return self._terminal

    @property
    def stdout(self):
        """All that was ever written, without colours; what overwrites a line is a line more."""
        return (
            re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", self.written)
            .replace("\r\n", "\n")
            .replace("\r", "\n")
        )

    @property
    def written(self):
        """As the terminal got it."""
        while select.select([self._screen], [], [], 0)[0]:
            self._seen += os.read(self._screen, 2**16)
        return self._seen.decode(errors="replace")

    def wait(self, timeout_s=60.0):
        def ended():
            _ = self.written  # a terminal that nobody reads holds the command up
            return self.process.poll() is not None

        wait_until(ended, timeout_s, "still running")
        return self.process.returncode

    def __exit__(self, *error):
        super().__exit__(*error)
        os.close(self._screen)
        os.close(self._terminal)


def is_running(pid):
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
