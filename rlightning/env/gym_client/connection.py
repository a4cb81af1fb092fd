"""A driver's connection for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import atexit
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

from rlightning.env.remote_client import EnvStatus
from rlightning.env.step_client import StepClient
from rlightning.errors import AlreadyExistsError, ConfigError, NotFoundError
from rlightning.rpc.loop import shared_loop
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import ClientAuthConfig, RpcConfig

_LOG = logging.getLogger(__name__)

_PAUSE_S = 0.2
_CLOSE_S = 5.0


class Connection:
    """Resets and steps envs of an env server; each call blocks until it is done.

    The connection and its heartbeats live in a thread of this process. Calls for different envs may
    come from different threads. Closed at the exit of the process, if not before, so that the envs
    are free at once.

    Args:
        address: `HOST:PORT` of the env server.
        auth: Token and certificates.
        rpc: Limits and times.
        connect_timeout_s: How long to wait for the server, and for a free env, in seconds.
        reconnect_timeout_s: How long a lost connection is waited for, in seconds.

    Raises:
        PreconditionError: The actor loop steps all envs there; the message names the key.
        UnavailableError: No server answered in time.
    """

    def __init__(
        self,
        address: str,
        *,
        auth: ClientAuthConfig | None = None,
        rpc: RpcConfig | None = None,
        connect_timeout_s: float = 30.0,
        reconnect_timeout_s: float = 60.0,
    ) -> None:
        self.address = address
        self._connect_timeout_s = connect_timeout_s
        self._loop = shared_loop()
        self._client: StepClient | None = self._loop.run(
            _opened(address, connect_timeout_s, auth, rpc, reconnect_timeout_s)
        )
        _OPEN.add(self)

    def take(
        self, wanted: Callable[[EnvMeta], bool], env_ids: Sequence[str] | None, *, count: int | None
    ) -> list[EnvMeta]:
        """Claims envs: those that are named, or free ones.

        Args:
            wanted: Which ones may be taken when none are named.
            env_ids: Their ids.
            count: How many to take when none are named; None: all that are alike.

        Returns:
            Their metadata.

        Raises:
            NotFoundError: There is no such env; the message lists those that there are.
            AlreadyExistsError: Another driver has it, or all of them.
            PreconditionError: The actor loop steps it.
        """
        deadline = time.monotonic() + self._connect_timeout_s
        client = self._opened()
        self._loop.run(client.wait_for_clients())
        while True:
            status = self._loop.run(client.describe())
            try:
                return self._take(client, status, wanted, env_ids, count)
            except AlreadyExistsError:  # free again once the lease of a driver that is gone ends
                if time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_S)

    def _take(
        self,
        client: StepClient,
        status: EnvStatus,
        wanted: Callable[[EnvMeta], bool],
        env_ids: Sequence[str] | None,
        count: int | None,
    ) -> list[EnvMeta]:
        metas = {str(meta.env_id): meta for meta in status.envs}
        if env_ids is not None:
            self._loop.run(client.claim(env_ids))
            return [metas[env_id] for env_id in env_ids]
        fitting = [one for one in status.external_env_ids if wanted(metas[one])]
        if not fitting:
            there = [f"{one} of num_envs {metas[one].num_envs}" for one in status.external_env_ids]
            raise NotFoundError(
                f"no env here fits; for drivers there are {there or 'none'}",
                peer=self.address,
            )
        taken: list[EnvMeta] = []
        refused: AlreadyExistsError | None = None
        for env_id in fitting:
            if len(taken) == count:
                break
            meta = metas[env_id]
            if taken and not _alike(taken[0], meta):
                continue
            try:
                self._loop.run(client.claim([env_id]))
            except AlreadyExistsError as error:
                refused = error
            else:
                taken.append(meta)
        if refused is not None and not taken:
            raise refused
        return taken

    def reset(
        self, env_id: str, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> EnvRet:
        """Begins a new episode in an env; see `StepClient.reset`."""
        return self._loop.run(self._opened().reset(env_id, seed=seed, options=options))

    def begin_reset(
        self, env_id: str, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> Future[EnvRet]:
        """Begins a reset; returns a future for what it gives."""
        return self._loop.submit(self._opened().reset(env_id, seed=seed, options=options))

    def step(self, response: PolicyResponse, *, autoreset: bool) -> EnvRet:
        """Steps an env; see `StepClient.step`."""
        return self._loop.run(self._opened().step(response, autoreset=autoreset))

    def begin_steps(
        self, responses: Sequence[PolicyResponse], *, autoreset: bool
    ) -> Future[list[EnvRet]]:
        """Begins a step of several envs at once; returns a future for what they give, in order.

        It raises what the first env raised, once all of them have ended their step.
        """
        client = self._opened()

        async def step_all() -> list[EnvRet]:
            steps = [client.step(one, autoreset=autoreset) for one in responses]
            if len(steps) == 1:
                return [await steps[0]]
            results = await asyncio.gather(*steps, return_exceptions=True)
            for failure in (one for one in results if isinstance(one, BaseException)):
                raise failure
            return cast("list[EnvRet]", results)

        return self._loop.submit(step_all())

    def close(self) -> None:
        """Ends the session in order, which frees the envs. Safe to repeat."""
        client, self._client = self._client, None
        _OPEN.discard(self)
        if client is not None:
            self._loop.run(client.close(), timeout=_CLOSE_S)

    def _opened(self) -> StepClient:
        if self._client is None:
            raise ConfigError("the env is closed")
        return self._client


async def _opened(
    address: str,
    connect_timeout_s: float,
    auth: ClientAuthConfig | None,
    rpc: RpcConfig | None,
    reconnect_timeout_s: float,
) -> StepClient:
    client = StepClient(address, auth=auth, rpc=rpc, reconnect_timeout_s=reconnect_timeout_s)
    try:
        await client.start(connect_timeout_s)
    except BaseException:
        await client.close()
        raise
    return client


def _alike(first: EnvMeta, other: EnvMeta) -> bool:
    return (
        first.observation_space == other.observation_space
        and first.action_space == other.action_space
    )


_OPEN: weakref.WeakSet[Connection] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for connection in tuple(_OPEN):
        try:
            connection.close()
        except Exception as error:  # a lease frees what this could not
            _LOG.debug("%s: %s", connection.address, error)
