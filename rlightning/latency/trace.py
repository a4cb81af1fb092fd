"""Traces of single steps, and the file that Perfetto and Chrome show them from."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlightning.latency.clock import Offset
from rlightning.latency.stages import ActTimes

_PROCESSES = ("env server", "network", "policy server")
_PROCESS_OF = {
    **dict.fromkeys(("uplink", "downlink"), 1),
    **dict.fromkeys(("queue", "batch_wait", "inference", "answer"), 2),
}


class Span(NamedTuple):
    """One stage of one step."""

    stage: str
    """Its name, one of `STAGES`."""
    start_ns: int
    """When it began, by the monotonic clock of the env server."""
    duration_ns: int
    """How long it took."""


class StepTrace(NamedTuple):
    """Where the time of one step of a group went, in nanoseconds of the env server's clock."""

    env_id: str
    """The env."""
    seq: int
    """Number of the request to the policy server."""
    start_ns: int
    """When the observation was there."""
    duration_ns: int
    """How long it took until the next observation was there."""
    spans: tuple[Span, ...]
    """Its stages, in order."""
    uncertainty_ns: int = 0
    """How far the bounds of the stages at the policy server may be off."""
    traceparent: str = ""
    """W3C trace context of who had the env act; empty if nobody has told one."""
    clock_uncertainty_ns: int = 0
    """How far all of it may be off against the traces of another env server."""

    def on_axis(self, offset: Offset) -> StepTrace:
        """Returns this by another clock.

        Args:
            offset: The env server's clock minus that one.
        """
        return self._replace(
            start_ns=self.start_ns - offset.offset_ns,
            spans=tuple(
                span._replace(start_ns=span.start_ns - offset.offset_ns) for span in self.spans
            ),
            clock_uncertainty_ns=offset.uncertainty_ns,
        )


def place_of(stage: str) -> str:
    """Returns where a stage happens: `env server`, `network` or `policy server`."""
    return _PROCESSES[_PROCESS_OF.get(stage, 0)]


def trace_step(
    env_id: str,
    times: ActTimes,
    *,
    asked_ns: int,
    answered_ns: int,
    stored_ns: int,
    stepped_ns: int,
    traceparent: str = "",
) -> StepTrace | None:
    """Puts the stages of one step on the time axis of the env server.

    Args:
        env_id: The env.
        times: Where the time of its answer went.
        asked_ns: When the observation was there.
        answered_ns: When the actor had the answer.
        stored_ns: When the buffer had taken both.
        stepped_ns: When the next observation was there.
        traceparent: As in `StepTrace`.

    Returns:
        The trace; None while the policy server's clock is unknown.
    """
    ways = times.ways
    if ways is None:
        return None
    lengths = {
        "encode": times.encoded_ns - asked_ns,
        "uplink": round(ways.uplink_s * 1e9),
        "queue": times.queue_ns,
        "batch_wait": times.batch_wait_ns,
        "inference": times.inference_ns,
        "answer": times.answer_ns,
        "downlink": round(ways.downlink_s * 1e9),
        "decode": answered_ns - times.heard_ns,
    }
    spans, at = [], asked_ns
    for stage, length in lengths.items():
        spans.append(Span(stage, at, length))
        at += length
    spans.append(Span("insert", answered_ns, stored_ns - answered_ns))
    spans.append(Span("env_step", stored_ns, stepped_ns - stored_ns))
    return StepTrace(
        env_id,
        times.seq,
        asked_ns,
        stepped_ns - asked_ns,
        tuple(spans),
        round(ways.uncertainty_s * 1e9),
        traceparent,
    )


class TraceLog:
    """The last traced steps of a process, each under a number.

    Args:
        every: Trace every so many steps of a group; 0: none.
    """

    KEPT = 1000

    def __init__(self, every: int = 0) -> None:
        self.every = every
        self._traces: deque[StepTrace] = deque(maxlen=self.KEPT)
        self._cursor = 0

    @property
    def cursor(self) -> int:
        """Traces so far."""
        return self._cursor

    def add(self, trace: StepTrace) -> None:
        """Keeps one, and forgets the oldest if there are too many."""
        self._traces.append(trace)
        self._cursor += 1

    def since(self, cursor: int) -> list[StepTrace]:
        """Returns those after a cursor that are still kept, oldest first."""
        new = min(len(self._traces), max(0, self._cursor - cursor))
        return list(self._traces)[len(self._traces) - new :]


class TraceFile:
    """Writes traces as a file of the Trace Event Format, which is whole after each `add`.

    Open it in https://ui.perfetto.dev or chrome://tracing. Env server, network and policy server
    are processes there, each group is a track. Steps of several env servers belong on one axis.

    Args:
        path: The file; made anew.

    References:
        "Trace Event Format", Google, 2016.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tracks: dict[str, int] = {}
        self._base_ns = 0
        self._end = 0
        path.write_text("", encoding="utf-8")
        self._write(
            {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
            for number, name in enumerate(_PROCESSES)
        )

    def add(self, traces: Iterable[StepTrace]) -> None:
        """Appends steps."""
        self._write(event for trace in traces for event in self._events(trace))

    def _events(self, trace: StepTrace) -> Iterator[dict[str, Any]]:
        self._base_ns = self._base_ns or trace.start_ns
        track = self._tracks.get(trace.env_id)
        if track is None:
            track = self._tracks[trace.env_id] = len(self._tracks)
            for number in range(len(_PROCESSES)):
                place = {"pid": number, "tid": track, "args": {"name": trace.env_id}}
                yield {"ph": "M", "name": "thread_name", **place}
        arguments = {
            "seq": trace.seq,
            "uncertainty_us": trace.uncertainty_ns / 1000,
            "clock_uncertainty_us": trace.clock_uncertainty_ns / 1000,
        }
        whole = Span("step", trace.start_ns, trace.duration_ns)
        for span in (whole, *trace.spans):
            yield {
                "ph": "X",
                "name": span.stage,
                "cat": "step",
                "pid": _PROCESS_OF.get(span.stage, 0),
                "tid": track,
                "ts": (span.start_ns - self._base_ns) / 1000,
                "dur": span.duration_ns / 1000,
                "args": arguments,
            }

    def _write(self, events: Iterable[dict[str, Any]]) -> None:
        with self._path.open("r+", encoding="utf-8") as file:
            file.seek(self._end)
            for event in events:
                file.write(("," if file.tell() else "[") + "\n" + json.dumps(event))
            self._end = file.tell()
            file.write("\n]\n")
