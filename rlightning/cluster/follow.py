"""A learner beside rank 0: it learns from its share, and leaves all else to rank 0."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

from typing_extensions import Self

from rlightning import learner
from rlightning.buffer.shards import unpack
from rlightning.cluster.backend import batch_size
from rlightning.cluster.remote import buffer_clients, dial, sample_client
from rlightning.env.remote_client import EnvClient
from rlightning.errors import DeadlineExceededError, InvalidRequestError, UnavailableError
from rlightning.learner.ranks import Ranks, follow
from rlightning.rpc.loop import shared_loop
from rlightning.types import EnvMeta
from rlightning.utils.config import MainConfig

_LOOK_S = 0.5
_CONNECT_S = 60.0
_PAUSE_S = 0.1


def tell_followers(ranks: Ranks, config: MainConfig, algorithm: learner.Algorithm) -> None:
    """Tells the other ranks where the services are, and with what state to begin."""
    from rlightning.learner.state_file import dump_state  # not before now: it loads torch

    if ranks.world_size > 1:
        ranks.share(json.dumps(config.to_dict()).encode())
        ranks.share(dump_state(algorithm.state()))


def follow_rank_0(ranks: Ranks) -> None:
    """Learns from the share of this rank, with the config and the state of rank 0, to its end.

    Raises:
        ClusterError: Rank 0 has ended.
        RLightningError: As of `rlightning.learner.ranks.follow`.
    """
    from rlightning.learner.state_file import load_state  # not before now: it loads torch

    config = MainConfig.from_dict(json.loads(ranks.share(b"")))
    state = load_state(ranks.share(b""))
    with _Share(config, ranks) as share:
        algorithm = learner.build_learner(config, share.env_meta(), ranks)
        algorithm.restore(state)
        follow(
            algorithm,
            share,
            ranks,
            replays=config.sampled.type == "ReplayBuffer",
            max_staleness=config.learner.max_staleness,
        )


class _Share:
    """Takes the share of one rank from the buffer servers; use as a context manager."""

    def __init__(self, config: MainConfig, ranks: Ranks) -> None:
        self._config = config
        self._ranks = ranks
        self._loop = shared_loop()

    def __enter__(self) -> Self:
        self._loop.run(self._open())
        return self

    async def _open(self) -> None:
        (self._buffer,) = buffer_clients(self._config)
        self._samples = sample_client(
            self._config,
            batch_size=batch_size(self._config) or 0,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
        )
        await self._samples.start(_CONNECT_S)

    def __exit__(self, *exception: object) -> None:
        self._loop.run(self._close())

    async def _close(self) -> None:
        await self._samples.close()
        await self._buffer.close()

    def env_meta(self) -> EnvMeta:
        return self._loop.run(self._env_meta())

    async def _env_meta(self) -> EnvMeta:
        client = EnvClient(**dial(self._config.services.env))
        try:
            return (await client.describe(timeout_s=_CONNECT_S)).envs[0]
        finally:
            await client.close()

    def next_batch(self) -> Mapping[str, Any]:
        while True:
            try:
                return self._loop.run(self._samples.next_batch(_LOOK_S)).columns
            except DeadlineExceededError:
                continue
            except UnavailableError:  # whether the run waits for a service, rank 0 decides
                time.sleep(_PAUSE_S)

    def update_priorities(self, columns: Mapping[str, Any], priorities: Any) -> None:
        _, indices = unpack(columns["sample_index"])
        # Rows of a buffer that has restarted are gone, or it is away.
        with contextlib.suppress(InvalidRequestError, UnavailableError, DeadlineExceededError):
            self._loop.run(
                self._buffer.update_priorities(
                    indices,
                    priorities,
                    columns["sample_generation"],
                    self._config.learner.table,
                    timeout_s=_CONNECT_S,
                )
            )

    def release(self) -> None:
        self._loop.run(self._samples.ack())
