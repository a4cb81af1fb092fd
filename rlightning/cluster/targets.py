"""Which services a cluster has, and where they are dialled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlightning.errors import ConfigError, UnavailableError
from rlightning.rpc.replicas import auth_of_replica, find_replicas
from rlightning.utils.config import ClientAuthConfig, MainConfig, RpcConfig, ServiceConfig


@dataclass(frozen=True)
class Target:
    """A service to look at.

    Attributes:
        name: What to call it: `env`, `policy`, `buffer`; of several addresses `buffer-1`, of
            several servers behind one name `env@10.0.0.3`; or its address.
        address: Where it is dialled.
        section: The part of the config that it is of: `env`, `policy` or `buffer`; None: of none.
        rpc: Limits and times; None: the defaults.
        auth: Token and certificates; None: none.
    """

    name: str
    address: str
    section: str | None = None
    rpc: RpcConfig | None = None
    auth: ClientAuthConfig | None = None


def targets_of(config: MainConfig, auth: ClientAuthConfig | None = None) -> list[Target]:
    """Returns the services of a config that can be dialled: those whose port it names.

    Args:
        config: The config.
        auth: Token and certificates instead of those of the config; None: those.
    """
    services = config.services
    return [
        *_dialled("policy", services.policy, lambda: services.policy.dial_addresses, auth),
        *_dialled("buffer", services.buffer, lambda: config.buffer_addresses, auth),
        *_dialled("env", services.env, lambda: services.env.dial_addresses, auth),
    ]


def _dialled(
    section: str,
    service: ServiceConfig,
    addresses: Callable[[], Sequence[str]],
    auth: ClientAuthConfig | None,
) -> list[Target]:
    try:
        found = addresses()
    except ConfigError:
        return []
    names = [section] if len(found) == 1 else [f"{section}-{i}" for i in range(len(found))]
    return [
        Target(name, address, section, rpc=service.rpc, auth=auth or service.auth)
        for name, address in zip(names, found, strict=True)
    ]


async def replicas_of(target: Target, *, timeout_s: float) -> list[Target]:
    """Returns the servers that a target stands for: itself, or several behind its name.

    It is itself, too, while its name is not known.
    """
    try:
        addresses = await find_replicas(target.address, timeout_s=timeout_s)
    except UnavailableError:
        return [target]
    if len(addresses) < 2:
        return [target]
    return [
        replace(
            target,
            name=f"{target.name}@{address.rpartition(':')[0]}",
            address=address,
            auth=auth_of_replica(target.auth, target.address, address),
        )
        for address in addresses
    ]
