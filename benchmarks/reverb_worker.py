"""Reverb as a peer of the network buffer benchmarks: a server process, and a client that jobs come to.

It runs in a Python of its own, which has `dm-reverb[tensorflow]` and not this project.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import Any

import numpy as np

from benchmarks.harness import answer_jobs

ROWS, BATCH, AHEAD = 64, 256, 4
_TABLE = "table"


def serve(capacity: int) -> None:
    """Serves a table with uniform sampling; says at which port."""
    import reverb  # type: ignore[import-not-found]

    table = reverb.Table(
        _TABLE,
        reverb.selectors.Uniform(),
        reverb.selectors.Fifo(),
        capacity,
        reverb.rate_limiters.MinSize(1),
    )
    server = reverb.Server([table])
    print(server.port, flush=True)
    server.wait()


class Peer:
    """A server of one kind of rows, full, with a client."""

    def __init__(self, kind: str, capacity: int) -> None:
        import reverb

        command = [sys.executable, "-m", "benchmarks.reverb_worker", "serve", str(capacity)]
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._server.stdout is not None
        self._address = f"127.0.0.1:{int(self._server.stdout.readline())}"
        self._client = reverb.Client(self._address)
        rng = np.random.default_rng(0)
        if kind == "img":
            self._seen: Any = rng.integers(0, 255, (5, 84, 84, 4), np.uint8)
        else:
            self._seen = rng.normal(size=(51, 4)).astype(np.float32)
        self.insert(items=capacity)
        self._batches = self._dataset()

    def insert(self, seconds: float = 0.0, items: int = 0) -> float:
        """Inserts transitions one by one, as its interface wants it; waits for acks every 64."""
        count, begun = 0, time.perf_counter()
        with self._client.trajectory_writer(num_keep_alive_refs=1) as writer:
            while count < items or time.perf_counter() - begun < seconds:
                for _ in range(ROWS):
                    at = count % (len(self._seen) - 1)
                    writer.append(
                        {
                            "observation": self._seen[at],
                            "next_observation": self._seen[at + 1],
                            "action": np.int64(1),
                            "reward": np.float32(1),
                            "terminated": np.bool_(False),
                        }
                    )
                    step = {name: column[-1:] for name, column in writer.history.items()}
                    writer.create_item(_TABLE, 1.0, step)
                    count += 1
                writer.flush()
        return count / (time.perf_counter() - begun)

    def _dataset(self) -> Any:
        import reverb
        import tensorflow as tf

        shape, dtype = self._seen.shape[1:], tf.as_dtype(self._seen.dtype)
        kinds = {
            "observation": (shape, dtype),
            "next_observation": (shape, dtype),
            "action": ((), tf.int64),
            "reward": ((), tf.float32),
            "terminated": ((), tf.bool),
        }
        data = reverb.TrajectoryDataset(
            self._address,
            _TABLE,
            dtypes={name: dtype for name, (_, dtype) in kinds.items()},
            shapes={name: tf.TensorShape((1, *shape)) for name, (shape, _) in kinds.items()},
            max_in_flight_samples_per_worker=2 * BATCH,
        )
        return iter(data.batch(BATCH).prefetch(AHEAD))

    def sample(self, seconds: float) -> float:
        """Takes batches of 256 that are fetched ahead."""
        next(self._batches)
        count, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < seconds:
            next(self._batches)
            count += BATCH
        return count / (time.perf_counter() - begun)

    def close(self) -> None:
        """Ends the server."""
        self._server.kill()
        self._server.wait()


_peers: dict[str, Peer] = {}


async def fill(job: dict[str, Any]) -> dict[str, Any]:
    """Starts the server of a kind, in place of another one, and fills it."""
    while _peers:
        _peers.popitem()[1].close()
    _peers[job["kind"]] = Peer(job["kind"], job["capacity"])
    return {}


async def insert(job: dict[str, Any]) -> dict[str, Any]:
    """Returns transitions per second."""
    return {"per_s": _peers[job["kind"]].insert(job["seconds"])}


async def sample(job: dict[str, Any]) -> dict[str, Any]:
    """Returns transitions per second."""
    return {"per_s": _peers[job["kind"]].sample(job["seconds"])}


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(int(sys.argv[2]))
    else:
        asyncio.run(answer_jobs({"fill": fill, "insert": insert, "sample": sample}))
        for peer in _peers.values():
            peer.close()
