"""Who acts in a `PolicyGroup`: a policy in this process, or one behind a policy server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from rlightning.errors import PolicyError
from rlightning.policy.base_policy import BasePolicy, fingerprint
from rlightning.policy.inference import Inference, Part
from rlightning.policy.layout import InputLayout
from rlightning.policy.remote_policy import PolicyClient
from rlightning.policy.state import GroupState, StateLayout, StateUse
from rlightning.policy.weights import (
    dump_weights,
    parse_weights,
)
from rlightning.rpc.loop import shared_loop
from rlightning.types import EnvMeta, EnvRet, Mode, PolicyResponse
from rlightning.utils.config import ClientAuthConfig, Config, RpcConfig

# How long a policy server may take to answer at the beginning, in seconds.
FIND_TIMEOUT_S = 30.0


class Member(Protocol):
    """One policy that acts.

    Attributes:
        sticky: Whether an env must be answered by the same one always.
    """

    sticky: bool

    @property
    def load(self) -> int:
        """Requests that wait for an answer; each env's is one."""
        ...

    def init(self, eval_config: Config | None, env_meta: EnvMeta) -> None:
        """Makes it ready to act in such spaces."""
        ...

    def submit(
        self, env_rets: Sequence[EnvRet], mode: Mode, *, reset_state: bool
    ) -> Future[list[PolicyResponse]]:
        """Answers some envs; each has a response of its own."""
        ...

    def receive(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Takes a copy of weights, to be used from `swap` on."""
        ...

    def swap(self) -> Future[None]:
        """Uses what it received, from the next batch on."""
        ...

    def fingerprint(self) -> dict[str, float]:
        """Returns the L2 norm of each tensor in use, by name."""
        ...

    def close(self) -> None:
        """Lets go of threads and connections."""
        ...


class LocalMember:
    """A policy of this process; see `Member`.

    Args:
        policy: Of role `eval`.
        threaded: Whether it runs on a thread of its own, or in that of the caller.
    """

    def __init__(self, policy: BasePolicy, *, threaded: bool) -> None:
        self.policy = policy
        self.sticky = False
        self._turns = policy.turns
        if threaded:
            self._turns.use_thread()
        self._layout: InputLayout | None = None
        self._inference: Inference | None = None
        self._states: StateLayout | None = None
        self._kept: dict[str, GroupState] = {}

    @property
    def load(self) -> int:
        """Requests that wait for an answer; each env's is one."""
        return self.policy.get_num_requests()

    def init(self, eval_config: Config | None, env_meta: EnvMeta) -> None:
        """Makes the network."""
        if env_meta.observation_space is None:
            raise PolicyError("init_eval needs an env_meta with an observation space")
        self.policy.init_eval(eval_config, env_meta)
        self._layout = InputLayout(env_meta.observation_space)
        self._states = StateLayout.of(self.policy)
        self._inference = Inference(self.policy, self._layout, self._states)
        self._kept.clear()
        self.sticky = self._states is not None

    def submit(
        self, env_rets: Sequence[EnvRet], mode: Mode, *, reset_state: bool
    ) -> Future[list[PolicyResponse]]:
        """Answers all of them in one inference.

        Raises:
            InvalidRequestError: An observation is not in the declared space.
            PolicyError: `init` was not called, or an env asks twice at once and has state.
        """
        inference, layout = self._inference, self._layout
        if inference is None or layout is None:
            raise PolicyError("rollout_batch needs init_eval")
        if self._states is not None:
            refuse_doubles(env_rets)
        parts = []
        for env_ret in env_rets:
            part = Part(env_ret.env_id, *layout.flatten(env_ret))
            if self._states is not None:
                state = self._kept.setdefault(env_ret.env_id, GroupState(None))
                part.state = StateUse.of(state, env_ret, part.rows or 1, fresh=reset_state)
            parts.append(part)
        self._turns.take(len(parts))

        def answer() -> list[PolicyResponse]:
            begun = time.perf_counter()
            with self._turns.answering(len(parts)):
                responses = inference.run(parts, mode)
            self.policy.latency.record("rollout_step", time.perf_counter() - begun)
            for response in responses:
                response.mark_policy_sent()
            return responses

        return self._turns.run(answer)

    def receive(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copies weights to the policy's device.

        Raises:
            InvalidRequestError: They do not fit the network.
        """
        self.policy.receive_weights(weights, version)

    def swap(self) -> Future[None]:
        """Puts what it received into the network, between two batches."""
        self.policy.notify_update_weights()

        def refresh() -> None:
            self.policy.wait_for_weight_update_done()  # over: this is the turn after it
            if self._states is not None:
                self._states.refresh()

        return self._turns.run(refresh)

    def fingerprint(self) -> dict[str, float]:
        """Returns the L2 norm of each tensor in use, by name."""
        return self._turns.run(self.policy.get_param_fingerprint).result()

    def move(self, *, away: bool) -> None:
        """Frees the policy's device of it, or takes it back; see `BasePolicy.offload`."""
        self._turns.run(self.policy.offload if away else self.policy.reload).result()

    def close(self) -> None:
        """Ends its thread once what was asked is answered."""
        self._turns.close()


class RemoteMember:
    """A policy behind a policy server, for a `PolicyGroup`; see `Member`.

    Each env has a session of its own, so that its state is kept and its requests share batches with
    those of others. Weights go to the server under versions above its own.

    Args:
        address: `HOST:PORT` of the server.
        rpc: Limits and times.
        auth: Token and certificates.
    """

    def __init__(
        self, address: str, *, rpc: RpcConfig | None = None, auth: ClientAuthConfig | None = None
    ) -> None:
        self.sticky = True
        self.load = 0
        self._address = address
        self._rpc = rpc
        self._auth = auth
        self._meta: EnvMeta | None = None
        self._loop = shared_loop()
        self._clients: dict[str, PolicyClient] = {}
        self._weights: PolicyClient | None = None
        self._received: tuple[bytes, int] | None = None
        self._offset = 0  # what is added to the group's versions

    def init(self, eval_config: Config | None, env_meta: EnvMeta) -> None:
        """Finds the server, and which version it has; its network is its own affair.

        Raises:
            UnavailableError: No server answers.
        """
        self._meta = env_meta
        self._loop.run(self._find())

    def submit(
        self, env_rets: Sequence[EnvRet], mode: Mode, *, reset_state: bool
    ) -> Future[list[PolicyResponse]]:
        """Asks about all of them at once.

        Raises:
            PolicyError: `init` was not called, or an env asks twice at once.
        """
        if self._meta is None:
            raise PolicyError("rollout_batch needs init_eval")
        refuse_doubles(env_rets)
        return self._loop.submit(self._answer(env_rets, mode, reset_state))

    def receive(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Makes a safetensors file of weights."""
        self._received = dump_weights(weights), version

    def swap(self) -> Future[None]:
        """Publishes what it received."""
        received, self._received = self._received, None
        return self._loop.submit(self._publish(received))

    def fingerprint(self) -> dict[str, float]:
        """Returns the L2 norm of each tensor that the server has, by name."""
        return self._loop.run(self._pull())

    def close(self) -> None:
        """Ends the sessions."""
        self._loop.run(self._close())

    async def _find(self) -> None:
        if self._weights is None:
            self._weights = PolicyClient(self._address, rpc=self._rpc, auth=self._auth)
        description = await self._weights.describe(timeout_s=FIND_TIMEOUT_S)
        self._offset = description.policy_version

    async def _answer(
        self, env_rets: Sequence[EnvRet], mode: Mode, reset_state: bool
    ) -> list[PolicyResponse]:
        asked = [(await self._client(env_ret), env_ret.numpy()) for env_ret in env_rets]
        self.load += len(asked)
        try:
            acts = (
                client.act(env_ret, mode=mode, reset_state=reset_state) for client, env_ret in asked
            )
            return list(await asyncio.gather(*acts))
        finally:
            self.load -= len(asked)

    async def _client(self, env_ret: EnvRet) -> PolicyClient:
        client = self._clients.get(env_ret.env_id)
        if client is None:
            meta = self._meta
            assert meta is not None
            assert meta.observation_space is not None
            _, rows = InputLayout(meta.observation_space).flatten(env_ret)
            spec = replace(meta, env_id=env_ret.env_id, num_envs=rows or 1)
            client = PolicyClient(self._address, spec=spec, rpc=self._rpc, auth=self._auth)
            try:
                await client.start()
            except BaseException:
                await client.close()
                raise
            self._clients[env_ret.env_id] = client
        return client

    async def _publish(self, received: tuple[bytes, int] | None) -> None:
        if received is not None and self._weights is not None:
            await self._weights.publish_weights(self._offset + received[1], received[0])

    async def _pull(self) -> dict[str, float]:
        assert self._weights is not None
        _, data = await self._weights.pull_weights()
        return fingerprint(parse_weights(data))

    async def _close(self) -> None:
        clients = [*self._clients.values(), *([self._weights] if self._weights else [])]
        await asyncio.gather(*(client.close() for client in clients))
        self._clients.clear()
        self._weights = None


def refuse_doubles(env_rets: Sequence[EnvRet]) -> None:
    """Refuses a batch in which an env asks twice.

    Raises:
        PolicyError: One does.
    """
    ids = [env_ret.env_id for env_ret in env_rets]
    for env_id in ids:
        if ids.count(env_id) > 1:
            raise PolicyError(f"env {env_id!r} asks twice in one batch")
