"""A cluster of local processes for a Python program that trains itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from rlightning.buffer.remote_buffer import BufferStatus
from rlightning.cluster.guard import add_import_paths
from rlightning.cluster.launcher import LocalLauncher
from rlightning.cluster.prepare import own_state, prepare
from rlightning.cluster.remote import (
    buffer_clients,
    dial,
    dial_options,
    policy_fleet,
    sample_client,
)
from rlightning.cluster.runs import Run, this_command
from rlightning.env.episodes import EpisodeRecord
from rlightning.env.remote_client import EnvClient, EnvStatus
from rlightning.errors import ConfigError, DeadlineExceededError
from rlightning.policy import PolicyClient, PolicyDescription
from rlightning.rpc.loop import shared_loop
from rlightning.types import EnvMeta, EnvRet, Mode, PolicyResponse, Purpose
from rlightning.utils.config import DEFAULT_POLICY, MainConfig, load_config
from rlightning.wire import Batch

_LOG = logging.getLogger(__name__)
_POLL_S = 0.5
_DESCRIBE_S = 30.0


class LocalCluster:
    """Starts the services of a config, and stops them at the end of the `with` block.

    The program publishes, samples and learns. The envs step and the buffer fills once there are
    weights: from the first publish on, or from the start with `policy.initial_weights: random`.

    Args:
        config: A YAML file, several that are merged from left to right, or a config.
        overrides: `dotted.key=value`, as `--set` of the command line.

    Attributes:
        config: The effective config, with the addresses that were bound.
        run_dir: Folder of config, logs and manifest.
        env: Asks and steers the env server.
        policy: Asks the policy server, and gives it weights.
        buffer: Takes batches from the buffer server.

    Raises:
        ConfigError: The config cannot be used.
        ClusterError: A service did not start, or is gone for good.
    """

    config: MainConfig
    run_dir: Path
    env: ClusterEnv
    policy: ClusterPolicy
    buffer: ClusterBuffer

    def __init__(
        self,
        config: str | Path | Sequence[str | Path] | MainConfig,
        *,
        overrides: Sequence[str] = (),
    ) -> None:
        if isinstance(config, MainConfig):
            self.config = prepare(config)
        else:
            files = [config] if isinstance(config, (str, Path)) else list(config)
            self.config = prepare(load_config(files, overrides))
            folders = (str(Path(file).resolve().parent) for file in files)
            self.config.services.python_path.extend(dict.fromkeys(folders))
        if self.config.services.env.replicas > 1:
            raise ConfigError("services.env.replicas: a LocalCluster has one env server")
        add_import_paths(self.config.services.python_path)

    def __enter__(self) -> Self:
        run = Run.create(self.config, command=this_command())
        self.run_dir = run.path
        own_state(self.config, run.path)
        launcher = LocalLauncher(self.config, run, report=_LOG.warning)
        with contextlib.ExitStack() as stack:
            stack.push(lambda kind, *_: run.finish("finished" if kind is None else "failed"))
            stack.enter_context(launcher)
            self.config = launcher.config
            self.env = stack.enter_context(ClusterEnv(launcher))
            self.policy = stack.enter_context(ClusterPolicy(launcher))
            self.buffer = stack.enter_context(ClusterBuffer(launcher))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)


class _Part:
    """The blocking side of clients that live on the process's event loop."""

    def __init__(self, launcher: LocalLauncher) -> None:
        self._launcher = launcher
        self._loop = shared_loop()

    def __enter__(self) -> Self:
        self._loop.run(self._connect())
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.run(self._close())

    async def _connect(self) -> None:
        raise NotImplementedError

    async def _close(self) -> None:
        raise NotImplementedError


class ClusterEnv(_Part):
    """The env server; every method blocks until it has answered."""

    _cursor = 0

    async def _connect(self) -> None:
        self._client = EnvClient(**dial(self._launcher.config.services.env))

    async def _close(self) -> None:
        await self._client.close()

    def metas(self) -> list[EnvMeta]:
        """Returns the spaces and sizes of the envs, one entry per group of rows."""
        return self.describe().envs

    def describe(self) -> EnvStatus:
        """Returns what the server is doing; its episodes are those since the last `episodes`."""
        return self._loop.run(self._client.describe(self._cursor))

    def episodes(self) -> list[EpisodeRecord]:
        """Returns the episodes that ended since the last call."""
        status = self.describe()
        self._cursor = status.episode_cursor
        return status.episodes

    def pause(self) -> None:
        """Lets the envs stop after the step in flight."""
        self._loop.run(self._client.control("pause"))

    def resume(self) -> None:
        """Lets the envs go on."""
        self._loop.run(self._client.control("start"))


class ClusterPolicy(_Part):
    """The policy server; every method blocks until it has answered."""

    async def _connect(self) -> None:
        self._service = self._launcher.config.services.policy
        self._opened = contextlib.AsyncExitStack()
        self._fleet = await self._opened.enter_async_context(policy_fleet(self._launcher.config))
        self._fleets = {DEFAULT_POLICY: self._fleet}
        self._actors: dict[tuple[str, int], PolicyClient] = {}

    async def _close(self) -> None:
        await self._opened.aclose()

    @property
    def version(self) -> int:
        """Version of the weights in use; 0 before the first publish."""
        return self.describe().policy_version

    def describe(self) -> PolicyDescription:
        """Returns what the server is doing; of replicas, the one with the newest weights."""
        replicas = self._loop.run(self._fleet.describe(timeout_s=_DESCRIBE_S))
        return max(replicas.values(), key=lambda replica: replica.policy_version)

    def publish(self, version: int, weights: bytes, *, policy: str = DEFAULT_POLICY) -> None:
        """Lets the policy act with new weights; returns when it does.

        All replicas get them. Should one come back without them, they are published again.

        Args:
            version: Above every version before.
            weights: A safetensors file, as `rlightning.policy.weights.dump_weights` makes it.
            policy: Whose they are: `default`, or one of `policy.named`.

        Raises:
            RemoteError: The server refused them, such as for a name or a shape.
        """
        # No name is the default one's, as on the wire: another fleet would wait for our own lease.
        self._loop.run(self._publish(version, weights, policy or DEFAULT_POLICY))

    async def _publish(self, version: int, weights: bytes, policy: str) -> None:
        if policy not in self._fleets:
            fleet = policy_fleet(self._launcher.config, policy=policy)
            self._fleets[policy] = await self._opened.enter_async_context(fleet)
        await self._fleets[policy].publish(version, weights)

    def pull(self) -> tuple[int, bytes]:
        """Returns version and safetensors bytes of the weights in use.

        Raises:
            NotFoundError: None were ever published.
        """
        return self._loop.run(next(iter(self._fleet.clients.values())).pull_weights())

    def act(self, env_ret: EnvRet, spec: EnvMeta, *, mode: Mode = Mode.EXPLOIT) -> PolicyResponse:
        """Returns the policy's answer to observations of an env of your own.

        Args:
            env_ret: Rows of one env; what they were is never stored.
            spec: Spaces and rows of that env.
            mode: Explore or exploit.

        Raises:
            RemoteError: The observation is not in the spec's space, or the policy raised.
        """
        return self._loop.run(self._act(env_ret, spec, mode))

    async def _act(self, env_ret: EnvRet, spec: EnvMeta, mode: Mode) -> PolicyResponse:
        key = (spec.env_id or "", spec.num_envs or 1)
        if key not in self._actors:
            addresses = self._service.dial_addresses
            client = PolicyClient(addresses, spec=spec, **dial_options(self._service))
            self._actors[key] = await self._opened.enter_async_context(client)
        return await self._actors[key].act(env_ret, mode=mode, purpose=Purpose.EVAL)


class ClusterBuffer(_Part):
    """The buffer server; every method blocks until it has answered."""

    async def _connect(self) -> None:
        self._clients = buffer_clients(self._launcher.config)
        self._samples = sample_client(self._launcher.config)
        await self._samples.start()

    async def _close(self) -> None:
        await self._samples.close()
        await asyncio.gather(*(client.close() for client in self._clients))

    def next_batch(self, timeout_s: float = 60.0) -> Batch:
        """Returns the next rollout; the one before it leaves the buffer by that.

        Returns:
            Columns [T, N, ...]; read-only arrays.

        Raises:
            DeadlineExceededError: There was none in time.
            ClusterError: A service is gone for good.
        """
        left_s = timeout_s
        while True:
            self._launcher.check()
            slice_s = min(_POLL_S, left_s)
            left_s -= slice_s
            try:
                return self._loop.run(self._samples.next_batch(slice_s))
            except DeadlineExceededError:
                if left_s <= 0:
                    raise

    def describe(self, shard: int = 0) -> BufferStatus:
        """Returns what the server holds.

        Args:
            shard: Which server, where there are several.
        """
        return self._loop.run(self._clients[shard].describe())

    def clear(self) -> int:
        """Drops what is stored; returns how many rows that were."""
        return sum(self._loop.run(client.clear()) for client in self._clients)
