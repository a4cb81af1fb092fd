"""Metrics of a process, served over HTTP for Prometheus: read when asked for, not before."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlightning.errors import ConfigError
from rlightning.latency import LatencyStats, SlidingHistogram
from rlightning.latency.histogram import EDGES_S, Counts
from rlightning.rpc.auth import is_loopback
from rlightning.rpc.calls import CallCounts
from rlightning.rpc.stream import Messages, Session
from rlightning.utils.config.rpc import check_address

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

PREFIX = "rlightning_"
"""What the name of every metric begins with, but for those of calls and of the process."""

_COLLECT_TIMEOUT_S = 5.0
# A client that is silent for so long in the middle of its request is let go.
_REQUEST_TIMEOUT_S = 3.0
# Each connection holds a thread; Prometheus needs one.
_MAX_CONNECTIONS = 32
_LAG_EVERY_S = 0.25
# The whole of an answer, which the actor and its client both measure.
_TOTAL, _TWICE = "round_trip", "act"

Classic = tuple[Sequence[int], int, float]


class Metrics:
    """Takes the metrics of one scrape; names and labels are those of `docs/latency.md`.

    Labels must have few values: never the name of a session, an env or a client.
    """

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        """Adds a value that goes up and down."""
        from prometheus_client.core import GaugeMetricFamily

        family = self._family(GaugeMetricFamily, PREFIX + name, text, labels)
        family.add_metric(list(labels.values()), value)

    def counter(self, name: str, text: str, value: float, **labels: str) -> None:
        """Adds a value that only goes up; its name ends with `_total`."""
        self._count(PREFIX + name, text, value, labels)

    def histogram(
        self, name: str, text: str, edges: Sequence[float], classic: Classic, **labels: str
    ) -> None:
        """Adds a distribution.

        Args:
            name: Its name.
            text: What it is.
            edges: Upper edges of its buckets.
            classic: How many values are at most each edge, how many there are, and their sum.
            **labels: Labels.
        """
        self._distribute(PREFIX + name, text, edges, classic, labels)

    def counts(self, name: str, text: str, counts: Counts, **labels: str) -> None:
        """Adds how many of which numbers there were."""
        self.histogram(name, text, counts.edges, counts.classic(), **labels)

    def stages(self, latency: LatencyStats, **labels: str) -> None:
        """Adds how long each stage took."""
        for stage, durations in latency.items():
            if stage == _TWICE:
                continue
            self.histogram(
                "step_latency_seconds",
                "How long each stage takes; between two clocks as far as they are known.",
                EDGES_S,
                durations.classic(),
                stage="total" if stage == _TOTAL else stage,
                **labels,
            )

    def sessions(self, method: str, sessions: Iterable[Session]) -> None:
        """Adds how many sessions of a method there are: connected, or away."""
        states = Counter({"connected": 0, "away": 0})
        states.update("connected" if one.connected else "away" for one in sessions)
        for state, count in states.items():
            self.gauge(
                *("sessions", "Sessions by whether their client is there.", count),
                method=method,
                state=state,
            )

    def calls(self, calls: CallCounts) -> None:
        """Adds the calls of a server, under the names that dashboards for gRPC go by."""
        for service, method, one in calls.items():
            labels = {"grpc_type": one.kind, "grpc_service": service, "grpc_method": method}
            name = "grpc_server_started_total"
            self._count(name, "Calls that began.", one.started, labels)
            for code, count in one.handled.items():
                name = "grpc_server_handled_total"
                self._count(name, "Calls that ended.", count, {**labels, "grpc_code": code})
            name, seconds = "grpc_server_handling_seconds", one.seconds
            text = "How long calls last; one that is a session, as long as that."
            self._distribute(name, text, seconds.edges, seconds.classic(), labels)

    def messages(self, service: str, method: str, messages: Messages) -> None:
        """Adds how many messages there were in the streams of a method."""
        labels = {"grpc_type": "bidi_stream", "grpc_service": service, "grpc_method": method}
        name = "grpc_server_msg_received_total"
        self._count(name, "Messages that came in streams.", messages.received, labels)
        name = "grpc_server_msg_sent_total"
        self._count(name, "Messages sent in streams.", messages.sent, labels)

    def clocks(self, clocks: Mapping[str, Mapping[str, Any]]) -> None:
        """Adds what is known of other clocks: `ClockOffset.summary` by peer."""
        for peer, summary in clocks.items():
            for key, name, text in (
                ("offset_s", "clock_offset_seconds", "A peer's monotonic clock minus this one."),
                ("uncertainty_s", "clock_uncertainty_seconds", "How far that may be off."),
            ):
                if key in summary:
                    self.gauge(name, text, summary[key], peer=peer)

    def families(self) -> list[Metric]:
        """Returns what was added."""
        return list(self._families.values())

    def _count(self, name: str, text: str, value: float, labels: Mapping[str, str]) -> None:
        from prometheus_client.core import CounterMetricFamily

        family = self._family(CounterMetricFamily, name, text, labels)
        family.add_metric(list(labels.values()), value)

    def _distribute(
        self,
        name: str,
        text: str,
        edges: Sequence[float],
        classic: Classic,
        labels: Mapping[str, str],
    ) -> None:
        from prometheus_client.core import HistogramMetricFamily

        cumulative, count, total = classic
        buckets = [(f"{edge:g}", n) for edge, n in zip(edges, cumulative, strict=True)]
        family = self._family(HistogramMetricFamily, name, text, labels)
        family.add_metric(list(labels.values()), [*buckets, ("+Inf", count)], sum_value=total)

    def _family(
        self, kind: Callable[..., Any], name: str, text: str, labels: Mapping[str, str]
    ) -> Any:
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = kind(name, text, labels=list(labels))
        return family


class MetricsServer:
    """Serves `/metrics` on a port of its own, from a thread of its own.

    Args:
        address: `HOST:PORT`; port 0 lets the system choose.
        collect: Adds the metrics of a scrape.
        loop: The event loop on which `collect` is called, whose lag is measured, too; None: it is
            called in the server's thread.

    Raises:
        ConfigError: prometheus-client is missing, or nobody can listen there.
    """

    def __init__(
        self,
        address: str,
        collect: Callable[[Metrics], None],
        *,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        try:
            from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
        except ModuleNotFoundError as error:
            raise ConfigError(
                "metrics need prometheus-client: pip install 'rlightning[serve]'"
            ) from error
        self._collect = collect
        self._loop = loop
        self._lag = SlidingHistogram()
        self._timer: asyncio.TimerHandle | None = None
        registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=registry)
        registry.register(self)
        host, _, port = check_address(address).rpartition(":")
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]"), registry)
        except (OSError, ValueError) as error:
            raise ConfigError(f"metrics: cannot listen on {address}: {error}") from error
        places = threading.Semaphore(_MAX_CONNECTIONS)
        handler = _bounded(self._server.RequestHandlerClass, places)
        self._server.RequestHandlerClass = handler
        self._server.verify_request = (  # type: ignore[method-assign]
            lambda request, client_address: places.acquire(blocking=False)
        )
        self.address = f"{host}:{self._server.server_port}"
        if not is_loopback(address):
            logger.warning("%s shows the metrics to anyone who reaches it", self.address)
        if loop is not None:
            self._look(loop.time())

    def close(self) -> None:
        """Stops serving; returns at once."""
        if self._timer is not None:
            self._timer.cancel()
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> list[Metric]:
        """Returns the metrics of now; prometheus-client calls this in its thread."""
        if self._loop is None:
            return self._gather()
        asked = asyncio.run_coroutine_threadsafe(self._gather_soon(), self._loop)
        return asked.result(_COLLECT_TIMEOUT_S)

    async def _gather_soon(self) -> list[Metric]:
        return self._gather()

    def _gather(self) -> list[Metric]:
        begun = time.perf_counter()
        metrics = Metrics()
        self._collect(metrics)
        if self._loop is not None:
            metrics.histogram(
                "event_loop_lag_seconds",
                "How late the event loop is to what is due.",
                EDGES_S,
                self._lag.classic(),
            )
        taken = time.perf_counter() - begun
        metrics.gauge("scrape_duration_seconds", "How long gathering these took.", taken)
        return metrics.families()

    def _look(self, due: float) -> None:
        assert self._loop is not None
        now = self._loop.time()
        self._lag.record(max(0.0, now - due))
        self._timer = self._loop.call_at(now + _LAG_EVERY_S, self._look, now + _LAG_EVERY_S)


def _bounded(base: Any, places: threading.Semaphore) -> Any:
    """Returns a request handler that lets a silent client go and its place with it."""

    class Handler(base):  # type: ignore[misc]
        timeout = _REQUEST_TIMEOUT_S

        def __init__(self, *arguments: Any) -> None:
            try:
                super().__init__(*arguments)
            finally:
                places.release()

        def handle(self) -> None:
            with contextlib.suppress(OSError):  # silent for too long, or gone
                super().handle()

    return Handler
