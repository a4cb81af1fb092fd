"""Which env writes to which storage, and which train workers read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Numbers of the workers by node and role: {node: {"buffer" | "train" | "env": {"ids": [...]}}}.
Distribution = Mapping[str, Mapping[str, Mapping[str, Sequence[int]]]]


class EpisodeTable:
    """Assigns envs to storages, and storages to train workers.

    An env keeps its storage: its episodes are put together there. A new env goes to the storage
    that has fewest; among equals they take turns. Train workers are dealt out in equal blocks.

    Args:
        num_storages: Number of storages.
        env_ids: Envs that are known already; others are added when they are asked for.
        num_train_workers: Number of train workers; None for none.
        component_distribution: Where the workers run: by node and role ("buffer", "train", "env")
            a dict with their numbers in "ids". Needed for affinity.
        node_affinity_env: Keep the envs of a node on its storage. The number of an env's worker is
            what follows the last "-" of its id, or else its place in `env_ids`.
        node_affinity_train: Give the train workers of a node its storage.

    Raises:
        ValueError: Fewer than one storage or train worker.
        AssertionError: The train workers cannot be dealt out equally, or affinity is asked for
            without a distribution.
        RuntimeError: With affinity, nodes differ in their numbers of workers, or do not have one
            storage each.
    """

    def __init__(
        self,
        num_storages: int,
        env_ids: Sequence[str] | None = None,
        num_train_workers: int | None = None,
        component_distribution: Distribution | None = None,
        node_affinity_env: bool = False,
        node_affinity_train: bool = False,
    ) -> None:
        if num_storages < 1:
            raise ValueError(f"expected at least one storage, got {num_storages}")
        if num_train_workers is not None and num_train_workers < 1:
            raise ValueError(f"expected at least one train worker, got {num_train_workers}")
        if (node_affinity_env or node_affinity_train) and component_distribution is None:
            raise AssertionError("node affinity needs to know where the workers run")
        self._envs: list[list[str]] = [[] for _ in range(num_storages)]
        self._storage_of: dict[str, int] = {}
        self._next = 0
        nodes = component_distribution or {}
        self._by_env_worker: dict[int, int] = {}
        if node_affinity_env:
            self._by_env_worker = {
                worker: storage
                for storage, workers in self._local(nodes, "env")
                for worker in workers
            }
        self._workers: dict[int, list[int]] = {}
        if num_train_workers is not None:
            self._workers = (
                dict(self._local(nodes, "train"))
                if node_affinity_train
                else self._blocks(num_train_workers)
            )
        self.register_envs(env_ids or ())

    def _blocks(self, workers: int) -> dict[int, list[int]]:
        storages = len(self._envs)
        if workers % storages:
            raise AssertionError(
                f"{workers} train workers cannot be dealt out to {storages} storages"
            )
        block = workers // storages
        return {i: list(range(i * block, (i + 1) * block)) for i in range(storages)}

    def _local(self, nodes: Distribution, role: str) -> list[tuple[int, list[int]]]:
        """Returns for each storage the workers of a role on its node."""
        pairs = []
        for name, node in nodes.items():
            storages = node.get("buffer", {}).get("ids", ())
            if len(storages) != 1:
                raise RuntimeError(f"node {name!r}: expected one storage, got {len(storages)}")
            pairs.append((storages[0], list(node.get(role, {}).get("ids", ()))))
        if sorted(storage for storage, _ in pairs) != list(range(len(self._envs))):
            raise RuntimeError(
                f"expected the {len(self._envs)} storages to be on nodes of their own"
            )
        counts = {len(workers) for _, workers in pairs}
        if len(counts) > 1:
            raise RuntimeError(f"nodes differ in their numbers of {role} workers: {sorted(counts)}")
        return sorted(pairs)

    def register_envs(self, env_ids: Iterable[str]) -> None:
        """Assigns envs to storages; those that have one keep it."""
        for position, env_id in enumerate(env_ids):
            if env_id not in self._storage_of:
                self._assign(env_id, position)

    def _assign(self, env_id: str, position: int) -> int:
        worker = env_id.rpartition("-")[2]
        index = self._by_env_worker.get(int(worker) if worker.isdecimal() else position)
        if index is None:
            fewest = min(map(len, self._envs))
            count = len(self._envs)
            turns = ((self._next + i) % count for i in range(count))
            index = next(i for i in turns if len(self._envs[i]) == fewest)
            self._next = (index + 1) % count
        self._envs[index].append(env_id)
        self._storage_of[env_id] = index
        return index

    def get_envs_for_storage(self, storage_idx: int) -> list[str]:
        """Returns the envs that write to a storage.

        Raises:
            IndexError: There is no such storage.
        """
        self._check(storage_idx)
        return list(self._envs[storage_idx])

    def get_storage_idx_for_env(self, env_id: str) -> int:
        """Returns the storage of an env; one that was not seen before gets one."""
        index = self._storage_of.get(env_id)
        return self._assign(env_id, len(self._storage_of)) if index is None else index

    def get_train_workers(self, storage_idx: int) -> list[int]:
        """Returns the ranks of the train workers that read a storage.

        Raises:
            IndexError: There is no such storage.
        """
        self._check(storage_idx)
        return list(self._workers.get(storage_idx, ()))

    def get_storage_to_train_workers(self) -> dict[int, list[int]]:
        """Returns the ranks of the train workers by storage; {} if their number was not given."""
        return {storage: list(workers) for storage, workers in self._workers.items()}

    def get_env_to_storage(self) -> dict[str, int]:
        """Returns the storage of each env."""
        return dict(self._storage_of)

    def _check(self, storage_idx: Any) -> None:
        if not 0 <= storage_idx < len(self._envs):
            raise IndexError(f"storage {storage_idx} of {len(self._envs)}")
