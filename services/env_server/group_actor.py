"""The actor of one group: its sessions with policy and buffer server, and its steps."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import gymnasium as gym

from rlightning.actor import INFO_KEYS, ActorControl, ActorStats, BufferPort, EnvPort, run_actor
from rlightning.buffer.remote_buffer import InsertClient, items_per_message
from rlightning.buffer.routing import tables_of
from rlightning.chunks import ChunkedActions
from rlightning.env.attached import AttachedGroup
from rlightning.env.control import Quorum
from rlightning.env.hosting import HostedGroup
from rlightning.env.lockstep import Round
from rlightning.errors import AlreadyExistsError, DeadlineExceededError, UnavailableError
from rlightning.latency import LatencyStats
from rlightning.latency.trace import TraceLog
from rlightning.policy.remote_policy import PolicyClient
from rlightning.policy.replicas import Replicas
from rlightning.utils.config import BufferConfig, MainConfig

from .unasked import UnaskedSteps

_LOG = logging.getLogger(__name__)

_CONNECT_S = 5.0
# Items of one writer that may be unacked.
_WINDOW = 32


class GroupActor:
    """The actor of one group, with its sessions at a policy and a buffer server.

    Args:
        config: Of the env server.
        group: What is stepped.
        control: Pauses and stops it.
        latency: Gets the durations of its stages.
        traces: Gets the steps that are traced.
        quorum: Nothing is stepped before it is reached.
        replicas: Of the policy server, which all actors of a process share.
        buffer_address: HOST:PORT of the buffer server that stores the rows of the group.

    Attributes:
        stats: Counters of the actor loop.
        policy: Session at the policy server.
        buffer: Session at the buffer server.
        steps: What an attached env did without being asked, with what the actor inserts.
        chunks: Hands on actions of responses that bring several; None where the client does.
    """

    def __init__(
        self,
        config: MainConfig,
        group: HostedGroup | AttachedGroup,
        control: ActorControl,
        latency: LatencyStats,
        traces: TraceLog,
        quorum: Quorum,
        *,
        replicas: Replicas,
        buffer_address: str,
    ) -> None:
        services = config.services
        tables = tables_of(config.buffer, group.env_id)
        # New per process: a server takes the group of a restarted process for another client.
        client_id = f"{group.env_id.replace('/', '.')[:50]}.{uuid.uuid4().hex[:12]}"
        self.group = group
        self.control = control
        self.quorum = quorum
        self.stats = ActorStats(latency=latency)
        self._traces = traces
        self._is_connected = False
        self.policy = PolicyClient(
            services.policy.dial_addresses,
            spec=group.meta,
            client_id=client_id,
            rpc=services.policy.rpc,
            auth=services.policy.auth,
            stats=latency,
            replicas=replicas,
            policy=group.policy if isinstance(group, AttachedGroup) else group.config.policy,
        )
        self.buffer = InsertClient(
            buffer_address,
            spec=group.meta,
            writer_id=client_id,
            tables=list(tables),
            window_items=min(map(window_of, tables.values())),
            rpc=services.buffer.rpc,
            auth=services.buffer.auth,
            stats=latency,
        )
        self.steps = UnaskedSteps(self.buffer)
        self.chunks: ChunkedActions | None = None
        # What comes when must not matter in lockstep.
        self._ahead = 0 if config.train.lockstep else services.env.chunk_ahead
        self._info_keys = group.config.info_keys if isinstance(group, HostedGroup) else INFO_KEYS

    async def run(self) -> None:
        """Steps the group until the control stops it; waits for servers that are not there."""
        await self.connect()
        if not self.control.stopping:
            steps = self.steps if isinstance(self.group, AttachedGroup) else self.buffer
            await self._act(self.group, steps)

    async def run_round(self, one: Round, steps: int) -> None:
        """Takes a round of lockstep, and returns when it is stored."""
        await self._act(one, self.buffer, max_steps=steps, new_segment=True)
        await self.buffer.flush()

    async def connect(self) -> None:
        """Opens the sessions. Safe to repeat."""
        if self._is_connected:
            return
        with self.group.activity.told_by_sessions():
            while not (self.quorum.reached or self.control.stopping):
                await self.control.sleep(0.05)
            await self._connected("policy", self.policy.start)
            if isinstance(self.group, AttachedGroup):
                # Rollouts wait for whoever writes: not for one that has not begun.
                await self.group.came()
            await self._connected("buffer", self.buffer.start)
        self._is_connected = True

    async def _act(self, env: EnvPort, buffer: BufferPort, **limits: Any) -> None:
        space = self.group.meta.action_space
        # A client with a control loop executes chunks by itself.
        if isinstance(space, gym.Space) and not getattr(self.group, "wants_acks", False):
            self.chunks = ChunkedActions(self.policy, buffer, space, ahead=self._ahead)
        await run_actor(
            env,
            self.chunks or self.policy,
            self.chunks or buffer,
            info_keys=self._info_keys,
            control=self.control,
            stats=self.stats,
            traces=self._traces,
            **limits,
        )
        if self.chunks is not None:
            await self.chunks.finish()

    async def close(self) -> None:
        """Ends the sessions."""
        await asyncio.gather(self.policy.close(), self.buffer.close())

    async def _connected(self, who: str, start: Callable[[float], Awaitable[None]]) -> None:
        """Opens a session, however long it takes for its server to be there."""
        warned = False
        while not self.control.stopping:
            try:
                await start(_CONNECT_S)
            except (UnavailableError, AlreadyExistsError, DeadlineExceededError) as error:
                if not warned:
                    _LOG.warning("%s waits for the %s server: %s", self.group.env_id, who, error)
                warned = True
                await self.control.sleep(0.1)
            else:
                return


def window_of(buffer: BufferConfig) -> int:
    """Returns how many items of one writer may be unacked.

    While the buffer is full, the rows in them have been answered already, like the one before them,
    which is acked but not complete, those that came with the last that there was room for, and the
    one after them, which waits for the window. Together they must fit into one rollout, or some
    would be older than `max_rollouts` versions in the end.
    """
    window = _WINDOW
    if buffer.type != "ReplayBuffer":
        room = buffer.rollout_length - 2
        while window > 1 and window + items_per_message(window) - 1 > room:
            window -= 1
    return window
