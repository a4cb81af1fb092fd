"""Where the envs behind an `EnvGroup`'s env server are: at another server, or attached here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Protocol

from rlightning.env.attach_sessions import AttachSessions
from rlightning.env.attached import AttachedGroup
from rlightning.env.control import Quorum
from rlightning.env.episodes import EpisodeLog
from rlightning.env.remote_client import SERVICE, EnvClient, EnvCommand
from rlightning.env.step_client import StepClient
from rlightning.errors import DeadlineExceededError, NotFoundError
from rlightning.rpc.handlers import Handler
from rlightning.rpc.registry import SessionRegistry
from rlightning.rpc.running import RunningServer
from rlightning.rpc.server import serve
from rlightning.rpc.session import SessionMethod
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import EnvConfig, RpcConfig

_PAUSE_S = 0.1


class EnvSource(Protocol):
    """Envs that are reset and stepped by id. Belongs to one event loop."""

    async def metas(self) -> list[EnvMeta]:
        """Returns the envs that are there, once there are enough of them.

        Raises:
            DeadlineExceededError: They did not come in time.
        """
        ...

    async def reset(
        self, env_id: str, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> EnvRet:
        """Begins a new episode in every row of an env."""
        ...

    async def step(self, response: PolicyResponse) -> EnvRet:
        """Steps the env that a response names."""
        ...

    async def command(self, command: EnvCommand) -> None:
        """Tells every env that is not attached to do something."""
        ...

    async def close(self) -> None:
        """Leaves the envs."""
        ...


class DialledEnvs:
    """The envs with `driver: external` of an env server that runs elsewhere.

    Args:
        config: `address`, `auth`, `min_clients` and `clients_timeout_s`.
    """

    def __init__(self, config: EnvConfig) -> None:
        assert config.address is not None
        self._address, self._auth = config.address, config.auth
        self._needed = config.min_clients
        self._timeout_s = config.clients_timeout_s
        self._client: StepClient | None = None

    async def metas(self) -> list[EnvMeta]:
        """Connects at first, then returns the envs that are there."""
        client = await self._started()
        await client.wait_for_clients()
        deadline = time.monotonic() + self._timeout_s
        while True:
            status = await client.describe()
            external = set(status.external_env_ids)
            metas = [meta for meta in status.envs if meta.env_id in external]
            if len(metas) >= self._needed:
                return metas
            if time.monotonic() > deadline:
                raise DeadlineExceededError(
                    f"{len(metas)} of {self._needed} envs were there within {self._timeout_s:g} s "
                    "(env.min_clients)",
                    peer=self._address,
                )
            await asyncio.sleep(_PAUSE_S)

    async def reset(
        self, env_id: str, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> EnvRet:
        """Begins a new episode in every row of an env."""
        return await (await self._started()).reset(env_id, seed=seed, options=options)

    async def step(self, response: PolicyResponse) -> EnvRet:
        """Steps the env that a response names."""
        return await (await self._started()).step(response)

    async def command(self, command: EnvCommand) -> None:
        """Tells every hosted env of the server to do something."""
        async with EnvClient(self._address, auth=self._auth) as client:
            await client.control(env=command)

    async def close(self) -> None:
        """Leaves the envs to others."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _started(self) -> StepClient:
        if self._client is None:
            client = StepClient(self._address, auth=self._auth)
            try:
                await client.start()
            except BaseException:
                await client.close()
                raise
            self._client = client
        return self._client


class EmbeddedEnvs:
    """The envs of clients that attach to a server in this process.

    Args:
        config: `listen`, `zmq_port`, `min_clients` and `clients_timeout_s`.
    """

    def __init__(self, config: EnvConfig) -> None:
        self._listen = config.listen
        if config.zmq_port is not None:
            host = config.listen.address.rpartition(":")[0]
            self._listen = config.listen.model_copy(update={"address": f"{host}:{config.zmq_port}"})
        self._needed = config.min_clients
        self._timeout_s = config.clients_timeout_s
        self._server: RunningServer | None = None
        self._service = _AttachService()
        self._quorum: Quorum | None = None

    async def start(self) -> str:
        """Begins to listen; returns the address with the real port.

        Raises:
            ConfigError: The address is not allowed, or taken.
        """
        self._server = await serve(self._service, listen=[self._listen])
        await self._server.ready()
        return self._server.address

    async def metas(self) -> list[EnvMeta]:
        """Returns the envs that are attached, once there are enough of them."""
        if self._quorum is None:
            self._quorum = Quorum(self._needed, self._timeout_s, "env.min_clients")
            self._service.quorum = self._quorum
            self._quorum.count(len(self._service.sessions.groups))
        await self._quorum.wait()
        return [group.meta for group in self._service.sessions.groups.values()]

    async def reset(
        self, env_id: str, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> EnvRet:
        """Returns the observation at which a client stands."""
        return await self._group(env_id).reset(seed=seed, options=options)

    async def step(self, response: PolicyResponse) -> EnvRet:
        """Lets a client execute an answer."""
        # A copy: what the client needs to hear again after a cut is kept.
        return (await self._group(response.env_id).step(response)).copy()

    async def command(self, command: EnvCommand) -> None:
        """Does nothing: clients take no commands."""

    async def close(self) -> None:
        """Tells the clients and stops to listen."""
        if self._server is not None:
            await self._server.stop(grace_s=1.0)
            self._server = None

    def _group(self, env_id: str) -> AttachedGroup:
        for group in self._service.sessions.groups.values():
            if group.env_id == env_id:
                return group
        raise NotFoundError(f"client {env_id!r} has left, or never came")


class _AttachService:
    """`EnvService` with nothing but `Attach`."""

    name = SERVICE
    scopes: Mapping[str, str] = {"Attach": "env"}

    def __init__(self) -> None:
        self.quorum: Quorum | None = None
        self.sessions = AttachSessions(
            EpisodeLog(), lambda policy: None, lambda group: self._count(1), self._detach
        )
        self._registry = SessionRegistry(RpcConfig(), f"/{SERVICE}/Attach")

    def handlers(self) -> Mapping[str, Handler]:
        return {"Attach": SessionMethod(self._registry, self.sessions)}

    async def start(self) -> None:
        pass

    async def drain(self, deadline_s: float) -> None:
        pass

    async def close(self) -> None:
        pass

    def _detach(self, group: AttachedGroup) -> None:
        group.leave()
        group.close()
        self._count(0)

    def _count(self, coming: int) -> None:
        if self.quorum is not None:
            self.quorum.count(len(self.sessions.groups) + coming)
