"""Puts requests of many sessions into batches and runs them one at a time, without torch.

All bookkeeping happens on the event loop. A batch runs on one thread beside it; batches that are
known to be short run on the loop itself, while that thread is idle. So no two batches, and no batch
and a change of weights, ever run at once. For a device that works beside the CPU, a second thread
may put the next batch together while one runs.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rlightning.errors import BatcherOverloadedError, DeadlineExceededError, UnavailableError
from rlightning.policy.batcher_stats import BatcherStats
from rlightning.policy.pending import Batch, Pending, Runner, StageTimes, failure
from rlightning.policy.worker import Worker
from rlightning.types import Mode, PolicyResponse

if TYPE_CHECKING:
    from rlightning.policy.inference import Part

_T = TypeVar("_T")
_UNKNOWN_NS = float("inf")
_PROMPT_NS = 50_000_000
# With more requests in a batch the loop has more to do meanwhile than a thread switch costs.
_INLINE_REQUESTS = 2


class Batcher:
    """Batches requests of the groups that are open.

    Everything queued for the same runner and mode leaves together, oldest first. With
    `max_wait_us` 0 that is what is there at the next turn of the event loop. Otherwise a batch
    waits until it is full, until every open group has asked, or until its oldest request has waited
    `max_wait_us`. While an inference runs, requests wait for the next one.

    Args:
        max_batch_rows: Rows in one batch; a single request with more is a batch of its own.
        max_wait_us: How long a request may wait for others to join.
        queue_rows: Rows that may wait.
        queue_bytes: Bytes of the requests that may wait.
        inline_below_us: Batches whose inference is known to take less run on the event loop, which
            saves two thread switches; 0: none do.
        gathers_ahead: While a batch runs, put the next one together on another thread, once there
            is enough for a full one, which nobody could join any more. If some of its requests
            have expired by its turn, it is put together anew without them.

    Attributes:
        stats: What was done so far.
    """

    def __init__(
        self,
        *,
        max_batch_rows: int = 4096,
        max_wait_us: int = 0,
        queue_rows: int = 65536,
        queue_bytes: int = 256 * 2**20,
        inline_below_us: int = 0,
        gathers_ahead: bool = False,
    ) -> None:
        self.stats = BatcherStats()
        self._max_batch_rows = max_batch_rows
        self._max_wait_ns = max_wait_us * 1000
        self._queue_rows = queue_rows
        self._queue_bytes = queue_bytes
        self._inline_below_ns = inline_below_us * 1000
        # Smoothed inference time by the bit length of the number of rows.
        self._cost_ns: dict[int, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: Worker | None = None
        self._gathers_ahead = gathers_ahead
        self._gatherer: Worker | None = None
        # What is put together while another batch runs.
        self._next: Batch | None = None
        self._closed = False
        self._queue: deque[Pending] = deque()
        self._rows = 0
        self._bytes = 0
        self._controls: deque[_Control] = deque()
        self._groups = 0
        self._busy = False
        self._scheduled = False
        self._alarm_ns = 0
        self._free_ns = 0

    @property
    def queued_rows(self) -> int:
        """Rows that wait for inference."""
        return self._rows

    @property
    def groups(self) -> int:
        """Groups that may ask."""
        return self._groups

    @property
    def prompt(self) -> bool:
        """Whether what is queued now will be answered within some milliseconds, as far as known."""
        ahead = self._busy + (self._next is not None)
        batches = 1 + self._rows // self._max_batch_rows + ahead
        cost_ns = self._cost_ns.get(min(self._rows, self._max_batch_rows).bit_length(), _UNKNOWN_NS)
        return self._max_wait_ns + batches * cost_ns < _PROMPT_NS

    def start(self) -> None:
        """Starts the inference thread; call on the event loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self._worker = Worker("inference", self._ring)
        if self._gathers_ahead:
            self._gatherer = Worker("gathering", self._ring)

    async def close(self) -> None:
        """Fails what is queued, waits for the inference that runs, and ends the thread."""
        self._closed = True
        error = UnavailableError("the policy server is shutting down")
        while self._queue:
            self._queue.popleft().fail(error)
        self._rows = self._bytes = 0
        while self._controls:
            self._controls.popleft().fail(error)
        if self._gatherer is not None:
            await self._gatherer.stop()  # it reads what those it puts together asked with
        if self._next is not None:
            for pending in self._next.pendings:
                pending.fail(error)
            self._next = None
        if self._worker is not None:
            await self._worker.stop()

    def open_group(self) -> None:
        """Counts one more group that may ask."""
        self._groups += 1

    def close_group(self) -> None:
        """Counts one group less: those that are left need not wait for it."""
        self._groups -= 1
        self._schedule()

    def enqueue(
        self,
        runner: Runner,
        part: Part,
        mode: Mode,
        *,
        received_ns: int = 0,
        timeout_us: int = 0,
        nbytes: int = 0,
    ) -> Pending:
        """Queues the rows of one group.

        Args:
            runner: Which policy and spec they are for.
            part: The rows.
            mode: Explore or exploit.
            received_ns: Monotonic time of their arrival; 0: now.
            timeout_us: How long from then on somebody waits for the answer; 0: for ever.
            nbytes: Size of the message that the rows are views of.

        Raises:
            BatcherOverloadedError: The queue has no room.
            UnavailableError: The batcher was closed.
        """
        if self._closed:
            raise UnavailableError("the policy server is shutting down")
        rows = part.rows or 1
        if self._rows + rows > self._queue_rows:
            self.stats.overloaded += 1
            raise BatcherOverloadedError(
                f"{self._rows} rows wait for inference, {rows} more exceed "
                f"policy.queue_rows = {self._queue_rows}"
            )
        if self._bytes + nbytes > self._queue_bytes:
            self.stats.overloaded += 1
            raise BatcherOverloadedError(
                f"{self._bytes} bytes wait for inference, {nbytes} more exceed "
                f"policy.queue_bytes = {self._queue_bytes}"
            )
        received_ns = received_ns or time.monotonic_ns()
        deadline_ns = received_ns + timeout_us * 1000 if timeout_us else 0
        pending = Pending(runner, part, mode, received_ns, deadline_ns, nbytes)
        self._queue.append(pending)
        self._rows += rows
        self._bytes += nbytes
        if self._groups <= 1 and not self._scheduled:
            self._dispatch()  # nobody else can join
        else:
            self._schedule()
        return pending

    async def submit(
        self,
        runner: Runner,
        part: Part,
        mode: Mode,
        *,
        received_ns: int = 0,
        timeout_us: int = 0,
    ) -> tuple[PolicyResponse, StageTimes]:
        """Queues the rows of one group and waits for the answer: `enqueue`, then `Pending.wait`."""
        pending = self.enqueue(runner, part, mode, received_ns=received_ns, timeout_us=timeout_us)
        return await pending.wait()

    async def run(self, function: Callable[[], _T]) -> _T:
        """Runs a function on the inference thread, between two batches, and returns its result.

        Raises:
            UnavailableError: The batcher was closed.
        """
        if self._closed or self._loop is None:
            raise UnavailableError("the policy server is shutting down")
        result: asyncio.Future[_T] = self._loop.create_future()
        self._controls.append(_Control(function, result))
        self._schedule()
        return await result

    # On the event loop.

    def _schedule(self) -> None:
        if self._scheduled or self._loop is None or (self._busy and not self._may_gather):
            return
        if self._queue or self._controls or self._next is not None:
            self._scheduled = True
            self._loop.call_soon(self._dispatch)

    @property
    def _may_gather(self) -> bool:
        return self._gatherer is not None and self._next is None

    def _dispatch(self) -> None:
        """Starts the next piece of work, unless one runs."""
        self._scheduled = False
        if self._closed or self._worker is None:
            return
        if self._busy:
            self._gather_next()
            return
        job = self._controls.popleft() if self._controls else self._take(time.monotonic_ns())
        if job is None:
            return
        self._alarm_ns = 0
        if (
            isinstance(job, Batch)
            and self._is_short(job.rows)
            and (len(job.pendings) <= _INLINE_REQUESTS)
        ):
            self.stats.inline_batches += 1
            job.execute()
            self._finish(job)
            self._schedule()
        else:
            self._busy = True
            self._worker.submit(job.execute, partial(self._finish_on_thread, job))
            self._gather_next()

    def _take(self, now: int) -> Batch | None:
        """Returns the batch whose turn it is, if it is ready."""
        batch = self._next
        if batch is None:
            return self._form(now)
        if not batch.gathered:
            return None
        self._next = None
        if not _any_expired(batch.pendings, now):
            return batch
        # Back to where they came from: the others are put together anew.
        self._queue.extendleft(reversed(batch.pendings))
        self._rows += batch.rows
        self._bytes += sum(pending.nbytes for pending in batch.pendings)
        return self._form(now)

    def _gather_next(self) -> None:
        """Begins to put the next batch together beside the one that runs, if it is full."""
        if self._gatherer is None or self._next is not None or self._rows < self._max_batch_rows:
            return
        batch = self._form(time.monotonic_ns(), only_full=True)
        if batch is not None:
            self._next = batch
            self._gatherer.submit(batch.gather, self._schedule)

    def _is_short(self, rows: int) -> bool:
        return self._cost_ns.get(rows.bit_length(), _UNKNOWN_NS) < self._inline_below_ns

    def _form(self, now: int, *, only_full: bool = False) -> Batch | None:
        """Takes the next batch out of the queue, if one is ready; or only if it is full."""
        if not only_full and len(self._queue) == 1 and (self._groups <= 1 or not self._max_wait_ns):
            only = self._queue[0]
            if not 0 < only.deadline_ns <= now:
                self._queue.clear()
                self._rows = self._bytes = 0
                return Batch([only], only.rows, max(only.received_ns, self._free_ns))
        self._drop_expired(now)
        if not self._queue:
            return None
        kinds: dict[tuple[int, Mode], list[Pending]] = {}
        for pending in self._queue:
            kinds.setdefault((id(pending.runner), pending.mode), []).append(pending)
        everybody_asked = len(self._queue) >= self._groups
        may_leave = not only_full and (everybody_asked or self._max_wait_ns == 0)
        alarm = 0
        for candidates in kinds.values():
            chosen, rows, full = self._choose(candidates)
            due = chosen[0].received_ns + self._max_wait_ns
            if full or may_leave or (now >= due and not only_full):
                if len(chosen) == len(self._queue):
                    self._queue.clear()
                else:
                    taken = set(map(id, chosen))
                    self._queue = deque(p for p in self._queue if id(p) not in taken)
                self._rows -= rows
                self._bytes -= sum(pending.nbytes for pending in chosen)
                return Batch(chosen, rows, max(chosen[0].received_ns, self._free_ns))
            if only_full:
                return None  # it would pass those of another kind that came before it
            alarm = min(alarm or due, due)
        self._set_alarm(alarm)
        return None

    def _choose(self, candidates: list[Pending]) -> tuple[list[Pending], int, bool]:
        """Returns the oldest requests that fit one batch, their rows, and whether it is full."""
        rows = candidates[0].rows
        count = 1
        while count < len(candidates) and rows + candidates[count].rows <= self._max_batch_rows:
            rows += candidates[count].rows
            count += 1
        return candidates[:count], rows, count < len(candidates) or rows >= self._max_batch_rows

    def _drop_expired(self, now: int) -> None:
        if not _any_expired(self._queue, now):
            return
        waiting = self._queue
        self._queue = deque()
        for pending in waiting:
            if 0 < pending.deadline_ns <= now:
                self._rows -= pending.rows
                self._bytes -= pending.nbytes
                self.stats.expired += 1
                waited = (now - pending.received_ns) // 1000
                pending.fail(
                    DeadlineExceededError(f"expired before inference, after {waited} us in queue")
                )
            else:
                self._queue.append(pending)

    def _set_alarm(self, due_ns: int) -> None:
        # The inference thread is the clock: it is idle now, and event loops count in milliseconds.
        if self._alarm_ns != due_ns and self._worker is not None:
            self._alarm_ns = due_ns
            self._worker.set_alarm(due_ns)

    def _ring(self) -> None:
        self._alarm_ns = 0
        if not self._scheduled:
            self._dispatch()

    def _finish_on_thread(self, job: Batch | _Control) -> None:
        self._busy = False
        self._finish(job)
        self._schedule()

    def _finish(self, job: Batch | _Control) -> None:
        """Tells whoever waits for a piece of work, once it is done."""
        job.answer()
        if isinstance(job, _Control):
            return
        self._free_ns = job.end_ns
        if job.error is not None:
            self.stats.errors += len(job.pendings)
            return
        self.stats.record(job)
        # Starts high: some batches on the thread must show first that they are short.
        size = job.rows.bit_length()
        cost_ns = self._cost_ns.get(size, 10 * self._inline_below_ns)
        self._cost_ns[size] = cost_ns + 0.1 * (job.end_ns - job.start_ns - cost_ns)


def _any_expired(pendings: Iterable[Pending], now: int) -> bool:
    return any(0 < pending.deadline_ns <= now for pending in pendings)


class _Control:
    """A function that runs between two batches."""

    def __init__(self, function: Callable[[], Any], result: asyncio.Future[Any]) -> None:
        self._function = function
        self._result = result
        self._value: Any = None
        self._error: Exception | None = None

    def execute(self) -> None:
        try:
            self._value = self._function()
        except Exception as error:  # raised again in whoever asked for it
            lost = isinstance(error, StopIteration)  # no future takes it
            self._error = failure("the policy", error) if lost else error
        except BaseException as error:  # it would end the thread
            self._error = failure("the policy", error)

    def answer(self) -> None:
        if self._error is not None:
            self.fail(self._error)
        elif not self._result.done():
            self._result.set_result(self._value)

    def fail(self, error: Exception) -> None:
        if not self._result.done():
            self._result.set_exception(error)
