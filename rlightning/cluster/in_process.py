"""A cluster in training whose services are objects of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium as gym
from typing_extensions import Self

from rlightning.actor import ActorControl, ActorStats, run_actor
from rlightning.buffer.local_buffer import LocalBuffer, LocalWriter
from rlightning.chunks import ChunkedActions
from rlightning.cluster.backend import ClusterState, batch_size
from rlightning.env.episodes import EpisodeLog
from rlightning.env.hosting import HostedGroup, close_groups, host_envs
from rlightning.env.lockstep import Round
from rlightning.errors import ConfigError, DeadlineExceededError
from rlightning.latency import LatencyStats
from rlightning.rpc.loop import shared_loop
from rlightning.types import EnvMeta
from rlightning.utils.config import MainConfig

if TYPE_CHECKING:
    from rlightning.policy import LocalPolicy

_STOP_S = 5.0


class _Actor(NamedTuple):
    """A group, and who answers and stores it."""

    group: HostedGroup
    policy: LocalPolicy
    writer: LocalWriter
    stats: ActorStats


class InProcessBackend:
    """The same actor loop, batcher and rollout table as in the services, without a network.

    A `Backend`. Use as a context manager: all of it lives inside, on the process's event loop.

    Args:
        config: Config of the run.
    """

    def __init__(self, config: MainConfig) -> None:
        self._config = config
        self._loop = shared_loop()
        self._log = EpisodeLog()
        self._cursor = 0
        self._groups: list[HostedGroup] = []
        self._latency = LatencyStats(enabled=config.log.latency)
        self._writers: list[LocalWriter] = []
        self._actors: list[asyncio.Task[None]] = []
        self._in_turn: list[_Actor] = []

    def __enter__(self) -> Self:
        self._loop.run(self._open())
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.run(self._close())

    async def _open(self) -> None:
        # Not before now: these load torch.
        from rlightning.policy import LocalPolicy, PolicyHosts

        config = self._config
        hosted = [env for env in config.env if env.num_workers and env.driver == "actor"]
        if not hosted:
            raise ConfigError(
                "nothing attaches to a cluster in one process: it needs an env with driver 'actor'"
            )
        self._control = ActorControl()
        self._buffer = LocalBuffer(config.buffer)
        self._hosts = PolicyHosts(config.policy, lockstep=config.train.lockstep)
        await self._hosts.start()
        self._groups = await host_envs(
            hosted,
            pipeline_depth=config.services.env.pipeline_depth,
            seed=config.train.seed,
            log=self._log,
        )
        for group in self._groups:
            policy = LocalPolicy(self._hosts.get(group.config.policy), group.meta)
            stats = ActorStats(latency=self._latency)
            writer = self._buffer.writer(group.meta)
            self._writers.append(writer)
            actor = _Actor(group, policy, writer, stats)
            self._in_turn.append(actor)
            if not config.train.lockstep:
                self._actors.append(asyncio.create_task(self._act(actor)))

    async def _act(self, actor: _Actor) -> None:
        await self._hosts.get(actor.group.config.policy).ready()
        await actor.policy.start()
        chunks = self._chunks_of(actor)
        await run_actor(actor.group, chunks, chunks, control=self._control, stats=actor.stats)
        await chunks.finish()

    def _chunks_of(self, actor: _Actor) -> ChunkedActions:
        space = actor.group.meta.action_space
        assert isinstance(space, gym.Space)
        # What comes when must not matter in lockstep.
        ahead = 0 if self._config.train.lockstep else self._config.services.env.chunk_ahead
        return ChunkedActions(actor.policy, actor.writer, space, ahead=ahead)

    async def _close(self) -> None:
        self._control.stop()
        # An actor that waits for room in the buffer would wait for a learner that has gone.
        if self._actors:
            await asyncio.wait(self._actors, timeout=0.1)
            for actor in self._actors:
                actor.cancel()
            await asyncio.wait(self._actors, timeout=_STOP_S)
        await close_groups(self._groups)
        for writer in self._writers:
            writer.close()
        await self._hosts.close()

    @property
    def config(self) -> MainConfig:
        """The config, in which no service has an address."""
        return self._config

    def env_metas(self) -> list[EnvMeta]:
        """Returns the spaces and sizes of the envs, one entry per group of rows."""
        return [group.meta for group in self._groups]

    def next_batch(self, timeout_s: float) -> Mapping[str, Any] | None:
        """Returns the next batch's columns; None if there was none in time."""
        size = batch_size(self._config)
        try:
            return self._loop.run(self._buffer.next_batch(timeout_s, batch_size=size)).columns
        except DeadlineExceededError:
            return None

    def publish(self, version: int, weights: bytes) -> None:
        """Lets the policy act with new weights; returns when it does."""
        from rlightning.policy.weight_store import Weights

        self._loop.run(self._hosts.default.publish(Weights.of(version, weights)))

    def hold(self, wanted: bool) -> None:
        """Pauses the actors, or lets them go on."""
        self._loop.run(self._hold(wanted))

    async def _hold(self, wanted: bool) -> None:
        if wanted:
            self._control.pause()
            await self._control.wait_idle(_STOP_S)
        else:
            self._control.start()

    def collect(self, begin: int, stop: Callable[[], bool]) -> None:
        """Lets the envs take a round of lockstep, and returns when it is stored."""
        self._loop.run(self._collect(begin))

    async def _collect(self, begin: int) -> None:
        self._buffer.ack()
        await self._hosts.default.ready()
        config, started = self._config, self.env_steps() > 0
        for index, actor in enumerate(self._in_turn):
            if not started:
                await actor.policy.start()
            chunks = self._chunks_of(actor)
            await run_actor(
                Round(actor.group, index, begin, config.train.seed),
                chunks,
                chunks,
                control=self._control,
                stats=actor.stats,
                max_steps=config.buffer.rollout_length,
                new_segment=True,
            )
            await chunks.finish()
        if config.buffer.type == "ReplayBuffer":
            for group in self._groups:
                self._buffer.table.truncate(group.env_id)

    def update_priorities(self, columns: Mapping[str, Any], priorities: Any) -> None:
        """Sets the priorities of a batch's rows."""
        self._loop.run(self._update_priorities(columns, priorities))

    async def _update_priorities(self, columns: Mapping[str, Any], priorities: Any) -> None:
        self._buffer.table.buffer.update_priorities(
            columns["sample_index"], priorities, columns["sample_generation"]
        )

    def checkpoint_buffer(self, keep: Sequence[str]) -> str | None:
        """Returns None: what is in memory has no checkpoints."""
        return None

    def policy_version(self) -> int:
        """Returns the version of the weights in use."""
        return self._hosts.default.version

    def env_steps(self) -> int:
        """Returns the env steps taken in this run; every row counts."""
        return sum(group.env_steps for group in self._groups)

    def observe(self) -> ClusterState:
        """Returns how the parts fare; each episode is reported once."""
        return self._loop.run(self._observe())

    async def _observe(self) -> ClusterState:
        episodes = self._log.since(self._cursor) if self._cursor < self._log.cursor else []
        self._cursor = self._log.cursor
        parts = {"env.": self._latency, "policy.": self._hosts.default.batcher.stats.latency}
        latencies = {
            f"{prefix}{name}": summary
            for prefix, latency in parts.items()
            for name, summary in latency.summary().items()
        }
        return ClusterState(
            env_steps=self.env_steps(),
            episodes=episodes,
            policy_version=self._hosts.default.version,
            latencies=latencies,
        )

    def check(self) -> None:
        """Raises what an actor raised, if one did."""
        for actor in self._actors:
            if actor.done() and not actor.cancelled() and (error := actor.exception()):
                raise error
