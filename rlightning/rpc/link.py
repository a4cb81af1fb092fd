"""Measures the link to a server: round trips, jitter, what it carries, the server's clocks."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import statistics
import time
from dataclasses import dataclass
from functools import lru_cache

from rlightning.errors import InvalidRequestError, ResourceExhaustedError
from rlightning.latency import ClockOffset, boot_id
from rlightning.rpc.channel import Channel, unary
from rlightning.rpc.handlers import Context, Handler, unary_unary
from rlightning.rpc.protocol import LIBRARY_VERSION, PROTOCOL_VERSION, arrival_of, measure, stamp
from rlightning.v1 import link_service_pb2 as pb

SERVICE = "rlightning.v1.LinkService"
"""Full name of the service."""

MAX_PROBE_BYTES = 2**20
"""Most that one probe carries, either way."""

_METHOD = f"/{SERVICE}/Probe"
_TIMEOUT_S = 10.0
_PROBES = 20
_FIRST_BYTES = 4 * 2**10
# What a probe should take, so that the round trip is little of it.
_LONG_S = 0.1
# Probes under way at once, so that the line is not idle while an answer comes back.
_AT_ONCE = 4
_LOAD_S = 1.0


def handlers() -> dict[str, Handler]:
    """Returns the handlers of the service."""
    return {"Probe": unary_unary(pb.ProbeRequest, _probe)}


@lru_cache(maxsize=1)
def _noise() -> bytes:
    """Returns what probes carry: random, since something on the way may compress what repeats."""
    return secrets.token_bytes(MAX_PROBE_BYTES)


async def _probe(request: pb.ProbeRequest, context: Context) -> pb.ProbeResponse:
    arrival = arrival_of(request)
    size = max(len(request.payload), request.answer_bytes)
    if request.answer_bytes < 0:
        raise InvalidRequestError(f"answer_bytes: {request.answer_bytes} is below 0")
    if size > MAX_PROBE_BYTES:
        raise ResourceExhaustedError(f"a probe of {size} bytes; {MAX_PROBE_BYTES} are allowed")
    response = pb.ProbeResponse(
        payload=_noise()[: request.answer_bytes],
        boot_id=boot_id(),
        protocol_version=PROTOCOL_VERSION,
        library_version=LIBRARY_VERSION,
        ts_sent_ns=_wall_ns(),
    )
    stamp(response, arrival)
    return response


def _wall_ns() -> int:
    return time.time_ns()


@dataclass(frozen=True)
class Clocks:
    """A server's clocks against those of this process.

    Attributes:
        same_machine: Both read one monotonic clock.
        wall_offset_s: The server's wall clock minus this machine's, in seconds.
        uncertainty_s: How far that may be off.
    """

    same_machine: bool
    wall_offset_s: float
    uncertainty_s: float


@dataclass(frozen=True)
class Link:
    """What was measured of the link to a server.

    Attributes:
        protocol_version: That the server speaks.
        library_version: Of the server.
        rtt_s: Median round trip of a small message, without the server's own time, in seconds.
        rtt_min_s: The shortest one.
        jitter_s: Mean difference of one round trip to the next, in seconds.
        up_mbit_s: What arrives at the server, in 10^6 bits of payload per second.
        down_mbit_s: What arrives here.
        clocks: The server's clocks; None where its answers told nothing of them.
    """

    protocol_version: int
    library_version: str
    rtt_s: float
    rtt_min_s: float
    jitter_s: float
    up_mbit_s: float
    down_mbit_s: float
    clocks: Clocks | None


async def measure_link(channel: Channel) -> Link:
    """Measures a link; takes about 3 s, and loads the link for 2 s of them.

    Args:
        channel: To the server, with a token where the server wants one.

    Raises:
        RemoteError: The server did not answer in time, refused, or has no such service.
    """
    offset = ClockOffset()
    trips: list[float] = []
    last = await _exchange(channel, offset, trips)  # connects
    trips.clear()
    for _ in range(_PROBES):
        last = await _exchange(channel, offset, trips)
    clocks = _clocks(offset, last)
    changes = [abs(after - before) for before, after in itertools.pairwise(trips)]
    rtt_s = statistics.median(trips)
    return Link(
        protocol_version=last.protocol_version,
        library_version=last.library_version,
        rtt_s=rtt_s,
        rtt_min_s=min(trips),
        jitter_s=statistics.fmean(changes),
        up_mbit_s=await _throughput(channel, rtt_s, up=True),
        down_mbit_s=await _throughput(channel, rtt_s, up=False),
        clocks=clocks,
    )


async def _exchange(channel: Channel, offset: ClockOffset, trips: list[float]) -> pb.ProbeResponse:
    """Sends an empty probe and records its round trip, in seconds."""
    request = pb.ProbeRequest()
    stamp(request)
    response = await unary(channel, _METHOD, request, pb.ProbeResponse, timeout=_TIMEOUT_S)
    now = time.monotonic_ns()
    measure(offset, request, response)
    there_ns = response.timing.sent_ns - response.timing.received_ns
    trips.append(max(0, now - request.timing.sent_ns - max(0, there_ns)) / 1e9)
    return response


def _clocks(offset: ClockOffset, last: pb.ProbeResponse) -> Clocks | None:
    """Returns how the server's wall clock stands, as of its last answer."""
    estimate = offset.estimate()
    if estimate is None or not last.ts_sent_ns:
        return None
    # When the server sent it: by its wall clock, and by ours.
    ago_ns = time.monotonic_ns() - (last.timing.sent_ns - estimate.offset_ns)
    here_ns = time.time_ns() - ago_ns
    return Clocks(
        same_machine=bool(last.boot_id) and last.boot_id == boot_id(),
        wall_offset_s=(last.ts_sent_ns - here_ns) / 1e9,
        uncertainty_s=estimate.uncertainty_ns / 1e9,
    )


async def _throughput(channel: Channel, rtt_s: float, *, up: bool) -> float:
    """Returns what the link carries one way, in Mbit/s of payload."""
    size, taken_s = _FIRST_BYTES, 0.0
    while size < MAX_PROBE_BYTES and taken_s < _LONG_S:
        size = min(MAX_PROBE_BYTES, 4 * size)
        # The shorter of two: a stall of one says nothing about the line.
        taken_s = min([await _carry(channel, size, up=up) for _ in range(2)]) - rtt_s
    carried, begun = 0, time.perf_counter()

    async def load() -> None:
        nonlocal carried
        while True:
            await _carry(channel, size, up=up)
            carried += size
            if time.perf_counter() - begun > _LOAD_S:
                return

    # One that takes long says enough, and several at once might keep others waiting.
    at_once = 1 if taken_s > _LOAD_S / 2 else _AT_ONCE
    await asyncio.gather(*(load() for _ in range(at_once)))
    return carried * 8 / 1e6 / (time.perf_counter() - begun)


async def _carry(channel: Channel, size: int, *, up: bool) -> float:
    """Sends one probe and returns how long it took, in seconds."""
    request = pb.ProbeRequest(payload=_noise()[:size]) if up else pb.ProbeRequest(answer_bytes=size)
    begun = time.perf_counter()
    await unary(channel, _METHOD, request, pb.ProbeResponse, timeout=_TIMEOUT_S)
    return time.perf_counter() - begun
