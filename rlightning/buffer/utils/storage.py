"""One place of a buffer: open episodes are put together here, and moved into columns."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlightning.buffer.arguments import log_durations
from rlightning.buffer.assembly import Group
from rlightning.buffer.checks import CheckedStep, Schema
from rlightning.buffer.columns import Counters
from rlightning.buffer.declared import declared, meta_of
from rlightning.buffer.episodes import EpisodeGroup, by_env
from rlightning.buffer.pipeline import Item, Pipeline
from rlightning.buffer.utils.compressed import Codec
from rlightning.buffer.utils.container import DataContainer
from rlightning.buffer.utils.indexing import Index, Indices
from rlightning.buffer.utils.layout import Layout, as_array, iter_arrays, map_arrays
from rlightning.buffer.utils.stored_rows import Mode, Removal, Unit
from rlightning.buffer.utils.tensordicts import tensordict_of
from rlightning.buffer.utils.utils import (
    default_env_ret_preprocess_fn,
    default_obs_preprocessor,
    default_policy_resp_preprocess_fn,
    default_postprocess_fn,
    default_preprocess_fn,
    default_reward_preprocessor,
)
from rlightning.errors import InvalidRowError, ReplayError, StorageFullError
from rlightning.latency import LatencyStats
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.memory import memory_limit

if TYPE_CHECKING:
    from tensordict import TensorDict

_ALL = slice(None)

# Without `buffer.max_bytes` a buffer takes this part of the memory: what is on its way takes up to
# as much again, and others need some too.
MEMORY_SHARE = 3


class Prepared(NamedTuple):
    """Checked items of one group, to be stored together."""

    group: Group
    steps: list[CheckedStep]


class Storage:
    """Open episodes of some envs, and the transitions of finished ones.

    What is added is copied, and nothing of the caller's is changed. Not thread-safe.

    Args:
        capacity: Transitions that it holds.
        mode: When it is full, `circular` overwrites, `fixed` refuses more.
        unit: What it counts, indexes and returns: transitions, or whole episodes.
        env_meta_list: The envs whose data will come, as `EnvMeta` or dicts with its fields; data of
            others is refused. None: any env, with what its first EnvRet shows.
        device: Only "cpu".
        obs_preprocessor: As of `DataBuffer`, like the functions that follow.
        reward_preprocessor: Transforms rewards.
        env_ret_preprocess_fn: Replaces `default_env_ret_preprocess_fn`.
        policy_resp_preprocess_fn: Replaces `default_policy_resp_preprocess_fn`.
        preprocess_fn: Replaces `default_preprocess_fn`.
        postprocess_fn: Replaces `default_postprocess_fn`.
        auto_truncate_episode: Whether an episode is stored once the env has ended it.
        frame_stack: The axis of frames by path of the array, as of `Observations`.
        removal: What `circular` overwrites, as of `DataContainer`.
        compression: How to compress arrays of the observation, as of `Observations`.
        columns: Which of `ts_observed_ns` and `action_age` are stored too.
        max_bytes: Memory that all transitions may take, in bytes; None: a third of the machine's.

    Attributes:
        container: The finished transitions.
        max_bytes: Memory that all transitions may take, in bytes.
        timing_raw: Durations by name, in seconds.

    Raises:
        ValueError: Functions were given that exclude each other.
        ConfigError: Another device than the CPU.
    """

    def __init__(
        self,
        capacity: int,
        mode: Mode = "circular",
        unit: Unit = "transition",
        env_meta_list: Sequence[EnvMeta | Mapping[str, Any]] | None = None,
        device: str = "cpu",
        obs_preprocessor: Callable[[Any], Any] | None = default_obs_preprocessor,
        reward_preprocessor: Callable[[Any], Any] | None = default_reward_preprocessor,
        env_ret_preprocess_fn: Callable[..., dict[str, Any]] | None = default_env_ret_preprocess_fn,
        policy_resp_preprocess_fn: Callable[..., dict[str, Any]]
        | None = default_policy_resp_preprocess_fn,
        preprocess_fn: Callable[..., dict[str, Any]] | None = default_preprocess_fn,
        postprocess_fn: Callable[..., dict[str, Any]] | None = default_postprocess_fn,
        auto_truncate_episode: bool = False,
        *,
        frame_stack: Mapping[str, int] | None = None,
        removal: Removal = "fifo",
        compression: Mapping[str, Codec] | None = None,
        columns: Collection[str] = (),
        max_bytes: int | None = None,
    ) -> None:
        self.container = DataContainer(
            capacity,
            mode,
            unit,
            device,
            frame_stack=frame_stack,
            removal=removal,
            compression=compression,
        )
        self._pipeline = Pipeline(
            obs_preprocessor,
            reward_preprocessor,
            env_ret_preprocess_fn,
            policy_resp_preprocess_fn,
            preprocess_fn,
            columns,
        )
        own = postprocess_fn not in (None, default_postprocess_fn)
        self._postprocess_fn = postprocess_fn if own else None
        self._auto_truncate = auto_truncate_episode
        self._metas = declared(env_meta_list)
        self.max_bytes = max_bytes or memory_limit() // MEMORY_SHARE
        self.timing_raw = LatencyStats()
        self._groups: dict[str, Group] = {}
        self._removed = Counters()
        self._pooled = 0  # what of the container was counted last that grows with what comes

    # What is stored.

    def __len__(self) -> int:
        return self.get_size()

    @property
    def size(self) -> int:
        """How many transitions or episodes it holds; those of open episodes do not count."""
        return self.get_size()

    def get_size(self) -> int:
        """Returns how many transitions or episodes it holds."""
        return len(self.container)

    def num_transitions(self) -> int:
        """Returns how many transitions it holds, whatever the unit."""
        return self.container.size

    def read(self, index: Index) -> Any:
        """Returns copies of what is stored; see `DataContainer.read`."""
        return self.container.read(index)

    def __getitem__(self, index: Index) -> Any:
        return self.read(index)

    def get_data(self, *, as_tensordict: bool = False) -> Any:
        """Returns copies of all transitions; {} if none ever was stored.

        Args:
            as_tensordict: Return a TensorDict over the same memory, see `tensordict_of`.

        Raises:
            ImportError: A TensorDict is wanted, and the extra `tensordict` is not installed.
        """
        data = self._get_columns()
        return tensordict_of(data) if as_tensordict else data

    def _get_columns(self) -> dict[str, Any]:
        return self.container.get_data()

    def read_rows(self, indices: Indices, length: int = 1, out: Any = None) -> Any:
        """Returns copies of what a sampler chose.

        Args:
            indices: Positions of transitions or episodes.
            length: How many consecutive transitions begin at each; leaves are [n, length, ...] if
                it is more than one.
            out: What an earlier call returned, to be written anew where it fits in shape; episodes
                are always new.
        """
        container = self.container
        if container.unit == "episode":
            return container.read(indices)
        if length == 1:
            return container.read_slots(container.slots_of(indices), out)
        return container.read_slots(container.following(indices, length), out)

    def clear(self) -> None:
        """Drops what is stored; open episodes stay."""
        self.container.clear()

    def print_timing_summary(self, reset: bool = False) -> None:
        """Logs how long adding took, at level DEBUG.

        Args:
            reset: Forget the durations afterwards.
        """
        log_durations("storage", self.timing_raw, reset=reset)

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

    # Adding.

    def add_transition(self, env_ret: Any, policy_resp: Any) -> None:
        """Adds what an env returned, with the answer to it; see `DataBuffer.add_transition`."""
        self._add(Item(env_ret, policy_resp))

    def add_data_async(self, data: Any) -> None:
        """Adds an EnvRet, or the answer to the last one; see `DataBuffer.add_data_async`."""
        if isinstance(data, EnvRet):
            self._add(Item(data))
        elif isinstance(data, PolicyResponse):
            self._add(Item(None, data))
        else:
            raise TypeError(f"expected an EnvRet or a PolicyResponse, got {type(data).__name__}")

    def add_episode(self, episode: Any, num_envs: int = 1) -> None:
        """Stores an episode that was made elsewhere, as it is; see `DataBuffer.add_episode`."""
        if num_envs == 1:
            self.container.push(episode)
            return
        columns = map_arrays(
            lambda leaf: as_array(leaf, "episode", text=True), dict(episode.items())
        )
        for leaf in iter_arrays(columns):
            if leaf.ndim < 2 or leaf.shape[1] != num_envs:
                raise InvalidRowError(
                    f"episode: expected shape [T, {num_envs}, ...], got {list(leaf.shape)}"
                )
        length = len(next(iter_arrays(columns)))
        self.container.push(by_env(columns), [length] * num_envs)

    def _add(self, item: Item) -> None:
        begun = time.perf_counter()
        env_id = env_id_of(item.response if item.env_ret is None else item.env_ret)
        prepared = self.prepare(env_id, [item])
        if not self.has_room(prepared):
            raise ReplayError(f"env {env_id!r}: the buffer is full until a rollout is released")
        self.commit(prepared)
        self.timing_raw.record("add", time.perf_counter() - begun)

    # Ending episodes.

    def truncate_one_episode(self, item: Any) -> None:
        """Ends the open episode of an env; see `DataBuffer.truncate_one_episode`."""
        self.truncate_group(env_id_of(item))

    def truncate_episodes(self, items: Sequence[Any]) -> None:
        """Ends the open episodes of several envs, once it is known that all of them are here."""
        for group in [self._group_of(env_id_of(item)) for item in items]:
            group.cut()

    def truncate_group(self, env_id: str) -> int:
        """Ends the open episodes of the rows of an env; returns how many there were.

        Raises:
            KeyError: No data of this env ever came.
        """
        return self._group_of(env_id).cut()

    def discard_episode(self, item: Any) -> int:
        """Removes an episode; see `DataBuffer.discard_episode`."""
        return self._group_of(env_id_of(item)).discard()

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
            self.container,
            auto_truncate=self._auto_truncate,
            from_space=self._pipeline.from_space,
            postprocess_fn=self._postprocess_fn,
        )

    def _close(self, group: Group) -> None:
        group.cut()

    @property
    def max_items(self) -> int:
        """How many items can be stored together at most; 0 means any number.

        Only one where storing it may still fail, so that none is stored of others before it.
        """
        return 1 if self.container.mode == "fixed" or self._postprocess_fn is not None else 0

    def prepare(self, env_id: str, items: Sequence[Item]) -> Prepared:
        """Checks items that shall be stored together, and that there is memory for them.

        Args:
            env_id: Id of the env.
            items: What came of it, in order.

        Raises:
            InvalidRowError: One does not fit; the message names the field.
            StorageFullError: The first ones of their kind, or an open episode that has become so
                long, need more memory than there is left.
            KeyError: `open_group` was not called for this env, nor is it in `env_meta_list`.
        """
        group = self._groups.get(env_id)
        if group is None:
            group = self._groups[env_id] = self._staged(meta_of(self._metas, env_id))
        steps: list[CheckedStep] = []
        for item in items:
            step = self._pipeline.step(item, group.meta)
            steps.append(group.check(step, steps[-1] if steps else None))
        if steps:
            schema, count = steps[-1].schema, len(steps)
            pooled = self.container.pooled_bytes
            grows = group.length_with(count) > group.length_with(0) or pooled > self._pooled
            if schema is not group.schema or grows:
                self._reserve(group, schema, count)
                self._pooled = pooled
        return Prepared(group, steps)

    def _reserve(self, group: Group, schema: Schema | None, steps: int) -> None:
        """Counts the memory of a group that will look like this after so many more steps.

        Raises:
            StorageFullError: There is not so much left; nothing has changed.
        """
        length, row_bytes = group.length_with(steps), group.row_bytes(schema)
        needed = group.nbytes_with(schema, length)
        others = sum(other.nbytes for other in self._alive() if other is not group)
        texts = 0 if schema is None else schema.text_bytes
        observation = group.declared if schema is None else schema.observation
        stored = self._storage_bytes(row_bytes - texts, observation)
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

    @property
    def nbytes(self) -> int:
        """Memory for what is stored, and for what may come of open episodes, in bytes."""
        return self.container.nbytes + sum(group.nbytes for group in self._alive())

    def _storage_bytes(self, row_bytes: int, observation: Layout | None) -> int:
        """Returns what the columns take once they hold transitions of so many bytes."""
        container = self.container
        return max(container.nbytes, container.nbytes_with(row_bytes, observation))

    @property
    def row_bytes(self) -> int:
        """Size of the largest transition that is here, in bytes."""
        schemas = (group.schema for group in self._alive())
        sizes = [schema.row_bytes for schema in schemas if schema is not None]
        return max(sizes, default=0) or self.container.row_bytes

    def has_room(self, prepared: Prepared) -> bool:
        """Tells whether items can be stored now, rather than once somebody has made room."""
        return True

    def commit(self, prepared: Prepared) -> None:
        """Stores checked items. Nothing of their env may have changed since they were checked."""
        for step in prepared.steps:
            prepared.group.apply(step)


class BufferView:
    """What a container holds, to be read only.

    Args:
        data: The container.
    """

    def __init__(self, data: DataContainer) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: Index) -> Any:
        return self._data.read(index)

    def tensordict(self, index: Index = _ALL) -> TensorDict:
        """Returns what is stored as `tensordict_of` does.

        Args:
            index: As of `DataContainer.read`; default: everything.
        """
        return tensordict_of(self._data.read(index))

    @property
    def capacity(self) -> int:
        """Transitions that it holds at most."""
        return self._data.capacity


def env_id_of(item: Any) -> str:
    """Returns an id that was given as such or as the `env_id` of an object.

    Raises:
        TypeError: It is neither.
    """
    env_id = item if isinstance(item, str) else getattr(item, "env_id", None)
    if not isinstance(env_id, str):
        raise TypeError(f"expected an env id or an object with one, got {item!r:.80}")
    return env_id
