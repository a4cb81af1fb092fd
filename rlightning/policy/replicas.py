"""The policy servers among which sessions are spread; needs no torch."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlightning.errors import DeadlineExceededError, RemoteError, UnavailableError
from rlightning.policy.transfer import look
from rlightning.rpc.channel import Channel, connect
from rlightning.rpc.replicas import Endpoint, resolve
from rlightning.utils.config import ClientAuthConfig, RpcConfig

# A replica that says nothing for so long is not the one to go to.
_LOOK_S = 1.0
# Replicas are started together: a session that opens waits this long for those that are not SERVING
# yet, or all sessions would go to the first.
_SETTLE_S = 2.0
_SETTLE_PAUSE_S = 0.05


class _Load(NamedTuple):
    """What a server that serves has, and has to do."""

    version: int
    sessions: int


@dataclass(frozen=True)
class _NotServing:
    """A server that answers, but does not serve yet, or no longer."""

    address: str

    def __str__(self) -> str:
        return f"{self.address} does not serve yet, or no longer"


# What is worth to be waited for, for a while.
_LATE = (_NotServing, DeadlineExceededError)


class Replicas:
    """Chooses a policy server for each session: of those that serve, the one with the fewest.

    The sessions of one process share it, so that those that open at the same time are spread.
    Belongs to one event loop.

    Args:
        addresses: Where the servers are; a name may have several addresses.
        rpc: Limits and times.
        auth: Token and certificates.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        rpc: RpcConfig | None = None,
        auth: ClientAuthConfig | None = None,
    ) -> None:
        self._addresses = list(addresses)
        self._rpc = rpc
        self._auth = auth
        self._channels: dict[Endpoint, Channel] = {}
        self._coming: Counter[Endpoint] = Counter()

    def seat(self) -> Seat:
        """Returns the place of one session, which has none yet."""
        return Seat(self)

    async def close(self) -> None:
        """Closes the connections over which it asks."""
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))

    def expect(self, endpoint: Endpoint) -> None:
        """Takes note that a session is on its way to a server, which does not count it yet."""
        self._coming[endpoint] += 1

    def arrived(self, endpoint: Endpoint) -> None:
        """Takes note that it is there, or will not come."""
        self._coming[endpoint] -= 1
        if not self._coming[endpoint]:
            del self._coming[endpoint]

    async def choose(self, min_version: int, before: Endpoint | None = None) -> Endpoint:
        """Returns where a session is to go.

        Args:
            min_version: The session needs weights of this version; servers that have them go first.
            before: Where it was; it stays there if that one serves and has such weights.

        Raises:
            UnavailableError: None of several servers serves, and what each answered; or a name
                cannot be resolved.
        """
        endpoints = await resolve(self._addresses)
        await self._forget_all_but(endpoints)
        if len(endpoints) == 1:
            return endpoints[0]
        settled = time.monotonic() + _SETTLE_S
        while True:
            looks = await asyncio.gather(*(self._look(endpoint) for endpoint in endpoints))
            fits = []
            for endpoint, found in zip(endpoints, looks, strict=True):
                if isinstance(found, _Load):
                    load = found.sessions + self._coming[endpoint]
                    behind = found.version < min_version
                    fits.append(((behind, endpoint != before, load, random.random()), endpoint))
            if not fits:
                reasons = "; ".join(map(str, looks))
                raise UnavailableError(
                    f"no replica serves: {reasons}", peer=",".join(self._addresses)
                )
            all_there = not any(isinstance(found, _LATE) for found in looks)
            if all_there or before is not None or time.monotonic() > settled:
                return min(fits)[1]
            await asyncio.sleep(_SETTLE_PAUSE_S)

    async def _forget_all_but(self, endpoints: Sequence[Endpoint]) -> None:
        """Closes the connections to servers that are gone from the names."""
        gone = [self._channels.pop(one) for one in self._channels.keys() - set(endpoints)]
        await asyncio.gather(*(channel.close() for channel in gone))

    async def _look(self, endpoint: Endpoint) -> _Load | RemoteError | _NotServing:
        """Returns what a server has to do, or why it is not to be chosen."""
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = self._channels[endpoint] = connect(
                endpoint.address, rpc=self._rpc, auth=endpoint.auth(self._auth)
            )
        try:
            found = await look(channel, _LOOK_S)
        except RemoteError as error:
            return error
        if not found.serving:
            return _NotServing(endpoint.address)
        if found.sessions < 0:
            return RemoteError(
                f"sessions: expected 0 or more, got {found.sessions}", peer=endpoint.address
            )
        return _Load(found.policy_version, found.sessions)


class Seat:
    """The place of one session at one of the replicas."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._endpoint: Endpoint | None = None
        self._on_its_way = False

    async def choose(self, min_version: int = 0) -> Endpoint:
        """Returns where to open the session, or to open it again; see `Replicas.choose`."""
        self.arrived()
        self._endpoint = await self._replicas.choose(min_version, self._endpoint)
        self._replicas.expect(self._endpoint)
        self._on_its_way = True
        return self._endpoint

    def arrived(self) -> None:
        """Takes note that the session is open, or will not be. Safe to repeat."""
        if self._endpoint is not None and self._on_its_way:
            self._replicas.arrived(self._endpoint)
            self._on_its_way = False
