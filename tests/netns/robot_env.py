"""A robot as far as a cluster can tell: two cameras, its state and an instruction; and the process that it runs in.

`python -m tests.netns.robot_env HOST PORT OPTIONS` attaches it with the options of `RemoteEnvClient` as JSON. It answers
each line on stdin with its status, as JSON; after the line `stop` it tells what was executed, and ends.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time

import gymnasium as gym
import numpy as np

from rlightning.env.remote_env import RemoteEnvClient

SHAPE = (480, 640, 3)
CAMERAS = ("front", "wrist")
# Pixels of which the checks are made.
SAMPLED = np.s_[::60, ::80]


def text_of(episode):
    return f"put cup {episode} on the shelf, then come back"


def panorama(seed):
    """A wide picture with detail at every scale, as camera pictures have."""
    random, width = np.random.default_rng(seed), 2 * SHAPE[1]
    total = np.zeros((SHAPE[0], width, 3))
    for size, weight in ((160, 80), (32, 40), (8, 12), (1, 3)):
        shape = (SHAPE[0] // size, width // size, 3)
        grid = random.uniform(-weight, weight, shape)
        total += np.kron(grid, np.ones((size, size, 1)))
    return (128 + total).clip(0, 255).astype(np.uint8)


PANORAMAS = [panorama(seed) for seed in range(len(CAMERAS))]


def pictures_of(step):
    """What the cameras see at a step: they turn with the robot."""
    offset = 8 * step % SHAPE[1]
    return {
        name: wide[:, offset : offset + SHAPE[1]]
        for name, wide in zip(CAMERAS, PANORAMAS, strict=True)
    }


class Robot(gym.Env):
    """Notes what it executes, and when.

    `state` is (episode, step). An action is (episode, step of the observation that it answers, number in its chunk).

    Attributes:
        executed: (monotonic ns, episode, step, *action) of each step.
        seen: (monotonic ns, episode, step) of each observation.
    """

    length = 300
    action_space = gym.spaces.Box(0, 2**40, (3,), np.int64)

    def __init__(self):
        image = gym.spaces.Box(0, 255, SHAPE, np.uint8)
        text = gym.spaces.Text(200, charset=[chr(code) for code in range(32, 127)])
        text.max_bytes = 256
        state = gym.spaces.Box(0, 2**40, (2,), np.int64)
        named = dict.fromkeys(CAMERAS, image)
        self.observation_space = gym.spaces.Dict({**named, "instruction": text, "state": state})
        self.executed, self.seen = [], []
        self._episode, self._step = -1, 0

    def _observe(self):
        self.seen.append((time.monotonic_ns(), self._episode, self._step))
        state = np.array([self._episode, self._step])
        return {
            **pictures_of(self._step),
            "instruction": text_of(self._episode),
            "state": state,
        }

    def reset(self, *, seed=None, options=None):
        self._episode, self._step = self._episode + 1, 0
        return self._observe(), {}

    def step(self, action):
        self.executed.append((time.monotonic_ns(), self._episode, self._step, *action.tolist()))
        self._step += 1
        return self._observe(), float(self._step), False, self._step == self.length, {}


def main(host, port, options):
    robot = Robot()
    client = RemoteEnvClient(robot, host, int(port), name="robot", **json.loads(options))

    def listen():
        for line in sys.stdin:
            if line.strip() == "stop":
                client.stop()
                return
            print(json.dumps(dataclasses.asdict(client.status)), flush=True)
        client.stop()

    threading.Thread(target=listen, daemon=True).start()
    with client:
        client.run()
        status = dataclasses.asdict(client.status)
    told = {"executed": robot.executed, "seen": robot.seen, "status": status}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
