"""What a client asks of a policy server without a session: weights, the lease, what it is doing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlightning.errors import DeadlineExceededError, PreconditionError, UnavailableError
from rlightning.latency import ClockOffset
from rlightning.policy.transfer import describe, fetch_weights, keep_lease, send_weights
from rlightning.rpc.channel import Channel
from rlightning.types import EnvMeta
from rlightning.utils.config import DEFAULT_POLICY
from rlightning.v1 import policy_service_pb2 as pb
from rlightning.wire import Reader, read_env_meta, read_value

CALL_TIMEOUT_S = 30.0
"""How long a call may take by default."""

# How long one call waits for newer weights; then it is made anew.
_WATCH_S = 30.0


@dataclass(frozen=True)
class PolicyDescription:
    """What a policy server is doing.

    Attributes:
        library_version: Of the server.
        policy_version: Version of the weights of `default` in use; 0 before the first publish.
        sessions: Sessions now open.
        serving: Whether it answers sessions.
        stats: Counters, and latency figures {count, mean, p50, p90, p99, max} in seconds, by name.
        spec: The spaces that it acts in; None before a group has asked.
    """

    library_version: str
    policy_version: int
    sessions: int
    serving: bool
    stats: Mapping[str, Any]
    spec: EnvMeta | None = None

    def version_of(self, policy: str) -> int:
        """Returns the version of a policy's weights; 0 before the first publish, or without one."""
        if policy in {"", DEFAULT_POLICY}:
            return self.policy_version
        found: Any = self.stats
        for key in ("policies", policy, "policy_version"):
            found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, int) else 0


class PolicyCalls:
    """Publishes and pulls weights, keeps the lease, and describes; see `PolicyClient`.

    Calls are made again while the server cannot be reached.

    Args:
        channel: To the server.
        policy: Name of the policy whose weights are meant; empty: `default`.
    """

    def __init__(self, channel: Channel, policy: str) -> None:
        self._channel = channel
        self._policy = policy
        self._offset = ClockOffset()

    @property
    def address(self) -> str:
        """Address of the server."""
        return self._channel.address

    async def publish_weights(
        self,
        version: int,
        data: bytes,
        *,
        learner_id: str = "learner",
        timeout_s: float = 60.0,
        retry: bool = True,
    ) -> int:
        """Sends weights to one server and waits until they are in use.

        Args:
            version: Above every version before.
            data: A safetensors file.
            learner_id: Who publishes.
            timeout_s: How long to try, in seconds.
            retry: Try again while the server cannot be reached.

        Returns:
            The version in use.

        Raises:
            PreconditionError: The server has a higher version, or another one under this number.
            AlreadyExistsError: Another learner holds the lease on publishing.
            InvalidRequestError: They do not fit the network; the message lists names and shapes.
            ResourceExhaustedError: They pass `policy.max_weights_bytes`.
            UnavailableError: The server could not be reached in time.
        """
        return await send_weights(
            self._channel,
            version,
            data,
            learner_id=learner_id,
            timeout_s=timeout_s,
            retry=retry,
            policy=self._policy,
        )

    async def pull_weights(
        self,
        min_version: int = 0,
        *,
        timeout_s: float = 60.0,
        max_bytes: int | None = None,
        flowing: bool = False,
    ) -> tuple[int, bytes]:
        """Returns version and safetensors bytes of the weights in use.

        Args:
            min_version: Wait until the version is at least this.
            timeout_s: How long to try and wait, in seconds.
            max_bytes: The most that is taken; None: what the server announces.
            flowing: Give up a server that sends nothing, or less than 64 KiB a second, for 10 s.

        Raises:
            NotFoundError: None were ever published.
            DeadlineExceededError: They did not come in time.
            PreconditionError: `min_version` did not come in time; the message tells which one is
                there.
            RemoteError: What came is not what was announced.
        """
        return await fetch_weights(
            self._channel,
            min_version,
            timeout_s=timeout_s,
            policy=self._policy,
            max_bytes=max_bytes,
            flowing=flowing,
        )

    async def watch_weights(self, version: int = 0) -> AsyncIterator[tuple[int, bytes]]:
        """Yields version and bytes of the weights whenever there are newer ones; never ends.

        Versions that are replaced before they are fetched are skipped. While the server cannot be
        reached, it is waited for.

        Args:
            version: The last one that the caller has.
        """
        while True:
            try:
                version, data = await self.pull_weights(version + 1, timeout_s=_WATCH_S)
            except (PreconditionError, UnavailableError, DeadlineExceededError) as error:
                if isinstance(error, PreconditionError) and error.reason != "VERSION_TOO_OLD":
                    raise
                continue
            yield version, data

    async def keep_lease(
        self, learner_id: str, *, leaving: bool = False, timeout_s: float = CALL_TIMEOUT_S
    ) -> int:
        """Takes or keeps the lease on publishing, which ends by itself; or gives it up.

        Args:
            learner_id: Who publishes, unique among learners.
            leaving: Give it up.
            timeout_s: How long to wait for the answer, in seconds.

        Returns:
            The version in use.

        Raises:
            AlreadyExistsError: Another learner holds it; says for how long at the most.
            UnavailableError: The server cannot be reached.
        """
        return await keep_lease(
            self._channel,
            learner_id,
            policy=self._policy,
            leaving=leaving,
            timeout_s=timeout_s,
        )

    async def describe(self, *, timeout_s: float = CALL_TIMEOUT_S) -> PolicyDescription:
        """Returns what the server is doing.

        Raises:
            UnavailableError: The server could not be reached in time.
        """
        response = await describe(self._channel, self._offset, timeout_s=timeout_s)
        reader = Reader(pb.PolicyServiceDescribeResponse, response.SerializeToString())
        return PolicyDescription(
            response.library_version,
            response.policy_version,
            response.sessions,
            response.serving,
            read_value(reader.message.stats, reader),
            read_env_meta(reader.message.spec, reader) if response.HasField("spec") else None,
        )
