"""The env servers of a cluster, which may come and go, as one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rlightning.env.episodes import KEPT_EPISODES, EpisodeRecord
from rlightning.env.remote_client import EnvClient, EnvStatus
from rlightning.errors import DeadlineExceededError, RemoteError, UnavailableError
from rlightning.latency import ClockOffset
from rlightning.latency.axis import Axis
from rlightning.latency.trace import StepTrace
from rlightning.rpc.replicas import Endpoint, resolve
from rlightning.types import EnvMeta
from rlightning.utils.config import EnvServiceConfig

_FIND_EVERY_S = 1.0
_KEPT_TRACES = 10_000
_AWAY = (UnavailableError, DeadlineExceededError)


class EnvServers:
    """Asks all env servers of a cluster how they fare, and steers them. Belongs to one event loop.

    There may be several addresses, and a name with several A records stands for several servers;
    those that come later take part from then on, also in a pause. What one has done counts after it
    has gone, as it was last seen. One that does not answer holds nobody up, as long as another
    does.

    Args:
        service: Section `services.env`.
        fresh: Whether the servers that are there have done all that they did for this run.
        report: Takes one line for people.
    """

    def __init__(
        self,
        service: EnvServiceConfig,
        *,
        fresh: bool,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._service = service
        self._fresh = fresh
        self._report = report
        self._servers: dict[Endpoint, _Server] = {}
        self._gone: list[_Server] = []
        self._found = 0.0
        self._met = 0
        self._held: bool | None = None
        self._looking = asyncio.Lock()
        self._episodes: deque[EpisodeRecord] = deque(maxlen=KEPT_EPISODES)
        self._traces: deque[StepTrace] = deque(maxlen=_KEPT_TRACES)
        self._axis = Axis()

    @property
    def env_steps(self) -> int:
        """Env steps taken in this run, as of the last look; every row counts."""
        return sum(server.env_steps for server in (*self._counted(), *self._gone))

    @property
    def envs(self) -> list[EnvMeta]:
        """Spaces and sizes of the groups of those that answered the last look."""
        return [meta for server in self._answering() for meta in server.last.envs]

    def stats(self) -> Mapping[str, Mapping[str, Any]]:
        """Returns the stats of those that answered the last look, by `env-NUMBER`.

        Those of a single one, as long as there was no other, by `env`.
        """
        return {
            "env" if self._met == 1 else f"env-{server.number}": server.last.stats
            for server in self._answering()
        }

    def news(self) -> tuple[list[EpisodeRecord], list[StepTrace]]:
        """Returns the episodes and traces of all looks since the last call, each once.

        Traces are by the clock of the env server that was met first, and left out while it is not
        known how the clock of theirs stands to it.
        """
        episodes, traces = list(self._episodes), list(self._traces)
        self._episodes.clear()
        self._traces.clear()
        return episodes, traces

    async def look(self, timeout_s: float) -> None:
        """Asks all of them how they fare.

        Args:
            timeout_s: Seconds until an answer must be here.

        Raises:
            RemoteError: None answered, or one refused; the class tells how.
        """
        # One at a time: an answer that is overtaken would look like that of a server come back.
        async with self._looking:
            await self._find(timeout_s)
            servers = list(self._servers.values())
            for server in servers:
                server.reap()
                if server.asking is None:
                    server.asking = asyncio.create_task(self._ask(server, timeout_s))
            awaited = [server for server in servers if server.answers] or servers
            await asyncio.wait({server.asking for server in awaited if server.asking is not None})
            for server in servers:
                server.reap()
            if not any(server.answers for server in servers):
                raise servers[0].error or UnavailableError("no answer", peer=servers[0].address)
            self._tell_of_silent()

    async def hold(self, wanted: bool, timeout_s: float) -> None:
        """Pauses the actors, or lets them go on; those that are away are told once they are back.

        Args:
            wanted: Whether to pause.
            timeout_s: Seconds until an answer must be here.

        Raises:
            RemoteError: None answered, or one refused; the class tells how.
        """
        self._held = wanted
        servers = list(self._answering()) or list(self._servers.values())
        results = await asyncio.gather(
            *(server.hold(wanted, timeout_s) for server in servers), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            if not isinstance(error, _AWAY) or len(errors) == len(servers):
                raise error

    async def collect(self, begin: int, steps: int, timeout_s: float) -> bool:
        """Lets the env server of a run in lockstep, which has one, take a round.

        Arguments, result and errors are those of `EnvClient.collect`.
        """
        await self._find(timeout_s)
        (server,) = self._servers.values()
        return await server.client.collect(begin, steps, timeout_s=timeout_s)

    async def close(self) -> None:
        """Closes the connections."""
        for server in self._servers.values():
            await server.close()

    # The servers.

    def _counted(self) -> Iterator[_Server]:
        return (server for server in self._servers.values() if server.known)

    def _answering(self) -> Iterator[_Server]:
        return (server for server in self._servers.values() if server.answers)

    async def _find(self, timeout_s: float) -> None:
        """Takes note of who has come and who has gone."""
        if self._servers and time.monotonic() - self._found < _FIND_EVERY_S:
            return
        self._found = time.monotonic()
        try:
            endpoints = await resolve(self._service.dial_addresses, timeout_s=timeout_s)
        except UnavailableError:
            if not self._servers:
                raise
            return  # they may well be there
        initial = not self._servers
        for gone in self._servers.keys() - set(endpoints):
            server = self._servers.pop(gone)
            await server.close()
            if server.known:
                self._gone.append(server)
                steps = f"{server.env_steps:,} env steps"
                self._report(f"the env server at {gone.address} has left after {steps}")
        for endpoint in endpoints:
            if endpoint not in self._servers:
                auth = endpoint.auth(self._service.auth)
                client = EnvClient(endpoint.address, rpc=self._service.rpc, auth=auth)
                self._servers[endpoint] = _Server(client, initial=initial)

    async def _ask(self, server: _Server, timeout_s: float) -> None:
        try:
            status = await server.client.describe(
                server.cursor, trace_cursor=server.trace_cursor, timeout_s=timeout_s
            )
            process = server.client.offset.clock_id
            if server.known or self._meet(server, process, status):
                server.take(process, status)
                self._episodes.extend(status.episodes)
                self._traces.extend(self._placed(server.client.offset, status.traces))
            server.error = None
            if self._held is not None and status.actor_running is self._held:
                await server.hold(self._held, timeout_s)  # it was away when the others were told
        except _AWAY as error:
            server.error = error

    def _placed(self, clock: ClockOffset, traces: Iterable[StepTrace]) -> Iterator[StepTrace]:
        """Yields traces by the clock of the env server that was met first."""
        now_ns = time.monotonic_ns()
        self._axis.learn(clock, now_ns)
        offset = self._axis.offset(clock.clock_id, now_ns)
        if offset is not None:
            yield from (trace.on_axis(offset) for trace in traces)

    def _meet(self, server: _Server, process: str, status: EnvStatus) -> bool:
        """Finds out who answers for the first time; returns whether all that it says counts."""
        if any(other.process == process for other in self._counted()):
            return False  # one of those that are known, under another address
        server.process = process
        for before in self._gone:
            if before.process == process:
                server.follow(before)
                self._gone.remove(before)
                return False
        server.number, self._met = self._met, self._met + 1
        if not server.initial:
            rows = sum(meta.num_envs or 0 for meta in status.envs)
            self._report(f"the env server at {server.address} has joined with {rows} rows")
        elif not self._fresh:  # it may have worked for others before
            server.begin(status)
            return False
        return True

    def _tell_of_silent(self) -> None:
        """Tells who falls silent, or is back; of all of them the launcher does."""
        for server in self._counted():
            silent = server.error is not None
            if silent != server.told:
                server.told = silent
                how = "does not answer" if silent else "answers again"
                self._report(f"the env server at {server.address} {how}")


class _Server:
    """One env server, and what it has done in this run."""

    def __init__(self, client: EnvClient, *, initial: bool) -> None:
        self.client = client
        self.initial = initial
        self.number = 0
        self.process = ""
        self.cursor = 0
        self.trace_cursor = 0
        self.error: RemoteError | None = None
        self.asking: asyncio.Task[None] | None = None
        self.told = False
        self.last: EnvStatus = _NOTHING
        self._steps = 0
        self._steps_before = 0

    @property
    def address(self) -> str:
        return self.client.address

    @property
    def known(self) -> bool:
        """Whether it has answered, under no other address."""
        return bool(self.process)

    @property
    def answers(self) -> bool:
        return self.known and self.error is None

    @property
    def env_steps(self) -> int:
        return self._steps_before + self._steps

    def begin(self, status: EnvStatus) -> None:
        """Counts from here on."""
        self._count(status)
        self._steps_before = -status.env_steps

    def follow(self, other: _Server) -> None:
        """Goes on as the one that was known under another address."""
        self.number = other.number
        self.cursor, self.trace_cursor = other.cursor, other.trace_cursor
        self._steps, self._steps_before = other._steps, other._steps_before
        self.last = other.last

    def take(self, process: str, status: EnvStatus) -> None:
        """Takes note of an answer."""
        self.process = process
        if status.env_steps < self._steps:  # an env server that came back counts from 0
            self._steps_before += self._steps
        self._count(status)

    def _count(self, status: EnvStatus) -> None:
        self.last = status
        self._steps = status.env_steps
        self.cursor, self.trace_cursor = status.episode_cursor, status.trace_cursor

    def reap(self) -> None:
        """Forgets a question that was answered; raises what nobody expected of it."""
        if self.asking is not None and self.asking.done():
            asking, self.asking = self.asking, None
            asking.result()

    async def hold(self, wanted: bool, timeout_s: float) -> None:
        await self.client.control("pause" if wanted else "start", timeout_s=timeout_s)

    async def close(self) -> None:
        if self.asking is not None:
            self.asking.cancel()
            await asyncio.gather(self.asking, return_exceptions=True)
        await self.client.close()


_NOTHING = EnvStatus("", [], [], False, 0, [], 0, {})
