"""Calls are counted by method and by what came of them."""

import json

import grpc

from rlightning.rpc.channel import connect
from rlightning.rpc.health import check
from rlightning.rpc.metrics import Metrics
from rlightning.rpc.server import serve
from rlightning.testing import assert_eventually
from rlightning.utils.config import ClientAuthConfig, ListenConfig
from tests.integration.rpc.echo import METHOD, EchoService
from tests.integration.rpc.harness import FAST, EchoClient, hello, status_of

TOKEN = "of-this-test-and-it-only"


def counted(server):
    """The samples of all metrics of calls by name, method and code."""
    metrics = Metrics()
    server.measure(metrics)
    return {
        (sample.name, sample.labels["grpc_method"], sample.labels.get("grpc_code")): sample
        for family in metrics.families()
        for sample in family.samples
        if "le" not in sample.labels
    }


async def test_sessions_refusals_and_calls_without_a_session_are_counted(tmp_path):
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps([{"name": "us", "token": TOKEN, "scopes": ["actor"]}]))
    listen = [ListenConfig(tokens=str(tokens))]
    server = await serve(EchoService(FAST), rpc=FAST, listen=listen)
    try:
        await server.ready()
        for _ in range(3):
            await check(server.address)
        auth = ClientAuthConfig(token=TOKEN)
        async with connect(server.address, rpc=FAST, auth=auth) as channel:
            client = EchoClient(channel)
            await client.session.start(5.0)

            def open_calls():
                found = counted(server)
                started = found.get(("grpc_server_started_total", "Act", None))
                return started is not None and started.value == 1 and len(found) > 3

            await assert_eventually(open_calls)
            assert ("grpc_server_handled_total", "Act", "OK") not in counted(server)
            await client.session.close()
        async with grpc.aio.insecure_channel(server.address) as channel:
            call = channel.stream_stream(METHOD)()
            assert (await status_of(call))[0] is grpc.StatusCode.UNAUTHENTICATED
            call = channel.stream_stream(METHOD)(metadata=(("authorization", f"Bearer {TOKEN}"),))
            await call.write(hello("a", version=99))
            assert (await status_of(call))[0] is grpc.StatusCode.FAILED_PRECONDITION
            for name in ("Nothing", "x" * 1000):
                call = channel.stream_stream(f"/rlightning.v1.PolicyService/{name}")()
                await status_of(call)

        def ended():
            handled = {
                (key[1], key[2]): sample.value
                for key, sample in counted(server).items()
                if key[0] == "grpc_server_handled_total"
            }
            return handled == {
                ("Check", "OK"): 3,
                ("Act", "OK"): 1,
                ("Act", "UNAUTHENTICATED"): 1,
                ("Act", "FAILED_PRECONDITION"): 1,
            }

        await assert_eventually(ended)
    finally:
        await server.stop(grace_s=0)
    found = counted(server)
    act = found["grpc_server_started_total", "Act", None]
    assert act.labels == {
        "grpc_type": "bidi_stream",
        "grpc_service": "rlightning.v1.PolicyService",
        "grpc_method": "Act",
    }
    assert act.value == found["grpc_server_handling_seconds_count", "Act", None].value == 3
    assert found["grpc_server_handling_seconds_sum", "Act", None].value > 0
    # Hello and farewell of the one, the hello of another; and a welcome.
    assert found["grpc_server_msg_received_total", "Act", None].value >= 3
    assert found["grpc_server_msg_sent_total", "Act", None].value >= 1
    assert {method for _, method, _ in found} == {"Act", "Check"}
