"""The data buffer: what was seen and done goes in, transitions come out."""

from __future__ import annotations

import copy
import time
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlightning.buffer.adding import Adding
from rlightning.buffer.arguments import (
    check_config,
    log_durations,
    make_table,
    storage_options,
)
from rlightning.buffer.columns import Counters
from rlightning.buffer.pipeline import Pipeline
from rlightning.buffer.remote_storage import RemoteShards, refuse_functions
from rlightning.buffer.sampler import Sampler, build_sampler
from rlightning.buffer.sampling import (
    Shard,
    draw_batches,
    local_shards,
    seed_shards,
    set_shard_priorities,
)
from rlightning.buffer.utils.indexing import as_index
from rlightning.buffer.utils.storage import MEMORY_SHARE, Storage
from rlightning.buffer.utils.table import EpisodeTable
from rlightning.buffer.utils.tensordicts import tensordict_of
from rlightning.buffer.utils.utils import (
    default_env_ret_preprocess_fn,
    default_obs_preprocessor,
    default_policy_resp_preprocess_fn,
    default_postprocess_fn,
    default_preprocess_fn,
    default_reward_preprocessor,
)
from rlightning.buffer.where import Where
from rlightning.latency import LatencyStats
from rlightning.types import EnvMeta
from rlightning.utils.config import BufferConfig, ClientAuthConfig, RpcConfig
from rlightning.utils.memory import memory_limit


class DataBuffer(Adding, ABC):
    """Stores transitions and samples them.

    Reward and flags of an EnvRet belong to the step before it: transition t is observation t, the
    answer to it, and reward, flags and next observation of EnvRet t+1. What is added is copied, and
    nothing of the caller's is changed. Not thread-safe.

    Args:
        config: Its section of the configuration; copied.
        obs_preprocessor: Transforms observations; a `Preprocessor` is called with single ones, or
            with `batch_transform` where an env has several rows.
        reward_preprocessor: Transforms rewards.
        env_ret_preprocess_fn: Replaces `default_env_ret_preprocess_fn`.
        policy_resp_preprocess_fn: Replaces `default_policy_resp_preprocess_fn`.
        preprocess_fn: Replaces `default_preprocess_fn`.
        postprocess_fn: Replaces `default_postprocess_fn`: makes columns of the steps of a finished
            episode. It gets them by name, [T, ...] or a list of T nested values, and the rows of
            a vector env that are ended by one call together, [T, num_envs, ...].
        rpc: Limits and times of connections to buffer servers, where `storage.addresses` names any.
        auth: What is shown to them, and expected.

    Attributes:
        config: The configuration.
        storages: The storages by index: each a `Storage`, or a `RemoteStorage` for a buffer server;
            empty before `init`.
        table: Which env writes to which storage; None before `init`.
        sampler: Chooses rows; None before `init`.
        max_bytes: Memory that all transitions may take, in bytes.
        timing_raw: Durations of adding, sampling and getting, in seconds.

    Raises:
        ValueError: Functions were given that exclude each other.
        ConfigError: The configuration asks for what this buffer does not offer.
    """

    def __init__(
        self,
        config: BufferConfig,
        obs_preprocessor: Callable[[Any], Any] | None = default_obs_preprocessor,
        reward_preprocessor: Callable[[Any], Any] | None = default_reward_preprocessor,
        env_ret_preprocess_fn: Callable[..., dict[str, Any]] | None = default_env_ret_preprocess_fn,
        policy_resp_preprocess_fn: Callable[..., dict[str, Any]]
        | None = default_policy_resp_preprocess_fn,
        preprocess_fn: Callable[..., dict[str, Any]] | None = default_preprocess_fn,
        postprocess_fn: Callable[..., dict[str, Any]] | None = default_postprocess_fn,
        *,
        rpc: RpcConfig | None = None,
        auth: ClientAuthConfig | None = None,
    ) -> None:
        self.config = copy.deepcopy(config)
        self._functions: dict[str, Any] = {
            "obs_preprocessor": obs_preprocessor,
            "reward_preprocessor": reward_preprocessor,
            "env_ret_preprocess_fn": env_ret_preprocess_fn,
            "policy_resp_preprocess_fn": policy_resp_preprocess_fn,
            "preprocess_fn": preprocess_fn,
        }
        Pipeline(*self._functions.values())  # says which functions exclude each other
        self._functions["postprocess_fn"] = postprocess_fn
        self.max_bytes = self.config.max_bytes or memory_limit() // MEMORY_SHARE
        check_config(self.config, self.max_bytes)
        self.storages: dict[int, Any] = {}
        self.table: EpisodeTable | None = None
        self.sampler: Sampler | None = None
        self.timing_raw = LatencyStats()
        self._dial: dict[str, Any] = {"rpc": rpc, "auth": auth}
        self._remote: RemoteShards | None = None
        self._shards: list[Shard] = []
        self._workers = 1

    # Lifecycle.

    def init(
        self,
        env_meta_list: Sequence[EnvMeta | Mapping[str, Any]] | None = None,
        env_ids: Sequence[str] | None = None,
        train_worker_num: int = 1,
    ) -> None:
        """Makes sampler and storage.

        Args:
            env_meta_list: The envs whose data will come, as `EnvMeta` or dicts with its fields;
                data of others is refused. None: any env, with what its first EnvRet shows.
            env_ids: Ids of the envs.
            train_worker_num: As of `init_storage_table`.

        Raises:
            ValueError: Less than one train worker.
            ConfigError: `storage.nodes` do not fit the node affinity that is asked for.
        """
        _check_workers(train_worker_num)
        self._init_sampler()
        self.close()
        if self.config.storage.addresses:
            refuse_functions(self._functions)
            self._remote = RemoteShards(self.config, env_meta_list, **self._dial)
            self.storages = dict(enumerate(self._remote.storages))
        else:
            storages = [
                self._make_storage(env_meta_list) for _ in range(self.config.storage.shards)
            ]
            self._shards = local_shards(storages, self.config, self._get_sampler())
            self.storages = dict(enumerate(storages))
        self.init_storage_table(env_ids, train_worker_num)

    def close(self) -> None:
        """Ends the connections to buffer servers, if there are any. Safe to repeat."""
        remote, self._remote = self._remote, None
        if remote is not None:
            remote.close()

    def _init_sampler(self) -> None:
        assert self.config.sampler is not None  # the config's validator sets one
        self.sampler = build_sampler(self.config.sampler, self.config.capacity)

    def _make_storage(self, env_meta_list: Sequence[EnvMeta | Mapping[str, Any]] | None) -> Storage:
        return Storage(self.config.capacity, **self._storage_options(env_meta_list))

    def _storage_options(
        self, env_meta_list: Sequence[EnvMeta | Mapping[str, Any]] | None
    ) -> dict[str, Any]:
        """Returns the arguments of a storage beside its capacity."""
        options = storage_options(self.config, self.max_bytes // self.config.storage.shards)
        return {**self._functions, **options, "env_meta_list": env_meta_list}

    def init_storage_table(
        self, env_ids: Sequence[str] | None = None, train_worker_num: int = 1
    ) -> None:
        """Says who writes and who shares the data: nothing happens before there is a storage.

        Args:
            env_ids: Ids of the envs; others are added when their data comes.
            train_worker_num: Train workers that `sample` splits a batch for.

        Raises:
            ValueError: Less than one train worker.
            ConfigError: `storage.nodes` do not fit the node affinity that is asked for.
        """
        _check_workers(train_worker_num)
        if self.storages:
            self.table = make_table(self.config, env_ids, train_worker_num)
            self._workers = train_worker_num

    def seed(self, seed: int | None) -> None:
        """Starts the generator of the sampler anew; a buffer server has one of its own."""
        self._get_sampler().seed(seed)
        seed_shards(self._shards, seed)

    def size(self) -> int:
        """Returns the number of stored transitions, or of episodes where `storage.unit` says so.

        Those of open episodes do not count.
        """
        return sum(map(len, self.storages.values()))

    def num_transitions(self) -> int:
        """Returns the number of stored transitions, whatever the unit."""
        return sum(int(storage.num_transitions()) for storage in self.storages.values())

    def __len__(self) -> int:
        return self.size()

    def clear(self) -> None:
        """Drops what is stored; open episodes stay."""
        for storage in self.storages.values():
            storage.clear()

    @property
    def env_ids(self) -> tuple[str, ...]:
        """Ids of the envs whose data came or may come."""
        return tuple(env_id for storage in self.storages.values() for env_id in storage.env_ids)

    @property
    def counters(self) -> Counters:
        """What happened to the rows of all envs so far."""
        total = Counters()
        for storage in self.storages.values():
            total.add(storage.counters)
        return total

    @property
    def row_bytes(self) -> int:
        """Size of the largest transition that is here, in bytes."""
        return max(int(storage.row_bytes) for storage in self.storages.values())

    def print_timing_summary(self, reset: bool = False) -> None:
        """Logs how long adding, sampling and getting took, at level DEBUG.

        Args:
            reset: Forget the durations afterwards.
        """
        log_durations("buffer", self.timing_raw, reset=reset)
        for storage in self.storages.values():
            storage.print_timing_summary(reset)

    # Getting and sampling.

    def get(self, item: Any, *, as_tensordict: bool = False) -> Any:
        """Returns stored transitions or episodes, copied; see `DataContainer.read`.

        Args:
            item: An index, a sequence, array or tensor of indices, or a dict with `storage_idx` and
                `indices`; negative indices count from the end of what is stored.
            as_tensordict: Return TensorDicts over the same memory, see `tensordict_of`.

        Raises:
            TypeError: Another kind of item.
            IndexError: Nothing is stored there.
            ImportError: A TensorDict is wanted, and the extra `tensordict` is not installed.
        """
        begun = time.perf_counter()
        index = 0
        if isinstance(item, Mapping):
            index, item = item["storage_idx"], item["indices"]
        data = self._get_storage(index).read(as_index(item))
        self.timing_raw.record("get", time.perf_counter() - begun)
        return _tensordicts(data) if as_tensordict else data

    def __getitem__(self, item: Any) -> Any:
        """Returns stored transitions; a tuple is (storage index, what `get` takes)."""
        if isinstance(item, tuple):
            return self.get({"storage_idx": item[0], "indices": item[1]})
        return self.get(item)

    def get_all(self, *, as_tensordict: bool = False) -> Any:
        """Returns copies of all stored transitions; {} if none ever was stored.

        Of several storages a dict of that, by index.

        Args:
            as_tensordict: Return TensorDicts over the same memory, see `tensordict_of`.

        Raises:
            ImportError: A TensorDict is wanted, and the extra `tensordict` is not installed.
        """
        convert = _tensordicts if as_tensordict else _unchanged
        if len(self.storages) > 1:
            return {i: convert(storage.get_data()) for i, storage in self.storages.items()}
        return convert(self._get_storage().get_data())

    def sample(
        self,
        batch_size: int | None = None,
        shuffle: bool | None = True,
        drop_last: bool | None = True,
        *,
        where: Where | None = None,
        out: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Draws a batch.

        Several storages give parts of one batch, as `storage.split` says; rows of one lie side by
        side in it.

        Args:
            batch_size: Number of transitions or episodes; None leaves it to the sampler, where it
                can tell.
            shuffle: Whether the order may be any.
            drop_last: With several train workers, drop what does not divide by their number, rather
                than give some of it twice. The rows of a rollout have to divide.
            where: What a transition must be to be drawn; all of a sequence must be so.
            out: What an earlier call returned for batches of this size, to be written anew and
                returned: its arrays must not be in use any more. For one storage of this process;
                elsewhere, and for episodes and text, new arrays are returned.

        Returns:
            The part of each train worker, by rank: columns by name, copied. Leaves are [B, ...];
            those of sequences and of episodes of one length [B, T, ...], and of episodes of several
            a list of B dicts. Of a prioritised sampler also `sample_index` and `sample_generation`,
            for `update_priorities`, and `sample_weight`, the factor of the loss.

        Raises:
            BufferEmptyError: Nothing is stored.
            ValueError: The sampler cannot give such a batch.
        """
        begun = time.perf_counter()
        sampler = self._get_sampler()
        assert self.table is not None or not self.storages
        if self._remote is not None:
            batches = self._remote.sample(
                batch_size, sampler, self._workers, drop_last=bool(drop_last), where=where
            )
        else:
            self._get_storage()
            batches = draw_batches(
                self._shards,
                batch_size,
                workers=self._workers,
                shuffle=bool(shuffle),
                drop_last=bool(drop_last),
                where=where,
                split=self.config.storage.split,
                readers=self._readers(),
                out=out,
            )
        self.timing_raw.record("sample", time.perf_counter() - begun)
        return batches

    def _readers(self) -> Mapping[int, Sequence[int]] | None:
        """Returns the train workers by storage, where each reads one only."""
        if len(self.storages) == 1 or self.config.storage.split != "equal" or self.table is None:
            return None
        return self.table.get_storage_to_train_workers() or None

    def update_priorities(self, indices: Any, priorities: Any, generations: Any = None) -> int:
        """Sets priorities of transitions; returns of how many.

        Args:
            indices: Which, as sampled; of repeated ones the last priority counts.
            priorities: Finite and not negative, one for each.
            generations: As sampled with them: rows whose place another has taken since are left
                alone. None: whatever is there.

        Raises:
            ReplayError: The sampler has no priorities.
            IndexError: Nothing is stored at an index.
            InvalidRowError: The arguments differ in length, or a priority is not allowed; nothing
                was changed.
        """
        if self._remote is not None:
            return self._remote.update_priorities(indices, priorities, generations)
        self._get_storage()
        return set_shard_priorities(self._shards, indices, priorities, generations)


def _tensordicts(data: Any) -> Any:
    return [tensordict_of(one) for one in data] if isinstance(data, list) else tensordict_of(data)


def _unchanged(data: Any) -> Any:
    return data


def _check_workers(train_worker_num: int) -> None:
    if train_worker_num < 1:
        raise ValueError(f"expected at least one train worker, got {train_worker_num}")
