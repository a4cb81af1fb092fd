"""Puts requests of many sessions into batches and runs them one at a time, without torch.

All bookkeeping happens on the event loop. A batch runs on one thread beside it; batches that are
known to be short run on the loop itself, while that thread is idle. So no two batches, and no batch
and a change of weights, ever run at once.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from rlightning.errors import (
    BatcherOverloadedError,
    DeadlineExceededError,
    PolicyError,
    UnavailableError,
)
from rlightning.latency import Histogram
from rlightning.types import Mode, PolicyResponse

if TYPE_CHECKING:
    from rlightning.policy.inference import Part

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_UNKNOWN_NS = float("inf")


class Runner(Protocol):
    """Answers batches of one kind; requests for different runners never share a batch."""

    def run(self, parts: Sequence[Part], mode: Mode) -> list[PolicyResponse]:
        """Returns one response for each part.

        Raises:
            PolicyError: None could be computed.
        """
        ...


class StageTimes(NamedTuple):
    """Where the time of one answer went."""

    queue_us: int
    """From receipt until its batch began to form."""
    batch_wait_us: int
    """From then until inference began."""
    inference_us: int
    """Inference."""
    batch_rows: int
    """Rows that shared it."""


@dataclass(slots=True)
class BatcherStats:
    """What a batcher has done so far.

    Attributes:
        requests: Requests answered by an inference that succeeded.
        rows: Their rows.
        batches: Inferences that succeeded.
        inline_batches: Those that ran on the event loop.
        errors: Requests whose inference failed.
        expired: Requests dropped since their deadline had passed before inference.
        overloaded: Requests refused since the queue was full.
        queue: Seconds from receipt until the batch began to form.
        batch_wait: Seconds from then until inference began.
        inference: Seconds of inference, one sample per batch.
    """

    requests: int = 0
    rows: int = 0
    batches: int = 0
    inline_batches: int = 0
    errors: int = 0
    expired: int = 0
    overloaded: int = 0
    queue: Histogram = field(default_factory=Histogram)
    batch_wait: Histogram = field(default_factory=Histogram)
    inference: Histogram = field(default_factory=Histogram)


class Pending:
    """One request, kept beyond its answer: that can be had repeatedly."""

    __slots__ = (
        "_error",
        "_response",
        "_stages",
        "_waiters",
        "deadline_ns",
        "mode",
        "part",
        "received_ns",
        "rows",
        "runner",
    )

    def __init__(
        self, runner: Runner, part: Part, mode: Mode, received_ns: int, deadline_ns: int
    ) -> None:
        self.runner = runner
        self.part: Part | None = part
        self.mode = mode
        self.rows = part.rows or 1
        self.received_ns = received_ns
        self.deadline_ns = deadline_ns
        self._response: PolicyResponse | None = None
        self._stages: StageTimes | None = None
        self._error: Exception | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def done(self) -> bool:
        """Whether there is an answer."""
        return self._response is not None or self._error is not None

    async def wait(self) -> tuple[PolicyResponse, StageTimes]:
        """Waits for the answer; any number of tasks may, and may be cancelled.

        Raises:
            PolicyError: The policy raised or broke its contract.
            DeadlineExceededError: The deadline passed before inference began.
            UnavailableError: The batcher was closed.
        """
        if not self.done:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        if self._error is not None:
            raise self._error
        assert self._response is not None
        assert self._stages is not None
        return self._response, self._stages

    def answer(self, response: PolicyResponse, stages: StageTimes) -> None:
        """Gives the answer to whoever waits."""
        self._response, self._stages = response, stages
        self._wake()

    def fail(self, error: Exception) -> None:
        """Raises an error in whoever waits."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        self.part = None  # it holds on to the message that the request came in
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()


@dataclass(slots=True)
class _Batch:
    pendings: list[Pending]
    rows: int
    formed_ns: int
    start_ns: int = 0
    end_ns: int = 0
    responses: list[PolicyResponse] | None = None
    error: Exception | None = None


@dataclass(slots=True)
class _Control:
    function: Callable[[], Any]
    result: asyncio.Future[Any]


class Batcher:
    """Batches requests of the groups that are open.

    Everything queued for the same runner and mode leaves together, oldest first. With
    `max_wait_us` 0 that is what is there at the next turn of the event loop. Otherwise a batch
    waits until it is full, until every open group has asked, or until its oldest request has waited
    `max_wait_us`. While an inference runs, requests gather for the next one.

    Args:
        max_batch_rows: Rows in one batch; a single request with more is a batch of its own.
        max_wait_us: How long a request may wait for others to join.
        queue_rows: Rows that may wait.
        inline_below_us: Batches whose inference is known to take less run on the event loop, which
            saves two thread switches; 0: none do.

    Attributes:
        stats: What was done so far.
    """

    def __init__(
        self,
        *,
        max_batch_rows: int = 4096,
        max_wait_us: int = 0,
        queue_rows: int = 65536,
        inline_below_us: int = 0,
    ) -> None:
        self.stats = BatcherStats()
        self._max_batch_rows = max_batch_rows
        self._max_wait_ns = max_wait_us * 1000
        self._queue_rows = queue_rows
        self._inline_below_ns = inline_below_us * 1000
        # Smoothed inference time by the bit length of the number of rows.
        self._cost_ns: dict[int, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: queue.SimpleQueue[_Batch | _Control | int | None] = queue.SimpleQueue()
        self._stopped: asyncio.Future[None] | None = None
        self._closed = False
        self._queue: deque[Pending] = deque()
        self._rows = 0
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
        """Whether what is queued now will be answered within a turn or two of the event loop."""
        return not self._busy and not self._max_wait_ns and self._is_short(self._rows)

    def start(self) -> None:
        """Starts the inference thread; call on the event loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self._stopped = self._loop.create_future()
        arguments = (self._loop, self._stopped)
        threading.Thread(
            target=self._run_thread, args=arguments, name="inference", daemon=True
        ).start()

    async def close(self) -> None:
        """Fails what is queued, waits for the inference that runs, and ends the thread."""
        self._closed = True
        error = UnavailableError("the policy server is shutting down")
        while self._queue:
            self._queue.popleft().fail(error)
        self._rows = 0
        for control in self._controls:
            if not control.result.done():
                control.result.set_exception(error)
        self._controls.clear()
        if self._stopped is not None:
            self._inbox.put(None)
            await self._stopped

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
    ) -> Pending:
        """Queues the rows of one group.

        Args:
            runner: Which policy and spec they are for.
            part: The rows.
            mode: Explore or exploit.
            received_ns: Monotonic time of their arrival; 0: now.
            timeout_us: How long from then on somebody waits for the answer; 0: for ever.

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
        received_ns = received_ns or time.monotonic_ns()
        deadline_ns = received_ns + timeout_us * 1000 if timeout_us else 0
        pending = Pending(runner, part, mode, received_ns, deadline_ns)
        self._queue.append(pending)
        self._rows += rows
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
        control = _Control(function, self._loop.create_future())
        self._controls.append(control)
        self._schedule()
        result: _T = await control.result
        return result

    # On the event loop.

    def _schedule(self) -> None:
        if self._scheduled or self._busy or self._loop is None:
            return
        if self._queue or self._controls:
            self._scheduled = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        if self._busy or self._closed:
            return
        job = self._controls.popleft() if self._controls else self._form(time.monotonic_ns())
        if job is None:
            return
        self._alarm_ns = 0
        if isinstance(job, _Batch) and self._is_short(job.rows):
            self.stats.inline_batches += 1
            self._execute(job)
            self._finish(job)
            self._schedule()
        else:
            self._busy = True
            self._inbox.put(job)

    def _is_short(self, rows: int) -> bool:
        return self._cost_ns.get(rows.bit_length(), _UNKNOWN_NS) < self._inline_below_ns

    def _form(self, now: int) -> _Batch | None:
        """Takes the next batch out of the queue, if one is ready."""
        self._drop_expired(now)
        if not self._queue:
            return None
        if len(self._queue) == 1 and (self._groups <= 1 or not self._max_wait_ns):
            only = self._queue.popleft()
            self._rows = 0
            return _Batch([only], only.rows, max(only.received_ns, self._free_ns))
        kinds: dict[tuple[int, Mode], list[Pending]] = {}
        for pending in self._queue:
            kinds.setdefault((id(pending.runner), pending.mode), []).append(pending)
        everybody_asked = len(self._queue) >= self._groups
        alarm = 0
        for candidates in kinds.values():
            chosen, rows, full = self._choose(candidates)
            due = chosen[0].received_ns + self._max_wait_ns
            if full or everybody_asked or self._max_wait_ns == 0 or now >= due:
                if len(chosen) == len(self._queue):
                    self._queue.clear()
                else:
                    taken = set(map(id, chosen))
                    self._queue = deque(p for p in self._queue if id(p) not in taken)
                self._rows -= rows
                return _Batch(chosen, rows, max(chosen[0].received_ns, self._free_ns))
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
        if not any(0 < pending.deadline_ns <= now for pending in self._queue):
            return
        waiting = self._queue
        self._queue = deque()
        for pending in waiting:
            if 0 < pending.deadline_ns <= now:
                self._rows -= pending.rows
                self.stats.expired += 1
                waited = (now - pending.received_ns) // 1000
                pending.fail(
                    DeadlineExceededError(f"expired before inference, after {waited} us in queue")
                )
            else:
                self._queue.append(pending)

    def _set_alarm(self, due_ns: int) -> None:
        # The inference thread is the clock: it is idle now, and event loops count in milliseconds.
        if self._alarm_ns != due_ns:
            self._alarm_ns = due_ns
            self._inbox.put(due_ns)

    def _ring(self) -> None:
        self._alarm_ns = 0
        if not self._scheduled:
            self._dispatch()

    def _finish(self, batch: _Batch) -> None:
        """Answers every request of a batch, once it has run."""
        self._free_ns = batch.end_ns
        stats = self.stats
        inference_ns = batch.end_ns - batch.start_ns
        if batch.error is not None:
            stats.errors += len(batch.pendings)
            for pending in batch.pendings:
                pending.fail(batch.error)
            return
        assert batch.responses is not None
        # Starts high: some batches on the thread must show first that they are short.
        cost = self._cost_ns.get(batch.rows.bit_length(), 10 * self._inline_below_ns)
        self._cost_ns[batch.rows.bit_length()] = cost + 0.1 * (inference_ns - cost)
        stats.batches += 1
        stats.rows += batch.rows
        stats.requests += len(batch.pendings)
        stats.inference.record(inference_ns * 1e-9)
        for pending, response in zip(batch.pendings, batch.responses, strict=True):
            joined_ns = max(batch.formed_ns, pending.received_ns)
            queue_ns = joined_ns - pending.received_ns
            wait_ns = batch.start_ns - joined_ns
            stats.queue.record(queue_ns * 1e-9)
            stats.batch_wait.record(wait_ns * 1e-9)
            pending.answer(
                response,
                StageTimes(queue_ns // 1000, wait_ns // 1000, inference_ns // 1000, batch.rows),
            )

    def _finish_on_thread(self, batch: _Batch) -> None:
        self._busy = False
        self._finish(batch)
        self._schedule()

    def _finish_control(self, control: _Control, result: Any, error: Exception | None) -> None:
        self._busy = False
        if not control.result.done():
            if error is None:
                control.result.set_result(result)
            else:
                control.result.set_exception(error)
        self._schedule()

    # On the inference thread, except that `_execute` may be on the event loop.

    def _execute(self, batch: _Batch) -> None:
        parts = [pending.part for pending in batch.pendings if pending.part is not None]
        batch.start_ns = time.monotonic_ns()
        try:
            batch.responses = batch.pendings[0].runner.run(parts, batch.pendings[0].mode)
        except PolicyError as error:
            batch.error = error
        except (Exception, SystemExit) as error:  # no batch may end the thread, or go unanswered
            _LOG.exception("inference failed")
            batch.error = PolicyError(f"inference failed: {type(error).__name__}: {error}")
        batch.end_ns = time.monotonic_ns()

    def _run_thread(self, loop: asyncio.AbstractEventLoop, stopped: asyncio.Future[None]) -> None:
        alarm_ns = 0
        while True:
            timeout = max(0.0, (alarm_ns - time.monotonic_ns()) * 1e-9) if alarm_ns else None
            try:
                job = self._inbox.get(timeout=timeout)
            except queue.Empty:
                alarm_ns = 0
                loop.call_soon_threadsafe(self._ring)
                continue
            if isinstance(job, int):
                alarm_ns = job
                continue
            alarm_ns = 0
            if job is None:
                break
            if isinstance(job, _Batch):
                self._execute(job)
                loop.call_soon_threadsafe(self._finish_on_thread, job)
            else:
                self._run_control(loop, job)
        loop.call_soon_threadsafe(stopped.set_result, None)

    def _run_control(self, loop: asyncio.AbstractEventLoop, control: _Control) -> None:
        result, error = None, None
        try:
            result = control.function()
        except Exception as raised:  # raised again in whoever asked for it
            error = raised
        loop.call_soon_threadsafe(self._finish_control, control, result, error)
