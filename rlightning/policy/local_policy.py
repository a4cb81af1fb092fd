"""A policy in the same process, as the actor loop wants it."""

from __future__ import annotations

from rlightning.policy.host import PolicyHost
from rlightning.policy.state import GroupState
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
        self._state: GroupState | None = None

    async def start(self) -> None:
        """Opens the group; see `PolicyHost.open_group` and `PolicyHost.keep_state`."""
        await self._host.open_group(self._meta)
        try:
            self._state = self._host.keep_state(self._meta.num_envs)
        except BaseException:
            self._host.close_group()
            raise

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
        pending = self._host.enqueue(env_ret, mode, state=self._state, reset_state=reset_state)
        response, _ = await pending.wait()
        self._seq += 1
        response.seq = self._seq
        response.mark_policy_sent()
        return response

    async def close(self) -> None:
        """Closes the group."""
        self._host.close_group()
        if self._state is not None:
            self._host.drop_state(self._state)
            self._state = None
