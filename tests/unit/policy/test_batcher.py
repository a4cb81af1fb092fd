"""The batcher, with runners that count rows instead of computing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from rlightning.errors import (
    BatcherOverloadedError,
    DeadlineExceededError,
    PolicyError,
    UnavailableError,
)
from rlightning.policy.batcher import Batcher
from rlightning.policy.inference import Part
from rlightning.policy.pending import Answer, Pending
from rlightning.types import Mode, PolicyResponse

EXPLORE, EXPLOIT = Mode.EXPLORE, Mode.EXPLOIT


class Panic(BaseException):
    """What a library in Rust raises when it panics."""


class Recorder:
    """Answers each part and keeps which parts shared a batch, and which were gathered ahead."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.batches: list[tuple[list[str], Mode]] = []
        self.ahead: list[list[str]] = []
        self.threads: set[str] = set()
        self.entered = threading.Event()
        self._gate = gate

    def gather(self, parts: Sequence[Part], mode: Mode) -> Callable[[], list[Answer]]:
        if threading.current_thread().name == "gathering":
            self.ahead.append([part.env_id for part in parts])
        if any(part.env_id == "no room" for part in parts):
            raise ValueError("no memory")
        if any(part.env_id == "no rows" for part in parts):
            raise Panic("no rows")
        return partial(self.infer, parts, mode)

    def infer(self, parts: Sequence[Part], mode: Mode) -> list[Answer]:
        self.batches.append(([part.env_id for part in parts], mode))
        self.threads.add(threading.current_thread().name)
        self.entered.set()
        if self._gate is not None:
            assert self._gate.wait(30)
        if any(part.env_id == "bad" for part in parts):
            raise PolicyError("no action for bad")
        if any(part.env_id == "exit" for part in parts):
            raise SystemExit(3)
        if any(part.env_id == "panic" for part in parts):
            raise Panic("index out of bounds")
        if any(part.env_id == "key" for part in parts):
            raise KeyboardInterrupt("ctrl-c")
        return [
            PolicyError("'action' is NaN")
            if part.env_id == "nan"
            else PolicyResponse(part.env_id, action=part.rows)
            for part in parts
        ]


def part(env_id: str = "a", rows: int | None = 1) -> Part:
    return Part(env_id, [], rows)


def start(groups: int = 1, **options: int) -> Batcher:
    batcher = Batcher(**options)
    batcher.start()
    for _ in range(groups):
        batcher.open_group()
    return batcher


async def until(condition: Callable[[], object], deadline_s: float = 10) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


async def test_answers_a_request_and_says_where_the_time_went() -> None:
    batcher, runner = start(), Recorder()
    response, stages = await batcher.submit(runner, part("a", 3), EXPLORE)
    assert (response.env_id, response.action) == ("a", 3)
    assert stages.batch_rows == 3
    assert min(stages.queue_us, stages.batch_wait_us, stages.inference_us) >= 0
    assert runner.threads == {"inference"}
    stats = batcher.stats
    assert (stats.requests, stats.rows, stats.batches, stats.errors) == (1, 3, 1, 0)
    await batcher.close()


async def test_takes_what_is_there_at_the_next_turn_of_the_loop() -> None:
    batcher, runner = start(groups=3), Recorder()
    asks = [batcher.submit(runner, part(name), EXPLORE) for name in "abc"]
    await asyncio.gather(*asks)
    assert runner.batches == [(["a", "b", "c"], EXPLORE)]
    await batcher.close()


async def test_requests_gather_while_an_inference_runs() -> None:
    gate = threading.Event()
    batcher, runner = start(groups=4), Recorder(gate)
    asks = [asyncio.ensure_future(batcher.submit(runner, part("a"), EXPLORE))]
    await until(runner.entered.is_set)
    asks += [asyncio.ensure_future(batcher.submit(runner, part(name), EXPLORE)) for name in "bcd"]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*asks)
    assert runner.batches == [(["a"], EXPLORE), (["b", "c", "d"], EXPLORE)]
    await batcher.close()


async def test_rows_of_another_mode_or_runner_never_share_a_batch() -> None:
    batcher, one, other = start(groups=4), Recorder(), Recorder()
    await asyncio.gather(
        batcher.submit(one, part("a"), EXPLORE),
        batcher.submit(one, part("b"), EXPLOIT),
        batcher.submit(other, part("c"), EXPLORE),
        batcher.submit(one, part("d"), EXPLORE),
    )
    assert one.batches == [(["a", "d"], EXPLORE), (["b"], EXPLOIT)]
    assert other.batches == [(["c"], EXPLORE)]
    await batcher.close()


async def test_a_full_batch_leaves_the_rest_for_the_next() -> None:
    batcher, runner = start(groups=4, max_batch_rows=4, max_wait_us=60_000_000), Recorder()
    await asyncio.gather(
        *(batcher.submit(runner, part(name, 2), EXPLORE) for name in "abcd"),
    )
    assert runner.batches == [(["a", "b"], EXPLORE), (["c", "d"], EXPLORE)]
    await batcher.close()


async def test_a_request_above_the_batch_size_is_a_batch_of_its_own() -> None:
    batcher, runner = start(groups=2, max_batch_rows=4), Recorder()
    await asyncio.gather(
        batcher.submit(runner, part("a", 9), EXPLORE), batcher.submit(runner, part("b"), EXPLORE)
    )
    assert [ids for ids, _ in runner.batches] == [["a"], ["b"]]
    await batcher.close()


async def test_with_a_wait_a_batch_leaves_when_every_group_has_asked() -> None:
    batcher, runner = start(groups=2, max_wait_us=60_000_000), Recorder()
    first = asyncio.ensure_future(batcher.submit(runner, part("a"), EXPLORE))
    for _ in range(5):
        await asyncio.sleep(0)
    assert runner.batches == []
    await batcher.submit(runner, part("b"), EXPLORE)
    await first
    assert runner.batches == [(["a", "b"], EXPLORE)]
    await batcher.close()


async def test_with_a_wait_a_group_that_closes_is_not_waited_for() -> None:
    batcher, runner = start(groups=2, max_wait_us=60_000_000), Recorder()
    first = asyncio.ensure_future(batcher.submit(runner, part("a"), EXPLORE))
    await asyncio.sleep(0)
    batcher.close_group()
    await asyncio.wait_for(first, 30)
    await batcher.close()


async def test_with_a_wait_a_silent_group_delays_the_others_no_longer_than_that() -> None:
    batcher, runner = start(groups=2, max_wait_us=20_000), Recorder()
    queued = []
    for _ in range(3):
        begin = time.monotonic()
        _, stages = await batcher.submit(runner, part("a"), EXPLORE)
        assert 0.019 <= time.monotonic() - begin < 10
        assert 19_000 <= stages.batch_wait_us < 10_000_000
        queued.append(stages.queue_us)
    assert min(queued) < 19_000
    await batcher.close()


async def test_rows_past_their_deadline_are_dropped_before_inference_and_counted() -> None:
    gate = threading.Event()
    batcher, runner = start(groups=3), Recorder(gate)
    running = asyncio.ensure_future(batcher.submit(runner, part("a"), EXPLORE))
    await until(runner.entered.is_set)
    late = batcher.enqueue(
        runner, part("b"), EXPLORE, received_ns=time.monotonic_ns() - 2_000_000, timeout_us=1000
    )
    patient = batcher.enqueue(runner, part("c"), EXPLORE, timeout_us=10_000_000)
    gate.set()
    await running
    with pytest.raises(DeadlineExceededError, match="expired before inference, after"):
        await late.wait()
    await patient.wait()
    assert runner.batches == [(["a"], EXPLORE), (["c"], EXPLORE)]
    assert batcher.stats.expired == 1
    await batcher.close()


async def test_an_error_answers_its_batch_and_the_next_one_runs() -> None:
    batcher, runner = start(groups=2), Recorder()
    results = await asyncio.gather(
        batcher.submit(runner, part("bad"), EXPLORE),
        batcher.submit(runner, part("a"), EXPLORE),
        return_exceptions=True,
    )
    assert [str(result) for result in results] == ["no action for bad"] * 2
    response, _ = await batcher.submit(runner, part("a"), EXPLORE)
    assert response.env_id == "a"
    assert (batcher.stats.errors, batcher.stats.requests) == (2, 1)
    await batcher.close()


async def test_an_error_of_one_request_leaves_the_others_their_answers() -> None:
    batcher, runner = start(groups=3), Recorder()
    bad, *good = await asyncio.gather(
        batcher.submit(runner, part("nan", 5), EXPLORE),
        batcher.submit(runner, part("a", 2), EXPLORE),
        batcher.submit(runner, part("b"), EXPLORE),
        return_exceptions=True,
    )
    assert runner.batches == [(["nan", "a", "b"], EXPLORE)]
    assert (type(bad), str(bad)) == (PolicyError, "'action' is NaN")
    assert [response.env_id for response, _ in good] == ["a", "b"]
    assert (batcher.stats.errors, batcher.stats.requests, batcher.stats.rows) == (1, 2, 3)
    with pytest.raises(PolicyError):  # alone in its batch, too
        await batcher.submit(runner, part("nan"), EXPLORE)
    assert (batcher.stats.errors, batcher.stats.batches) == (2, 2)
    await batcher.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exit", "SystemExit: 3"),
        ("panic", "Panic: index out of bounds"),
        ("key", "KeyboardInterrupt: ctrl-c"),  # who reads a keyboard may raise it on any thread
    ],
)
async def test_whatever_the_user_s_code_raises_answers_the_batch(name: str, message: str) -> None:
    batcher, runner = start(), Recorder()
    with pytest.raises(PolicyError, match=f"inference failed: {message}"):
        await asyncio.wait_for(batcher.submit(runner, part(name), EXPLORE), 10)
    await batcher.submit(runner, part("a"), EXPLORE)
    await batcher.close()


async def test_past_the_queue_requests_are_refused_and_counted() -> None:
    gate = threading.Event()
    batcher, runner = start(groups=3, queue_rows=4), Recorder(gate)
    running = asyncio.ensure_future(batcher.submit(runner, part("a"), EXPLORE))
    await until(runner.entered.is_set)
    queued = batcher.enqueue(runner, part("b", 3), EXPLORE)
    with pytest.raises(BatcherOverloadedError, match="policy.queue_rows = 4"):
        batcher.enqueue(runner, part("c", 2), EXPLORE)
    gate.set()
    await running
    await queued.wait()
    assert batcher.stats.overloaded == 1
    batcher.enqueue(runner, part("c", 4), EXPLORE)
    await batcher.close()


async def test_past_the_bytes_of_the_queue_requests_are_refused_and_counted() -> None:
    gate = threading.Event()
    batcher, runner = start(groups=3, queue_bytes=1000), Recorder(gate)
    running = asyncio.ensure_future(batcher.submit(runner, part("a"), EXPLORE))
    await until(runner.entered.is_set)
    queued = [
        batcher.enqueue(runner, part("b"), EXPLORE, nbytes=600),
        batcher.enqueue(runner, part("c"), EXPLOIT, nbytes=400, timeout_us=1),
    ]
    with pytest.raises(BatcherOverloadedError, match="1000 bytes.*policy.queue_bytes = 1000"):
        batcher.enqueue(runner, part("d"), EXPLORE, nbytes=1)
    gate.set()
    await running
    await asyncio.gather(*(pending.wait() for pending in queued), return_exceptions=True)
    assert batcher.stats.overloaded == 1
    await batcher.enqueue(runner, part("d"), EXPLORE, nbytes=1000).wait()
    await batcher.close()


async def test_many_producers_each_get_their_own_answer() -> None:
    batcher, runner = start(groups=64, max_batch_rows=100), Recorder()

    async def produce(i: int) -> None:
        for k in range(20):
            rows = (i + k) % 7 + 1
            response, _ = await batcher.submit(runner, part(f"env-{i}", rows), EXPLORE)
            assert (response.env_id, response.action) == (f"env-{i}", rows)

    await asyncio.gather(*(produce(i) for i in range(64)))
    stats = batcher.stats
    assert stats.requests == 64 * 20
    assert stats.batches < stats.requests / 4
    assert sum(len(ids) for ids, _ in runner.batches) == stats.requests
    assert stats.latency["queue"].count == stats.latency["batch_wait"].count == stats.requests
    await batcher.close()


async def test_all_who_ask_again_at_once_get_their_turns() -> None:
    """The oldest requests leave first, whatever their size: nobody is passed twice."""
    batcher, runner = start(groups=6, max_batch_rows=4), Recorder()
    answered = dict.fromkeys("abcdef", 0)

    async def ask(name: str) -> None:
        while max(answered.values()) < 30:
            await batcher.submit(runner, part(name, 4 if name == "a" else 1), EXPLORE)
            answered[name] += 1
            assert max(answered.values()) - min(answered.values()) <= 2

    await asyncio.gather(*map(ask, answered))
    await batcher.close()


async def test_short_batches_move_to_the_loop_and_long_ones_back_to_the_thread() -> None:
    batcher, runner = start(inline_below_us=2000), Recorder()
    for _ in range(60):
        await batcher.submit(runner, part("a"), EXPLORE)
    assert batcher.stats.inline_batches > 0
    assert threading.current_thread().name in runner.threads

    class Slow(Recorder):
        def infer(self, parts: Sequence[Part], mode: Mode) -> list[Answer]:
            time.sleep(0.05)
            return super().infer(parts, mode)

    slow = Slow()
    await batcher.submit(slow, part("a"), EXPLORE)
    await batcher.submit(slow, part("a"), EXPLORE)
    assert "inference" in slow.threads
    # Another size of batch has to show first that it is short.
    inline = batcher.stats.inline_batches
    await batcher.submit(runner, part("a", 1000), EXPLORE)
    assert batcher.stats.inline_batches == inline
    await batcher.close()


async def test_a_full_batch_is_put_together_while_another_one_runs() -> None:
    gate = threading.Event()
    batcher, runner = start(groups=3, max_batch_rows=4, gathers_ahead=True), Recorder(gate)
    first = batcher.enqueue(runner, part("a", 4), EXPLORE)
    await until(runner.entered.is_set)
    assert runner.ahead == []
    half = batcher.enqueue(runner, part("b", 2), EXPLORE)
    await asyncio.sleep(0.01)
    assert runner.ahead == []  # another one may join it
    other = batcher.enqueue(runner, part("c", 2), EXPLORE)
    await until(lambda: runner.ahead == [["b", "c"]])
    last = batcher.enqueue(runner, part("d", 4), EXPLORE)
    swapped = asyncio.ensure_future(batcher.run(lambda: len(runner.batches)))
    await asyncio.sleep(0)
    assert [ids for ids, _ in runner.batches] == [["a"]]
    gate.set()
    for pending in (first, half, other, last):
        await pending.wait()
    assert [ids for ids, _ in runner.batches] == [["a"], ["b", "c"], ["d"]]
    assert await swapped == 1  # no batch comes before a function that waits
    assert (batcher.stats.batches, batcher.stats.rows) == (3, 12)
    assert batcher.queued_rows == 0
    await batcher.close()


async def test_what_is_put_together_ahead_passes_nobody_of_another_kind() -> None:
    gate = threading.Event()
    batcher = start(groups=5, max_batch_rows=2, gathers_ahead=True)
    runner, other = Recorder(gate), Recorder()
    asked = [batcher.enqueue(runner, part("a", 2), EXPLORE)]
    await until(runner.entered.is_set)
    asked.append(batcher.enqueue(other, part("b", 1), EXPLORE))
    asked += [batcher.enqueue(runner, part(name, 2), EXPLORE) for name in "cd"]
    await asyncio.sleep(0.01)
    assert runner.ahead == []
    gate.set()
    await asked[1].wait()
    assert [ids for ids, _ in runner.batches] == [["a"]]
    await asyncio.gather(*(pending.wait() for pending in asked))
    await batcher.close()


@pytest.mark.parametrize(
    ("name", "message"), [("no room", "ValueError: no memory"), ("no rows", "Panic: no rows")]
)
async def test_a_batch_that_cannot_be_put_together_is_an_error_of_its_own(
    name: str, message: str
) -> None:
    gate = threading.Event()
    batcher, runner = start(groups=2, max_batch_rows=2, gathers_ahead=True), Recorder(gate)
    running = batcher.enqueue(runner, part("a", 2), EXPLORE)
    await until(runner.entered.is_set)
    wrong = batcher.enqueue(runner, part(name, 2), EXPLORE)
    await until(lambda: runner.ahead)
    after = batcher.enqueue(runner, part("b", 2), EXPLORE)
    gate.set()
    with pytest.raises(PolicyError, match=f"inference failed: {message}"):
        await asyncio.wait_for(wrong.wait(), 10)
    await asyncio.gather(running.wait(), after.wait())
    await batcher.close()


async def test_requests_that_expire_once_they_are_put_together_are_dropped_too() -> None:
    gate = threading.Event()
    batcher, runner = start(groups=4, max_batch_rows=4, gathers_ahead=True), Recorder(gate)
    running = batcher.enqueue(runner, part("a", 4), EXPLORE)
    await until(runner.entered.is_set)
    late = batcher.enqueue(runner, part("b", 2), EXPLORE, nbytes=100)
    patient = batcher.enqueue(runner, part("c", 2), EXPLORE, nbytes=100, timeout_us=60_000_000)
    await until(lambda: runner.ahead == [["b", "c"]])
    other = batcher.enqueue(runner, part("d", 2), EXPLORE, nbytes=100)
    late.deadline_ns = time.monotonic_ns()
    gate.set()
    with pytest.raises(DeadlineExceededError, match="expired before inference"):
        await late.wait()
    await asyncio.gather(running.wait(), patient.wait(), other.wait())
    assert [ids for ids, _ in runner.batches] == [["a"], ["c", "d"]]
    assert (batcher.stats.expired, batcher.stats.requests) == (1, 3)
    assert batcher.queued_rows == batcher._bytes == 0
    await batcher.close()


async def test_closing_fails_what_was_put_together_ahead() -> None:
    gate = threading.Event()
    batcher, runner = start(groups=2, max_batch_rows=2, gathers_ahead=True), Recorder(gate)
    running = batcher.enqueue(runner, part("a", 2), EXPLORE)
    await until(runner.entered.is_set)
    ahead = batcher.enqueue(runner, part("b", 2), EXPLORE)
    await until(lambda: runner.ahead)
    closing = asyncio.ensure_future(batcher.close())
    await asyncio.sleep(0)
    gate.set()
    await closing
    with pytest.raises(UnavailableError):
        await ahead.wait()
    await running.wait()
    assert len(runner.batches) == 1


async def test_closing_takes_no_rows_away_from_what_is_being_put_together() -> None:
    gate, gathering = threading.Event(), threading.Event()
    batcher, runner = start(groups=2, max_batch_rows=2, gathers_ahead=True), Recorder(gate)
    running = batcher.enqueue(runner, part("a", 2), EXPLORE)
    await until(runner.entered.is_set)
    assert batcher._gatherer is not None
    batcher._gatherer.submit(lambda: assert_set(gathering), lambda: None)
    ahead = batcher.enqueue(runner, part("b", 2), EXPLORE)
    await until(lambda: batcher.queued_rows == 0)
    closing = asyncio.ensure_future(batcher.close())
    await asyncio.sleep(0)
    gathering.set()
    gate.set()
    await closing
    assert runner.ahead == [["b"]]
    with pytest.raises(UnavailableError):
        await ahead.wait()
    await running.wait()


def assert_set(event: threading.Event) -> None:
    assert event.wait(30)


async def test_a_function_runs_between_two_batches() -> None:
    gate = threading.Event()
    batcher, runner = start(groups=2), Recorder(gate)
    order: list[str] = []
    running = asyncio.ensure_future(batcher.submit(runner, part("a"), EXPLORE))
    await until(runner.entered.is_set)
    swap = asyncio.ensure_future(batcher.run(lambda: order.append(f"after {len(runner.batches)}")))
    after = batcher.enqueue(runner, part("b"), EXPLORE)
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(running, swap, after.wait())
    assert order == ["after 1"]
    assert len(runner.batches) == 2

    def fail() -> None:
        raise ValueError("no such weights")

    with pytest.raises(ValueError, match="no such weights"):
        await batcher.run(fail)
    await batcher.close()


@pytest.mark.parametrize("error", [SystemExit(3), Panic("no weights"), StopIteration()])
async def test_a_function_that_raises_what_ends_loops_only_fails(error: BaseException) -> None:
    batcher, runner = start(), Recorder()

    def fail() -> None:
        raise error

    with pytest.raises(PolicyError, match=f"the policy failed: {type(error).__name__}"):
        await asyncio.wait_for(batcher.run(fail), 10)
    await batcher.submit(runner, part("a"), EXPLORE)
    await batcher.close()


async def test_an_alarm_survives_a_function_that_runs_meanwhile() -> None:
    batcher, runner = start(groups=2, max_wait_us=50_000), Recorder()
    waiting = asyncio.ensure_future(batcher.submit(runner, part("a"), EXPLORE))
    await asyncio.sleep(0.005)
    await batcher.run(lambda: None)
    await asyncio.wait_for(waiting, 30)
    await batcher.close()


async def test_an_answer_can_be_had_again_and_a_waiter_may_give_up() -> None:
    gate = threading.Event()
    batcher, runner = start(), Recorder(gate)
    pending = batcher.enqueue(runner, part("a"), EXPLORE)
    gone = asyncio.ensure_future(pending.wait())
    await asyncio.sleep(0)
    gone.cancel()
    gate.set()
    first, _ = await pending.wait()
    second, _ = await pending.wait()
    assert first is second
    assert len(runner.batches) == 1
    await batcher.close()


async def test_closing_fails_what_waits() -> None:
    gate = threading.Event()
    batcher, runner = start(groups=2), Recorder(gate)
    running = asyncio.ensure_future(batcher.submit(runner, part("a"), EXPLORE))
    await until(runner.entered.is_set)
    queued: Pending = batcher.enqueue(runner, part("b"), EXPLORE)
    closing = asyncio.ensure_future(batcher.close())
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await queued.wait()
    gate.set()
    await closing
    await running
    with pytest.raises(UnavailableError):
        batcher.enqueue(runner, part("c"), EXPLORE)
    with pytest.raises(UnavailableError):
        await batcher.run(lambda: None)


async def test_closing_may_be_given_up_and_done_again() -> None:
    gate = threading.Event()
    batcher, runner = start(), Recorder(gate)
    running = batcher.enqueue(runner, part("a"), EXPLORE)
    await until(runner.entered.is_set)
    closing = asyncio.ensure_future(batcher.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    again = asyncio.ensure_future(batcher.close())
    await asyncio.sleep(0)
    assert not again.done()
    gate.set()
    await again
    await running.wait()
