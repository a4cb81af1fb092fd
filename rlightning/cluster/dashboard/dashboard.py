"""The page of one run: looks at its services every second, and serves what it sees."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from rlightning.cluster.dashboard.feed import Feed
from rlightning.cluster.dashboard.server import PageServer
from rlightning.cluster.dashboard.view import COLUMNS, View
from rlightning.cluster.progress import read_progress
from rlightning.cluster.runs import Run
from rlightning.cluster.snapshot import Observer, Snapshot
from rlightning.cluster.targets import Target
from rlightning.errors import DeadlineExceededError
from rlightning.rpc.loop import shared_loop

_LOG = logging.getLogger(__name__)

_PERIOD_S = 1.0
_PAUSE_S = 0.1
_CLOSE_S = 5.0


class Dashboard:
    """Serves the page from the process's event loop. Use as a context manager.

    Args:
        address: `HOST:PORT`, port 0 lets the system choose; None: there is no page, and nothing is
            done.
        run: Folder of the run, whose learner is shown.
        name: What to call the run.
        report: Takes one line for people.

    Attributes:
        outcome: How the run ended; None before, or if it has no end of its own.

    Raises:
        ConfigError: It is no address, or nobody can listen there; on entering.
    """

    def __init__(
        self, address: str | None, *, run: Path, name: str, report: Callable[[str], None]
    ) -> None:
        self.outcome: str | None = None
        self._run = run
        self._report = report
        self._view = View(name)
        self._feed = Feed(COLUMNS)
        self._server = None if address is None else PageServer(address, self._feed)
        self._last: Snapshot | None = None
        self._watching: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> Self:
        if self._server is not None:
            address = shared_loop().run(self._server.start())
            self._report(f"dashboard at http://{address}/")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._server is None:
            return
        if self._watching is not None:
            self._watching.cancel()
        with contextlib.suppress(DeadlineExceededError):
            shared_loop().run(self._close(self._server, error), _CLOSE_S)

    def watch(self, targets: Sequence[Target]) -> None:
        """Begins to look at the services; of a run in one process there are none."""
        if self._server is None:
            return
        self._watching = shared_loop().submit(self._watch(targets))
        self._watching.add_done_callback(_tell_of_bug)

    async def _watch(self, targets: Sequence[Target]) -> None:
        loop = asyncio.get_running_loop()
        async with Observer(targets, run=self._run) as observer:
            while True:
                begun = loop.time()
                self._last = await observer.gather()
                self._feed.publish(*self._view.show(self._last))
                await asyncio.sleep(max(_PAUSE_S, begun + _PERIOD_S - loop.time()))

    async def _close(self, server: PageServer, error: BaseException | None) -> None:
        """Tells the readers how it ended, and lets them go."""
        if self._last is not None:
            learner = read_progress(self._run, in_process=not self._last.services)
            if learner is not None and self.outcome is not None:
                learner["outcome"] = self.outcome
            last = dataclasses.replace(self._last, learner=learner)
            self._feed.publish(*self._view.show(last, ended=self._ending(error)))
        await server.close()

    def _ending(self, error: BaseException | None) -> str:
        if self.outcome is not None:
            return f"The run has ended: {self.outcome.replace('_', ' ')}."
        if error is None or isinstance(error, KeyboardInterrupt):
            return "This was stopped."
        # What stands below are lines of logs.
        return f"This has ended: {next(iter(str(error).splitlines()), type(error).__name__)}"


def shown(address: str | None, run: Run, report: Callable[[str], None]) -> Dashboard:
    """Returns the page of a run; without an address, one that does nothing."""
    name = f"{run.path.parent.name}/{run.path.name}"
    return Dashboard(address, run=run.path, name=name, report=report)


def _tell_of_bug(watching: concurrent.futures.Future[None]) -> None:
    if not watching.cancelled() and (error := watching.exception()) is not None:
        _LOG.error("the dashboard looks no longer", exc_info=error)
