"""Sessions that are part of a trace: their log lines say which, and it is passed on."""

import asyncio

import grpc

from rlightning.rpc.server import serve
from rlightning.rpc.trace_context import parse_traceparent, use_trace
from rlightning.testing import assert_eventually
from tests.integration.rpc.echo import METHOD, EchoService
from tests.integration.rpc.harness import FAST, connected, hello
from tests.log_lines import written_lines

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


async def test_lines_of_a_session_have_its_ids_and_its_trace():
    server = await serve(EchoService(FAST), rpc=FAST)
    try:
        with written_lines() as lines:
            async with grpc.aio.insecure_channel(server.address) as channel:
                for client_id, metadata in (
                    ("traced", (("traceparent", TRACEPARENT),)),
                    ("broken", (("traceparent", "00-nonsense"),)),
                ):
                    call = channel.stream_stream(METHOD)(metadata=metadata)
                    await call.write(hello(client_id))
                    await call.read()
                    call.cancel()

            def about(client_id):
                return [line for line in lines() if line.get("client_id") == client_id]

            await assert_eventually(lambda: len(about("traced")) == len(about("broken")) == 2)
            opened, over = about("traced")
            assert (opened["method"], opened["epoch"]) == (METHOD, 1)
            assert opened["session_id"] in opened["message"]
            assert opened["trace_id"] == over["trace_id"] == TRACE
            assert over["session_id"] == opened["session_id"]
            assert "the session of client traced" in over["message"]
            assert not [line for line in about("broken") if "trace_id" in line]
    finally:
        await server.stop(grace_s=0)


async def test_a_client_that_works_for_a_trace_passes_it_on():
    server = await serve(EchoService(FAST), rpc=FAST)

    async def work():
        use_trace(parse_traceparent(TRACEPARENT))
        async with connected(server.address):
            pass

    try:
        with written_lines() as lines:
            await asyncio.create_task(work())  # in a task of its own, whose context ends with it
            async with connected(server.address, client_id="other"):
                pass
            opened = [line for line in lines() if " opened session " in line["message"]]
            assert [line.get("trace_id") for line in opened] == [TRACE, None]
    finally:
        await server.stop(grace_s=0)
