"""Get by page, Truncate, Clear and DiscardEpisode, over real sockets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlightning.errors import (
    InvalidRequestError,
    PreconditionError,
    ResourceExhaustedError,
)
from tests.integration.buffer.harness import act, asking, buffer_server, inserting, sampling
from tests.unit.buffer.scripted import ScriptedEnv, check_transitions

REPLAY: dict[str, Any] = {"type": "ReplayBuffer", "auto_truncate_episode": True, "capacity": 1000}


def env(length: int = 5, env_id: str = "env") -> ScriptedEnv:
    return ScriptedEnv(1, lambda row, episode: (length, True), env_id=env_id)


async def test_an_episode_is_discarded_once_per_request() -> None:
    one = env()
    async with (
        buffer_server(**REPLAY) as buffers,
        inserting(buffers.address, one.meta) as client,
        asking(buffers.address) as asker,
    ):
        await act(client, one, 13, last=False)  # two episodes, and 2 of the third complete
        await client.flush(5)
        assert await asker.discard_episode("env", request_id="a") == 2
        assert await asker.discard_episode("env", request_id="a") == 2  # the answer once more
        assert buffers.table.buffer.size() == 10
        assert await asker.discard_episode("env") == 5
        assert await asker.discard_episode("env") == 0  # the last one is gone
        columns = await asker.get()
        assert check_transitions(columns) == 5
        with pytest.raises(InvalidRequestError, match="request_id: a was that of table"):
            await asker.discard_episode("other", request_id="a")
        with pytest.raises(PreconditionError, match="env_id: no data of 'other'") as refused:
            await asker.discard_episode("other")
        assert refused.value.reason == "UNKNOWN_ENV"
        with pytest.raises(InvalidRequestError, match="request_id: expected 1 to 128"):
            await asker.discard_episode("env", request_id="x" * 129)
        await act(client, one, 5)  # nothing of it is joined to what was removed
        await client.flush(5)
        assert check_transitions(await asker.get()) == 10


async def test_an_episode_cannot_be_taken_out_of_rollouts() -> None:
    one = env()
    async with (
        buffer_server() as buffers,
        inserting(buffers.address, one.meta) as client,
        asking(buffers.address) as asker,
    ):
        await act(client, one, 3)
        await client.flush(5)
        with pytest.raises(PreconditionError, match="cannot be taken out of rollouts"):
            await asker.discard_episode("env")


async def test_all_that_is_stored_comes_in_pages() -> None:
    one = env()
    async with (
        buffer_server(**REPLAY) as buffers,
        inserting(buffers.address, one.meta) as client,
        asking(buffers.address) as asker,
    ):
        assert [page async for page in asker.pages(4)] == []
        await act(client, one, 15)
        await client.flush(5)
        whole = await asker.get()
        pages = [page async for page in asker.pages(4)]
        assert [check_transitions(page) for page in pages] == [4, 4, 4, 3]
        for name, column in whole.items():
            np.testing.assert_array_equal(np.concatenate([page[name] for page in pages]), column)
        steps = whole["step"].tolist()
        for first, limit in ((13, 5), (-4, 2), (-4, 4), (-4, 9), (3, 0), (-2, 0)):
            expected = steps[first:][: limit or None]
            assert (await asker.get(first=first, limit=limit))["step"].tolist() == expected
        assert await asker.get(first=99, limit=1) == {}
        assert (await asker.get([-15, -1, 0]))["step"].tolist() == [0, 4, 0]
        for indices in ([15], [-16]):
            with pytest.raises(InvalidRequestError, match=f"index {indices[0]} of 15"):
                await asker.get(indices)
        for options, message in (
            ({"limit": -1}, "limit: expected at least 0"),
            ({"indices": [1], "first": 2}, "first, limit: expected all beside them"),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                await asker.get(**options)  # type: ignore[arg-type]


async def test_what_is_too_much_at_once_comes_in_pages() -> None:
    one = env(50)
    async with (
        buffer_server(**REPLAY, max_bytes=180_000) as buffers,
        inserting(buffers.address, one.meta) as client,
        asking(buffers.address) as asker,
    ):
        await act(client, one, 1000)
        await client.flush(5)
        with pytest.raises(ResourceExhaustedError, match="ask for fewer at once"):
            await asker.get()
        pages = [check_transitions(page) async for page in asker.pages(250)]
        assert pages == [250] * 4


async def test_a_large_table_with_text_comes_at_once() -> None:
    count = 12_000  # more strings than a message that nobody asked for may have
    tasks = [f"lift {number % 7}" for number in range(count)]
    async with (
        buffer_server(**{**REPLAY, "capacity": count}) as buffers,
        asking(buffers.address) as asker,
        sampling(buffers.address, batch_size=count) as learner,
    ):
        buffers.table.buffer.add_episode({"reward": np.arange(count), "task": tasks})
        buffers.table.changed()
        columns = await asker.get()
        assert list(columns["task"]) == tasks
        batch = await learner.next_batch(20)
        assert batch.columns["task"][0] == tasks[batch.columns["reward"][0]]


async def test_pages_of_episodes_count_episodes() -> None:
    lengths = {1: 3, 2: 3, 3: 2, 4: 4}
    one = ScriptedEnv(1, lambda row, episode: (lengths.get(episode, 9), True))
    async with (
        buffer_server(**REPLAY, storage={"unit": "episode"}) as buffers,
        inserting(buffers.address, one.meta) as client,
        asking(buffers.address) as asker,
    ):
        await act(client, one, 12)
        await client.flush(5)
        first, second = [page async for page in asker.pages(2)]
        assert first["step"].tolist() == [[0, 1, 2], [0, 1, 2]]
        assert [len(episode["step"]) for episode in second] == [2, 4]
        assert await asker.clear() == 12
