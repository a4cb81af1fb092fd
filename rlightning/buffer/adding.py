"""How data comes into a buffer: what envs return, whole episodes, and where episodes end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from typing_extensions import Self

from rlightning.buffer.arguments import (
    resolved,
    truncation_flags,
)
from rlightning.buffer.pipeline import Item
from rlightning.buffer.sampler import Sampler
from rlightning.buffer.utils.storage import Prepared, Storage, env_id_of
from rlightning.buffer.utils.table import EpisodeTable
from rlightning.errors import BufferEmptyError, ReplayError
from rlightning.latency import LatencyStats
from rlightning.types import BatchedData, EnvMeta


class Adding:
    """The methods of a `DataBuffer` by which data comes, and episodes end.

    Attributes:
        storages: As of `DataBuffer`.
        table: As of `DataBuffer`.
        sampler: As of `DataBuffer`.
        timing_raw: As of `DataBuffer`.
    """

    storages: dict[int, Any]
    table: EpisodeTable | None
    sampler: Sampler | None
    timing_raw: LatencyStats

    def add_transition(
        self,
        env_id: str,
        env_ret: Any,
        policy_resp: Any,
        truncated: bool | None = False,
        is_eval: bool | None = False,
    ) -> None:
        """Adds what an env returned, with the answer to it.

        Args:
            env_id: Id of the env.
            env_ret: An EnvRet of one env or group of rows, or a future of one.
            policy_resp: The PolicyResponse to it, or a future of one.
            truncated: End the episode after this, see `truncate_one_episode`.
            is_eval: It is of an evaluation, of which nothing is stored and no episode ended: end
                that of an env which is evaluated in between yourself.

        Raises:
            ValueError: It does not fit what came before; an InvalidRowError that names the field,
                or two different env ids.
            TypeError: Another type.
            KeyError: `init` was given other envs.
        """
        env_ret, policy_resp = resolved(env_ret), resolved(policy_resp)
        if is_eval:
            return
        storage = self._storage_of(env_id)
        begun = time.perf_counter()
        storage.add_transition(env_ret, policy_resp)
        self.timing_raw.record("add", time.perf_counter() - begun)
        if truncated:
            storage.truncate_one_episode(env_ret)

    def add_batched_transition(
        self,
        batched_env_ret: BatchedData,
        batched_policy_resp: BatchedData,
        truncations: list[bool] | None = None,
        is_eval: bool | None = False,
    ) -> Self:
        """Adds several transitions in order; see `add_transition`.

        Args:
            batched_env_ret: EnvRets by env id.
            batched_policy_resp: The responses, with the same ids in the same order.
            truncations: For each, whether its episode ends after it; default: none does.
            is_eval: They are of an evaluation, of which nothing is stored.

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
        flags = truncation_flags(truncations, len(batched_env_ret))
        pairs = zip(batched_env_ret.items(), batched_policy_resp.values(), flags, strict=True)
        for (env_id, env_ret), policy_resp, truncated in pairs:
            self.add_transition(env_id, env_ret, policy_resp, truncated, is_eval)
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
        data = resolved(data)
        storage = self._storage_of(env_id)
        begun = time.perf_counter()
        storage.add_data_async(data)
        self.timing_raw.record("add", time.perf_counter() - begun)
        if truncated:
            storage.truncate_one_episode(data)

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
        flags = truncation_flags(truncations, len(batched_data))
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
            ReplayError: The storage is a buffer server, which takes what envs return.
        """
        index = 0  # of several storages any one
        if len(self.storages) > 1:
            index = int(self._get_sampler().rng.integers(len(self.storages)))
        self._get_storage(index).add_episode(resolved(episode), num_envs)

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
        env_id = env_id_of(item)
        self._storage_of(env_id).truncate_one_episode(env_id)

    def truncate_episodes(self, items: Sequence[Any]) -> None:
        """Ends the open episodes of several envs; see `truncate_one_episode`.

        All items are looked at before the first episode is ended.
        """
        by_storage: dict[int, list[str]] = {}
        for env_id in map(env_id_of, items):
            by_storage.setdefault(self._index_of(env_id), []).append(env_id)
        for index, env_ids in by_storage.items():
            self._get_storage(index).truncate_episodes(env_ids)

    def discard_episode(self, item: Any) -> int:
        """Removes an episode of an env: the open one, or the last that was stored if none is open.

        Each episode is removed once: another call without new data removes nothing. Of an env with
        several rows, those of all rows are removed.

        Args:
            item: Id of the env, or an object with an `env_id`.

        Returns:
            How many transitions were removed; those that were overwritten do not count.

        Raises:
            TypeError: Neither.
            KeyError: No data of this env ever came.
            ReplayError: The env makes rollouts.
        """
        env_id = env_id_of(item)
        return int(self._storage_of(env_id).discard_episode(env_id))

    def _index_of(self, env_id: str) -> int:
        return 0 if self.table is None else self.table.get_storage_idx_for_env(env_id)

    def _storage_of(self, env_id: str) -> Any:
        return self._get_storage(self._index_of(env_id))

    def _local(self, env_id: str) -> Storage:
        """Returns the storage of an env, which has to be in this process."""
        storage = self._storage_of(env_id)
        if not isinstance(storage, Storage):
            raise ReplayError("the sessions of writers are with the buffer server itself")
        return storage

    # What one session of a writer does; see the methods of `Storage` with these names.

    def open_group(self, meta: EnvMeta) -> None:
        """Lets the rows of an env come; what comes is not joined to what came before."""
        self._local(meta.env_id or "").open_group(meta)

    def close_group(self, env_id: str) -> None:
        """Forgets an env; its open episodes are ended and stored. Safe to repeat."""
        self._local(env_id).close_group(env_id)

    def break_group(self, env_id: str) -> None:
        """Joins nothing that comes of an env to what came: an item of it was lost."""
        self._local(env_id).break_group(env_id)

    def truncate_group(self, env_id: str) -> int:
        """Ends the open episodes of the rows of an env; returns how many there were."""
        return self._local(env_id).truncate_group(env_id)

    def prepare(self, env_id: str, items: Sequence[Item]) -> Prepared:
        """Checks items that shall be stored together, and that there is memory for them."""
        return self._local(env_id).prepare(env_id, items)

    def has_room(self, prepared: Prepared) -> bool:
        """Tells whether items can be stored now, rather than once somebody has made room."""
        return self._local(prepared.group.env_id).has_room(prepared)

    def commit(self, prepared: Prepared) -> None:
        """Stores checked items. Nothing of their env may have changed since they were checked."""
        self._local(prepared.group.env_id).commit(prepared)

    def _get_sampler(self) -> Sampler:
        if self.sampler is None:
            raise BufferEmptyError("the buffer has no sampler before init()")
        return self.sampler

    def _get_storage(self, index: int = 0) -> Any:
        if not self.storages:
            raise ReplayError("the buffer has no storage before init()")
        try:
            return self.storages[index]
        except KeyError:
            raise IndexError(f"storage {index} of {len(self.storages)}") from None
