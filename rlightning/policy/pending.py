"""One request for inference, and the batch in which it is answered."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from rlightning.errors import PolicyError
from rlightning.types import Mode, PolicyResponse

if TYPE_CHECKING:
    from rlightning.policy.inference import Part

_LOG = logging.getLogger(__name__)

_T = TypeVar("_T")


Answer: TypeAlias = "PolicyResponse | PolicyError"
"""What comes of one request: its rows' actions, or why there are none for it."""


class Runner(Protocol):
    """Answers batches of one kind; requests for different runners never share a batch."""

    def gather(self, parts: Sequence[Part], mode: Mode) -> Callable[[], list[Answer]]:
        """Puts the rows of a batch together, maybe while another one is answered.

        Returns:
            What answers it: returns one answer for each part, or raises a `PolicyError`.

        Raises:
            PolicyError: None can be had.
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


class Pending:
    """One request, kept beyond its answer: that can be had repeatedly."""

    __slots__ = (
        "_error",
        "_response",
        "_stages",
        "_waiters",
        "deadline_ns",
        "mode",
        "nbytes",
        "part",
        "received_ns",
        "rows",
        "runner",
    )

    def __init__(
        self,
        runner: Runner,
        part: Part,
        mode: Mode,
        received_ns: int,
        deadline_ns: int,
        nbytes: int = 0,
    ) -> None:
        self.runner = runner
        self.part: Part | None = part
        self.mode = mode
        self.rows = part.rows or 1
        self.received_ns = received_ns
        self.deadline_ns = deadline_ns
        self.nbytes = nbytes
        self._response: PolicyResponse | None = None
        self._stages: StageTimes | None = None
        self._error: Exception | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def done(self) -> bool:
        """Whether there is an answer."""
        return self._response is not None or self._error is not None

    @property
    def failed(self) -> bool:
        """Whether the answer is an error: nothing was inferred, or it does not count."""
        return self._error is not None

    @property
    def policy_version(self) -> int:
        """Version of the weights that answered; 0 before that, and without one."""
        return getattr(self._response, "policy_version", 0)

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
class Batch:
    """Requests that are answered together.

    Attributes:
        pendings: The requests; of one runner and mode.
        rows: Their rows.
        formed_ns: Since when it took shape: the oldest had come, and the inference before was over.
        start_ns: When inference began.
        end_ns: When it ended.
        answers: One for each request; None if the batch failed.
        error: Why it failed.
        infer: Answers what `gather` has put together; None before that, and once it has begun.
    """

    pendings: list[Pending]
    rows: int
    formed_ns: int
    start_ns: int = 0
    end_ns: int = 0
    answers: list[Answer] | None = None
    error: Exception | None = None
    infer: Callable[[], list[Answer]] | None = None

    @property
    def gathered(self) -> bool:
        """Whether `gather` is over."""
        return self.infer is not None or self.error is not None

    def gather(self) -> None:
        """Puts the rows together, for `execute`; never raises."""
        first = self.pendings[0]
        parts = [pending.part for pending in self.pendings if pending.part is not None]
        self.infer = self._try(first.runner.gather, parts, first.mode)

    def execute(self) -> None:
        """Runs the inference, of what was gathered ahead or is now; never raises."""
        self.start_ns = time.monotonic_ns()
        if not self.gathered:
            self.gather()
        infer, self.infer = self.infer, None  # it holds on to the rows
        if infer is not None:
            self.answers = self._try(infer)
        self.end_ns = time.monotonic_ns()

    def _try(self, work: Callable[..., _T], *args: Any) -> _T | None:
        """Returns what a part of the work returns; None if it raised, which is kept."""
        try:
            return work(*args)
        except PolicyError as error:
            self.error = error
        except BaseException as error:  # no batch may end its thread unanswered
            if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():
                raise  # a signal's, meant for the loop, where short batches run
            self.error = failure("inference", error)
        return None

    def answer(self) -> None:
        """Gives each request its answer, or all the error."""
        if self.answers is None:
            for pending in self.pendings:
                pending.fail(self.error or PolicyError("inference gave no answer"))
            return
        inference_us = (self.end_ns - self.start_ns) // 1000
        for pending, answer in zip(self.pendings, self.answers, strict=True):
            if isinstance(answer, PolicyError):
                pending.fail(answer)
                continue
            joined_ns = max(self.formed_ns, pending.received_ns)
            queue_us = (joined_ns - pending.received_ns) // 1000
            wait_us = (self.start_ns - joined_ns) // 1000
            pending.answer(answer, StageTimes(queue_us, wait_us, inference_us, self.rows))


def failure(what: str, error: BaseException) -> PolicyError:
    """Logs what was raised where nobody expects it, and returns it as an error to be told."""
    _LOG.error("%s failed", what, exc_info=error)
    return PolicyError(f"{what} failed: {type(error).__name__}: {error}")
