"""Recurrent state: each row its own, whatever shares the batch; episodes, resets, limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from rlightning.errors import (
    CodecError,
    InvalidRequestError,
    PolicyError,
    ResourceExhaustedError,
)
from rlightning.policy import LocalPolicy, PolicyHost, policy_weights
from rlightning.policy.carried import CarriedState
from rlightning.policy.state import StateLayout
from rlightning.policy.weight_store import Weights
from rlightning.policy.weights import dump_weights
from rlightning.types import EnvRet, Mode, MultiAgentEnvRet, PolicyResponse
from rlightning.utils.config import PolicyConfig
from tests.unit.policy.policies import VECTOR, Remembering, meta

REMEMBERING = "tests.unit.policy.policies:Remembering"
ROW_BYTES = 8 * 4 + 8 + 3 * 4 * 4


@asynccontextmanager
async def running(**config: Any) -> AsyncIterator[PolicyHost]:
    fresh = {"device": "cpu", "initial_weights": "random", "type": REMEMBERING}
    host = PolicyHost(PolicyConfig(**{**fresh, **config}))
    await host.start()
    try:
        yield host
    finally:
        await host.close()


@asynccontextmanager
async def local(host: PolicyHost, rows: int = 1) -> AsyncIterator[LocalPolicy]:
    policy = LocalPolicy(host, meta(rows))
    await policy.start()
    yield policy
    await policy.close()


def seen(observation: Any, *, env_id: str = "env", **fields: Any) -> EnvRet:
    """Returns an EnvRet of the observations [rows, 4], or of their first numbers [rows]."""
    array = np.asarray(observation, np.float32)
    if array.ndim == 1:
        array = array[:, None] * np.ones(4, np.float32)
    return EnvRet(env_id, array, **fields)


async def total(policy: LocalPolicy, ret: EnvRet, **options: Any) -> list[float]:
    return (await policy.act(ret, **options)).total.tolist()


async def test_rows_remember_the_same_whatever_shares_the_batch() -> None:
    sizes, steps = (3, 1, 4), 6
    rng = np.random.default_rng(0)
    observations = rng.standard_normal((steps, sum(sizes), 4), np.float32)
    ended = rng.random((steps, sum(sizes))) < 0.3
    ends = np.cumsum(sizes)
    async with running(max_wait_us=60_000_000) as host:
        groups = [LocalPolicy(host, meta(size)) for size in sizes]
        for group in groups:
            await group.start()
        together = []
        for observation, flags in zip(observations, ended, strict=True):
            rets = [
                EnvRet("env", observation[end - n : end], 0.0, flags[end - n : end])
                for n, end in zip(sizes, ends, strict=True)
            ]
            asked = [group.act(ret) for group, ret in zip(groups, rets, strict=True)]
            answers = await asyncio.wait_for(asyncio.gather(*asked), 30)
            together.append(np.concatenate([answer.hidden_out for answer in answers]))
        assert host.batcher.stats.batches == steps
        for group in groups:
            await group.close()
        for row in range(sum(sizes)):
            async with local(host) as alone:
                for t in range(steps):
                    ret = EnvRet("one", observations[t, row : row + 1], 0.0, ended[t, row])
                    answer = await alone.act(ret)
                    np.testing.assert_allclose(answer.hidden_out[0], together[t][row], atol=1e-5)


async def test_a_row_begins_anew_exactly_when_its_episode_has_ended() -> None:
    async with running() as host, local(host, 3) as policy:
        assert await total(policy, seen([1, 2, 3])) == [1, 2, 3]
        flags = {"last_terminated": [False, True, False], "last_truncated": [False, False, True]}
        response = await policy.act(seen([1, 2, 3], **flags))
        assert response.total.tolist() == [2, 2, 3]
        first = await policy.act(seen([1, 2, 3]), reset_state=True)
        assert first.total.tolist() == [1, 2, 3]
        np.testing.assert_array_equal(first.hidden_out[1:], response.hidden_out[1:])
        assert await total(policy, seen([1, 2, 3])) == [2, 4, 6]


async def test_an_episode_that_ended_where_nobody_asked_is_seen_by_its_id() -> None:
    async with running() as host, local(host, 2) as policy:
        ids = np.array([4, 5])
        assert await total(policy, seen([1, 2], episode_id=ids)) == [1, 2]
        assert await total(policy, seen([1, 2], episode_id=ids)) == [2, 4]
        assert await total(policy, seen([1, 2], episode_id=np.array([4, 6]))) == [3, 2]
        assert await total(policy, seen([1, 2])) == [4, 4]


async def test_rows_that_come_by_themselves_keep_their_own() -> None:
    async with running() as host, local(host, 4) as policy:
        assert await total(policy, seen([1, 2], rows=np.array([0, 3], np.int32))) == [1, 2]
        assert await total(policy, seen([9], rows=np.array([2], np.int32))) == [9]
        assert await total(policy, seen([1, 1, 1, 1])) == [2, 1, 10, 3]
        for rows, message in [
            ([4], r"rows 0 to 3, .*num_envs.*, got rows 4 to 4"),
            ([0, 1], "expected 1 rows, got 2"),
        ]:
            with pytest.raises(InvalidRequestError, match=message):
                await policy.act(seen([9], rows=np.array(rows, np.int32)))
        with pytest.raises(InvalidRequestError, match="ascending"):
            await policy.act(seen([9, 9], rows=np.array([1, 0], np.int32)))
        with pytest.raises(InvalidRequestError, match="episode_id: expected 1 episodes, got 2"):
            await policy.act(seen([9], episode_id=np.array([1, 2])))
        with pytest.raises(InvalidRequestError, match="got rows 0 to 4"):
            await policy.act(seen([9] * 5))
        assert await total(policy, seen([1, 1, 1, 1])) == [3, 2, 11, 4]


async def test_one_row_may_come_without_a_leading_dimension() -> None:
    async with running() as host, local(host) as policy:
        row = EnvRet("env", np.full(4, 2, np.float32))
        assert [(await policy.act(row)).total for _ in range(3)] == [2, 4, 6]


async def test_a_history_of_frames_is_a_state_too() -> None:
    async with running() as host, local(host) as policy:
        oldest = [(await policy.act(seen([n]))).oldest[0, 0] for n in range(1, 6)]
        assert oldest == [0, 0, 1, 2, 3]


async def test_a_step_that_fails_is_no_step_of_the_state() -> None:
    async with running() as host, local(host) as policy:
        assert await total(policy, seen([1])) == [1]
        with pytest.raises(PolicyError, match="on fire"):
            await policy.act(seen([101], last_terminated=True))
        assert await total(policy, seen([1])) == [2]


async def test_an_action_that_is_no_number_is_no_step_of_that_group_alone() -> None:
    class Sums(Remembering):
        def initial_state(self, num_rows: int) -> Any:
            return torch.zeros(num_rows)

        def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
            after = env_ret.state + env_ret.observation[:, 0]  # type: ignore[attr-defined]
            return PolicyResponse("env", action=after, next_state=after)

    with patch("rlightning.policy.host.build_policy", lambda c, r: Sums(c, r)):
        async with running(max_wait_us=60_000_000) as host:
            async with local(host, 2) as good, local(host, 2) as bad:

                async def both(mine: list[float], theirs: list[float]) -> list[Any]:
                    asked = good.act(seen(mine)), bad.act(seen(theirs, env_id="arm"))
                    got = await asyncio.gather(*asked, return_exceptions=True)
                    return [getattr(one, "action", one) for one in got]

                await both([1, 2], [1, 2])
                mine, error = await both([1, 1], [1, np.nan])
                assert mine.tolist() == [2, 3]
                assert isinstance(error, PolicyError)
                assert "Sums.rollout_step failed for env 'arm': 'action' is NaN, in row 1" in str(
                    error
                )
                mine, theirs = await both([1, 1], [1, 1])
                assert (mine.tolist(), theirs.tolist()) == ([3, 4], [2, 3])
        assert host.batcher.stats.batches == 3


async def test_new_weights_leave_what_is_remembered() -> None:
    async with running() as host, local(host) as policy:
        assert await total(policy, seen([1])) == [1]
        await host.publish(Weights.of(1, dump_weights(policy_weights(host._policy))))
        response = await policy.act(seen([1]))
        assert (response.total.tolist(), response.policy_version) == ([2], 1)


async def test_how_rows_begin_may_depend_on_the_weights() -> None:
    def initial(self: Remembering, num_rows: int) -> Any:
        bias = self.gru.bias_ih[:8].expand(num_rows, 8)
        return {"hidden": bias, "more": (bias[:, 0].double(), torch.zeros(num_rows, 3, 4))}

    with patch.object(Remembering, "initial_state", initial):
        async with running() as host, local(host) as policy:
            tensors = {k: torch.full_like(v, 2) for k, v in policy_weights(host._policy).items()}
            await host.publish(Weights.of(1, dump_weights(tensors)))
            assert await total(policy, seen([1]), reset_state=True) == [3]


async def test_the_state_that_an_action_was_chosen_in_is_stored_with_it() -> None:
    async with running(store_state=True) as host, local(host, 2) as policy:
        await policy.act(seen([1, 2]))
        response = await policy.act(seen([1, 2], last_terminated=[False, True]))
        assert list(response.to_dict()) == ["action", "hidden_out", "total", "oldest", "state"]
        assert response.state["more"][0].tolist() == [1, 0]
        assert response.state["hidden"].shape == (2, 8)


async def test_agents_of_a_row_end_together() -> None:
    space = {"a": VECTOR, "b": VECTOR}

    class Team(Remembering):
        def initial_state(self, num_rows: int) -> Any:
            return torch.zeros(num_rows)

        def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
            after = env_ret.state + 1  # type: ignore[attr-defined]
            return PolicyResponse("env", action=after, next_state=after)

    with patch("rlightning.policy.host.build_policy", lambda c, r: Team(c, r)):
        async with running() as host:
            policy = LocalPolicy(host, meta(2, observation=space))
            await policy.start()
            both = {agent: np.zeros((2, 4), np.float32) for agent in space}
            counts = []
            for a, b in [(0, 0), (1, 0), (1, 1)]:
                ended = {"a": np.array([a, 0], bool), "b": np.array([b, 0], bool)}
                ret = MultiAgentEnvRet("env", both, {"a": 0, "b": 0}, ended, {"a": 0, "b": 0})
                counts.append((await policy.act(ret)).action.tolist())
            assert counts == [[1, 1], [2, 2], [1, 3]]


async def test_what_is_kept_is_counted_and_limited() -> None:
    limits = {"max_session_state_bytes": 10 * ROW_BYTES, "max_state_bytes": 15 * ROW_BYTES}
    async with running(**limits) as host:
        first, second, third = (LocalPolicy(host, meta(rows)) for rows in (10, 6, 11))
        await first.start()
        kept = host.describe()
        assert (kept["state_groups"], kept["state_bytes"]) == (1, 10 * ROW_BYTES)
        with pytest.raises(ResourceExhaustedError, match=r"policy.max_state_bytes of the server"):
            await second.start()
        with pytest.raises(ResourceExhaustedError, match=r"11 rows.*max_session_state_bytes"):
            await third.start()
        assert host.describe()["groups"] == 1
        await first.close()
        assert host.state_bytes == 0
        await second.start()
        assert await total(second, seen([1] * 6)) == [1] * 6


@pytest.mark.parametrize(
    ("next_state", "message"),
    [
        (None, "next_state: expected 'next_state.hidden', .*, got 'next_state'"),
        ({"hidden": torch.zeros(2, 8), "more": ()}, r"expected .*'next_state.more\[0\]'"),
        (
            {"hidden": torch.zeros(1, 8), "more": (torch.zeros(2).double(), torch.zeros(2, 3, 4))},
            r"'next_state.hidden' came as float32\[1, 8\], expected float32\[2, 8\]",
        ),
        (
            {"hidden": torch.zeros(2, 8), "more": (torch.zeros(2), torch.zeros(2, 3, 4))},
            r"'next_state.more\[0\]' came as float32\[2\], expected float64\[2\]",
        ),
        ("none", "the response has no 'next_state', though initial_state returns one"),
    ],
)
async def test_a_state_that_is_not_like_the_first_is_an_error(
    next_state: Any, message: str
) -> None:
    data = {} if next_state == "none" else {"next_state": next_state}
    async with running() as host, local(host, 2) as policy:
        answer = PolicyResponse("env", action=torch.zeros(2), **data)
        with patch.object(Remembering, "rollout_step", return_value=answer):
            with pytest.raises(PolicyError, match=message):
                await policy.act(seen([1, 2]))
        assert await total(policy, seen([1, 2])) == [1, 2]


async def test_a_first_state_without_rows_is_told_to_who_opens() -> None:
    with patch.object(Remembering, "initial_state", return_value={"h": torch.zeros(8)}):
        async with running() as host:
            with pytest.raises(PolicyError, match=r"'initial_state.h' came as float32\[8\]"):
                await host.open_group(meta())


async def test_a_stored_state_may_not_take_the_name_of_an_output() -> None:
    answer = PolicyResponse("env", action=torch.zeros(1), state=torch.zeros(1), next_state=None)
    async with running(store_state=True) as host, local(host) as policy:
        answer.next_state = host._policy.initial_state(1)
        with patch.object(Remembering, "rollout_step", return_value=answer):
            with pytest.raises(PolicyError, match="policy.store_state adds 'state'"):
                await policy.act(seen([1]))


def layout() -> StateLayout:
    policy = Remembering(PolicyConfig(device="cpu"), "eval")
    policy.init_eval(env_meta=meta())
    return StateLayout(policy)


def test_carried_state_follows_rows_and_episodes() -> None:
    carried = CarriedState(layout().initial, 3)

    def step(**fields: Any) -> list[float]:
        ret = seen([0] * len(fields.get("rows", range(3))), **fields)
        state = carried.of(ret)
        totals: list[float] = state["more"][0].tolist()
        state["more"][0][:] += 1
        carried.keep(ret, state)
        return totals

    assert step(episode_id=np.array([1, 2, 3])) == [0, 0, 0]
    assert step(episode_id=np.array([1, 2, 4])) == [1, 1, 0]
    assert step(rows=np.array([1], np.int32)) == [2]
    assert step() == [2, 3, 1]
    carried.reset()
    assert step() == [0, 0, 0]
    with pytest.raises(InvalidRequestError, match=r"declares 3 \(num_envs\), got row 3"):
        step(rows=np.array([3], np.int32))
    with pytest.raises(CodecError, match="not like the initial state"):
        carried.keep(seen([0]), {"hidden": np.zeros(1)})
    with pytest.raises(CodecError, match=r"expected arrays \[1, ...\]"):
        CarriedState({"hidden": 3}, 1)


def test_a_carried_state_is_read_and_given_back_as_it_was() -> None:
    states = layout()
    state = CarriedState(states.initial, 2).of(seen([0, 0]))
    state["hidden"][:] = np.arange(16).reshape(2, 8)
    again = states.arrays(states.read_carried(state))
    np.testing.assert_array_equal(again["hidden"], state["hidden"])
    assert isinstance(again["more"], tuple)
    for wrong, message in [
        ({**state, "hidden": np.zeros((2, 9), np.float32)}, r"float32\[2, 9\], expected"),
        ({**state, "hidden": 7}, "'state.hidden' came as int"),
        (7, "expected 'state.hidden'"),
        ({}, "expected 'state.hidden'"),
    ]:
        with pytest.raises(InvalidRequestError, match=message):
            states.read_carried(wrong)


async def test_a_carried_state_has_the_rows_that_ask() -> None:
    async with running() as host, local(host, 4):
        assert host.states is not None
        initial = CarriedState(host.states.initial, 2).of(seen([0, 0]))
        state = host.states.read_carried(initial)
        with pytest.raises(InvalidRequestError, match="state: expected 3 rows, got 2"):
            host.enqueue(seen([1, 2, 3]), Mode.EXPLORE, state=state)
        ret = seen([1, 2], rows=np.array([1, 3], np.int32))
        await host.enqueue(ret, Mode.EXPLORE, state=state).wait()
        assert host.states.arrays(state)["more"][0].tolist() == [1, 2]
