"""Hosts the envs of a config, lets clients attach theirs, runs their actors, answers for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from rlightning.actor import ActorControl
from rlightning.env.base_env import BaseEnv
from rlightning.env.env_server import AttachedGroup, RemoteEnvServer
from rlightning.env.episodes import EpisodeLog, EpisodeRecord
from rlightning.env.hosting import HostedGroup, host_envs
from rlightning.env.remote_client import SERVICE
from rlightning.errors import (
    ConfigError,
    InvalidRequestError,
    PreconditionError,
    RLightningError,
)
from rlightning.latency.trace import StepTrace
from rlightning.rpc.activity import describe_sessions
from rlightning.rpc.handlers import Context, Handler, unary_unary
from rlightning.rpc.metrics import Metrics
from rlightning.rpc.protocol import LIBRARY_VERSION, arrival_of, stamp
from rlightning.rpc.session import SessionMethod, SessionRegistry
from rlightning.utils.config import MainConfig
from rlightning.v1 import env_service_pb2 as pb
from rlightning.wire import Writer, fill_env_meta, fill_value

from .driver import Driver

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
    """`rlightning.v1.EnvService`: hosted and attached envs and their actors.

    Args:
        config: Sections `env`, `services`, `buffer` and `train.seed`.

    Attributes:
        failure: Gets the error of the first actor that gives up.
    """

    name = SERVICE
    scopes: Mapping[str, str] = {"Attach": "env", "Describe": "learner", "Control": "learner"}

    def __init__(self, config: MainConfig) -> None:
        self._config = config
        self._log = EpisodeLog()
        self._control = ActorControl()
        self._groups: list[HostedGroup] = []
        self._driver: Driver | None = None
        self._clients = SessionRegistry(config.services.env.rpc, f"/{SERVICE}/Attach")
        self._attached = RemoteEnvServer(
            self._log, lambda: [group.meta for group in self._groups], self._attach, self._detach
        )
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def handlers(self) -> Mapping[str, Handler]:
        """Returns the handlers; methods without one are UNIMPLEMENTED to who calls them."""
        return {
            "Attach": SessionMethod(self._clients, self._attached),
            "Describe": unary_unary(pb.EnvServiceDescribeRequest, self._describe),
            "Control": unary_unary(pb.ControlRequest, self._steer),
        }

    async def start(self) -> None:
        """Makes and resets the envs, and starts their actors, which wait for their servers.

        Raises:
            ConfigError: No env is configured, one is not known, or a server has no address.
            EnvError: An env could not be made or reset.
        """
        config, services = self._config, self._config.services
        if not config.env:
            raise ConfigError("env: no env is configured")
        for name in ("policy", "buffer"):
            try:
                getattr(services, name).dial_address  # noqa: B018 - raises without an address
            except ConfigError as error:
                raise ConfigError(f"services.{name}: {error}") from None
        self._groups = await host_envs(
            config.env,
            pipeline_depth=services.env.pipeline_depth,
            seed=config.train.seed,
            log=self._log,
            inline_below_us=services.env.step_inline_below_us,
        )
        self._driver = Driver(config, self._groups, self._control, on_failure=self._cannot_go_on)
        self._driver.start()
        rows = sum(group.meta.num_envs or 0 for group in self._groups)
        _LOG.info("%d rows in %d groups are reset", rows, len(self._groups))

    async def drain(self, deadline_s: float) -> None:
        """Ends the actors after the step in flight and waits until what they inserted is acked."""
        if self._driver is not None:
            await self._driver.stop(deadline_s - _DRAIN_MARGIN_S)

    async def close(self) -> None:
        """Closes the envs."""
        if self._driver is not None:
            await self._driver.stop(0.0)
        for group in self._groups:
            await group.close()

    def measure(self, metrics: Metrics) -> None:
        """Adds the metrics of now."""
        metrics.sessions("Attach", self._clients.sessions)
        steps = sum(group.env_steps for group in self._groups) + self._attached.env_steps
        metrics.counter("env_steps_total", "Env steps; every row counts.", steps)
        metrics.counter("episodes_total", "Finished episodes.", self._log.cursor)
        text = "Groups of rows."
        metrics.gauge("groups", text, len(self._groups), kind="hosted")
        metrics.gauge("groups", text, len(self._attached.groups), kind="attached")
        if self._driver is not None:
            self._driver.measure(metrics)

    def _attach(self, group: AttachedGroup) -> None:
        if self._driver is None:  # the gate lets no client in before
            raise PreconditionError("the server is still starting")
        self._driver.attach(group)

    def _detach(self, group: AttachedGroup) -> None:
        if self._driver is not None:
            self._driver.detach(group)

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
        response, writer = pb.EnvServiceDescribeResponse(), Writer()
        response.library_version = LIBRARY_VERSION
        attached = [group.meta for group in self._attached.groups.values()]
        for meta in (*(group.meta for group in self._groups), *attached):
            fill_env_meta(response.envs.add(), meta, writer)
        response.actor_running = self._control.running
        response.env_steps = sum(group.env_steps for group in self._groups)
        response.env_steps += self._attached.env_steps
        for episode in self._log.since(request.episode_cursor):
            _fill_episode(response.episodes.add(), episode)
        response.episode_cursor = self._log.cursor
        stats = {} if self._driver is None else self._driver.stats()
        stats["sessions"] = describe_sessions(self._clients.sessions)
        fill_value(response.stats, stats, writer)
        if self._driver is not None:
            for trace in self._driver.traces.since(request.trace_cursor):
                _fill_trace(response.traces.add(), trace)
            response.trace_cursor = self._driver.traces.cursor
        stamp(response, arrival)
        return writer.finish(response)

    async def _steer(self, request: pb.ControlRequest, context: Context) -> pb.ControlResponse:
        if request.actor == pb.ACTOR_COMMAND_PAUSE:
            self._control.pause()
            await self._control.wait_idle(_PAUSE_S)
        if request.env != pb.ENV_COMMAND_UNSPECIFIED:
            await self._command(request.env)
        if request.actor == pb.ACTOR_COMMAND_START:
            self._control.start()
        return pb.ControlResponse(actor_running=self._control.running)

    async def _command(self, command: pb.EnvCommand) -> None:
        name = _ENV_COMMANDS.get(command)
        if name is None:
            raise InvalidRequestError(f"env: there is no command {command}")
        if self._control.running:
            raise PreconditionError("pause the actors before a command for envs")
        if not self._control.idle:
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
