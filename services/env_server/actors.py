"""One actor for each group, hosted or attached, over the network."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

from rlightning.actor import ActorControl
from rlightning.buffer.arguments import make_table
from rlightning.env.attached import AttachedGroup
from rlightning.env.control import Quorum
from rlightning.env.hosting import HostedGroup
from rlightning.env.lockstep import Round
from rlightning.errors import PreconditionError, RLightningError, StorageFullError
from rlightning.latency import ClockOffset, LatencyStats
from rlightning.latency.trace import TraceLog
from rlightning.policy.replicas import Replicas
from rlightning.rpc.metrics import Metrics
from rlightning.utils.config import MainConfig
from rlightning.utils.log_fields import add_log_fields

from .group_actor import GroupActor

_LOG = logging.getLogger(__name__)

# A stop gives up on servers that let nothing happen for this long.
_STALLED_S = 1.0
# How long a request waits for the round that it asks for.
_ROUND_LOOK_S = 0.2
# How long an actor whose client has left may take to store what came of it.
_DETACH_S = 5.0


class Actors:
    """Connects every group to the policy and the buffer server and steps it.

    Servers that are not there yet are waited for without end.

    Args:
        config: Sections `services`, where they are, and `buffer`, how far actors may run ahead.
        groups: What is stepped; reset.
        control: Pauses and stops.
        quorum: Nothing is stepped before it is reached.
        on_failure: Called with the error of an actor that gave up.

    Attributes:
        latency: Durations of the stages, of all groups together.
        traces: The last traced steps.
    """

    def __init__(
        self,
        config: MainConfig,
        groups: list[HostedGroup],
        control: ActorControl,
        *,
        quorum: Quorum,
        on_failure: Callable[[RLightningError], None],
    ) -> None:
        self.latency = LatencyStats(enabled=config.log.latency)
        self.traces = TraceLog(config.log.trace_every)
        self._config = config
        self._control = control
        self._quorum = quorum
        self._on_failure = on_failure
        self._table = make_table(config.buffer)
        # Made with the first actor: where drivers step all envs there is no address.
        self._replicas: Replicas | None = None
        self._hosted = [self._actor(group, control, hosted=True) for group in groups]
        self._attached: dict[AttachedGroup, tuple[GroupActor, asyncio.Task[None]]] = {}
        self._detaching: dict[asyncio.Task[None], GroupActor] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False
        self._round: asyncio.Task[None] | None = None
        self._begin = 0

    def start(self) -> None:
        """Starts the actors, except in lockstep; returns at once."""
        if self._config.train.lockstep:
            return
        self._tasks = [asyncio.create_task(self._drive(actor)) for actor in self._hosted]

    async def collect(self, begin: int, steps: int) -> bool:
        """Lets the actors take a round of lockstep, one after the other.

        So each answer is computed for the rows of one group, and rows are stored in one order.

        Args:
            begin: Env steps of the run before it.
            steps: Steps of every row.

        Returns:
            Whether the round that begins there is stored; False while it is on its way.
        """
        if self._round is None or self._begin != begin:
            if self._round is not None and not self._round.done():
                raise PreconditionError(f"the round that begins at {self._begin} is on its way")
            self._begin = begin
            self._round = asyncio.create_task(self._collect(begin, steps))
            self._tasks = [self._round]
        await asyncio.wait({self._round}, timeout=_ROUND_LOOK_S)
        return self._round.done()

    async def _collect(self, begin: int, steps: int) -> None:
        seed = self._config.train.seed
        for actor in self._hosted:  # first of all, since rollouts wait for all that are connected
            await self._guarded(actor, actor.connect())
        for index, actor in enumerate(self._hosted):
            if isinstance(actor.group, HostedGroup):
                one = Round(actor.group, index, begin, seed)
                await self._guarded(actor, actor.run_round(one, steps))

    def attach(self, group: AttachedGroup) -> None:
        """Starts the actor of a client's env; returns at once."""
        actor = self._actor(group, self._control.branch())
        group.store = actor.steps.store
        self._attached[group] = actor, asyncio.create_task(self._drive_attached(actor, group))

    def buffer_of(self, env_id: str, *, hosted: bool = False) -> str:
        """Returns the address of the buffer server that stores the rows of a group.

        Args:
            env_id: Id of the group.
            hosted: Whether it is one of several groups of a worker, `NAME-WORKER-GROUP`; with node
                affinity they stay together.
        """
        addresses = self._config.buffer_addresses
        if len(addresses) == 1:
            return addresses[0]
        if hosted and self._config.buffer.node_affinity_env:
            env_id = env_id.rpartition("-")[0]
        return addresses[self._table.get_storage_idx_for_env(env_id)]

    def detach(self, group: AttachedGroup) -> bool:
        """Ends the actor of a client that has left, once what came of it is stored.

        Returns:
            Whether it had one.
        """
        if group not in self._attached:
            return False
        actor, task = self._attached.pop(group)
        parting = asyncio.create_task(self._part(group, actor, task))
        self._detaching[parting] = actor
        parting.add_done_callback(self._detaching.pop)
        return True

    async def stop(self, timeout_s: float) -> None:
        """Ends every actor after its step in flight and waits until what it inserted is acked.

        A full buffer is not waited for: who would make room may be gone, and what comes next would
        only begin a rollout that these actors do not end. Safe to repeat.

        Args:
            timeout_s: How long to wait for servers, in seconds; for one that lets nothing happen, a
                second.
        """
        if self._stopped:
            return
        self._stopped = True
        deadline = time.monotonic() + timeout_s
        self._control.stop()
        for group in tuple(self._attached):
            self.detach(group)
        for actor in (*self._hosted, *self._detaching.values()):
            actor.buffer.stop_waiting_for_room()
        await self._settle(self._tasks, deadline)
        flushes = [asyncio.create_task(self._flush(actor)) for actor in self._hosted]
        await self._settle(flushes, deadline)
        for actor, flush in zip(self._hosted, flushes, strict=True):
            if flush.cancelled() or flush.exception() is not None:
                _LOG.warning("not all that %s inserted was acked", actor.group.env_id)
        await asyncio.gather(*(actor.close() for actor in self._hosted))
        detaching = tuple(self._detaching)
        if detaching:
            await asyncio.wait(detaching, timeout=max(0.1, deadline - time.monotonic()))
            for task in detaching:
                task.cancel()
            await asyncio.gather(*detaching, return_exceptions=True)
        if self._replicas is not None:
            await self._replicas.close()

    def stats(self) -> dict[str, Any]:
        """Returns counters, and seconds by stage, over all groups."""
        actors = self._all_actors()
        stats = {actor.group.env_id: actor.stats for actor in actors}
        hosted = [actor.group for actor in actors if isinstance(actor.group, HostedGroup)]
        return {
            "groups": len(hosted),
            "groups_attached": len(self._attached),
            "groups_stepped_inline": sum(group.placement.inline for group in hosted),
            "env_errors": sum(one.env_errors for one in stats.values()),
            "policy_errors": sum(one.policy_errors for one in stats.values()),
            "segments": sum(one.segments for one in stats.values()),
            "actions_skipped": sum(a.chunks.skipped for a in actors if a.chunks is not None),
            "steps_dropped": sum(group.dropped for group in self._attached),
            "inserts_resent": sum(actor.buffer.resent for actor in actors),
            "last_errors": {name: one.last_error for name, one in stats.items() if one.last_error},
            "one_way_unknown": sum(actor.policy.one_way_unknown for actor in actors),
            "latency": self.latency.summary(),
            "latency_window_s": self.latency.WINDOW_S,
            "clocks": {name: offset.summary() for name, offset in self.clocks().items()},
        }

    def measure(self, metrics: Metrics) -> None:
        """Adds the metrics of all groups."""
        metrics.stages(self.latency)
        metrics.clocks({name: offset.summary() for name, offset in self.clocks().items()})
        actors = self._all_actors()
        unknown = sum(actor.policy.one_way_unknown for actor in actors)
        for name, text, value in (
            ("env_errors", "Times an env failed", sum(a.stats.env_errors for a in actors)),
            (
                "policy_errors",
                "Answers refused",
                sum(a.stats.policy_errors for a in actors),
            ),
            ("inserts_resent", "Inserts sent again", sum(a.buffer.resent for a in actors)),
            ("one_way_unknown", "Answers whose uplink and downlink are not known", unknown),
        ):
            metrics.gauge(name, f"{text}, of the groups that are here.", value)

    def clocks(self) -> dict[str, ClockOffset]:
        """Returns the clocks of policy and buffer server, as the best-informed group has them."""
        actors = self._all_actors()
        buffers = [actor.buffer.offset for actor in actors]
        found = {
            "policy": _best([actor.policy.offset for actor in actors]),
            "buffer": _best([offset for offset in buffers if offset is not None]),
        }
        return {name: offset for name, offset in found.items() if offset is not None}

    def _all_actors(self) -> list[GroupActor]:
        return [*self._hosted, *(actor for actor, _ in self._attached.values())]

    def _actor(
        self, group: HostedGroup | AttachedGroup, control: ActorControl, *, hosted: bool = False
    ) -> GroupActor:
        if self._replicas is None:
            service = self._config.services.policy
            self._replicas = Replicas(service.dial_addresses, rpc=service.rpc, auth=service.auth)
        address = self.buffer_of(group.env_id, hosted=hosted)
        return GroupActor(
            *(self._config, group, control, self.latency, self.traces, self._quorum),
            replicas=self._replicas,
            buffer_address=address,
        )

    async def _drive(self, actor: GroupActor) -> None:
        await self._guarded(actor, actor.run())

    async def _guarded(self, actor: GroupActor, work: Coroutine[Any, Any, None]) -> None:
        env_id = actor.group.env_id
        add_log_fields(env_id=env_id)
        try:
            await work
        except Exception as error:
            if not isinstance(error, RLightningError):  # a bug, which nobody else will see
                _LOG.error("the actor of %s raised", env_id, exc_info=error)
            if not self._control.stopping:
                failure = RLightningError(f"the actor of {env_id} gave up: {error}")
                failure.__cause__ = error
                self._on_failure(failure)

    async def _drive_attached(self, actor: GroupActor, group: AttachedGroup) -> None:
        """Drives one client's env; what goes wrong there is told to that client alone."""
        add_log_fields(env_id=group.env_id)
        try:
            await actor.run()
        except Exception as error:
            if not isinstance(error, RLightningError):  # a bug, which nobody else will see
                _LOG.error("the actor of %s raised", group.env_id, exc_info=error)
            # A server that stops tells its clients to come back, whatever else goes wrong then.
            if not actor.control.stopping:
                _LOG.warning("the actor of %s gave up: %s", group.env_id, error)
                group.fail(error)

    async def _part(
        self, group: AttachedGroup, actor: GroupActor, task: asyncio.Task[None]
    ) -> None:
        """Lets an actor store what its client left behind, and ends its sessions."""
        actor.control.stop()
        group.leave()
        rest: asyncio.Task[None] | None = None
        flush: asyncio.Task[None] | None = None
        try:
            await asyncio.wait({task}, timeout=_DETACH_S)
            if task.done():
                rest = asyncio.create_task(self._store_rest(group, actor))
                await asyncio.wait({rest}, timeout=_DETACH_S)
            group.close()
            flush = asyncio.create_task(self._flush(actor))
            await asyncio.wait({flush}, timeout=_DETACH_S)
        finally:
            tasks = [one for one in (task, rest, flush) if one is not None]
            for one in tasks:
                one.cancel()
            if any(await asyncio.gather(*tasks, return_exceptions=True)):
                _LOG.warning("not all that %s brought was stored", group.env_id)
            await actor.close()
        _LOG.info("%s has left after %d steps", group.env_id, actor.stats.steps)

    async def _store_rest(self, group: AttachedGroup, actor: GroupActor) -> None:
        with suppress(StorageFullError):  # said when the rest is flushed
            await group.drain()
            await actor.steps.finish()

    async def _flush(self, actor: GroupActor) -> None:
        try:
            await actor.buffer.flush()
        except StorageFullError as error:
            _LOG.info("%s: %s", actor.group.env_id, error)

    async def _settle(self, tasks: Iterable[asyncio.Task[None]], deadline: float) -> None:
        """Waits for tasks while anything happens, and until the deadline; cancels what is left."""
        pending, progress = set(tasks), -1
        while pending and (left_s := deadline - time.monotonic()) > 0:
            if progress == (progress := self._progress()):
                break
            _, pending = await asyncio.wait(pending, timeout=min(_STALLED_S, left_s))
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    def _progress(self) -> int:
        return sum(actor.stats.steps + actor.buffer.acked for actor in self._hosted)


def _best(offsets: Iterable[ClockOffset]) -> ClockOffset | None:
    """Returns the offset that is known best, or one that is not known if none is."""
    best: ClockOffset | None = None
    least = math.inf
    for offset in offsets:
        uncertainty = offset.uncertainty_ns
        if best is None or (uncertainty is not None and uncertainty < least):
            best = offset
            least = math.inf if uncertainty is None else uncertainty
    return best
