"""A server as a process: signals, grace, watchdog, crash, freeze."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time

import pytest

from rlightning.rpc import health
from rlightning.rpc.health import ServingStatus
from rlightning.rpc.server import EXIT_NOW, EXIT_STUCK
from rlightning.testing import ServerProcess, assert_eventually, free_address
from rlightning.utils.config.rpc import RpcConfig
from rlightning.v1 import policy_service_pb2 as pb
from tests.integration.rpc.harness import FAST, connected, hello, raw_call, serving
from tests.integration.rpc.harness import echo_process as echo


async def wait(server: ServerProcess, timeout_s: float = 20) -> int:
    return await asyncio.to_thread(server.wait, timeout_s)


@pytest.mark.parametrize(
    ("number", "loop"), [(signal.SIGTERM, "uvloop"), (signal.SIGINT, "asyncio")]
)
async def test_a_signal_drains_and_exits_0_with_an_idle_stream_open(tmp_path, number, loop):
    with echo(tmp_path, "--loop", loop) as server:
        address = await serving(server)
        async with connected(address) as client:
            await client.ask()
            begun = time.monotonic()
            server.child.send_signal(number)
            assert await wait(server) == 0, server.log
            assert time.monotonic() - begun < 15
            await assert_eventually(lambda: not client.session.connected)
            assert client.session.draining
        assert "drained" in server.log
        assert "Traceback" not in server.log
        assert "Exception" not in server.log


async def test_what_is_about_to_end_when_the_server_has_stopped_is_not_cancelled(tmp_path):
    # gRPC's own task of a call would log a traceback then.
    with echo(tmp_path, "--mode", "slow-end") as server:
        await serving(server)
        server.terminate()
        assert await wait(server) == 0, server.log
        assert "last step taken" in server.log


async def test_the_announcement_names_what_was_bound(tmp_path):
    with echo(tmp_path) as server:
        address = await serving(server)
        said = json.loads((tmp_path / "announced.json").read_text())
        assert said == {
            "service": "echo",
            "address": address,
            "addresses": [address],
            "pid": server.child.pid,
        }


async def test_a_signal_during_the_start_ends_it(tmp_path):
    with echo(tmp_path, "--mode", "slow-start") as server:
        address = server.address()
        assert await health.check(address) is ServingStatus.NOT_SERVING
        assert await health.check(address, "liveness") is ServingStatus.SERVING
        server.terminate()
        assert await wait(server) == 0, server.log
        assert "drained" not in server.log


async def test_a_second_signal_ends_it_now(tmp_path):
    with echo(tmp_path, "--mode", "hang", "--grace", "30") as server:
        await serving(server)
        server.terminate()
        await assert_eventually(lambda: "echo stops" in server.log)
        await asyncio.sleep(0.3)
        server.terminate()
        assert await wait(server, 20) == EXIT_NOW, server.log


async def test_signals_that_come_together_are_one(tmp_path):
    # As from `timeout`, which tells the process and then its group.
    with echo(tmp_path, "--mode", "hang", "--grace", "1") as server:
        await serving(server)
        server.terminate()
        await asyncio.sleep(0.02)
        server.terminate()
        assert await wait(server, 20) == 0, server.log
        assert "told twice" not in server.log


async def test_a_drain_that_hangs_is_given_up_at_the_end_of_the_grace(tmp_path):
    with echo(tmp_path, "--mode", "hang", "--grace", "1") as server:
        await serving(server)
        begun = time.monotonic()
        server.terminate()
        assert await wait(server, 20) == 0, server.log
        assert time.monotonic() - begun < 15


@pytest.mark.parametrize(
    ("mode", "loop"), [("block", "uvloop"), ("block", "asyncio"), ("block-drain", "uvloop")]
)
async def test_a_blocked_event_loop_is_ended_by_the_watchdog(tmp_path, mode, loop):
    with echo(tmp_path, "--mode", mode, "--loop", loop, "--grace", "0.2") as server:
        address = server.address()
        if mode == "block":
            await asyncio.sleep(0.5)
            with pytest.raises(Exception, match="(?i)deadline"):
                await health.check(address, "liveness", timeout_s=0.3)
        else:
            await serving(server)
        server.terminate()
        assert await wait(server, 20) == EXIT_STUCK, server.log
        assert "Current thread" in server.log  # says where it hangs


async def test_a_failed_start_is_one_line_and_exit_1(tmp_path):
    with echo(tmp_path, "--mode", "fail") as server:
        assert await wait(server) == 1
        lines = [line for line in server.log.splitlines() if "ERROR" in line]
        assert [line.partition("echo ")[2] for line in lines] == [
            "did not start: the model is missing"
        ]
        assert "Traceback" not in server.log


async def test_a_taken_port_is_one_line(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with echo(tmp_path / "one") as first:
        address = await serving(first)
        with echo(tmp_path / "two", "--listen", address) as second:
            assert await wait(second) == 2
            assert second.log == f"error: cannot listen on {address}: address already in use\n"


async def test_a_killed_server_is_noticed_at_once_and_found_again_after_its_restart(tmp_path):
    with echo(tmp_path, "--listen", free_address()) as server:
        address = await serving(server)
        async with connected(address) as client:
            await client.ask()
            client.session._stream.lease_s = 60  # it is not the lease that tells
            server.kill()
            await assert_eventually(lambda: not client.session.connected)
            asking = asyncio.create_task(client.ask())
            with echo(tmp_path, "--listen", address) as again:
                await serving(again)
                begun = time.monotonic()
                assert (await asking).seq == 2
                assert time.monotonic() - begun < 10
                assert not client.session.resumed


async def test_a_frozen_server_is_noticed_by_its_lease_and_resumed_after_a_thaw(tmp_path):
    with echo(tmp_path) as server:
        address = await serving(server)
        async with connected(address) as client:
            await client.ask()
            server.freeze()
            begun = time.monotonic()
            await assert_eventually(lambda: not client.session.connected)
            assert FAST.lease_s * 0.5 < time.monotonic() - begun < FAST.lease_s + 15
            server.thaw()
            assert (await client.ask()).seq == 2
            assert client.session.resumed


async def test_a_server_that_was_frozen_reads_first_and_ends_leases_later(tmp_path):
    with echo(tmp_path) as server:
        address = await serving(server)
        async with raw_call(address) as call:
            await call.write(hello())
            await call.read()
            heartbeat = pb.ActRequest()
            heartbeat.heartbeat.SetInParent()
            server.freeze()
            begun, written = time.monotonic(), 0
            while time.monotonic() - begun < 2 * FAST.lease_s:
                await call.write(heartbeat.SerializeToString())
                written += 1
                await asyncio.sleep(FAST.heartbeat_s)
            server.thaw()
            for _ in range(written):
                assert pb.ActResponse.FromString(await call.read()).WhichOneof("body")
            assert "closed" not in server.log


async def test_a_frozen_server_is_noticed_by_the_transport_too(tmp_path):
    # The lease would take a minute here, and so would gRPC without ping_timeout_ms.
    rpc = RpcConfig(keepalive_time_s=0.5, keepalive_timeout_s=0.5, heartbeat_s=20, lease_s=60)
    with echo(tmp_path) as server:
        address = await serving(server)
        async with connected(address, rpc=rpc) as client:
            client.session._stream.heartbeat_s = client.session._stream.lease_s = 60
            server.freeze()
            begun = time.monotonic()
            await assert_eventually(lambda: not client.session.connected, 60)
            assert time.monotonic() - begun < 20
            server.thaw()


def test_a_signal_after_the_loop_has_ended_does_not_end_the_process():
    code = (
        "import asyncio, os, signal, time; from rlightning.rpc.run import _Signals\n"
        "with _Signals(asyncio.new_event_loop(), 5):\n"
        "    os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.3)\n"
        "time.sleep(0.3); raise SystemExit(3)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert done.returncode == 3


async def test_a_process_that_runs_is_not_started_twice(tmp_path):
    with echo(tmp_path) as server, pytest.raises(RuntimeError, match="still runs"):
        server.start()
