"""Gets from the other replicas the weights that they have served meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from rlightning.errors import (
    DeadlineExceededError,
    PolicyError,
    PreconditionError,
    RemoteError,
    RLightningError,
    UnavailableError,
)
from rlightning.policy.remote_policy import PolicyClient
from rlightning.policy.weight_store import Weights
from rlightning.rpc.replicas import resolve
from rlightning.utils.config import PolicyServiceConfig

if TYPE_CHECKING:
    from rlightning.policy.host import PolicyHost
    from rlightning.policy.hosts import PolicyHosts

_LOG = logging.getLogger(__name__)

# How long the others may take to say which version they have, and then to send it.
_LOOK_S = 3.0
_PULL_S = 600.0


async def catch_up(hosts: PolicyHosts, service: PolicyServiceConfig) -> None:
    """Installs the newest weights of the replicas that are there, if they are newer than its own.

    One that cannot be reached, or does not let this server ask, is left out: a session that has
    seen a newer version than this server has is not answered by it anyway.

    Args:
        hosts: The policies; may be published to meanwhile.
        service: Where the replicas are dialled, itself among them; without addresses there are no
            others.
    """
    if service.address is None and not service.addresses:
        return
    try:
        endpoints = await resolve(service.dial_addresses)
    except UnavailableError as error:
        _LOG.warning("no other replica is known: %s", error)
        return
    if len(endpoints) < 2:
        return
    for name, host in hosts.by_name.items():
        clients = [
            PolicyClient(one.address, rpc=service.rpc, auth=one.auth(service.auth), policy=name)
            for one in endpoints
        ]
        try:
            versions = await asyncio.gather(*(_version_of(client, name) for client in clients))
            await _take_newest(host, sorted(zip(versions, clients, strict=True), key=itemgetter(0)))
        finally:
            await asyncio.gather(*(client.close() for client in clients))


async def _version_of(client: PolicyClient, name: str) -> int:
    """Returns the version that a replica, or this server, has; 0 if it does not say."""
    try:
        return (await client.describe(timeout_s=_LOOK_S)).version_of(name)
    except RLightningError as error:
        away = isinstance(error, (UnavailableError, DeadlineExceededError))
        _LOG.log(logging.INFO if away else logging.WARNING, "a replica is not asked: %s", error)
        return 0


async def _take_newest(host: PolicyHost, found: Sequence[tuple[int, PolicyClient]]) -> None:
    """Installs the newest weights that can be had, of versions in ascending order."""
    for version, client in reversed(found):
        if version <= host.version or await _take(host, client, version):
            return


async def _take(host: PolicyHost, client: PolicyClient, version: int) -> bool:
    """Installs the weights of a replica; returns whether that worked."""
    try:
        # It has them, as it says, or is not waited for.
        found, data = await client.pull_weights(
            timeout_s=_PULL_S, max_bytes=host.max_weights_bytes, flowing=True
        )
        if found < version:
            raise RemoteError(f"version {found} came", peer=client.address)
        weights = await asyncio.to_thread(Weights.of, found, data)
    except RemoteError as error:
        _LOG.warning("version %d of %s is not used: %s", version, client.address, error)
        return False
    version = found
    try:
        await host.publish(weights)
    except PreconditionError:
        return True  # the learner was faster
    except (RemoteError, PolicyError) as error:
        _LOG.warning("version %d of %s is not used: %s", version, client.address, error)
        return False
    _LOG.info("took policy version %d from %s", version, client.address)
    return True
