"""A policy server for programs without an event loop, such as a robot's own; needs no torch."""

from __future__ import annotations

from typing import Any

from typing_extensions import Self

from rlightning.errors import UnavailableError
from rlightning.policy.remote_policy import PolicyClient
from rlightning.rpc.loop import shared_loop
from rlightning.types import EnvMeta, EnvRet, Mode, PolicyResponse, Purpose


class RemotePolicy:
    """Asks a policy server for actions; every call blocks. Use as a context manager, or close it.

    The connection lives in a thread of its own, where heartbeats go on between two calls; after a
    cut or a restart of the server it is made again by itself. Nothing of what is asked is stored.

    Args:
        address: As of `PolicyClient`: one server, or several with the same weights.
        spec: Spaces of the env; `num_envs` is the number of rows that ask together.
        timeout_s: How long to wait for the server at first, in seconds.
        **options: Of `PolicyClient`: `client_id`, `policy`, `auth`, `rpc`, `act_timeout_s`.

    Raises:
        PreconditionError: The policy is for other spaces; the message lists what differs.
        UnavailableError: No server answered in time.
    """

    def __init__(
        self, address: str | list[str], spec: EnvMeta, *, timeout_s: float = 30.0, **options: Any
    ) -> None:
        self._loop = shared_loop()
        connecting = _connect(address, spec, timeout_s, options)
        self._client: PolicyClient | None = self._loop.run(connecting)

    def act(
        self, env_ret: EnvRet, *, mode: Mode = Mode.EXPLOIT, purpose: Purpose = Purpose.EVAL
    ) -> PolicyResponse:
        """Returns the policy's answer; see `PolicyClient.act`.

        Args:
            env_ret: What the env returned: rows with a leading dimension, or one row without.
            mode: Explore or exploit.
            purpose: What the answer is for.

        Raises:
            UnavailableError: It was closed.
            RLightningError: As `PolicyClient.act`.
        """
        return self._loop.run(self._open().act(env_ret, mode=mode, purpose=purpose))

    def close(self) -> None:
        """Ends the session. Safe to repeat."""
        client, self._client = self._client, None
        if client is not None:
            self._loop.run(client.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _open(self) -> PolicyClient:
        if self._client is None:
            raise UnavailableError("the policy was closed")
        return self._client


async def _connect(
    address: str | list[str], spec: EnvMeta, timeout_s: float, options: dict[str, Any]
) -> PolicyClient:
    client = PolicyClient(address, spec=spec, **options)
    try:
        await client.start(timeout_s)
    except BaseException:
        await client.close()
        raise
    return client
