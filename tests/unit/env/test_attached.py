"""An attached group whose server stops: what its client brought is stored, whatever the order."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest

from rlightning.actor import ActorControl, run_actor
from rlightning.buffer.local_buffer import LocalBuffer
from rlightning.env.attached import AttachedGroup
from rlightning.env.episodes import EpisodeLog
from rlightning.errors import InvalidRequestError, PolicyError
from rlightning.rpc.protocol import Arrival
from rlightning.services.env_server.unasked import UnaskedSteps
from rlightning.types import ActionSource, EnvMeta, PolicyResponse
from rlightning.utils.config import BufferConfig
from rlightning.v1 import env_service_pb2 as pb
from rlightning.wire import Reader, Writer, fill_env_ret, fill_policy_response
from tests.unit.env.test_unasked import SPACE, answer, step


class Session(SimpleNamespace):
    """A session that keeps what is sent."""

    client_id, spec, owner = "robot", EnvMeta("e", SPACE, gym.spaces.Box(-1e3, 1e3, (1,)), 1), None

    async def send(self, message):
        if isinstance(message, pb.AttachResponse):  # answers are encoded
            self.acks.append(message.ack)


class Policy:
    """Answers with the observation, or raises."""

    def __init__(self):
        self.error = None
        self.asked = 0

    async def act(self, env_ret, **ignored):
        self.asked += 1
        if self.error is not None:
            raise self.error
        return PolicyResponse(env_ret.env_id, action=env_ret.observation, policy_version=1)


class Attached:
    """A group, its actor, and the buffer behind them, as the env server puts them together."""

    def __init__(self):
        self.session = Session(acks=[])
        self.group = AttachedGroup(self.session, EpisodeLog(), lambda rows: None)
        self.group.wants_acks = True
        self.buffer = LocalBuffer(BufferConfig(type="ReplayBuffer", capacity=100))
        self.steps = UnaskedSteps(self.buffer.writer(self.group.meta))
        self.group.store = self.steps.store
        self.control, self.policy = ActorControl(), Policy()
        actor = run_actor(self.group, self.policy, self.steps, control=self.control)
        self.actor = asyncio.create_task(actor)

    async def take(self, *numbers, answered=None):
        request, writer = pb.AttachRequest(), Writer()
        for number in numbers:
            one = request.steps.steps.add(seq=number + 1, wants_action=number == numbers[-1])
            executed = (ActionSource.POLICY, number - 1) if number else ()
            fill_env_ret(one.env_ret, step(number, *executed), writer)
            if number == answered:
                fill_policy_response(one.response, answer(number), writer)
        data = writer.finish(request)
        await self.group.take(Reader(pb.AttachRequest, data), Arrival(0, 0, 0), 0)

    async def pause(self):
        for _ in range(20):
            await asyncio.sleep(0)

    async def end(self):
        self.control.stop()
        self.group.leave()
        await self.actor
        await self.group.drain()
        await self.steps.finish()
        self.buffer.table.buffer.truncate_group(self.group.env_id)
        return self.buffer.table.buffer.get_all()


@pytest.mark.parametrize("several", [True, False])
async def test_a_step_that_comes_after_the_actor_has_ended_is_joined(several):
    attached = Attached()
    await attached.take(0)
    await attached.pause()
    attached.control.stop()  # as a server does that stops; its clients hear of it a moment later
    await attached.take(1)
    await attached.pause()
    assert attached.actor.done()
    await (attached.take(2, 3) if several else attached.take(2))
    columns = await attached.end()
    last = 3 if several else 2
    np.testing.assert_array_equal(columns["observation"].reshape(-1), np.arange(last))
    np.testing.assert_array_equal(columns["next_observation"].reshape(-1), np.arange(1, last + 1))
    np.testing.assert_array_equal(columns["action"].reshape(-1), np.arange(last))


async def test_a_step_to_which_no_answer_came_is_the_outcome_of_the_one_before():
    attached = Attached()
    attached.policy.error = PolicyError("not now")
    await attached.take(0, 1, answered=0)
    await attached.pause()
    assert attached.policy.asked == 1
    columns = await attached.end()
    np.testing.assert_array_equal(columns["observation"].reshape(-1), [0])
    np.testing.assert_array_equal(columns["next_observation"].reshape(-1), [1])


async def test_no_ack_after_the_last_one_says_that_more_is_taken():
    attached = Attached()
    await attached.take(*range(40))  # too many to be acked before the actor has begun
    attached.group.leave()
    await attached.take(40)
    await attached.pause()
    assert [ack.closing for ack in attached.session.acks] == [True, True]
    assert {ack.taken_seq for ack in attached.session.acks} == {40}
    await attached.end()


async def test_who_takes_over_from_a_driver_in_a_step_begins_without_its_outcome():
    attached = Attached()
    attached.actor.cancel()
    group = attached.group
    group.store = None  # drivers step it
    await attached.take(0)
    first = await group.reset()
    stepping = asyncio.create_task(group.step(answer(0)))
    await attached.pause()
    stepping.cancel()
    await attached.take(1)
    env_ret = await group.reset()
    assert env_ret.observation == first.observation + 1
    assert env_ret.last_reward.tolist() == [0.0]
    assert env_ret.executed_action is None


async def refusal(broken):
    """What a client is told of a step."""
    group = AttachedGroup(Session(acks=[]), EpisodeLog(), lambda rows: None)
    request, writer = pb.AttachRequest(), Writer()
    fill_env_ret(request.steps.steps.add(seq=1).env_ret, broken, writer)
    reader = Reader(pb.AttachRequest, writer.finish(request))
    with pytest.raises(InvalidRequestError) as caught:
        await group.take(reader, Arrival(0, 0, 0), 0)
    return str(caught.value)


def with_last(observation):
    info = {"final_rows": np.zeros(1, np.int32), "final_observation": observation}
    return replace(step(1), info=info)


async def test_numbers_that_would_spoil_an_update_are_refused():
    nan = np.full((1, 1), np.nan, np.float32)
    executed = replace(step(1), executed_action=nan)
    assert await refusal(executed) == "step 1: executed_action: NaN or infinite"
    assert await refusal(with_last(nan)) == "step 1: final_observation: NaN or infinite"


async def test_a_last_observation_that_is_none_of_the_space_is_named():
    for broken in (np.zeros((1, 3), np.float32), np.zeros((2, 1), np.float32), np.zeros((1, 1))):
        expected = "step 1: final_observation: expected float32[1, 1], got "
        assert (await refusal(with_last(broken))).startswith(expected)


async def test_a_step_whose_pictures_are_decoded_while_the_server_stops_is_not_acked(monkeypatch):
    attached, decoded = Attached(), asyncio.Event()

    async def decode(seq, env_ret, cameras):
        await decoded.wait()

    await attached.take(0, 1)
    await attached.pause()
    monkeypatch.setattr(attached.group, "_cameras", object())
    monkeypatch.setattr(attached.group, "_decode", decode)
    taking = asyncio.create_task(attached.take(2))
    await attached.pause()
    columns = await attached.end()
    decoded.set()
    await taking
    np.testing.assert_array_equal(columns["observation"].reshape(-1), [0])
    assert (attached.session.acks[-1].taken_seq, attached.session.acks[-1].closing) == (2, True)
