"""The journal in an event loop: records of many writers are written together.

What is short is written by the loop itself, since handing it to a thread and hearing of it takes
longer than writing it; the rest by a thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from rlightning.buffer.durable.files import SyncError
from rlightning.buffer.durable.journal import Entry, Journal
from rlightning.errors import ResourceExhaustedError, UnavailableError
from rlightning.latency import SlidingHistogram
from rlightning.rpc.status import DISK_FULL
from rlightning.utils.waiting import in_thread

logger = logging.getLogger(__name__)

_MOST_PENDING_BYTES = 64 * 2**20
_RETRY_S = 0.25
# A short write that took so long met a system that holds writers up. The loop is spared so many
# times as long, but at least for a while: it then waits for no more than a hundredth of its time.
_SLOW_S = 0.005
_SPARED_TIMES = 100
_LEAST_SPARED_S = 1.0


class Log:
    """Appends records to a journal in order; whoever acks something awaits `settled` first.

    While one batch is written, what comes is gathered for the next. When the disk is full or
    broken, nothing settles, and writing is tried again until it works. After anything else that
    goes wrong, nothing is written any more.

    Args:
        journal: The journal.
        on_full: Called with True when writing does not work, and with False when it does again.
        on_lost: Called when the disk did not confirm what was written, or something unexpected
            happened: the process has to end.

    Attributes:
        end: Position after the last record appended.
        failure: Why nothing can be written now; None while it can.
        writes: How long writing took, each time, what the durability asks of the disk included.
        syncs: How long the disk took to confirm it, each time that it was asked.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        on_full: Callable[[bool], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        self.end = journal.end
        self.failure: Exception | None = None
        self.writes = SlidingHistogram()
        self.syncs = SlidingHistogram()
        self._journal = journal
        self._on_full = on_full
        self._on_lost = on_lost
        self._settled = journal.end
        self._pending: deque[Entry] = deque()
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._sparing = 0  # reasons why the thread writes all that comes
        self._spared_until = 0.0
        self._writing: asyncio.Task[None] | None = None
        self._lost = False
        self._closed = False

    @property
    def pending_bytes(self) -> int:
        """Bytes that are not written yet."""
        return self.end - self._settled

    @property
    def behind(self) -> bool:
        """Whether so much waits to be written that nothing more should come."""
        return self.pending_bytes > _MOST_PENDING_BYTES

    def append(self, kind: int, parts: tuple[bytes, ...]) -> None:
        """Appends a record; it is written soon."""
        entry = Entry(self.end, kind, parts)
        self._pending.append(entry)
        self.end = entry.end
        if self._writing is None and not self._closed and not self._lost:
            self._writing = asyncio.get_running_loop().create_task(self._write())

    def check(self) -> None:
        """Checks that more can be written.

        Raises:
            ResourceExhaustedError: The disk is full or broken; reason `DISK_FULL`.
        """
        if self.failure is not None:
            raise ResourceExhaustedError(
                f"the journal cannot be written: {self.failure}; nothing is stored until it can",
                reason=DISK_FULL,
            )

    async def settled(self) -> None:
        """Returns once everything appended so far is written as safely as the mode promises.

        Raises:
            UnavailableError: It will not be; see `on_lost`.
        """
        if self._lost:
            raise self._never()
        if self._settled < self.end:
            future = asyncio.get_running_loop().create_future()
            self._waiters.append((self.end, future))
            await future

    async def run(self, work: Callable[[Journal], None]) -> None:
        """Does something with the journal between two batches, in a thread."""
        with self.sparing_loop():
            await in_thread(self._thread, work, self._journal)

    @contextmanager
    def sparing_loop(self) -> Iterator[None]:
        """Leaves all writing to the thread meanwhile, as when others keep the disk busy."""
        self._sparing += 1
        try:
            yield
        finally:
            self._sparing -= 1

    async def _write(self) -> None:
        try:
            while self._pending:
                batch = tuple(self._pending)
                begun = time.monotonic()
                try:
                    await self._write_batch(batch, begun)
                except OSError as error:
                    self._set_failure(error)
                    if self._closed:
                        return
                    await asyncio.sleep(_RETRY_S)
                    continue
                self._set_failure(None)
                self.writes.record(time.monotonic() - begun)
                if self._journal.synced_s is not None:
                    self.syncs.record(self._journal.synced_s)
                for _ in batch:
                    self._pending.popleft()
                self._settled = batch[-1].end
                while self._waiters and self._waiters[0][0] <= self._settled:
                    _, future = self._waiters.popleft()
                    if not future.done():
                        future.set_result(None)
        except SyncError as error:
            logger.critical("%s; what was written is not known, so this process ends", error)
            self._lose(error)
        except Exception as error:
            logger.critical(
                "the journal is not written any more, so this process ends", exc_info=True
            )
            self._lose(error)
        finally:
            self._writing = None

    async def _write_batch(self, batch: tuple[Entry, ...], begun: float) -> None:
        if self._sparing or begun < self._spared_until or not self._journal.is_short(batch):
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, self._journal.write, batch)
            return
        self._journal.write(batch)
        if (took := time.monotonic() - begun) > _SLOW_S:
            self._spared_until = begun + took + max(_LEAST_SPARED_S, _SPARED_TIMES * took)

    def _lose(self, error: Exception) -> None:
        self._lost = True
        self._set_failure(error)
        for _, future in self._waiters:
            if not future.done():
                future.set_exception(self._never())
        self._waiters.clear()
        self._on_lost(error)

    def _never(self) -> UnavailableError:
        return UnavailableError(f"the journal is not written any more: {self.failure}")

    def _set_failure(self, error: Exception | None) -> None:
        if (error is None) != (self.failure is None):
            if error is not None:
                logger.error("the journal cannot be written, nothing is acked: %s", error)
            else:
                logger.warning("the journal can be written again")
            self._on_full(error is not None)
        self.failure = error

    async def close(self) -> None:
        """Writes what is left, if that works, and closes the journal."""
        self._closed = True
        if self._writing is not None and self.failure is None:
            await asyncio.wait({self._writing})
        elif self._writing is not None:
            self._writing.cancel()
            await asyncio.wait({self._writing})
        self._thread.shutdown(wait=True)
        self._journal.close()
