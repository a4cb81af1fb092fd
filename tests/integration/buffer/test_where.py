"""A learner asks for some of the transitions, over real sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlightning.buffer import Where
from rlightning.errors import DeadlineExceededError, InvalidRequestError
from rlightning.types import ActionSource
from tests.integration.buffer.harness import act, buffer_server, inserting, sampling
from tests.unit.buffer.scripted import ScriptedEnv, check_transitions


async def test_batches_hold_only_what_was_asked_for() -> None:
    env = ScriptedEnv(2, lambda row, episode: (5, True))
    where = Where(min_version=5, max_version=8, sources=[ActionSource.POLICY])
    async with (
        buffer_server(type="ReplayBuffer", auto_truncate_episode=True) as buffers,
        inserting(buffers.address, env.meta) as writer,
        sampling(buffers.address, batch_size=8, where=where) as learner,
        sampling(buffers.address, batch_size=8, where=Where(sources=[ActionSource.HUMAN])) as other,
    ):
        waiting = asyncio.create_task(learner.next_batch(5))
        await act(writer, env, 5)  # versions 0 to 4
        await writer.flush(5)
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await act(writer, env, 20)
        versions = set()
        for _ in range(10):
            batch = await waiting
            assert check_transitions(batch.columns) == 8
            versions |= set(batch.columns["policy_version"].tolist())
            waiting = asyncio.create_task(learner.next_batch(5))
        await waiting
        assert versions == {5, 6, 7, 8}
        with pytest.raises(DeadlineExceededError):
            await other.next_batch(0.1)  # nobody took over


@pytest.mark.parametrize(
    "options",
    [
        {"type": "RolloutBuffer"},
        {"type": "ReplayBuffer", "storage": {"unit": "episode"}},
    ],
)
async def test_where_is_refused_where_no_single_transitions_are_sampled(
    options: dict[str, Any],
) -> None:
    size = 0 if options["type"] == "RolloutBuffer" else 4
    async with buffer_server(**options) as buffers:
        with pytest.raises(InvalidRequestError, match="where: table 'default' does not sample"):
            async with sampling(buffers.address, batch_size=size, where=Where(min_version=1)):
                pass


async def test_where_names_action_sources_that_exist() -> None:
    async with buffer_server(type="ReplayBuffer") as buffers:
        with pytest.raises(ValueError, match="allows no transition"):
            async with sampling(buffers.address, batch_size=4, where=Where(sources=[])):
                pass
        where = Where(sources=[99])  # type: ignore[list-item]
        with pytest.raises(InvalidRequestError, match=r"where\.sources: 99"):
            async with sampling(buffers.address, batch_size=4, where=where):
                pass
