"""The policy service: its policies, their weights, and what it tells of them."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import BytesIO
from typing import TYPE_CHECKING, Any

from rlightning.errors import (
    InvalidRequestError,
    ResourceExhaustedError,
)
from rlightning.latency import LatencyStats
from rlightning.policy.preload import preload_torch
from rlightning.policy.transfer import SERVICE
from rlightning.policy.weight_store import Weights
from rlightning.rpc.activity import describe_sessions
from rlightning.rpc.handlers import Context, Handler, stream_unary, unary_stream, unary_unary
from rlightning.rpc.health import Health
from rlightning.rpc.metrics import Metrics
from rlightning.rpc.protocol import LIBRARY_VERSION, arrival_of, stamp
from rlightning.rpc.session import SessionMethod, SessionRegistry
from rlightning.utils.config import DEFAULT_POLICY, MainConfig
from rlightning.utils.failpoints import failpoint
from rlightning.utils.garbage import uncollected
from rlightning.v1 import policy_service_pb2 as pb
from rlightning.wire import (
    Writer,
    fill_env_meta,
    fill_value,
    split_batch,
)

from .acting import ActHandler
from .lease import PublishLease
from .peers import catch_up

if TYPE_CHECKING:
    from rlightning.policy.host import PolicyHost
    from rlightning.policy.hosts import PolicyHosts

_LOG = logging.getLogger(__name__)


class PolicyService:
    """`rlightning.v1.PolicyService` over the policies of a config.

    Args:
        config: Sections `policy` and `services.policy`, and `log.latency`.
    """

    name = SERVICE
    scopes: Mapping[str, str] = {
        "Act": "actor",
        "PublishWeights": "learner",
        "PullWeights": "learner",
        "KeepLease": "learner",
        "Describe": "actor learner",
    }
    # A learner may bring the first weights, which a server without initial ones waits for.
    early_methods = ("PublishWeights", "KeepLease", "Describe")

    def __init__(self, config: MainConfig) -> None:
        self._config = config.policy
        self._lockstep = config.train.lockstep
        self._measures = config.log.latency
        self._rpc = config.services.policy.rpc
        self._replicas = config.services.policy
        self._health: Health | None = None
        self._hosts: PolicyHosts | None = None
        self._leases: dict[str, PublishLease] = {}
        self._hosting = asyncio.Event()
        self._registry = SessionRegistry(self._rpc, f"/{SERVICE}/Act")
        self._acting = ActHandler(self._rpc)
        self._uploaded = 0  # bytes of all the weights that are coming in

    def handlers(self) -> Mapping[str, Handler]:
        """Returns the handlers of all methods."""
        return {
            "Act": SessionMethod(self._registry, self._acting),
            "PublishWeights": stream_unary(pb.PublishWeightsRequest, self._publish_weights),
            "PullWeights": unary_stream(pb.PullWeightsRequest, self._pull_weights),
            "KeepLease": unary_unary(pb.KeepLeaseRequest, self._keep_lease),
            "Describe": unary_unary(pb.PolicyServiceDescribeRequest, self._describe),
        }

    def use_health(self, health: Health) -> None:
        """Lets replicas and clients know whether this server serves."""
        self._health = health

    async def start(self) -> None:
        """Imports torch and the policies, and returns when `default` may act.

        Of several replicas, one that comes back gets from the others what they have served since.
        """
        # In a thread, since the import takes a second or more and health must answer meanwhile.
        await asyncio.to_thread(preload_torch)
        with uncollected():
            module: Any = await asyncio.to_thread(import_module, "rlightning.policy.hosts")
        make = partial(module.PolicyHosts, self._config, lockstep=self._lockstep)
        hosts: PolicyHosts = await asyncio.to_thread(make)
        if not self._measures:
            for host in hosts.by_name.values():
                host.batcher.stats.latency = LatencyStats(enabled=False)
        await hosts.start()
        # What torch made lives for ever: looking through it would stop the loop for 0.2 s.
        gc.freeze()
        self._leases = {name: PublishLease(self._rpc.lease_s) for name in hosts.by_name}
        self._hosts = self._acting.hosts = hosts
        self._hosting.set()
        await catch_up(hosts, self._replicas)
        await hosts.default.ready()

    async def drain(self, deadline_s: float) -> None:
        """Waits until every request that came has its answer."""
        await self._acting.drain(self._registry.sessions, deadline_s)

    async def close(self) -> None:
        """Ends the inference threads."""
        if self._hosts is not None:
            await self._hosts.close()

    def measure(self, metrics: Metrics) -> None:
        """Adds the metrics of now."""
        metrics.sessions("Act", self._registry.sessions)
        text = "Tensors of requests that came through shared memory."
        metrics.counter(
            "shared_memory_bytes_total", text, self._registry.shared_bytes, method="Act"
        )
        if self._hosts is not None:
            for name, host in self._hosts.by_name.items():
                measure_policy(metrics, name, host)

    async def _hosted(self) -> PolicyHosts:
        await self._hosting.wait()
        assert self._hosts is not None
        return self._hosts

    async def _publish_weights(
        self, requests: AsyncIterator[pb.PublishWeightsRequest], context: Context
    ) -> pb.PublishWeightsResponse:
        hosts = await self._hosted()
        received_ns = time.monotonic_ns()
        first = await anext(requests, None)
        if first is None or first.WhichOneof("body") != "header":
            raise InvalidRequestError("the first message must be the header")
        header = first.header
        host = hosts.get(header.policy)
        lease = self._leases[header.policy or DEFAULT_POLICY]
        upload = _Upload()
        try:
            weights = await self._receive(header, requests, upload, lease)
            await host.publish(weights, received_ns=received_ns)
        finally:
            self._uploaded -= upload.nbytes
        lease.keep(header.learner_id)
        failpoint("weights.swapped")
        _LOG.debug("policy %r: version %d is in use", header.policy, weights.version)
        return pb.PublishWeightsResponse(policy_version=host.version)

    async def _receive(
        self,
        header: pb.WeightsHeader,
        requests: AsyncIterator[pb.PublishWeightsRequest],
        upload: _Upload,
        lease: PublishLease,
    ) -> Weights:
        """Reads the chunks; holds no more than the header announced."""
        cap = self._config.max_weights_bytes
        if not 0 < header.total_bytes <= cap:
            raise ResourceExhaustedError(
                f"weights of {header.total_bytes} bytes; policy.max_weights_bytes of the server "
                f"allows {cap}",
                reason="WEIGHTS_TOO_LARGE",
            )
        lease.keep(header.learner_id)
        digest, data = hashlib.sha256(), BytesIO()

        def take(chunk: bytes) -> None:
            digest.update(chunk)
            data.write(chunk)

        async for request in requests:
            lease.keep(header.learner_id)
            upload.nbytes += len(request.chunk)
            self._uploaded += len(request.chunk)
            if request.WhichOneof("body") != "chunk" or upload.nbytes > header.total_bytes:
                raise InvalidRequestError(
                    f"expected chunks of {header.total_bytes} bytes in all, as announced"
                )
            if self._uploaded > cap:
                raise ResourceExhaustedError(
                    "the weights of several learners come at once: more than "
                    f"policy.max_weights_bytes of the server, {cap}",
                    reason="WEIGHTS_TOO_LARGE",
                )
            await asyncio.to_thread(take, request.chunk)
        received = upload.nbytes
        if received != header.total_bytes or digest.digest() != header.sha256:
            raise InvalidRequestError(
                f"{received} of {header.total_bytes} bytes came, with SHA-256 "
                f"{digest.hexdigest()}, expected {header.sha256.hex()}"
            )
        return Weights(header.policy_version, data.getvalue(), header.sha256)  # copies nothing

    async def _pull_weights(
        self, request: pb.PullWeightsRequest, context: Context
    ) -> AsyncIterator[pb.PullWeightsResponse]:
        host = (await self._hosted()).get(request.policy)
        # Somewhat less than the caller's time, so that the error still reaches it.
        left_s = context.time_remaining()
        timeout_s = self._rpc.lease_s if left_s is None else 0.9 * left_s
        await host.wait_for_version(request.min_policy_version, timeout_s)
        weights = host.weights
        header = pb.WeightsHeader(
            policy_version=weights.version,
            total_bytes=len(weights.data),
            sha256=weights.sha256,
            policy=request.policy,
        )
        yield pb.PullWeightsResponse(header=header)
        for _, part in split_batch(weights.data):
            yield pb.PullWeightsResponse(chunk=bytes(part))

    async def _keep_lease(
        self, request: pb.KeepLeaseRequest, context: Context
    ) -> pb.KeepLeaseResponse:
        host = (await self._hosted()).get(request.policy)
        if not request.learner_id:
            raise InvalidRequestError("learner_id: expected who publishes, got none")
        lease = self._leases[request.policy or DEFAULT_POLICY]
        if request.leaving:
            lease.leave(request.learner_id)
        else:
            lease.keep(request.learner_id)
        lease_ms = int(self._rpc.lease_s * 1000)
        return pb.KeepLeaseResponse(policy_version=host.version, lease_ms=lease_ms)

    async def _describe(self, request: pb.PolicyServiceDescribeRequest, context: Context) -> bytes:
        arrival = arrival_of(request)
        hosts = await self._hosted()
        response = pb.PolicyServiceDescribeResponse(
            library_version=LIBRARY_VERSION,
            policy_version=hosts.default.version,
            sessions=self._registry.open_count,
            serving=self._health is not None and self._health.ready,
        )
        writer = Writer()
        described = {name: self._describe_policy(name, h) for name, h in hosts.by_name.items()}
        stats = {
            **described.pop(DEFAULT_POLICY),
            "sessions": describe_sessions(self._registry.sessions),
            "shared_bytes": self._registry.shared_bytes,
        }
        if described:
            stats["policies"] = described
        fill_value(response.stats, stats, writer)
        if hosts.default.meta is not None:
            fill_env_meta(response.spec, hosts.default.meta, writer)
        stamp(response, arrival)
        return writer.finish(response)

    def _describe_policy(self, name: str, host: PolicyHost) -> dict[str, Any]:
        holder = self._leases[name].holder
        return host.describe() if holder is None else {**host.describe(), "learner": holder}


@dataclass
class _Upload:
    """Weights that are coming in, until they are installed: how many bytes have come."""

    nbytes: int = 0


def measure_policy(metrics: Metrics, name: str, host: PolicyHost) -> None:
    """Adds the metrics of one policy."""
    stats = host.batcher.stats
    metrics.stages(stats.latency, policy=name)
    metrics.counts("inference_batch_size", "Rows in one inference.", stats.batch_rows, policy=name)
    queued = host.batcher.queued_rows
    text = "What waits, by queue."
    metrics.gauge("queue_depth", text, queued, queue="inference_rows", policy=name)
    metrics.gauge("policy_version", "Version of the weights in use.", host.version, policy=name)
    text = "Recurrent state that is kept."
    metrics.gauge("state_bytes", text, host.state_bytes, policy=name)
    for counter, text, value in (
        ("requests_total", "Requests answered.", stats.requests),
        ("rows_total", "Rows answered.", stats.rows),
        ("inference_errors_total", "Requests whose inference failed.", stats.errors),
        ("overloaded_total", "Requests refused since too much waited.", stats.overloaded),
    ):
        metrics.counter(counter, text, value, policy=name)
    text = "Work dropped since nobody waited for it any more."
    metrics.counter("expired_total", text, stats.expired, where="policy_queue", policy=name)
