"""One service on a node of a Ray cluster."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from rlightning.cluster.launcher import last_words
from rlightning.cluster.process import ServiceProcess, label_of
from rlightning.cluster.runs import write_atomically

_POLL_S = 0.1
_LOG_BYTES = 2**20


class ServiceActor:
    """Runs a service as a process of its own beside this one, and ends it with this one.

    A process of its own, since a service drains on signals and has one event loop, which Ray's
    worker has neither of for it. Methods are called by Ray, several at a time.

    Args:
        section: `env`, `policy` or `buffer`; of several buffer servers `buffer-0` and so on.
        files: Config files by name, in the order in which they are merged.
    """

    def __init__(self, section: str, files: Mapping[str, str]) -> None:
        self._section = section
        self._folder = Path(tempfile.mkdtemp(prefix=f"rlightning-{section}-"))
        self._files = [self._folder / name for name in files]
        for file, text in zip(self._files, files.values(), strict=True):
            write_atomically(file, text, mode=0o600)
        self._process: ServiceProcess | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def run(self) -> str:
        """Runs the service until it ends, and returns why it did.

        Whoever calls this again starts it again; so does Ray on another node when this one is gone.
        """
        options = [word for file in self._files[1:] for word in ("--config", str(file))]
        with self._lock:
            if self._stopped:
                return f"the {label_of(self._section)} was stopped"
            process = ServiceProcess(self._section, self._files[0], self._folder, options=options)
            self._process = process
            self._ended.clear()
        while process.poll() is None:  # not wait(), for which `stop` waits at the same time
            time.sleep(_POLL_S)
        try:
            process.release()
            return last_words(process)
        finally:
            self._ended.set()

    def stop(self, grace_s: float) -> str:
        """Stops the service for good and removes its files; one that overstays its grace is killed.

        Returns:
            The end of its log.
        """
        with self._lock:
            self._stopped = True
            process = self._process
        if process is None:
            shutil.rmtree(self._folder)
            return ""
        process.terminate()
        deadline = time.monotonic() + grace_s
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        process.kill()
        log = process.log.read_bytes()[-_LOG_BYTES:].decode(errors="replace")
        self._ended.wait(_POLL_S * 10)  # `run` reads the log, too
        shutil.rmtree(self._folder)
        return log
