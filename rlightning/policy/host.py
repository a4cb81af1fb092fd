"""One policy in this process: its network, its batches, and the version of its weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlightning.errors import (
    ConfigError,
    InvalidRequestError,
    NotFoundError,
    PolicyError,
    PreconditionError,
    RLightningError,
    UnavailableError,
)
from rlightning.policy.base_policy import PolicyRole
from rlightning.policy.batcher import Batcher
from rlightning.policy.batcher_stats import BatcherStats
from rlightning.policy.builder import build_policy
from rlightning.policy.inference import Part
from rlightning.policy.layout import InputLayout
from rlightning.policy.pending import Pending
from rlightning.policy.runner import WARM_UP_ID, PolicyRunner
from rlightning.policy.state import GroupState, StateBudget, StateLayout, StateUse
from rlightning.policy.weight_store import Weights, WeightStore, read_weights
from rlightning.policy.weights import (
    check_numbers,
    check_weights,
    parse_weights,
    policy_weights,
)
from rlightning.rpc.spec import check_spec
from rlightning.types import EnvMeta, EnvRet, Mode, MultiAgentEnvRet
from rlightning.utils.config import PolicyConfig
from rlightning.utils.failpoints import failpoint
from rlightning.utils.waiting import wait_within

_LOG = logging.getLogger(__name__)

# How many rows a client has is what it says: they are not worth more than this before one came.
_WARM_UP_BYTES = 16 * 2**20
# The next learner counts on from the version in use, so the one after it must fit its field too.
_MAX_VERSION = 2**62


class PolicyHost:
    """Batches the requests of many groups for one policy and swaps its weights between batches.

    The network is made for the spaces of the first group that opens; all others must have the same.
    Weights may be published before that: they are checked once there is a network. Methods run on
    the event loop on which `start` was called.

    Args:
        config: Section `policy`.
        lockstep: Whether to begin the policy's random numbers anew with each publish, from seeds
            that follow from the weights and `policy.seed`.

    Attributes:
        batcher: Runs the inferences; its `stats` are those of this host.
        meta: Spaces of the groups; None before the first opened.

    Raises:
        ConfigError: The policy class cannot be loaded, or the state directory cannot be made.
    """

    def __init__(self, config: PolicyConfig, *, lockstep: bool = False) -> None:
        self._config = config
        self._lockstep = lockstep
        self._policy = build_policy(config, PolicyRole.EVAL)
        self._store = WeightStore(config.state_dir) if config.state_dir is not None else None
        # Any other device works while the host waits for it: the event loop must not be who waits.
        device = self._policy.device.type
        self.batcher = Batcher(
            max_batch_rows=config.max_batch_rows,
            max_wait_us=config.max_wait_us,
            queue_rows=config.queue_rows,
            queue_bytes=config.queue_bytes,
            inline_below_us=config.inline_below_us if device == "cpu" else 0,
            gathers_ahead=device == "cuda",
        )
        self.meta: EnvMeta | None = None
        self._runner: PolicyRunner | None = None
        self._weights: Weights | None = None
        self._first: Weights | None = None  # read from `policy.restore`
        self._changed = asyncio.Event()
        # Making the network and installing weights exclude each other.
        self._lock = asyncio.Lock()
        self._budget = StateBudget(config.max_session_state_bytes, config.max_state_bytes)
        self._installing: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int:
        """Version of the weights in use: 0 before the first publish."""
        return self._weights.version if self._weights is not None else 0

    @property
    def weights(self) -> Weights:
        """The weights in use, as they were published.

        Raises:
            NotFoundError: None were ever published.
        """
        if self._weights is None:
            raise NotFoundError("no weights were published yet")
        return self._weights

    @property
    def max_weights_bytes(self) -> int:
        """The most that weights may take."""
        return self._config.max_weights_bytes

    @property
    def state_bytes(self) -> int:
        """Size of the recurrent state that is kept, or has a place reserved."""
        return self._budget.held_bytes

    @property
    def carried(self) -> bool:
        """Whether clients carry the recurrent state, if there is any."""
        return self._config.state == "carried"

    @property
    def states(self) -> StateLayout | None:
        """The policy's recurrent state; None if it keeps none, or before the first group opened."""
        return None if self._runner is None else self._runner.states

    async def start(self) -> None:
        """Starts the inference thread and loads the newest weights of the state directory.

        Raises:
            ConfigError: The weights to begin with cannot be read.
        """
        self.batcher.start()
        threads = self._config.torch_threads
        torch.set_num_threads(threads)
        await self.batcher.run(lambda: torch.set_num_threads(threads))
        if self._store is not None:
            self._weights = await asyncio.to_thread(self._store.load)
            if self._weights is not None:
                _LOG.info("restored policy version %d", self._weights.version)
        if self._weights is None and self._config.restore is not None:
            self._weights = await asyncio.to_thread(self._read_first, self._config.restore)
            self._first = self._weights

    def _read_first(self, path: str) -> Weights:
        weights = read_weights(path)
        try:
            check_numbers(parse_weights(weights.data))
        except InvalidRequestError as error:
            raise ConfigError(f"policy.restore '{path}': {error}") from error
        return weights

    async def ready(self) -> None:
        """Waits until the policy may act: with `initial_weights: none`, for the first publish."""
        while self._config.initial_weights == "none" and self._weights is None:
            await self._changed.wait()

    async def close(self) -> None:
        """Fails what is queued and ends the inference thread."""
        await self.batcher.close()

    async def open_group(
        self,
        meta: EnvMeta,
        *,
        min_version: int = 0,
        timeout_s: float = 10.0,
        rehearse: Callable[[EnvRet], Awaitable[None]] | None = None,
    ) -> None:
        """Lets one more group ask; the first one makes the network and warms it up.

        Args:
            meta: Spaces of the group.
            min_version: The least version that may answer it.
            timeout_s: How long to wait for that version, in seconds.
            rehearse: Called once the network is warm, with rows of zeros, to send them the way of a
                request; neither counted nor measured.

        Raises:
            PreconditionError: The spaces are not those of the other groups, or weights that were
                published do not fit the network.
            UnavailableError: The version did not come in time; the message tells which one is
                there.
            ConfigError: The policy cannot act in such spaces.
            PolicyError: The network cannot be made.
        """
        if self._config.initial_weights == "none":
            min_version = max(min_version, 1)
        try:
            await self.wait_for_version(min_version, timeout_s)
        except PreconditionError as error:
            # A learner may bring it later: whether to ask again is for who waits to decide.
            raise UnavailableError(str(error), reason=error.reason) from error
        async with self._lock:
            if self._runner is None:
                self._runner = await self._make_runner(meta)
                # The rows of one group are its own affair.
                self.meta = replace(meta, env_id=None, num_envs=None)
                if rehearse is not None and self._runner.layout.sized:
                    await self._rehearse(rehearse, self._warm_up_rows(meta, self._runner.layout))
        if self.meta is not None:
            check_spec(self.meta, meta)
        self.batcher.open_group()

    def close_group(self) -> None:
        """Tells that a group will not ask any more, or not for some time."""
        self.batcher.close_group()

    def reopen_group(self) -> None:
        """Tells that a group that was closed asks again."""
        self.batcher.open_group()

    def keep_state(self, rows: int | None) -> GroupState | None:
        """Returns fresh recurrent state for an open group of so many rows (None: one).

        `drop_state` lets go of it. None if the policy keeps none.

        Raises:
            ResourceExhaustedError: `policy.max_session_state_bytes` or `policy.max_state_bytes` do
                not allow so many rows.
        """
        states = self.states
        return None if states is None else self._budget.open(max(1, rows or 1), states.row_bytes)

    def drop_state(self, state: GroupState) -> None:
        """Lets go of the state of a group, once."""
        self._budget.close(state)

    def enqueue(
        self,
        env_ret: EnvRet,
        mode: Mode,
        *,
        state: GroupState | None = None,
        reset_state: bool = False,
        received_ns: int = 0,
        timeout_us: int = 0,
        nbytes: int = 0,
    ) -> Pending:
        """Queues the rows of one group of those that are open.

        Args:
            env_ret: Arrays with a leading dimension of rows, or one row without.
            mode: Explore or exploit.
            state: The group's recurrent state; no other request that is queued may use it. Without
                one, a policy that keeps state answers as at the beginning of an episode.
            reset_state: Begin with a fresh one, though no episode ended.
            received_ns: Monotonic time of its arrival; 0: now.
            timeout_us: How long somebody waits for the answer; 0: for ever.
            nbytes: Size of the message that it was read from.

        Raises:
            InvalidRequestError: The observation is not in the declared space, or state is kept for
                other rows; the message names the key.
            BatcherOverloadedError: The queue has no room.
        """
        runner = self._runner
        if runner is None:
            raise PolicyError("no group is open")
        values, rows = runner.layout.flatten(env_ret)
        part = Part(env_ret.env_id, values, rows)
        if runner.states is not None:
            state = runner.states.begin_carried() if state is None else state
            part.state = StateUse.of(state, env_ret, rows or 1, fresh=reset_state)
        return self.batcher.enqueue(
            runner, part, mode, received_ns=received_ns, timeout_us=timeout_us, nbytes=nbytes
        )

    async def publish(self, weights: Weights, *, received_ns: int | None = None) -> None:
        """Installs weights: checks them, keeps them in the state directory, then swaps them in.

        Every answer is computed with the weights before or after, never with some of both. A
        version that is there already is accepted again if it is the same.

        Args:
            weights: The weights.
            received_ns: When they began to come, in monotonic nanoseconds; now if None.

        Raises:
            PreconditionError: The version is not above the one in use.
            InvalidRequestError: They are no safetensors file, do not fit the network, or hold NaN;
                the old ones stay in use.
            PolicyError: They cannot be written to the state directory.
        """
        # A publisher that goes away must not leave the swap half done.
        received_ns = time.monotonic_ns() if received_ns is None else received_ns
        task = asyncio.ensure_future(self._publish(weights, received_ns))
        self._installing.add(task)
        task.add_done_callback(self._installing.discard)
        await asyncio.shield(task)

    async def wait_for_version(self, version: int, timeout_s: float) -> None:
        """Waits until the weights in use have at least a version.

        Raises:
            PreconditionError: They did not get there in time; the message tells their version.
        """
        deadline = time.monotonic() + timeout_s
        while self.version < version:
            left = deadline - time.monotonic()
            try:
                await wait_within(self._changed.wait(), max(0.0, left))
            except asyncio.TimeoutError:
                raise PreconditionError(
                    f"version {version} of the weights was asked for, {self.version} is in use "
                    f"after {timeout_s:g} s",
                    reason="VERSION_TOO_OLD",
                ) from None

    def describe(self) -> dict[str, Any]:
        """Returns counters, and latency figures in seconds, by name."""
        stats = self.batcher.stats
        counters = ("requests", "rows", "batches", "inline_batches", "errors", "expired")
        return {
            **{name: getattr(stats, name) for name in (*counters, "overloaded")},
            "queue_rows": self.batcher.queued_rows,
            "groups": self.batcher.groups,
            "state_groups": self._budget.groups,
            "state_bytes": self._budget.held_bytes,
            "policy_version": self.version,
            "weights_sha256": "" if self._weights is None else self._weights.sha256.hex(),
            "latency": stats.latency.summary(),
            "latency_window_s": stats.latency.WINDOW_S,
            "first_uses": [use._asdict() for use in stats.first_uses.last()],
        }

    async def _publish(self, weights: Weights, received_ns: int) -> None:
        async with self._lock:
            if not 1 <= weights.version <= _MAX_VERSION:
                raise InvalidRequestError(
                    f"versions count from 1 to {_MAX_VERSION}, got {weights.version}"
                )
            if weights.version == self.version and weights.sha256 == self.weights.sha256:
                return
            if weights.version <= self.version:
                raise PreconditionError(
                    f"version {self.version} is in use, version {weights.version} cannot replace "
                    "it: publish under a higher one",
                    reason="VERSION_TOO_OLD",
                )
            runner = self._runner
            tensors = await asyncio.to_thread(self._unpack, weights, runner)
            if self._store is not None:
                try:
                    await asyncio.to_thread(self._store.save, weights)
                except OSError as error:
                    raise PolicyError(
                        f"version {weights.version} is not used, since it cannot be kept in "
                        f"policy.state_dir: {error.strerror}"
                    ) from error
                failpoint("weights.kept")
            self.batcher.stats.first_uses.received(weights.version, received_ns)
            if runner is not None:
                await self.batcher.run(lambda: self._load(runner, tensors, weights))
            self._weights = weights
            self._changed.set()
            self._changed = asyncio.Event()

    def _load(self, runner: PolicyRunner, tensors: dict[str, Tensor], weights: Weights) -> None:
        runner.load(tensors, weights.version)
        self._reseed(weights)

    def _reseed(self, weights: Weights | None) -> None:
        if self._lockstep and weights is not None:
            digest = int.from_bytes(weights.sha256[:8], "little")
            drawn = np.random.SeedSequence([self._config.seed or 0, digest]).generate_state(1)
            self._policy.seed_actions(int(drawn[0]))

    def _unpack(self, weights: Weights, runner: PolicyRunner | None) -> dict[str, Tensor]:
        tensors = parse_weights(weights.data)
        if runner is not None:
            check_weights(policy_weights(self._policy), tensors)
        check_numbers(tensors)
        device = self._policy.device
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    async def _make_runner(self, meta: EnvMeta) -> PolicyRunner:
        if meta.observation_space is None or meta.action_space is None:
            raise PreconditionError("the spec names no observation space or no action space")
        layout = InputLayout(meta.observation_space)
        weights = self._weights

        def make() -> PolicyRunner:
            try:
                self._policy.init_eval(env_meta=meta)
                runner = PolicyRunner(self._policy, layout)
            except RLightningError:
                raise
            except Exception as error:
                name = type(self._policy).__name__
                _LOG.exception("%s.init_eval failed", name)
                raise PolicyError(
                    f"{name}.init_eval failed: {type(error).__name__}: {error}"
                ) from error
            if weights is not None:
                self._load(runner, parse_weights(weights.data), weights)
            return runner

        try:
            runner = await self.batcher.run(make)
        except InvalidRequestError as error:
            assert weights is not None
            read = f" (policy.restore '{self._config.restore}')" if weights is self._first else ""
            raise PreconditionError(f"version {weights.version}{read}: {error}") from error
        if layout.sized:
            rows = self._warm_up_rows(meta, layout)
            # No batch is larger than what may wait for one.
            most = self._config.queue_bytes // layout.row_bytes
            for size in {rows, *(size for size in runner.sizes if size <= most)}:
                await self.batcher.run(partial(runner.warm_up, size))
            await self.batcher.run(lambda: self._reseed(weights))
        return runner

    def _warm_up_rows(self, meta: EnvMeta, layout: InputLayout) -> int:
        rows = min(meta.num_envs or 1, self._config.max_batch_rows)
        return min(rows, max(1, _WARM_UP_BYTES // layout.row_bytes))

    async def _rehearse(self, rehearse: Callable[[EnvRet], Awaitable[None]], rows: int) -> None:
        assert self._runner is not None
        layout = self._runner.layout
        observation, *flags = layout.build(layout.zeros(rows))
        kind = MultiAgentEnvRet if isinstance(flags[0], dict) else EnvRet
        stats, self.batcher.stats = self.batcher.stats, BatcherStats()
        try:
            with suppress(RLightningError):  # as the warm-up has told
                await rehearse(kind(WARM_UP_ID, observation, *flags))
        finally:
            # Runs behind what was rehearsed, also when whoever opened the group has gone meanwhile.
            await asyncio.shield(self._end_rehearsal(stats))

    async def _end_rehearsal(self, stats: BatcherStats) -> None:
        await self.batcher.run(lambda: self._reseed(self._weights))
        self.batcher.stats = stats
