"""The client of an env server: what its envs and its actors do, and how to steer them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import Self

from rlightning.env.episodes import EpisodeRecord
from rlightning.latency import ClockOffset
from rlightning.latency.trace import Span, StepTrace
from rlightning.rpc.channel import connect, unary
from rlightning.rpc.protocol import measure, stamp
from rlightning.types import EnvMeta
from rlightning.utils.config import ClientAuthConfig, RpcConfig
from rlightning.v1 import env_service_pb2 as pb
from rlightning.wire import Reader, read_env_meta, read_value

SERVICE = "rlightning.v1.EnvService"
"""Full name of the service."""

ActorCommand = Literal["start", "pause"]
EnvCommand = Literal["offload", "reload", "apply_evaluate_cfg", "restore_evaluate_cfg"]


@dataclass(frozen=True)
class EnvStatus:
    """What an env server is doing.

    Attributes:
        library_version: Of the server.
        envs: The groups.
        external_env_ids: Ids of those that a driver steps, through `Step`.
        actor_running: Whether the actors run.
        env_steps: Env steps since the start of the server; every row counts.
        episodes: Finished episodes after the cursor that was given, oldest first.
        episode_cursor: Cursor for the next call.
        stats: Counters, and latency figures {count, mean, p50, p90, p99, max} in seconds, by name.
        traces: Traces of single steps after the cursor that was given, oldest first.
        trace_cursor: Cursor for the next call.
    """

    library_version: str
    envs: list[EnvMeta]
    external_env_ids: list[str]
    actor_running: bool
    env_steps: int
    episodes: list[EpisodeRecord]
    episode_cursor: int
    stats: Mapping[str, Any]
    traces: list[StepTrace] = field(default_factory=list)
    trace_cursor: int = 0


class EnvClient:
    """Asks an env server how it fares and steers it. Belongs to one event loop.

    Args:
        address: `HOST:PORT`, `[IPv6]:PORT` or `unix:PATH`.
        rpc: Limits and times.
        auth: Token and certificates.

    Attributes:
        offset: The server's clock against this one, as far as `describe` tells.
    """

    def __init__(
        self,
        address: str,
        *,
        rpc: RpcConfig | None = None,
        auth: ClientAuthConfig | None = None,
    ) -> None:
        self.offset = ClockOffset()
        self._channel = connect(address, rpc=rpc, auth=auth)

    @property
    def address(self) -> str:
        """Address of the server."""
        return self._channel.address

    async def describe(
        self,
        episode_cursor: int = 0,
        *,
        trace_cursor: int = 0,
        max_episodes: int = 0,
        max_traces: int = 0,
        timeout_s: float = 10.0,
    ) -> EnvStatus:
        """Returns what the server is doing.

        Args:
            episode_cursor: Only episodes after it; 0: all that are still kept.
            trace_cursor: Only traces after it; 0: all that are still kept.
            max_episodes: Only the newest so many of those episodes; 0: all.
            max_traces: Only the newest so many of those traces; 0: all.
            timeout_s: Seconds until the answer must be here.

        Raises:
            RemoteError: The server did not answer, or refused; the class tells how.
        """
        request = pb.EnvServiceDescribeRequest(
            episode_cursor=episode_cursor,
            trace_cursor=trace_cursor,
            max_episodes=max_episodes,
            max_traces=max_traces,
        )
        stamp(request)
        response = await unary(
            self._channel,
            f"/{SERVICE}/Describe",
            request,
            pb.EnvServiceDescribeResponse,
            timeout=timeout_s,
        )
        measure(self.offset, request, response)
        reader = Reader(pb.EnvServiceDescribeResponse, response.SerializeToString())
        message = reader.message
        return EnvStatus(
            library_version=message.library_version,
            envs=[read_env_meta(env, reader) for env in message.envs],
            external_env_ids=list(message.external_env_ids),
            actor_running=message.actor_running,
            env_steps=message.env_steps,
            episodes=[_read_episode(episode) for episode in message.episodes],
            episode_cursor=message.episode_cursor,
            stats=read_value(message.stats, reader) or {},
            traces=[_read_trace(trace) for trace in message.traces],
            trace_cursor=message.trace_cursor,
        )

    async def collect(self, begin: int, steps: int, *, timeout_s: float) -> bool:
        """Lets the envs of a server in lockstep take a round of steps; safe to repeat.

        Args:
            begin: Env steps of the run before this round.
            steps: Steps of every row.
            timeout_s: Seconds until the answer must be here; it comes soon, whatever it is.

        Returns:
            Whether the round is stored; if not, it is on its way.

        Raises:
            PreconditionError: The server is not in lockstep.
            RemoteError: The server did not answer, or refused; the class tells how.
        """
        response = await unary(
            self._channel,
            f"/{SERVICE}/Control",
            pb.ControlRequest(collect=pb.CollectRound(begin=begin, steps=steps)),
            pb.ControlResponse,
            timeout=timeout_s,
        )
        return response.collected

    async def control(
        self,
        actor: ActorCommand | None = None,
        env: EnvCommand | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> bool:
        """Steers the actors, or the envs while the actors are paused.

        Args:
            actor: `start` or `pause`; a pause is answered when every group has ended its step, at
                the latest after 5 seconds. None leaves the actors as they are.
            env: What every env shall do; None: nothing.
            timeout_s: Seconds until the answer must be here.

        Returns:
            Whether the actors run.

        Raises:
            PreconditionError: A command for envs while actors run, or still end their step.
            RemoteError: The server did not answer, or refused; the class tells how.
        """
        response = await unary(
            self._channel,
            f"/{SERVICE}/Control",
            pb.ControlRequest(
                actor=None if actor is None else f"ACTOR_COMMAND_{actor.upper()}",
                env=None if env is None else f"ENV_COMMAND_{env.upper()}",
            ),
            pb.ControlResponse,
            timeout=timeout_s,
        )
        return response.actor_running

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def _read_trace(message: pb.StepTrace) -> StepTrace:
    return StepTrace(
        message.env_id,
        message.seq,
        message.start_ns,
        message.duration_ns,
        tuple(Span(span.stage, span.start_ns, span.duration_ns) for span in message.spans),
        message.uncertainty_ns,
    )


def _read_episode(message: pb.EpisodeRecord) -> EpisodeRecord:
    return EpisodeRecord(
        env_id=message.env_id,
        row=message.row,
        episode_id=message.episode_id,
        episode_return=message.episode_return,
        length=message.length,
        seed=message.seed if message.HasField("seed") else None,
        policy_version=message.policy_version,
        reason=message.reason,
        ts_end_ns=message.ts_end_ns,
    )
