"""The data buffer: what was seen and done goes in, transitions come out."""

from __future__ import annotations

import copy
import logging
import time
from abc import ABC
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from rlightning.buffer.assembly import Counters, Group
from rlightning.buffer.checks import CheckedStep, Schema
from rlightning.buffer.episodes import EpisodeGroup
from rlightning.buffer.pipeline import Item, Pipeline
from rlightning.buffer.sampler import Indices, Sampler, build_sampler, deal
from rlightning.buffer.utils.layout import as_array, map_arrays
from rlightning.buffer.utils.storage import USE_BYTES, Storage, as_index
from rlightning.buffer.utils.utils import (
    default_env_ret_preprocess_fn,
    default_obs_preprocessor,
    default_policy_resp_preprocess_fn,
    default_postprocess_fn,
    default_preprocess_fn,
    default_reward_preprocessor,
)
from rlightning.errors import ConfigError, ReplayError, StorageFullError
from rlightning.latency import LatencyStats
from rlightning.types import BatchedData, EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import BufferConfig
from rlightning.utils.memory import memory_limit
from rlightning.utils.registry import BUFFERS

logger = logging.getLogger(__name__)

# Without `buffer.max_bytes` a buffer takes this part of the memory: what is on its way takes up to
# as much again, and others need some too.
_MEMORY_SHARE = 3


class Prepared(NamedTuple):
    """Checked items of one group, to be stored together."""

    group: Group
    steps: list[CheckedStep]


class DataBuffer(ABC):  # noqa: B024 - documented as one, and complete
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
        postprocess_fn: Only the default, or None, which means the same.

    Attributes:
        config: The configuration.
        storages: The storages by index; empty before `init`.
        sampler: Chooses rows; None before `init`.
        max_bytes: Memory that all transitions may take, in bytes.
        timing: Durations of adding, sampling and getting.

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
    ) -> None:
        self.config = copy.deepcopy(config)
        self._pipeline = Pipeline(
            obs_preprocessor,
            reward_preprocessor,
            env_ret_preprocess_fn,
            policy_resp_preprocess_fn,
            preprocess_fn,
        )
        self.max_bytes = self.config.max_bytes or memory_limit() // _MEMORY_SHARE
        _check_config(self.config, self.max_bytes)
        if postprocess_fn not in (None, default_postprocess_fn):
            raise ConfigError("postprocess_fn: only the default one is supported")
        self.storages: dict[int, Storage] = {}
        self.sampler: Sampler | None = None
        self.timing = LatencyStats()
        self._groups: dict[str, Group] = {}
        self._removed = Counters()
        self._metas: dict[str, EnvMeta] | None = None
        self._train_workers = 1

    # Lifecycle.

    def init(
        self,
        env_meta_list: Sequence[EnvMeta | Mapping[str, Any]] | None = None,
        env_ids: Sequence[str] | None = None,
    ) -> None:
        """Makes sampler and storage.

        Args:
            env_meta_list: The envs whose data will come, as `EnvMeta` or dicts with its fields;
                data of others is refused. None: any env, with what its first EnvRet shows.
            env_ids: Ids of the envs.
        """
        if env_meta_list is not None:
            metas = [m if isinstance(m, EnvMeta) else EnvMeta(**m) for m in env_meta_list]
            self._metas = {meta.env_id or "": meta for meta in metas}
        self._init_sampler()
        self.storages = {0: Storage(self.config.capacity, self.config.storage.mode)}
        self.init_storage_table(env_ids)

    def _init_sampler(self) -> None:
        assert self.config.sampler is not None  # the config's validator sets one
        self.sampler = build_sampler(self.config.sampler)

    def init_storage_table(
        self, env_ids: Sequence[str] | None = None, train_worker_num: int = 1
    ) -> None:
        """Says who shares the data: nothing happens before there is a storage.

        Args:
            env_ids: Ids of the envs; every env has its rows in the one storage here.
            train_worker_num: Train workers that `sample` splits a batch for.

        Raises:
            ValueError: Less than one train worker.
        """
        if train_worker_num < 1:
            raise ValueError(f"expected at least one train worker, got {train_worker_num}")
        if self.storages:
            self._train_workers = train_worker_num

    def seed(self, seed: int | None) -> None:
        """Starts the generator of the sampler anew."""
        self._get_sampler().seed(seed)

    def size(self) -> int:
        """Returns the number of stored transitions; those of open episodes do not count."""
        return sum(map(len, self.storages.values()))

    def __len__(self) -> int:
        return self.size()

    def clear(self) -> None:
        """Drops what is stored; open episodes stay."""
        for storage in self.storages.values():
            storage.clear()

    @property
    def env_ids(self) -> tuple[str, ...]:
        """Ids of the envs whose data came or may come."""
        return tuple(self._groups)

    @property
    def counters(self) -> Counters:
        """What happened to the rows of all envs so far."""
        total = Counters()
        total.add(self._removed)
        for group in self._groups.values():
            total.add(group.counters)
        return total

    def print_timing_summary(self, reset: bool = False) -> None:
        """Logs how long adding, sampling and getting took, at level DEBUG.

        Args:
            reset: Forget the durations afterwards.
        """
        for name, summary in self.timing.summary().items():
            logger.debug("buffer %s: %s", name, summary)
        if reset:
            self.timing.clear()

    # Adding.

    def add_transition(
        self, env_id: str, env_ret: Any, policy_resp: Any, truncated: bool | None = False
    ) -> None:
        """Adds what an env returned, with the answer to it.

        Args:
            env_id: Id of the env.
            env_ret: An EnvRet of one env or group of rows, or a future of one.
            policy_resp: The PolicyResponse to it, or a future of one.
            truncated: End the episode after this, see `truncate_one_episode`.

        Raises:
            ValueError: It does not fit what came before; an InvalidRowError that names the field,
                or two different env ids.
            TypeError: Another type.
            KeyError: `init` was given other envs.
        """
        env_ret = _resolved(env_ret)
        self._add(Item(env_ret, _resolved(policy_resp)))
        if truncated:
            self.truncate_one_episode(env_ret)

    def add_batched_transition(
        self,
        batched_env_ret: BatchedData,
        batched_policy_resp: BatchedData,
        truncations: list[bool] | None = None,
    ) -> DataBuffer:
        """Adds several transitions in order; see `add_transition`.

        Args:
            batched_env_ret: EnvRets by env id.
            batched_policy_resp: The responses, with the same ids in the same order.
            truncations: For each, whether its episode ends after it; default: none does.

        Raises:
            ValueError: Lengths or ids differ.
            TypeError: `truncations` is no list.
        """
        if len(batched_env_ret) != len(batched_policy_resp):
            raise ValueError(
                f"{len(batched_env_ret)} env_rets, but {len(batched_policy_resp)} policy responses"
            )
        if batched_env_ret.ids() != batched_policy_resp.ids():
            raise ValueError(f"ids differ: {batched_env_ret.ids()} and {batched_policy_resp.ids()}")
        flags = _truncations(truncations, len(batched_env_ret))
        pairs = zip(batched_env_ret.items(), batched_policy_resp.values(), flags, strict=True)
        for (env_id, env_ret), policy_resp, truncated in pairs:
            self.add_transition(env_id, env_ret, policy_resp, truncated)
        return self

    def add_data_async(self, env_id: str, data: Any, truncated: bool | None = False) -> None:
        """Adds an EnvRet, or the answer to the last one, as it comes.

        Args:
            env_id: Id of the env.
            data: An EnvRet, a PolicyResponse, or a future of one.
            truncated: End the episode after this.

        Raises:
            ValueError: It does not fit, or it is an answer and no observation waits for one.
            TypeError: Another type.
        """
        data = _resolved(data)
        if isinstance(data, EnvRet):
            self._add(Item(data))
        elif isinstance(data, PolicyResponse):
            self._add(Item(None, data))
        else:
            raise TypeError(f"expected an EnvRet or a PolicyResponse, got {type(data).__name__}")
        if truncated:
            self.truncate_one_episode(data)

    def add_batched_data_async(
        self, batched_data: BatchedData, truncations: list[bool] | bool | None = None
    ) -> None:
        """Adds several EnvRets or responses in order; see `add_data_async`.

        Args:
            batched_data: What to add, by env id.
            truncations: For each, or one for all, whether its episode ends after it.

        Raises:
            ValueError: The number of truncations differs.
            TypeError: `truncations` is neither a list nor a bool.
        """
        if isinstance(truncations, bool):
            truncations = [truncations] * len(batched_data)
        flags = _truncations(truncations, len(batched_data))
        for (env_id, data), truncated in zip(batched_data.items(), flags, strict=True):
            self.add_data_async(env_id, data, truncated)

    def add_episode(self, episode: Any, num_envs: int = 1) -> None:
        """Stores transitions that were made elsewhere, as they are.

        Args:
            episode: Columns by name, or a future of them; leaves are [T, ...], with several envs
                [T, num_envs, ...].
            num_envs: Number of envs in it.

        Raises:
            InvalidRowError: They do not fit what is stored already.
        """
        columns = {name: _plain(value) for name, value in _resolved(episode).items()}
        storage = self._get_storage()
        if num_envs == 1:
            storage.push(columns)
            return
        for i in range(num_envs):
            storage.push(map_arrays(itemgetter((slice(None), i)), columns))

    def truncate_one_episode(self, item: Any) -> None:
        """Ends the open episode of an env from outside, and stores what it has.

        Its last transition is marked in the column `cut`, unless the env itself ended the episode.
        An episode ends once: for an env without an open one, nothing happens.

        Args:
            item: Id of the env, or an object with an `env_id`.

        Raises:
            TypeError: Neither.
            KeyError: No data of this env ever came.
        """
        self.truncate_group(_env_id(item))

    def truncate_episodes(self, items: Sequence[Any]) -> None:
        """Ends the open episodes of several envs; see `truncate_one_episode`.

        All items are looked at before the first episode is ended.
        """
        for group in [self._group_of(env_id) for env_id in map(_env_id, items)]:
            group.cut()

    def truncate_group(self, env_id: str) -> int:
        """Ends the open episodes of the rows of an env; returns how many there were.

        Raises:
            KeyError: No data of this env ever came.
        """
        return self._group_of(env_id).cut()

    def _group_of(self, env_id: str) -> Group:
        group = self._groups.get(env_id)
        if group is None:
            raise KeyError(f"no data of env {env_id!r} ever came")
        return group

    # What one session of a writer does; the documented methods above are made of these.

    def open_group(self, meta: EnvMeta) -> None:
        """Lets the rows of an env come; what comes is not joined to what came before.

        Args:
            meta: The env: `env_id` is required; what else is left open is taken from its first
                EnvRet.

        Raises:
            ConfigError: A space of it cannot be stored.
            StorageFullError: Its rows need more memory than there is left.
        """
        env_id = meta.env_id or ""
        group = self._groups.get(env_id)
        if group is not None and group.meta == meta:
            group.break_segment()
            return
        self.close_group(env_id)
        group = self._groups[env_id] = self._opened(meta)
        try:
            self._reserve(group, None, 0)
        except StorageFullError:
            self.close_group(env_id)
            raise

    def close_group(self, env_id: str) -> None:
        """Forgets an env; its open episodes are ended and stored. Safe to repeat."""
        group = self._groups.pop(env_id, None)
        if group is not None:
            self._close(group)
            self._removed.add(group.counters)

    def break_group(self, env_id: str) -> None:
        """Joins nothing that comes of an env to what came: an item of it was lost."""
        group = self._groups.get(env_id)
        if group is not None:
            group.break_segment()

    def _opened(self, meta: EnvMeta) -> Group:
        """Makes the group of an env that a writer opened."""
        return self._staged(meta)

    def _staged(self, meta: EnvMeta) -> Group:
        """Makes a group whose episodes are stored once they have ended."""
        return EpisodeGroup(
            meta,
            self._get_storage(),
            auto_truncate=self.config.auto_truncate_episode,
            from_space=self._pipeline.from_space,
        )

    def _close(self, group: Group) -> None:
        group.cut()

    def prepare(self, env_id: str, items: Sequence[Item]) -> Prepared:
        """Checks items that shall be stored together, and that there is memory for them.

        Args:
            env_id: Id of the env.
            items: What came of it, in order.

        Raises:
            InvalidRowError: One does not fit; the message names the field.
            StorageFullError: The first ones of their kind, or an open episode that has become so
                long, need more memory than there is left.
            KeyError: `open_group` was not called for this env, nor `init` with it.
        """
        group = self._groups.get(env_id)
        if group is None:
            group = self._groups[env_id] = self._staged(self._meta_of(env_id))
        steps: list[CheckedStep] = []
        for item in items:
            step = self._pipeline.step(item, group.meta)
            steps.append(group.check(step, steps[-1] if steps else None))
        if steps:
            schema, count = steps[-1].schema, len(steps)
            if schema is not group.schema or group.length_with(count) > group.length_with(0):
                self._reserve(group, schema, count)
        return Prepared(group, steps)

    def _reserve(self, group: Group, schema: Schema | None, steps: int) -> None:
        """Counts the memory of a group that will look like this after so many more steps.

        Raises:
            StorageFullError: There is not so much left; nothing has changed.
        """
        length, row_bytes = group.length_with(steps), group.row_bytes(schema)
        needed = group.nbytes_with(schema, length)
        others = sum(other.nbytes for other in self._alive() if other is not group)
        stored = self._storage_bytes(row_bytes)
        if needed + others + stored > self.max_bytes:
            rows = group.rows if schema is None else schema.rows
            raise StorageFullError(
                f"env {group.env_id!r}: {length} steps of {rows} rows of {row_bytes} bytes need "
                f"{needed} bytes, beside {others} of other envs and {stored} of the storage; "
                f"buffer.max_bytes allows {self.max_bytes}: raise it, or make {self._size_keys} "
                "or the env smaller"
            )
        group.nbytes = needed

    @property
    def _size_keys(self) -> str:
        """Names the keys of the configuration that decide how much is kept."""
        return "buffer.capacity"

    def _alive(self) -> Collection[Group]:
        """Returns the groups whose columns exist."""
        return self._groups.values()

    def _storage_bytes(self, row_bytes: int) -> int:
        """Returns what the storage takes once it holds transitions of so many bytes."""
        storage = self._get_storage()
        return max(storage.nbytes, storage.nbytes_with(row_bytes))

    @property
    def row_bytes(self) -> int:
        """Size of the largest transition that is here, in bytes."""
        schemas = (group.schema for group in self._alive())
        sizes = [schema.row_bytes for schema in schemas if schema is not None]
        return max(sizes, default=0) or self._get_storage().row_bytes

    def has_room(self, prepared: Prepared) -> bool:
        """Tells whether items can be stored now, rather than once somebody has made room."""
        return True

    def commit(self, prepared: Prepared) -> None:
        """Stores checked items. Nothing of their env may have changed since they were checked."""
        for step in prepared.steps:
            prepared.group.apply(step)

    def _add(self, item: Item) -> None:
        begun = time.perf_counter()
        env_id = _env_id(item.response if item.env_ret is None else item.env_ret)
        prepared = self.prepare(env_id, [item])
        if not self.has_room(prepared):
            raise ReplayError(f"env {env_id!r}: the buffer is full until a rollout is released")
        self.commit(prepared)
        self.timing.record("add", time.perf_counter() - begun)

    def _meta_of(self, env_id: str) -> EnvMeta:
        """Returns what is known of an env; a row's id `env/row` stands for a lone env."""
        if self._metas is None:
            return EnvMeta(env_id)
        if env_id in self._metas:
            return self._metas[env_id]
        parent = self._metas.get(env_id.rpartition("/")[0])
        if parent is None:
            raise KeyError(f"env {env_id!r} is none of {sorted(self._metas)}")
        return EnvMeta(env_id, parent.action_space, parent.observation_space, 1)

    # Getting and sampling.

    def get(self, item: Any) -> dict[str, Any]:
        """Returns stored transitions, copied.

        Args:
            item: An index, a sequence, array or tensor of indices, or a dict with `storage_idx` and
                `indices`; negative indices count from the end of what is stored.

        Raises:
            TypeError: Another kind of item.
            IndexError: Nothing is stored there.
        """
        begun = time.perf_counter()
        index = 0
        if isinstance(item, Mapping):
            index, item = item["storage_idx"], item["indices"]
        data = self._read(index, as_index(item))
        self.timing.record("get", time.perf_counter() - begun)
        return data

    def _read(self, storage: int, indices: int | Indices) -> dict[str, Any]:
        return self._get_storage(storage).read(indices)

    def __getitem__(self, item: Any) -> dict[str, Any]:
        """Returns stored transitions; a tuple is (storage index, what `get` takes)."""
        if isinstance(item, tuple):
            return self.get({"storage_idx": item[0], "indices": item[1]})
        return self.get(item)

    def get_all(self) -> dict[str, Any]:
        """Returns copies of all stored transitions; {} if none ever was stored."""
        return self._get_storage().get_data()

    def sample(
        self,
        batch_size: int | None = None,
        shuffle: bool | None = True,
        drop_last: bool | None = True,
    ) -> list[dict[str, Any]]:
        """Draws a batch.

        Args:
            batch_size: Number of transitions; None leaves it to the sampler, where it can tell.
            shuffle: Whether the order may be any.
            drop_last: With several train workers, drop what does not divide by their number, rather
                than give some of it twice.

        Returns:
            The part of each train worker, by rank: columns by name, leaves [B, ...], copied.

        Raises:
            BufferEmptyError: Nothing is stored.
            ValueError: The sampler cannot give such a batch.
        """
        begun = time.perf_counter()
        indices = self._get_sampler().sample(self.size(), batch_size, shuffle=bool(shuffle))
        parts = deal(indices, self._train_workers, drop_last=bool(drop_last))
        batches = [self._read(0, part) for part in parts]
        self.timing.record("sample", time.perf_counter() - begun)
        return batches

    def _get_sampler(self) -> Sampler:
        if self.sampler is None:
            raise ReplayError("the buffer has no sampler before init()")
        return self.sampler

    def _get_storage(self, index: int = 0) -> Storage:
        if not self.storages:
            raise ReplayError("the buffer has no storage before init()")
        try:
            return self.storages[index]
        except KeyError:
            raise IndexError(f"storage {index} of {len(self.storages)}") from None


def build_data_buffer(config: BufferConfig, **functions: Any) -> DataBuffer:
    """Makes the buffer that a config names; `init` readies it.

    Args:
        config: Its section of the configuration.
        **functions: Preprocessors and preprocess functions, as of `DataBuffer`.
    """
    buffer: DataBuffer = BUFFERS.get(config.type)(config, **functions)
    return buffer


def _check_config(config: BufferConfig, max_bytes: int) -> None:
    if config.capacity < 1:
        raise ConfigError(f"buffer.capacity: expected at least 1, got {config.capacity}")
    if (needed := config.capacity * USE_BYTES) > max_bytes:
        raise ConfigError(
            f"buffer.capacity: {config.capacity} transitions need {needed} bytes before one is "
            f"stored; buffer.max_bytes allows {max_bytes}"
        )
    for key, value, supported in (
        ("storage.type", config.storage.type, "unified"),
        ("storage.unit", config.storage.unit, "transition"),
        ("storage.device", config.storage.device, "cpu"),
        ("node_affinity_env", config.node_affinity_env, False),
        ("node_affinity_train", config.node_affinity_train, False),
    ):
        if value != supported:
            raise ConfigError(f"buffer.{key}: {value!r} is not supported, only {supported!r} is")


def _resolved(data: Any) -> Any:
    """Returns the result of a future, and anything else as it is."""
    kind = type(data)
    if callable(getattr(kind, "result", None)) and callable(getattr(kind, "done", None)):
        return data.result()
    return data


def _env_id(item: Any) -> str:
    env_id = item if isinstance(item, str) else getattr(item, "env_id", None)
    if not isinstance(env_id, str):
        raise TypeError(f"expected an env id or an object with one, got {item!r:.80}")
    return env_id


def _truncations(truncations: Any, count: int) -> list[bool]:
    if truncations is None:
        return [False] * count
    if not isinstance(truncations, list):
        raise TypeError(f"truncations: expected a list, got {type(truncations).__name__}")
    if len(truncations) != count:
        raise ValueError(f"{len(truncations)} truncations for {count} elements")
    return truncations


def _plain(value: Any) -> Any:
    return map_arrays(lambda leaf: as_array(leaf, "episode"), value)
