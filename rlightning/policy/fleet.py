"""The policy servers of a cluster as its learner sees them: all get the same weights."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from typing_extensions import Self

from rlightning.errors import DeadlineExceededError, RemoteError, UnavailableError
from rlightning.policy.calls import PolicyDescription
from rlightning.policy.publisher import WeightPublisher, late_message
from rlightning.policy.remote_policy import PolicyClient
from rlightning.rpc.replicas import Endpoint, resolve
from rlightning.utils.config import ClientAuthConfig, RpcConfig
from rlightning.utils.waiting import wait_within

_LOG = logging.getLogger(__name__)


class PolicyFleet:
    """Publishes the latest weights to every replica, also to those that come later or come back.

    One that is away holds nobody up, as long as another one takes the weights: it gets them when it
    is back. Belongs to one event loop.

    Args:
        addresses: Where the servers are; a name may have several addresses, and is looked up again
            and again.
        rpc: Limits and times.
        auth: Token and certificates.
        learner_id: Who publishes, unique among learners; default: a random one.
        policy: Name of the policy whose weights are published; empty: `default`.
        watch_s: How often to look at the servers' versions and at the names, in seconds.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        rpc: RpcConfig | None = None,
        auth: ClientAuthConfig | None = None,
        learner_id: str | None = None,
        policy: str = "",
        watch_s: float = 1.0,
    ) -> None:
        self._addresses = list(addresses)
        self._rpc = rpc
        self._auth = auth
        self._learner_id = learner_id or f"learner-{uuid.uuid4().hex[:12]}"
        self._policy = policy
        self._watch_s = watch_s
        self._members: dict[Endpoint, _Member] = {}
        self._latest: tuple[int, bytes] | None = None
        self._acks = asyncio.Condition()
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Looks the names up, and begins to publish what is offered."""
        with suppress(UnavailableError):  # a name that is not known yet
            await self._look_up()
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stops; what was offered last may not have been published."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})
        members = tuple(self._members.values())
        await asyncio.gather(*(member.close() for member in members))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def clients(self) -> Mapping[str, PolicyClient]:
        """A client of each server by its address, in the order of the addresses."""
        return {endpoint.address: member.client for endpoint, member in self._members.items()}

    def offer(self, version: int, data: bytes) -> None:
        """Takes weights to publish; those offered before and not sent yet are skipped.

        Raises:
            RemoteError: A server refused earlier weights.
        """
        self._latest = version, data
        for member in self._members.values():
            member.publisher.offer(version, data)

    async def publish(self, version: int, data: bytes, *, timeout_s: float = 60.0) -> None:
        """Offers weights and waits until they, or later ones, are in use at all who can be reached.

        Raises:
            DeadlineExceededError: That took too long, or nobody could be reached in time.
            RemoteError: A server refused them.
        """
        self.offer(version, data)
        deadline = time.monotonic() + timeout_s
        async with self._acks:
            while (late := self._late(version)) is not None:
                try:
                    left_s = max(0.0, deadline - time.monotonic())
                    await wait_within(self._acks.wait(), left_s)
                except asyncio.TimeoutError:
                    raise DeadlineExceededError(
                        late_message(version, timeout_s, self._trouble()), peer=late
                    ) from None

    async def describe(self, *, timeout_s: float) -> dict[str, PolicyDescription]:
        """Returns what the servers that answer in time say, by address.

        Raises:
            UnavailableError: None could be reached.
            RemoteError: What the first one answered, if none did better.
        """
        clients = self.clients
        found = await asyncio.gather(
            *(client.describe(timeout_s=timeout_s) for client in clients.values()),
            return_exceptions=True,
        )
        described: dict[str, PolicyDescription] = {}
        errors = []
        for address, one in zip(clients, found, strict=True):
            if isinstance(one, PolicyDescription):
                described[address] = one
            elif self.clients.get(address) is clients[address]:
                if not isinstance(one, RemoteError):
                    raise one
                errors.append(one)
            # else it has left meanwhile, and its client was closed
        if not described:
            raise errors[0] if errors else UnavailableError("there is no policy server")
        return described

    def _late(self, version: int) -> str | None:
        """Returns who still has to take a version; None if nobody is waited for any more."""
        publishers = {e.address: member.publisher for e, member in self._members.items()}
        for publisher in publishers.values():
            publisher.raise_failure()
        late = [a for a, one in publishers.items() if one.acked < version]
        reached = [a for a in late if publishers[a].reached]
        if reached or len(late) == len(publishers):
            return ",".join(reached or late)
        return None

    def _trouble(self) -> RemoteError | None:
        troubles = (member.publisher.trouble for member in self._members.values())
        return next((trouble for trouble in troubles if trouble is not None), None)

    async def _look_up(self) -> None:
        endpoints = await resolve(self._addresses)
        for endpoint in endpoints:
            if endpoint not in self._members:
                self._members[endpoint] = self._join(endpoint)
        gone = [self._members.pop(e) for e in tuple(self._members) if e not in endpoints]
        await asyncio.gather(*(member.close() for member in gone))
        if gone:
            async with self._acks:
                self._acks.notify_all()

    def _join(self, endpoint: Endpoint) -> _Member:
        auth = endpoint.auth(self._auth)
        client = PolicyClient(endpoint.address, rpc=self._rpc, auth=auth, policy=self._policy)
        publisher = WeightPublisher(
            client, learner_id=self._learner_id, watch_s=self._watch_s, acks=self._acks
        )
        publisher.start()
        if self._latest is not None:
            _LOG.info("%s is a policy server, too", endpoint.address)
            publisher.offer(*self._latest)
        return _Member(client, publisher)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._watch_s)
            with suppress(UnavailableError):
                await self._look_up()


@dataclass(frozen=True, eq=False)
class _Member:
    """One server: the client that asks it, and who publishes to it."""

    client: PolicyClient
    publisher: WeightPublisher

    async def close(self) -> None:
        await self.publisher.close()
        await self.client.close()
