"""Buffer servers as the storages of a `DataBuffer`; every call blocks until it was answered."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from rlightning.buffer.columns import Counters
from rlightning.buffer.declared import declared, meta_of
from rlightning.buffer.parts import split
from rlightning.buffer.remote_buffer import BufferClient, BufferStatus, InsertClient, TableStatus
from rlightning.buffer.sampler import AllDataSampler, Sampler, deal
from rlightning.buffer.sharded_client import ShardedSampleClient
from rlightning.buffer.shards import unpack
from rlightning.buffer.shares import indivisible
from rlightning.buffer.utils.indexing import as_index
from rlightning.buffer.utils.layout import iter_arrays, map_arrays
from rlightning.buffer.utils.utils import (
    default_env_ret_preprocess_fn,
    default_obs_preprocessor,
    default_policy_resp_preprocess_fn,
    default_postprocess_fn,
    default_preprocess_fn,
    default_reward_preprocessor,
)
from rlightning.buffer.where import Where
from rlightning.errors import (
    BufferEmptyError,
    DeadlineExceededError,
    InvalidRequestError,
    InvalidRowError,
    PreconditionError,
    ReplayError,
    UnavailableError,
)
from rlightning.latency import LatencyStats
from rlightning.rpc.loop import shared_loop
from rlightning.rpc.status import UNKNOWN_ENV
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import BufferConfig, ClientAuthConfig, RpcConfig

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_PAUSE_S = 0.1

_DEFAULTS = (
    None,
    default_env_ret_preprocess_fn,
    default_obs_preprocessor,
    default_policy_resp_preprocess_fn,
    default_postprocess_fn,
    default_preprocess_fn,
    default_reward_preprocessor,
)


def refuse_functions(functions: Mapping[str, Any]) -> None:
    """Refuses functions of the caller, which a buffer server never gets.

    Raises:
        ValueError: There is one; the message names it.
    """
    own = [name for name, function in functions.items() if function not in _DEFAULTS]
    if own:
        raise ValueError(f"{', '.join(own)}: functions do not travel to buffer servers")


@dataclass
class _Writer:
    """The session of one env.

    Attributes:
        client: Inserts.
        pending: The EnvRet that waits for its answer.
        over: The last EnvRet ended the episode, and no answer to it counts.
    """

    client: InsertClient
    pending: EnvRet | None = None
    over: bool = False


class RemoteStorage:
    """What a `Storage` of this process does, done by a buffer server.

    Its configuration says how rows are kept; what is added here is there once a read returns.

    Args:
        address: Of the server.
        config: Section `buffer`.
        metas: The envs whose data may come, by id; None for any.
        rpc: Limits and times.
        auth: Token and certificates.
    """

    def __init__(
        self,
        address: str,
        config: BufferConfig,
        metas: Mapping[str, EnvMeta] | None,
        *,
        rpc: RpcConfig | None = None,
        auth: ClientAuthConfig | None = None,
    ) -> None:
        self._address = address
        self._unit = config.storage.unit
        self._skips = config.storage.missing_shards == "skip"
        self._timeout_s = config.storage.timeout_s
        self._metas = metas
        self._dial: dict[str, Any] = {"rpc": rpc, "auth": auth}
        self._loop = shared_loop()
        self._client = self._loop.run(self._make_client())
        self._writers: dict[str, _Writer] = {}
        self._latency = LatencyStats()

    async def _make_client(self) -> BufferClient:  # gRPC's objects belong to their loop
        return BufferClient(self._address, **self._dial)

    def close(self) -> None:
        """Ends the connections."""
        self._loop.run(self._close())

    async def _close(self) -> None:
        await asyncio.gather(*(writer.client.close() for writer in self._writers.values()))
        await self._client.close()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        return self._loop.run(work, self._timeout_s)

    # What is stored.

    def __len__(self) -> int:
        return self.get_size()

    @property
    def size(self) -> int:
        """How many transitions or episodes it holds; those of open episodes do not count."""
        return self.get_size()

    def get_size(self) -> int:
        """Returns how many transitions or episodes it holds; 0 while it is away and left out."""
        table = self._table()
        return 0 if table is None else table.size

    def num_transitions(self) -> int:
        """Returns how many transitions it holds, whatever the unit."""
        return int(self._stats().get("transitions", 0))

    @property
    def counters(self) -> Counters:
        """What happened to the rows of all envs so far."""
        counters, stats = Counters(), self._stats()
        for name in Counters.__slots__:
            setattr(counters, name, int(stats.get(name, 0)))
        return counters

    @property
    def env_ids(self) -> tuple[str, ...]:
        """Ids of the envs whose data came through here."""
        return tuple(self._writers)

    def read(self, index: Any) -> Any:
        """Returns what is stored, as `Storage.read` does; the arrays are read-only."""
        if isinstance(index, slice):
            index = range(*index.indices(self.get_size()))
        where = as_index(index)
        try:
            found = self._run(self._get(np.atleast_1d(where).tolist()))
        except InvalidRequestError as error:
            raise IndexError(str(error)) from None
        if not isinstance(where, int):
            return found
        return found[0] if isinstance(found, list) else map_arrays(lambda leaf: leaf[0], found)

    def __getitem__(self, index: Any) -> Any:
        return self.read(index)

    def get_data(self) -> Any:
        """Returns all transitions; {} if none is stored."""
        return self._run(self._get(None)) if self.get_size() else {}

    async def _get(self, indices: Sequence[int] | None) -> Any:
        await self.flush()
        return await self._client.get(indices, timeout_s=self._timeout_s)

    def clear(self) -> None:
        """Drops what is stored; open episodes stay."""
        self._run(self._clear())

    async def _clear(self) -> None:
        await self.flush()
        await self._client.clear(timeout_s=self._timeout_s)

    def _table(self) -> TableStatus | None:
        status = self._describe()
        return None if status is None else status.tables["default"]

    def _stats(self) -> Mapping[str, Any]:
        status = self._describe()
        stats: Mapping[str, Any] = {} if status is None else status.stats["tables"]["default"]
        return stats

    def _describe(self) -> BufferStatus | None:
        deadline = time.monotonic() + self._timeout_s
        try:
            while True:
                try:
                    return self._run(self._described())
                except UnavailableError:
                    if self._skips or time.monotonic() > deadline:
                        raise
                    time.sleep(_PAUSE_S)  # it may be about to start
        except (UnavailableError, DeadlineExceededError) as error:
            if not self._skips:
                raise
            logger.warning(
                "what the buffer server at %s holds is left out: %s", self._address, error
            )
            return None

    async def _described(self) -> BufferStatus:
        status = await self._client.describe(timeout_s=self._timeout_s)  # first: it fails at once
        if any(writer.client.unacked for writer in self._writers.values()):
            await self.flush()
            status = await self._client.describe(timeout_s=self._timeout_s)
        return status

    async def flush(self) -> None:
        """Returns when the server has stored what was added."""
        for writer in self._writers.values():
            await writer.client.flush(self._timeout_s)

    async def update_priorities(self, indices: Any, priorities: Any, generations: Any) -> int:
        """Sets priorities as `BufferClient.update_priorities` does."""
        return await self._client.update_priorities(
            indices, priorities, generations, timeout_s=self._timeout_s
        )

    def print_timing_summary(self, reset: bool = False) -> None:
        """Logs latencies of the server and of what was sent to it from here, at level DEBUG.

        Args:
            reset: Forget those of what was sent; the server's, of all its clients, stay.
        """
        status = self._describe()
        stages = {} if status is None else status.stats["latency"]
        for name, summary in {**stages, **self._run(self._sent(reset))}.items():
            logger.debug("buffer server %s %s: %s", self._address, name, summary)

    async def _sent(self, reset: bool) -> Mapping[str, Any]:
        """Returns how long inserts took, read on the loop that records them."""
        summary = self._latency.summary()
        if reset:
            self._latency.clear()
        return summary

    # Adding.

    def add_transition(self, env_ret: Any, policy_resp: Any) -> None:
        """Adds what an env returned, with the answer to it; see `DataBuffer.add_transition`."""
        _check_type(env_ret, EnvRet)
        _check_type(policy_resp, PolicyResponse)
        if env_ret.env_id != policy_resp.env_id:
            raise InvalidRowError(
                f"env_id: the EnvRet is of {env_ret.env_id!r}, the response of "
                f"{policy_resp.env_id!r}"
            )
        writer = self._writer(env_ret.env_id)
        self._send_pending(writer)
        writer.over = False
        self._run(writer.client.insert(env_ret, policy_resp))

    def add_data_async(self, data: Any) -> None:
        """Adds an EnvRet, or the answer to the last one; see `DataBuffer.add_data_async`."""
        if not isinstance(data, (EnvRet, PolicyResponse)):
            raise TypeError(f"expected an EnvRet or a PolicyResponse, got {type(data).__name__}")
        writer = self._writer(data.env_id)
        if isinstance(data, EnvRet):
            self._send_pending(writer)
            # The caller may change it before its answer comes.
            writer.pending = copy.deepcopy(data)
            writer.over = "final_rows" not in data.info and _is_over(data)
            if writer.over:
                self._send_pending(writer)
            return
        pending, writer.pending = writer.pending, None
        if pending is not None:
            self._run(writer.client.insert(pending, data))
        elif writer.over:
            writer.over = False
        else:
            raise InvalidRowError(
                f"env {data.env_id!r}: a response, but no observation that waits for one"
            )

    def add_episode(self, episode: Any, num_envs: int = 1) -> None:
        """Refuses episodes made elsewhere: a buffer server takes what envs return."""
        raise ReplayError("add_episode: a buffer server takes what envs return, and no episodes")

    def truncate_one_episode(self, item: Any) -> None:
        """Ends the open episode of an env; see `DataBuffer.truncate_one_episode`."""
        self.truncate_episodes([item])

    def truncate_episodes(self, items: Sequence[Any]) -> None:
        """Ends the open episodes of several envs."""
        env_ids = [item if isinstance(item, str) else item.env_id for item in items]
        for env_id in env_ids:
            if env_id in self._writers:
                self._send_pending(self._writers[env_id])
        try:
            self._run(self._truncate(env_ids))
        except PreconditionError as error:
            raise _documented(error) from None

    async def _truncate(self, env_ids: Sequence[str]) -> int:
        await self.flush()
        return await self._client.truncate(env_ids, timeout_s=self._timeout_s)

    def discard_episode(self, item: Any) -> int:
        """Removes the episode of an env; see `DataBuffer.discard_episode`."""
        env_id = item if isinstance(item, str) else item.env_id
        if env_id in self._writers:
            self._send_pending(self._writers[env_id])
        try:
            return self._run(self._discard(env_id))
        except PreconditionError as error:
            raise _documented(error) from None

    async def _discard(self, env_id: str) -> int:
        await self.flush()
        return await self._client.discard_episode(env_id, timeout_s=self._timeout_s)

    def _send_pending(self, writer: _Writer) -> None:
        pending, writer.pending = writer.pending, None
        if pending is not None:
            self._run(writer.client.insert(pending, None))

    def _writer(self, env_id: str) -> _Writer:
        writer = self._writers.get(env_id)
        if writer is None:
            client = self._run(self._open(meta_of(self._metas, env_id)))
            writer = self._writers[env_id] = _Writer(client)
        return writer

    async def _open(self, meta: EnvMeta) -> InsertClient:
        client = InsertClient(self._address, spec=meta, stats=self._latency, **self._dial)
        try:
            await client.start(self._timeout_s)
        except BaseException:
            await client.close()
            raise
        return client


class RemoteShards:
    """The buffer servers of a `DataBuffer`, and what concerns all of them.

    Args:
        config: Section `buffer`.
        env_meta_list: As of `DataBuffer.init`.
        rpc: Limits and times.
        auth: Token and certificates.

    Attributes:
        storages: One for each server.
    """

    def __init__(
        self,
        config: BufferConfig,
        env_meta_list: Sequence[EnvMeta | Mapping[str, Any]] | None,
        *,
        rpc: RpcConfig | None = None,
        auth: ClientAuthConfig | None = None,
    ) -> None:
        metas = declared(env_meta_list)
        self.storages = [
            RemoteStorage(address, config, metas, rpc=rpc, auth=auth)
            for address in config.storage.addresses
        ]
        self._config = config
        self._dial: dict[str, Any] = {"rpc": rpc, "auth": auth}
        self._loop = shared_loop()
        self._samples: ShardedSampleClient | None = None
        self._where: Where | None = None
        self._kept: tuple[Any, bool] | None = None

    def close(self) -> None:
        """Ends the connections."""
        if self._samples is not None:
            self._loop.run(self._samples.close())
        for storage in self.storages:
            storage.close()

    def sample(
        self,
        batch_size: int | None,
        sampler: Sampler,
        workers: int,
        *,
        drop_last: bool,
        where: Where | None,
    ) -> list[Any]:
        """Returns the part of a batch for each train worker; see `DataBuffer.sample`.

        Raises:
            DeadlineExceededError: There was no batch within `storage.timeout_s`.
            UnavailableError: A server is away, or a producer silent; the reason says which.
            ReplayError: The rows of a rollout cannot be shared equally. The next call gets it.
        """
        if self._config.type == "ReplayBuffer" and batch_size is None:
            if not isinstance(sampler, AllDataSampler):
                raise ValueError("a batch_size is needed: only the sampler 'all' can do without")
            batch_size = sum(map(len, self.storages))
            if not batch_size:
                raise BufferEmptyError("nothing is stored to sample from")
        timeout_s = self._config.storage.timeout_s
        columns, lengths = self._loop.run(self._next(batch_size or 0, where, timeout_s))
        if workers == 1:
            return [columns]
        axis = int(self._config.type == "RolloutBuffer")  # [T, N, ...]: each has rows of its own
        count = len(columns) if lengths else next(iter_arrays(columns)).shape[axis]
        if axis and count % workers:
            self._kept = columns, lengths
            raise ReplayError(indivisible(count, workers))
        parts = deal(np.arange(count), workers, drop_last=drop_last)
        if lengths:
            return [[columns[i] for i in part] for part in parts]
        return [_rows(columns, part, axis) for part in parts]

    async def _next(
        self, batch_size: int, where: Where | None, timeout_s: float
    ) -> tuple[Any, bool]:
        for storage in self.storages:
            await storage.flush()
        if self._samples is not None and where != self._where:
            await self._samples.close()
            self._samples = self._kept = None
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return kept
        if self._samples is None:
            samples = ShardedSampleClient(
                self._config, batch_size=batch_size, where=where, prefetch=0, **self._dial
            )
            try:
                await samples.start(timeout_s)
            except BaseException:
                await samples.close()
                raise
            self._samples, self._where = samples, where
        batch = await self._samples.next_batch(timeout_s, batch_size=batch_size)
        lengths = batch.metadata.get("lengths")
        return (batch.columns, False) if lengths is None else (split(batch.columns, lengths), True)

    def update_priorities(self, indices: Any, priorities: Any, generations: Any) -> int:
        """Sets priorities of transitions; see `DataBuffer.update_priorities`."""
        where = np.atleast_1d(as_index(indices)).astype(np.int64)
        values = np.atleast_1d(np.asarray(priorities, np.float64))
        numbers = None if generations is None else np.atleast_1d(np.asarray(generations, np.int64))
        for name, given in (("priorities", values), ("generations", numbers)):
            if given is not None and given.shape != where.shape:
                raise InvalidRowError(f"{name}: expected {len(where)}, got {list(given.shape)}")
        owners, positions = unpack(where)
        if len(owners) and not 0 <= owners.min() <= owners.max() < len(self.storages):
            raise IndexError(f"an index of shard {owners.max()} of {len(self.storages)}")
        return self._loop.run(self._update(owners, positions, values, numbers))

    async def _update(self, owners: Any, positions: Any, values: Any, numbers: Any) -> int:
        mine = [np.flatnonzero(owners == i) for i in range(len(self.storages))]
        updated = await asyncio.gather(
            *(
                storage.update_priorities(
                    positions[rows], values[rows], () if numbers is None else numbers[rows]
                )
                for storage, rows in zip(self.storages, mine, strict=True)
                if len(rows)
            )
        )
        return sum(updated)


def _documented(error: PreconditionError) -> Exception:
    """Returns what the documented API raises where a buffer server says something else."""
    return KeyError(str(error)) if error.reason == UNKNOWN_ENV else error


def _is_over(env_ret: EnvRet) -> bool:
    """Tells whether the episode of every row has ended, for each of its agents."""
    flags = env_ret.last_terminated, env_ret.last_truncated
    agents = {agent for one in flags if isinstance(one, Mapping) for agent in one} or {""}
    pairs = (
        [one.get(agent, False) if isinstance(one, Mapping) else one for one in flags]
        for agent in agents
    )
    return all(np.logical_or(*pair).all() for pair in pairs)


def _rows(columns: Any, rows: Any, axis: int) -> Any:
    return map_arrays(lambda leaf: np.take(leaf, rows, axis), columns)


def _check_type(value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
