"""Hosts the envs of a config, lets clients attach theirs, and lets actors and drivers step them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from rlightning.actor import ActorControl
from rlightning.env.attach_sessions import AttachSessions
from rlightning.env.attached import PREFIX, AttachedGroup
from rlightning.env.base_env import BaseEnv
from rlightning.env.control import Quorum
from rlightning.env.episodes import EpisodeLog, EpisodeRecord
from rlightning.env.hosting import HostedGroup, close_groups, host_envs
from rlightning.env.remote_client import SERVICE
from rlightning.env.replica import replica_name
from rlightning.env.step_sessions import DrivenGroup, StepSessions
from rlightning.errors import (
    ConfigError,
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    PreconditionError,
    RLightningError,
)
from rlightning.latency.trace import StepTrace
from rlightning.rpc.activity import describe_sessions
from rlightning.rpc.handlers import Context, Handler, unary_unary
from rlightning.rpc.metrics import Metrics
from rlightning.rpc.protocol import LIBRARY_VERSION, arrival_of, stamp
from rlightning.rpc.session import SessionMethod, SessionRegistry
from rlightning.types import EnvMeta
from rlightning.utils.config import MainConfig
from rlightning.v1 import env_service_pb2 as pb
from rlightning.wire import Writer, fill_env_meta, fill_value

from .actors import Actors
from .spans import SpanExport

_LOG = logging.getLogger(__name__)

_PAUSE_S = 5.0
# What the drain leaves to the server for ending its streams.
_DRAIN_MARGIN_S = 0.5

_ENV_COMMANDS = {
    pb.ENV_COMMAND_OFFLOAD: BaseEnv.offload.__name__,
    pb.ENV_COMMAND_RELOAD: BaseEnv.reload.__name__,
    pb.ENV_COMMAND_APPLY_EVALUATE_CFG: BaseEnv.apply_evaluate_cfg.__name__,
    pb.ENV_COMMAND_RESTORE_EVALUATE_CFG: BaseEnv.restore_evaluate_cfg.__name__,
}
_NEEDS_RESET = {pb.ENV_COMMAND_APPLY_EVALUATE_CFG, pb.ENV_COMMAND_RESTORE_EVALUATE_CFG}


class EnvService:
    """`rlightning.v1.EnvService`: hosted and attached envs, their actors and their drivers.

    Args:
        config: Sections `env`, `services`, `buffer` and `train.seed`.

    Attributes:
        failure: Gets the error of the first actor that gives up.
    """

    name = SERVICE
    scopes: Mapping[str, str] = {
        "Attach": "env",
        "Step": "learner",
        "Describe": "learner",
        "Control": "learner",
    }

    def __init__(self, config: MainConfig) -> None:
        self._config = config
        self._log = EpisodeLog()
        self._control = ActorControl()
        self._groups: list[HostedGroup] = []
        self._actors: Actors | None = None
        self._spans: SpanExport | None = None
        env = config.services.env
        self._quorum = Quorum(env.min_clients, env.clients_timeout_s, "services.env.min_clients")
        self._clients = SessionRegistry(env.rpc, f"/{SERVICE}/Attach")
        self._attached = AttachSessions(self._log, self._expected, self._attach, self._detach)
        self._drivers = SessionRegistry(env.rpc, f"/{SERVICE}/Step")
        self._driven = StepSessions(self._admit, self._find, self._quorum, env.rpc.lease_s)
        self._waiting: asyncio.Task[None] | None = None
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def handlers(self) -> Mapping[str, Handler]:
        """Returns the handlers; methods without one are UNIMPLEMENTED to who calls them."""
        return {
            "Attach": SessionMethod(self._clients, self._attached),
            "Step": SessionMethod(self._drivers, self._driven),
            "Describe": unary_unary(pb.EnvServiceDescribeRequest, self._describe),
            "Control": unary_unary(pb.ControlRequest, self._steer),
        }

    async def start(self) -> None:
        """Makes and resets the envs, and starts their actors, which wait for their servers.

        Raises:
            ConfigError: An env is not known, there is none and no client is waited for, a server
                that actors need has no address, or spans shall go where nothing can send them.
            EnvError: An env could not be made or reset.
        """
        config, services = self._config, self._config.services
        hosted = [env for env in config.env if env.num_workers]
        if not hosted and not services.env.min_clients:
            raise ConfigError(
                "env: no env is configured; for a server whose envs all attach set "
                "services.env.min_clients"
            )
        acting = any(env.driver == "actor" for env in hosted) or (
            services.env.min_clients > 0 and services.env.attached_driver == "actor"
        )
        if acting:
            self._check_upstream()
        self._groups = await host_envs(
            config.env,
            pipeline_depth=services.env.pipeline_depth,
            seed=config.train.seed,
            log=self._log,
            inline_below_us=services.env.step_inline_below_us,
            replica=replica_name(services.env.replica),
        )
        acted = [group for group in self._groups if group.config.driver == "actor"]
        self._actors = Actors(
            config, acted, self._control, quorum=self._quorum, on_failure=self._cannot_go_on
        )
        self._actors.start()
        if config.log.otlp_endpoint is not None:
            self._spans = SpanExport(self._actors.traces, config.log.otlp_endpoint)
        self._waiting = asyncio.create_task(self._wait_for_clients())
        rows = sum(group.meta.num_envs or 0 for group in self._groups)
        _LOG.info("%d rows in %d groups are reset", rows, len(self._groups))

    async def drain(self, deadline_s: float) -> None:
        """Ends the actors after the step in flight and waits until what they inserted is acked."""
        if self._actors is not None:
            await self._actors.stop(deadline_s - _DRAIN_MARGIN_S)
        await self._driven.drain()

    async def close(self) -> None:
        """Closes the envs."""
        if self._waiting is not None:
            self._waiting.cancel()
        if self._actors is not None:
            await self._actors.stop(0.0)
        if self._spans is not None:
            await self._spans.close()
        await close_groups(self._groups)

    def measure(self, metrics: Metrics) -> None:
        """Adds the metrics of now."""
        metrics.sessions("Attach", self._clients.sessions)
        steps = sum(group.env_steps for group in self._groups) + self._attached.env_steps
        metrics.counter("env_steps_total", "Env steps; every row counts.", steps)
        metrics.counter("episodes_total", "Finished episodes.", self._log.cursor)
        text = "Groups of rows."
        metrics.gauge("groups", text, len(self._groups), kind="hosted")
        metrics.gauge("groups", text, len(self._attached.groups), kind="attached")
        if self._actors is not None:
            self._actors.measure(metrics)

    def _attach(self, group: AttachedGroup) -> None:
        client_id = group.env_id.removeprefix(PREFIX)
        if self._actors is None:  # the gate lets no client in before
            raise PreconditionError("the server is still starting")
        if any(hosted.env_id == client_id for hosted in self._groups):
            raise PreconditionError(f"client id {client_id!r} is that of a hosted env")
        if self._config.services.env.attached_driver == "actor":
            self._check_upstream()
            self._actors.attach(group)
        self._quorum.count(len(self._attached.groups) + 1)

    def _detach(self, group: AttachedGroup) -> None:
        self._quorum.count(len(self._attached.groups))
        self._driven.forget(group)
        if self._actors is not None and self._actors.detach(group):
            return
        group.leave()
        group.close()

    def _expected(self, policy: str) -> EnvMeta | None:
        """Returns what clients have to declare: a policy answers all the same spaces."""
        if self._config.services.env.attached_driver == "external":
            return None
        acted = [
            group.meta
            for group in self._groups
            if group.config.driver == "actor" and group.config.policy == policy
        ]
        attached = [g.meta for g in self._attached.groups.values() if g.policy == policy]
        return next(iter(acted + attached), None)

    def _check_upstream(self) -> None:
        upstream: dict[str, Callable[[], list[str]]] = {
            "policy": lambda: self._config.services.policy.dial_addresses,
            "buffer": lambda: self._config.buffer_addresses,
        }
        for name, dialled in upstream.items():
            try:
                dialled()  # raises without an address
            except ConfigError as error:
                raise ConfigError(f"services.{name}: {error}") from None

    async def _wait_for_clients(self) -> None:
        try:
            await self._quorum.wait()
        except DeadlineExceededError as error:
            self._cannot_go_on(error)

    def _admit(self) -> None:
        """Lets drivers in where there is something for them to drive."""
        hosted = any(group.config.driver == "external" for group in self._groups)
        if not hosted and self._config.services.env.attached_driver == "actor":
            raise PreconditionError(
                "the actor loop steps all envs here: set env[].driver, or "
                "services.env.attached_driver for those of clients, to 'external'",
                reason="DRIVER",
            )

    def _find(self, env_id: str) -> DrivenGroup:
        attached = self._attached.groups.get(env_id.removeprefix(PREFIX))
        if attached is not None and env_id.startswith(PREFIX):
            if self._config.services.env.attached_driver == "external":
                return attached
            raise PreconditionError(
                f"the actor loop steps env {env_id!r}: set services.env.attached_driver to "
                "'external'",
                reason="DRIVER",
            )
        for group in self._groups:
            if group.env_id == env_id:
                if group.config.driver == "external":
                    return group
                raise PreconditionError(
                    f"the actor loop steps env {env_id!r}: set env[].driver to 'external'",
                    reason="DRIVER",
                )
        raise NotFoundError(f"there is no env {env_id!r}")

    def _external_ids(self) -> list[str]:
        ids = [group.env_id for group in self._groups if group.config.driver == "external"]
        if self._config.services.env.attached_driver == "external":
            ids += [group.env_id for group in self._attached.groups.values()]
        return ids

    def _cannot_go_on(self, error: RLightningError) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)
            self.failure.exception()  # or asyncio complains where nobody looks at it

    async def _describe(self, request: pb.EnvServiceDescribeRequest, context: Context) -> bytes:
        arrival = arrival_of(request)
        if request.episode_cursor < 0:
            raise InvalidRequestError(f"episode_cursor: {request.episode_cursor} is below 0")
        if request.trace_cursor < 0:
            raise InvalidRequestError(f"trace_cursor: {request.trace_cursor} is below 0")
        if request.max_episodes < 0:
            raise InvalidRequestError(f"max_episodes: {request.max_episodes} is below 0")
        if request.max_traces < 0:
            raise InvalidRequestError(f"max_traces: {request.max_traces} is below 0")
        response, writer = pb.EnvServiceDescribeResponse(), Writer()
        response.library_version = LIBRARY_VERSION
        attached = [group.meta for group in self._attached.groups.values()]
        for meta in (*(group.meta for group in self._groups), *attached):
            fill_env_meta(response.envs.add(), meta, writer)
        response.external_env_ids.extend(self._external_ids())
        response.actor_running = self._control.running
        response.env_steps = sum(group.env_steps for group in self._groups)
        response.env_steps += self._attached.env_steps
        for episode in self._log.since(request.episode_cursor)[-request.max_episodes :]:
            _fill_episode(response.episodes.add(), episode)
        response.episode_cursor = self._log.cursor
        stats = {} if self._actors is None else self._actors.stats()
        stats["sessions"] = describe_sessions(self._clients.sessions)
        stats["drivers"] = self._driven.drivers
        fill_value(response.stats, stats, writer)
        if self._actors is not None:
            for trace in self._actors.traces.since(request.trace_cursor)[-request.max_traces :]:
                _fill_trace(response.traces.add(), trace)
            response.trace_cursor = self._actors.traces.cursor
        stamp(response, arrival)
        return writer.finish(response)

    async def _steer(self, request: pb.ControlRequest, context: Context) -> pb.ControlResponse:
        if request.actor not in pb.ActorCommand.values():
            raise InvalidRequestError(f"actor: there is no command {request.actor}")
        if request.actor == pb.ACTOR_COMMAND_PAUSE:
            self._control.pause()
            await self._control.wait_idle(_PAUSE_S)
        if request.env != pb.ENV_COMMAND_UNSPECIFIED:
            await self._command(request.env)
        if request.actor == pb.ACTOR_COMMAND_START:
            self._control.start()
        collected = request.HasField("collect") and await self._collect(request.collect)
        return pb.ControlResponse(actor_running=self._control.running, collected=collected)

    async def _collect(self, asked: pb.CollectRound) -> bool:
        if not self._config.train.lockstep or self._actors is None:
            raise PreconditionError("no round is collected here: train.lockstep is false")
        for name, value, least in (("begin", asked.begin, 0), ("steps", asked.steps, 1)):
            if not least <= value < 2**40:
                raise InvalidRequestError(f"collect.{name}: expected {least} to 2^40, got {value}")
        return await self._actors.collect(asked.begin, asked.steps)

    async def _command(self, command: pb.EnvCommand) -> None:
        name = _ENV_COMMANDS.get(command)
        if name is None:
            raise InvalidRequestError(f"env: there is no command {command}")
        acting = any(group.config.driver == "actor" for group in self._groups)
        if acting and self._control.running:
            raise PreconditionError("pause the actors before a command for envs")
        if acting and not self._control.idle:
            raise PreconditionError("an actor still ends its step; try again")
        for group in self._groups:
            await group.call(lambda env: getattr(env, name)())
        if command in _NEEDS_RESET:
            self._control.reset_envs()


def _fill_episode(message: pb.EpisodeRecord, episode: EpisodeRecord) -> None:
    message.env_id = episode.env_id
    message.row = episode.row
    message.episode_id = episode.episode_id
    message.episode_return = episode.episode_return
    message.length = episode.length
    if episode.seed is not None:
        message.seed = episode.seed
    message.policy_version = episode.policy_version
    message.reason = episode.reason
    message.ts_end_ns = episode.ts_end_ns


def _fill_trace(message: pb.StepTrace, trace: StepTrace) -> None:
    message.env_id = trace.env_id
    message.seq = trace.seq
    message.start_ns = trace.start_ns
    message.duration_ns = trace.duration_ns
    message.uncertainty_ns = trace.uncertainty_ns
    for span in trace.spans:
        message.spans.add(stage=span.stage, start_ns=span.start_ns, duration_ns=span.duration_ns)
