"""A policy in the same process, as the actor loop wants it."""

from __future__ import annotations

from rlightning.policy.host import PolicyHost
from rlightning.types import EnvMeta, EnvRet, Mode, PolicyResponse, Purpose


class LocalPolicy:
    """Asks a `PolicyHost` for one group of rows; many share a host, and so its batches.

    Args:
        host: Has been started.
        meta: Spaces of the group.
    """

    def __init__(self, host: PolicyHost, meta: EnvMeta) -> None:
        self._host = host
        self._meta = meta
        self._seq = 0

    async def start(self) -> None:
        """Opens the group; see `PolicyHost.open_group`."""
        await self._host.open_group(self._meta)

    async def act(
        self,
        env_ret: EnvRet,
        *,
        mode: Mode = Mode.EXPLORE,
        purpose: Purpose = Purpose.TRAIN,
        reset_state: bool = False,
    ) -> PolicyResponse:
        """Returns the policy's answer; leaves are arrays with the leading dimension of `env_ret`.

        Args:
            env_ret: Rows of the group.
            mode: Explore or exploit.
            purpose: What the answer is for.
            reset_state: Begin with a fresh recurrent state.

        Raises:
            InvalidRequestError: The observation is not in the declared space.
            PolicyError: The policy raised, or broke its contract.
        """
        response, _ = await self._host.enqueue(env_ret, mode).wait()
        self._seq += 1
        response.seq = self._seq
        response.mark_policy_sent()
        return response

    async def close(self) -> None:
        """Closes the group."""
        self._host.close_group()
