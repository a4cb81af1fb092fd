"""Measuring a link whose speed and delay are known."""

import json
import time

import pytest

from rlightning.errors import (
    InvalidRequestError,
    RemoteError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from rlightning.rpc import link
from rlightning.rpc.channel import connect, unary
from rlightning.rpc.link import MAX_PROBE_BYTES, measure_link
from rlightning.rpc.protocol import LIBRARY_VERSION, PROTOCOL_VERSION
from rlightning.rpc.server import serve
from rlightning.testing import FaultProxy
from rlightning.utils.config import ClientAuthConfig, ListenConfig
from rlightning.v1 import link_service_pb2 as pb
from tests.integration.rpc.echo import EchoService
from tests.integration.rpc.harness import FAST


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(link, "_LOAD_S", 0.4)
    monkeypatch.setattr(link, "_LONG_S", 0.05)


async def probe(channel, **fields):
    return await unary(
        channel,
        "/rlightning.v1.LinkService/Probe",
        pb.ProbeRequest(**fields),
        pb.ProbeResponse,
        timeout=10,
    )


async def test_what_is_measured_is_what_the_line_does(short):
    server = await serve(EchoService(FAST), rpc=FAST)
    try:
        async with FaultProxy(server.address) as proxy:
            proxy.delay_s, proxy.bytes_per_s = 0.02, 1e6
            async with connect(proxy.address) as channel:
                measured = await measure_link(channel)
    finally:
        await server.stop(grace_s=0)
    assert (measured.protocol_version, measured.library_version) == (
        PROTOCOL_VERSION,
        LIBRARY_VERSION,
    )
    assert measured.rtt_s >= measured.rtt_min_s >= 0.04
    assert measured.jitter_s >= 0
    # The proxy lets 8 Mbit/s of everything through; waiting for answers costs some of it, and a
    # machine that is busy more.
    for rate in (measured.up_mbit_s, measured.down_mbit_s):
        assert 1 < rate < 9
    clocks = measured.clocks
    assert clocks.same_machine
    assert abs(clocks.wall_offset_s) <= clocks.uncertainty_s + 0.01
    assert clocks.uncertainty_s >= 0.02


async def test_a_wall_clock_that_is_off_is_seen(short, monkeypatch):
    server = await serve(EchoService(FAST), rpc=FAST)
    monkeypatch.setattr(link, "_wall_ns", lambda: time.time_ns() + 5_000_000_000)
    try:
        async with connect(server.address) as channel:
            clocks = (await measure_link(channel)).clocks
    finally:
        await server.stop(grace_s=0)
    assert abs(clocks.wall_offset_s - 5) <= clocks.uncertainty_s + 0.05


async def test_a_probe_has_a_cap_either_way():
    server = await serve(EchoService(FAST), rpc=FAST)
    try:
        async with connect(server.address) as channel:
            full = await probe(
                channel, payload=bytes(MAX_PROBE_BYTES), answer_bytes=MAX_PROBE_BYTES
            )
            assert len(full.payload) == MAX_PROBE_BYTES
            for fields in (
                {"payload": bytes(MAX_PROBE_BYTES + 1)},
                {"payload": bytes(3 * MAX_PROBE_BYTES)},
                {"answer_bytes": MAX_PROBE_BYTES + 1},
                {"answer_bytes": 2**31 - 1},
            ):
                with pytest.raises(ResourceExhaustedError, match="allowed"):
                    await probe(channel, **fields)
            with pytest.raises(InvalidRequestError, match="answer_bytes: -1"):
                await probe(channel, answer_bytes=-1)
    finally:
        await server.stop(grace_s=0)


async def test_any_valid_token_may_probe_and_nobody_else(tmp_path):
    file = tmp_path / "tokens.json"
    token = "of-a-robot-on-the-roof"
    file.write_text(json.dumps([{"name": "robot", "token": token, "scopes": ["env"]}]))
    server = await serve(EchoService(FAST), listen=[ListenConfig(tokens=str(file))], rpc=FAST)
    try:
        async with connect(server.address, auth=ClientAuthConfig(token=token)) as channel:
            assert (await probe(channel)).library_version == LIBRARY_VERSION
        for auth in (None, ClientAuthConfig(token="of-somebody-else-again")):
            async with connect(server.address, auth=auth) as channel:
                with pytest.raises(UnauthenticatedError):
                    await probe(channel)
    finally:
        await server.stop(grace_s=0)


async def test_a_link_to_nobody_is_an_error():
    async with connect("127.0.0.1:1") as channel:
        with pytest.raises(RemoteError, match="cannot connect"):
            await measure_link(channel)
