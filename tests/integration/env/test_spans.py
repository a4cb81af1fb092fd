"""Traced steps as spans, at a collector of OpenTelemetry on a real socket."""

import asyncio
import contextlib
import sys
import threading
import time
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from rlightning.errors import ConfigError
from rlightning.latency import STAGES
from rlightning.latency.trace import TraceLog
from rlightning.rpc.trace_context import parse_traceparent, use_trace
from rlightning.services.env_server.spans import SpanExport
from rlightning.testing import assert_eventually, free_address
from rlightning.utils.config import LogConfig
from tests.integration.env.attaching import (
    COUNT,
    ECHO,
    FAST,
    Cluster,
    Counting,
    RemoteEnvClient,
    attached,
    stepped,
)

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
OTHER = "0af7651916cd43dd8448eb211c80319c"


class Collector(TraceServiceServicer):
    """Keeps what it gets."""

    def __init__(self):
        self.spans, self.resources = [], []

    async def Export(self, request, context):
        for one in request.resource_spans:
            self.resources.append(values(one.resource.attributes))
            self.spans += [span for scope in one.scope_spans for span in scope.spans]
        return ExportTraceServiceResponse()


def values(attributes):
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@asynccontextmanager
async def collecting():
    collector, server = Collector(), grpc.aio.server()
    add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def exporting(endpoint):
    async with AsyncExitStack() as stack:
        running = Cluster(stack, COUNT, ECHO, FAST)
        running.config.log = LogConfig(trace_every=5, otlp_endpoint=endpoint)
        await running.start()
        yield running


def traced_by(trace, parent, flags):
    class Traced(RemoteEnvClient):
        def run(self):
            use_trace(parse_traceparent(f"00-{trace}-{parent}-{flags}"))
            super().run()

    return Traced


async def test_steps_are_spans_of_the_trace_that_their_env_acts_for():
    began_ns = time.time_ns()
    async with collecting() as (collector, endpoint):
        async with exporting(endpoint) as running:
            async with contextlib.AsyncExitStack() as clients:
                for name, ids in (
                    ("robot", (TRACE, PARENT, "01")),
                    ("quiet", (OTHER, PARENT, "00")),
                ):
                    kind = traced_by(*ids)
                    client = await clients.enter_async_context(
                        attached(running.env_address, Counting(), name=name, kind=kind)
                    )
                    await stepped(client, 20)

                def seen():
                    steps = [span for span in collector.spans if span.name == "step"]
                    return {span.trace_id.hex() == TRACE for span in steps} == {True, False}

                await assert_eventually(seen, 30, "no spans")
        count = len(collector.spans)
    resource = collector.resources[0]
    assert resource["service.name"] == "rlightning.env_server"
    # Each step with its stages, none twice; also those of the end.
    steps = {span.span_id: span for span in collector.spans if span.name == "step"}
    stages = {}
    for span in collector.spans:
        if span.span_id not in steps:
            stages.setdefault(span.parent_span_id, []).append(span)
    assert stages.keys() <= steps.keys()
    assert count == len({span.span_id for span in collector.spans})
    for step_id, spans in stages.items():
        step = steps[step_id]
        assert {span.trace_id for span in spans} == {step.trace_id}
        assert [span.name for span in spans] == list(STAGES)
        begin = step.start_time_unix_nano
        assert began_ns <= begin <= step.end_time_unix_nano <= time.time_ns()
        took = sum(span.end_time_unix_nano - span.start_time_unix_nano for span in spans)
        assert took == pytest.approx(step.end_time_unix_nano - begin, rel=0.05)
        inference = values(spans[4].attributes)
        assert inference["rlightning.place"] == "policy server"
        assert inference["rlightning.uncertainty_ns"] == 0  # one clock
        assert inference["rlightning.seq"] >= 1
    # That of the client, and those of the hosted env, which are of nobody's trace.
    of_client = [s for s in steps.values() if s.trace_id.hex() == TRACE]
    assert {values(s.attributes)["rlightning.env_id"] for s in of_client} == {"attached/robot"}
    assert {s.parent_span_id.hex() for s in of_client} == {PARENT}
    others = [s for s in steps.values() if s.trace_id.hex() != TRACE]
    assert len({s.trace_id for s in others}) == len(others)
    assert {s.parent_span_id for s in others} == {b""}
    # Whose caller does not record its trace is in none.
    assert {values(s.attributes)["rlightning.env_id"] for s in others} == {"count-0-0"}


async def test_a_collector_that_is_not_there_delays_no_end():
    async with exporting(f"http://{free_address()}") as running:
        traces = running.service._actors.traces
        await assert_eventually(lambda: traces.cursor > 0, 30, "no traces")
        await asyncio.sleep(0)
        begun = time.monotonic()
        await running.service._spans.close()
        assert time.monotonic() - begun < 10
        # What tries on draws random numbers for its pauses: hypothesis suspects its own tests of that.
        trying = ("spans", "OtelBatchSpan")
        await assert_eventually(
            lambda: not any(t.name.startswith(trying) for t in threading.enumerate()), 60
        )


async def test_without_opentelemetry_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"rlightning\[otel\]"):
        SpanExport(TraceLog(1), "http://127.0.0.1:1")


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:4317", "grpc://h:1", "http://h", "http://h:p", "http://:1", "http://h:1/x"],
)
def test_what_is_no_collector_is_refused(endpoint):
    with pytest.raises(ValueError, match="otlp_endpoint"):
        LogConfig(trace_every=5, otlp_endpoint=endpoint)


def test_spans_need_traces():
    with pytest.raises(ValueError, match="trace_every"):
        LogConfig(otlp_endpoint="http://[::1]:4317")
    with pytest.raises(ValueError, match="latency"):
        LogConfig(trace_every=1, latency=False, otlp_endpoint="https://collector:4317/")
