"""Insert and sample in one process: ours, cpprb, TorchRL, and arrays without any of what a buffer is for.

Every contender holds the same transitions of the same capacity, full. One item is one transition. cpprb and
TorchRL are left out where they are not installed.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.harness import Ratio, report, run_rounds
from rlightning.buffer import BufferConfig, ReplayBuffer, SamplerConfig

BLOCK, BATCH = 64, 256
_CALLS = 16
KINDS = {"vec": 100_000, "img": 4_000}
# Targets by reference: of inserts and samples, small rows and images.
TARGETS = {
    "cpprb": {("insert", "vec"): 1.0, ("insert", "img"): 0.8, ("sample", "vec"): 1.0, ("sample", "img"): 0.8},
    "TorchRL": {("insert", "vec"): 8.0, ("insert", "img"): 8.0, ("sample", "vec"): 4.0, ("sample", "img"): 4.0},
    "numpy ring": {(what, kind): 0.5 for what in ("insert", "sample") for kind in KINDS},
}  # fmt: skip

Columns = dict[str, np.ndarray[Any, Any]]
Functions = tuple[Callable[[], object], Callable[[], object]]


def block(kind: str) -> Columns:
    """Returns 64 consecutive transitions."""
    rng = np.random.default_rng(0)
    if kind == "vec":
        seen: Any = rng.normal(size=(BLOCK + 1, 4)).astype(np.float32)
    else:
        seen = rng.integers(0, 255, (BLOCK + 1, 84, 84, 4), np.uint8)
    return {
        "observation": seen[:-1],
        "next_observation": seen[1:],
        "action": rng.integers(0, 4, BLOCK),
        "reward": rng.normal(size=BLOCK).astype(np.float32),
        "terminated": np.zeros(BLOCK, np.bool_),
    }


def ours(columns: Columns, capacity: int, sampler: str = "uniform") -> Functions:
    """A ReplayBuffer."""
    config = BufferConfig(
        type="ReplayBuffer",
        capacity=capacity,
        sampler=SamplerConfig(type=sampler, seed=0),  # type: ignore[arg-type]
    )
    buffer = ReplayBuffer(config)
    buffer.init()
    return lambda: buffer.add_episode(columns), lambda: buffer.sample(BATCH)


def numpy_ring(columns: Columns, capacity: int) -> Functions:
    """Arrays, a pointer and a generator."""
    arrays = {
        name: np.zeros((capacity, *new.shape[1:]), new.dtype) for name, new in columns.items()
    }
    rng, pointer = np.random.default_rng(0), [0]

    def insert() -> None:
        slots = (pointer[0] + np.arange(BLOCK)) % capacity
        for name, array in arrays.items():
            array[slots] = columns[name]
        pointer[0] = (pointer[0] + BLOCK) % capacity

    def sample() -> Columns:
        slots = rng.integers(0, capacity, BATCH)
        return {name: array[slots] for name, array in arrays.items()}

    return insert, sample


def cpprb(columns: Columns, capacity: int) -> Functions:
    """Cpprb's ReplayBuffer."""
    from cpprb import ReplayBuffer as Theirs  # type: ignore[import-not-found]

    spec = {
        name: {"shape": new.shape[1:] or 1, "dtype": new.dtype} for name, new in columns.items()
    }
    buffer = Theirs(capacity, spec)
    return lambda: buffer.add(**columns), lambda: buffer.sample(BATCH)


def torchrl(columns: Columns, capacity: int) -> Functions:
    """TorchRL's replay buffer over LazyTensorStorage."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=BATCH)
    tensors = TensorDict({name: torch.from_numpy(new) for name, new in columns.items()}, [BLOCK])
    return lambda: buffer.extend(tensors), buffer.sample


def contenders() -> Mapping[str, Callable[[Columns, int], Functions]]:
    """Returns who is measured, by name: those that are installed."""
    found: dict[str, Callable[[Columns, int], Functions]] = {"ours": ours, "numpy ring": numpy_ring}
    found["ours, prioritised"] = lambda columns, capacity: ours(columns, capacity, "prioritised")
    for name, module, function in (("cpprb", "cpprb", cpprb), ("TorchRL", "torchrl", torchrl)):
        if importlib.util.find_spec(module) is not None:
            found[name] = function
        else:
            print(f"\n{name} is not installed: left out")
    return found


def rate(function: Callable[[], object], items: int, seconds: float) -> float:
    """Returns items per second of calls of a function, over about so many seconds of this thread's CPU time.

    What else keeps the machine busy does not count that way.
    """
    count, begun = 0, time.thread_time()
    while (spent := time.thread_time() - begun) < seconds:
        for _ in range(_CALLS):  # asking for the time takes part of a microsecond
            function()
        count += _CALLS
    return count * items / spent


def measure(rounds: int, seconds: float, slack: float) -> bool:
    """Prints the tables."""
    good, known = True, contenders()
    for kind, capacity in KINDS.items():
        columns = block(kind)
        cells: dict[str, Callable[[], float]] = {}
        for name, make in known.items():
            insert, sample = make(columns, capacity)
            for _ in range(capacity // BLOCK + 1):
                insert()
            cells[f"{name}: insert"] = lambda f=insert: rate(f, BLOCK, seconds)
            cells[f"{name}: sample"] = lambda f=sample: rate(f, BATCH, seconds)
        table = run_rounds(cells, rounds=rounds, unit="transitions/s")
        ratios = [
            Ratio(
                f"{kind} {what}: ours / {name}",
                f"ours: {what}",
                f"{name}: {what}",
                floor=targets[what, kind],
            )
            for name, targets in TARGETS.items()
            if name in known
            for what in ("insert", "sample")
        ]
        sizes = "4 + 4 float32" if kind == "vec" else "2 x 84x84x4 uint8"
        title = f"Buffer in process, {kind} ({sizes}), inserts of {BLOCK}, samples of {BATCH}"
        good &= report(title, table, ratios, slack=slack)
    return good
