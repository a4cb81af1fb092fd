"""The Piper SDK against a simulated arm: what it is told, and what keeps it safe."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from rlightning.testing import wait_until
from rlightning.testing.piper_arm import SimulatedPiper
from rlightning.types import ActionSource, PolicyResponse
from rlightning.utils.config import EnvConfig
from tests.real_env.harness import (
    Recorder,
    assert_same,
    collect,
    in_own_process,
    running,
)

pytestmark = pytest.mark.real_env

LIMIT = 40
LOW = np.array([-150_000, 0, -170_000, -100_000, -70_000, -120_000])
HIGH = np.array([150_000, 180_000, 0, 100_000, 70_000, 120_000])
IN_RADIANS = np.array([180_000 / math.pi] * 6 + [1_000_000])


def directly(actions):
    """Moves an arm through the SDK alone, each time until it has arrived."""
    from piper_sdk import C_PiperInterface_V2

    def position():
        state = piper.GetArmJointMsgs().joint_state
        joints = [getattr(state, f"joint_{i}") for i in range(1, 7)]
        return np.array([*joints, piper.GetArmGripperMsgs().gripper_state.grippers_angle])

    def observed():
        values = (position() / IN_RADIANS).astype(np.float32)
        return {"joints": values[:6], "gripper": values[6:]}

    recorder = Recorder()
    with SimulatedPiper("virtual", speed=1000) as simulated:
        piper = C_PiperInterface_V2(simulated.channel, judge_flag=False, can_auto_init=False)
        piper.CreateCanBus(simulated.channel, bustype="virtual", judge_flag=False)
        piper.ConnectPort()
        wait_until(piper.EnablePiper, 5)
        now = observed()
        for t, action in enumerate(actions[:, 0]):
            target = np.rint(action.astype(np.float64) * IN_RADIANS).astype(int)
            piper.MotionCtrl_2(0x01, 0x01, 100, 0)
            piper.JointCtrl(*(int(one) for one in target[:6]))
            piper.GripperCtrl(int(target[6]), 1000, 0x01, 0)
            wait_until(lambda target=target: (position() == target).all(), 5)
            after = observed()
            truncated = (t + 1) % LIMIT == 0
            recorder.add(
                {key: value[None] for key, value in now.items()},
                np.zeros(1, np.float32),
                np.zeros(1, bool),
                np.array([truncated]),
                {key: value[None] for key, value in after.items()},
            )
            now = after
        piper.DisconnectPort()
    return recorder.columns()


def env_of(simulated, **options):
    return {
        "backend": "piper",
        "task": "piper",
        "max_episode_steps": LIMIT,
        "env_kwargs": {
            "can_port": simulated.channel,
            "bus": "slcan",
            "enable_piper": True,
            "move_speed": 100,
            **options,
        },
    }


async def test_transitions_are_those_of_the_sdk_itself(tmp_path):
    """Over a serial CAN adapter, with actions of which many are outside the limits."""
    with SimulatedPiper("slcan", speed=1000) as simulated:
        env = env_of(simulated, block=True, max_action_age_ms=60_000)
        got = await collect(tmp_path, env, scale=1.2)
        commanded = np.array(simulated.arm.commanded)
    assert (got["action_source"] == ActionSource.CLIPPED).mean() > 0.3
    assert_same(got, in_own_process(directly, got["action"]))
    assert len(commanded) > 200
    assert (commanded >= LOW - 1).all()
    assert (commanded <= HIGH + 1).all()
    assert (np.abs(commanded - commanded[0]).max(axis=0) > 10_000).all()


async def test_the_arm_holds_its_position_while_no_answer_comes(tmp_path):
    with SimulatedPiper("slcan") as simulated:
        env = env_of(simulated, move_speed=20, max_action_age_ms=300, control_hz=4)
        async with running(tmp_path, env, scale=1.0, steps=16) as (services, samples):

            def moves():
                with simulated.lock:
                    return simulated.arm.is_moving

            wait_until(moves, 20)
            services.processes["policy"].freeze()
            wait_until(lambda: not moves(), 2)
            with simulated.lock:
                held = list(simulated.arm.joints)
                asked = len(simulated.arm.commanded)
                # It stopped on its way: the last target that a policy chose is elsewhere.
                assert np.abs(np.subtract(simulated.arm.commanded[-2], held)).max() > 1000
            time.sleep(1.0)
            with simulated.lock:
                # Less than the least that can be commanded, a thousandth of a degree.
                assert np.abs(np.subtract(simulated.arm.joints, held)).max() < 1
                assert len(simulated.arm.commanded) == asked  # it was told once
            services.processes["policy"].thaw()
            wait_until(moves, 10)
            sources = set()
            while ActionSource.HOLD not in sources:
                batch = await samples.next_batch(60)
                sources |= set(batch.columns["action_source"].flat)
            late = batch.columns["action_source"] == ActionSource.HOLD
            # What is stored is where the arm was held, not what the policy answered at last.
            executed, answered = batch.columns["action"], batch.columns["policy_action"]
            assert np.abs(np.degrees(executed[late][0, :6]) - np.array(held) / 1000).max() < 0.1
            assert np.abs(executed[late] - answered[late]).max() > 0.01


def lost_feedback():
    from rlightning.env.piper_env import PiperEnv
    from rlightning.errors import ConfigError, EnvError

    def made(**options):
        values = env_of(simulated, bus="virtual", **options)
        return PiperEnv(EnvConfig(name="arm", **values))

    def act(env, *action):
        return env._step(PolicyResponse(env.env_id, action=np.array(action, np.float32)))

    still = (0.0, 0.1, -0.1, 0.0, 0.0, 0.0, 0.01)
    with SimulatedPiper("virtual", speed=1000) as simulated:
        with pytest.raises(
            ConfigError, match="env_kwargs.speed: no such option; did you mean 'move_speed'"
        ):
            made(speed=3)
        with pytest.raises(ConfigError, match="move_speed: expected 1 to 100, got 0"):
            made(move_speed=0)
        env = made(block=True, env_reset_joint=[0.5, 1.0, -1.0, 0.0, 0.0, 0.0])
        env.init()
        first = env._reset()
        assert np.allclose(first.observation["joints"], [0.5, 1.0, -1.0, 0, 0, 0], atol=1e-4)
        assert first.ts_observed_ns > 0
        with pytest.raises(EnvError, match="is not finite"):
            act(env, *still[:6], np.nan)
        env_ret = act(env, *still)
        assert np.allclose(env_ret.observation["joints"], still[:6], atol=1e-4)
        assert env_ret.action_source is None
        time.sleep(0.6)  # longer than an answer may take
        env_ret = act(env, 1.0, *still[1:])
        assert env_ret.action_source == ActionSource.HOLD
        assert np.allclose(env_ret.executed_action, still, atol=1e-4)
        simulated.mute.set()
        time.sleep(0.3)
        asked = len(simulated.arm.commanded)
        with pytest.raises(EnvError, match=r"no feedback from the arm on 'piper-.*' for 0\.\d+ s"):
            act(env, 1.0, *still[1:])
        with pytest.raises(EnvError, match="no feedback"):
            env._reset()
        env.close()
        assert len(simulated.arm.commanded) == asked  # nothing was sent into the blue
        simulated.mute.clear()
    with SimulatedPiper("virtual") as simulated:
        simulated.mute.set()
        env = made()
        with pytest.raises(EnvError, match="for ever"):
            env.init()
        env.close()
    with SimulatedPiper("virtual") as simulated:
        env = made(enable_piper=False)  # a dry run
        env.init()
        env._reset()
        assert act(env, *still).observation["joints"].tolist() == [0.0] * 6
        env.close()
        assert not simulated.arm.commanded
        assert not any(simulated.arm.enabled)


def test_lost_feedback_late_answers_and_wrong_options():
    in_own_process(lost_feedback)
