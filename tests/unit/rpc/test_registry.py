"""When the leases of silent streams end, to the moment."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rlightning.rpc.registry import SessionRegistry
from rlightning.utils.config.rpc import RpcConfig

# Looked at with every heartbeat, this would be found up to 20 s later.
RPC = RpcConfig(heartbeat_s=20, lease_s=60, resume_window_s=60)


class Silent:
    """A stream, as far as a sweep looks at it, from which nothing has come for some time."""

    def __init__(self, silence_s: float, *, busy: bool = False, writing: bool = False) -> None:
        self.heard_ns = time.monotonic_ns() - int(silence_s * 1e9)
        self.write_since_ns = self.heard_ns if writing else 0
        self.busy = busy
        self.session = None
        self.gone = asyncio.Event()
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def end(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_result(time.monotonic_ns() - self.heard_ns)


@pytest.mark.parametrize("writing", [False, True])
async def test_a_lease_ends_in_its_moment_and_not_with_the_next_heartbeat(writing: bool) -> None:
    registry = SessionRegistry(RPC, "/package.Service/Method")
    heard, at_work = Silent(0.0), Silent(65.0, busy=True)
    silent = Silent(59.8, busy=writing, writing=writing)
    streams: list[Any] = [heard, at_work, silent]
    for stream in streams:
        registry.add(stream)
    silence_s = await asyncio.wait_for(silent.ended, 30) / 1e9
    assert 60 < silence_s < 75
    assert not heard.ended.done()
    assert not at_work.ended.done()
    assert registry._sweeper is not None
    registry._sweeper.cancel()
    await asyncio.wait({registry._sweeper})


async def test_what_is_looked_for_next() -> None:
    registry = SessionRegistry(RPC, "/package.Service/Method")
    assert registry._next_end_ns() == float("inf")
    registry._streams = {Silent(1.0): None, Silent(3.0): None}  # type: ignore[dict-item]
    oldest = min(stream.heard_ns for stream in registry._streams)
    assert registry._next_end_ns() == oldest + 60_000_000_000
