"""A point on a line that shall be moved to 0: the smallest env in which there is something to learn."""

import gymnasium as gym
import numpy as np

LENGTH = 8
STEP = 0.25


class Reach(gym.Env):
    """Reward: minus the distance from 0. Nobody who acts at random gets more than about -4."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gym.spaces.Box(-3.0, 3.0, (1,), np.float32)

    def __init__(self, continuous=False, render_mode=None):
        self.render_mode = render_mode
        discrete = gym.spaces.Discrete(3, start=-1)
        self.action_space = gym.spaces.Box(-2.0, 2.0, (1,), np.float32) if continuous else discrete

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._x, self._steps = self.np_random.uniform(-1.0, 1.0), 0
        return self._observe(), {}

    def step(self, action):
        self._x = float(np.clip(self._x + STEP * float(np.asarray(action).item()), -3.0, 3.0))
        self._steps += 1
        truncated = self._steps == LENGTH
        return self._observe(), -abs(self._x), False, truncated, {"is_success": abs(self._x) < STEP}

    def render(self):
        picture = np.zeros((33, 61, 3), np.uint8)
        picture[:, round(30 + 10 * self._x)] = 255
        return picture

    def _observe(self):
        return np.array([self._x], np.float32)


gym.register("Reach-v0", Reach)
gym.register("ReachBox-v0", Reach, kwargs={"continuous": True})
