"""Lets a policy server act in an env of this machine: python robot.py HOST:PORT [STEPS]."""

import sys

import gymnasium

from rlightning.policy import RemotePolicy
from rlightning.types import EnvMeta, EnvRet

env = gymnasium.make("CartPole-v1")  # your robot
spec = EnvMeta("robot", env.action_space, env.observation_space, 1)

with RemotePolicy(sys.argv[1] if sys.argv[1:] else sys.exit(__doc__), spec) as policy:
    observation, _ = env.reset(seed=0)
    episode_return = 0.0
    for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 1000):
        answer = policy.act(EnvRet("robot", observation))
        observation, reward, terminated, truncated, _ = env.step(answer.action)
        episode_return += float(reward)
        if terminated or truncated:
            print(f"return {episode_return:g}, policy version {answer.policy_version}")
            (observation, _), episode_return = env.reset(), 0.0
