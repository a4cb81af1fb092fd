"""The policies of one server: `default`, and those that the config names beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rlightning.errors import NotFoundError
from rlightning.policy.host import PolicyHost
from rlightning.utils.config import DEFAULT_POLICY, PolicyConfig


class PolicyHosts:
    """A `PolicyHost` for each policy: their rows never share a batch, nor do their weights mix.

    Args:
        config: Section `policy`.
        lockstep: As of `PolicyHost`.

    Attributes:
        by_name: The hosts; `default` comes first.

    Raises:
        ConfigError: As `PolicyHost`; or what a policy begins with cannot be read.
    """

    def __init__(self, config: PolicyConfig, *, lockstep: bool = False) -> None:
        self.by_name: Mapping[str, PolicyHost] = {
            name: PolicyHost(one, lockstep=lockstep) for name, one in config.by_name().items()
        }

    @property
    def default(self) -> PolicyHost:
        """The policy of those who name none."""
        return self.by_name[DEFAULT_POLICY]

    def get(self, name: str) -> PolicyHost:
        """Returns a policy.

        Args:
            name: Its name; empty: `default`.

        Raises:
            NotFoundError: There is none of this name.
        """
        host = self.by_name.get(name or DEFAULT_POLICY)
        if host is None:
            raise NotFoundError(
                f"no policy {name[:80]!r} here, only {', '.join(self.by_name)} (policy.named)",
                reason="NO_SUCH_POLICY",
            )
        return host

    async def start(self) -> None:
        """Starts all of them."""
        for host in self.by_name.values():
            await host.start()

    async def close(self) -> None:
        """Fails what is queued and ends the inference threads."""
        await asyncio.gather(*(host.close() for host in self.by_name.values()))
