"""Traced steps as spans of OpenTelemetry, for collectors that take OTLP over gRPC."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from rlightning._version import __version__
from rlightning.errors import ConfigError
from rlightning.latency.trace import StepTrace, TraceLog, place_of
from rlightning.rpc.trace_context import parse_traceparent

if TYPE_CHECKING:
    from opentelemetry.context import Context

_LOG = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
# What waits for the collector: some thousand steps. More are dropped, and the SDK says so.
_QUEUE_SPANS = 2**15
# A collector that does not answer must not keep the service from stopping.
_STOP_S = 2.0


class SpanExport:
    """Sends each traced step to a collector: a span of the step, and within it one for each stage.

    The step of an env that acts for a trace (W3C trace context) is part of that trace, and left out
    where its caller does not record it; any other is a trace of its own. Times are those of this
    machine's wall clock. Spans that the collector does not take in time are dropped.

    Args:
        traces: What is traced.
        endpoint: URL of the collector, `http://HOST:PORT` or `https://HOST:PORT`.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self, traces: TraceLog, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import DEFAULT_ON
        except ModuleNotFoundError as error:
            raise ConfigError(
                "log.otlp_endpoint needs OpenTelemetry: pip install 'rlightning[otel]'"
            ) from error
        resource = {
            "service.name": "rlightning.env_server",
            "service.version": __version__,
            "service.instance.id": str(uuid.uuid4()),
        }
        self._provider = TracerProvider(
            sampler=DEFAULT_ON, resource=Resource.create(resource), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(endpoint),
                max_queue_size=_QUEUE_SPANS,
                schedule_delay_millis=_LOOK_EVERY_S * 1000,
            )
        )
        self._tracer = self._provider.get_tracer("rlightning", __version__)
        self._traces = traces
        self._cursor = 0
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Sends what is left, if the collector takes it soon."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._hand_on(self._news())
        # Not on a pool of threads, which would be waited for at the end of the process.
        end = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        end.start()
        await asyncio.to_thread(end.join, _STOP_S)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            # Making spans takes longer than anything else about a step.
            await asyncio.to_thread(self._hand_on, self._news())

    def _news(self) -> Sequence[StepTrace]:
        cursor, self._cursor = self._cursor, self._traces.cursor
        news = self._traces.since(cursor)
        if len(news) < self._cursor - cursor:
            missed = self._cursor - cursor - len(news)
            _LOG.warning("%d traced steps came too quickly to be exported", missed)
        return news

    def _hand_on(self, traces: Sequence[StepTrace]) -> None:
        from opentelemetry.trace import set_span_in_context

        began_ns = time.time_ns() - time.monotonic_ns()
        for trace in traces:
            about: dict[str, str | int] = {
                "rlightning.env_id": trace.env_id,
                "rlightning.seq": trace.seq,
            }
            start_ns = began_ns + trace.start_ns
            step = self._tracer.start_span(
                "step", _context_of(trace.traceparent), start_time=start_ns, attributes=about
            )
            inside = set_span_in_context(step)
            for stage, begin_ns, duration_ns in trace.spans:
                span = self._tracer.start_span(
                    stage,
                    inside,
                    start_time=began_ns + begin_ns,
                    attributes={
                        **about,
                        "rlightning.place": place_of(stage),
                        "rlightning.uncertainty_ns": trace.uncertainty_ns,
                    },
                )
                span.end(began_ns + begin_ns + duration_ns)
            step.end(start_ns + trace.duration_ns)


def _context_of(traceparent: str) -> Context:
    """Returns whose child a span is; an empty context if it is nobody's."""
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        set_span_in_context,
    )

    parent = parse_traceparent(traceparent)
    if parent is None:
        return Context()
    flags = TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT
    ids = int(parent.trace_id, 16), int(parent.parent_id, 16)
    span = NonRecordingSpan(SpanContext(*ids, is_remote=True, trace_flags=TraceFlags(flags)))
    return set_span_in_context(span, Context())
