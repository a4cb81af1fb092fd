"""Envs in processes that can be told to make another one."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rlightning.env.utils.venv import ReconfigureSubprocEnv
from rlightning.errors import EnvError

pytestmark = pytest.mark.slow


class Jammed(EnvError):
    """Cannot be pickled with a lock in it, nor be made again from its text alone."""

    def __init__(self, joint, what):
        super().__init__(f"{joint} is jammed")
        self.what = what


class Arm:
    """An env of gym's older interface, as robot simulators have it."""

    def __init__(self, task):
        if task < 0:
            raise OSError("no such task")
        self.task = task
        self.state = 0
        self.lock = threading.Lock()
        self.unknown = Unknown()

    def seed(self, seed):
        self.state = seed

    def reset(self):
        return {"state": np.array([self.task, self.state])}

    def step(self, action):
        if action > 100:
            os._exit(3)
        if action == 50:
            raise Jammed("elbow", threading.Lock())
        if action == 51:
            raise Jammed("wrist", 7)
        if action > 10:
            raise RuntimeError("too far")
        self.state += int(action)
        return (
            {"state": np.array([self.task, self.state])},
            0.5,
            self.state > 5,
            {"pid": os.getpid()},
        )

    def set_init_state(self, state):
        if state == "leave a child and die":
            child = os.fork()
            if not child:
                time.sleep(60)
                os._exit(0)
            Path(os.environ["CHILD_OF_ARM"]).write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        self.state = state
        return self.reset()

    def check_success(self):
        return self.state > 5

    def get_sim_state(self):
        return np.array([self.state])

    def close(self):
        pass


def test_envs_step_in_processes_and_make_others():
    venv = ReconfigureSubprocEnv([partial(Arm, 1), partial(Arm, 2)])
    try:
        venv.seed(3)
        assert [one["state"].tolist() for one in venv.reset()] == [[1, 3], [2, 4]]
        observation, reward, done, info = venv.step(np.array([1, 2]))
        assert [one["state"].tolist() for one in observation] == [[1, 4], [2, 6]]
        assert (reward.tolist(), done.tolist()) == ([0.5, 0.5], [False, True])
        processes = [one["pid"] for one in info]
        assert len({os.getpid(), *processes}) == 3
        venv.step([1], id=1)
        assert [one.tolist() for one in venv.get_sim_state()] == [[4], [7]]
        assert venv.check_success() == [False, True]
        assert venv.set_init_state([9], id=[0])[0]["state"].tolist() == [1, 9]
        venv.set_env_attr("state", 0)
        assert venv.get_env_attr("state") == [0, 0]

        venv.reconfigure_env_fns([partial(Arm, 7)], id=[1])
        assert [one["state"].tolist() for one in venv.reset()] == [[1, 0], [7, 0]]
        assert [one["pid"] for one in venv.step([0, 0])[3]] == processes  # the same processes

        with pytest.raises(EnvError, match="RuntimeError: too far"):
            venv.step([11, 2])
        # Which does not end it, and what came of the other is not taken for what comes next.
        states = [one["state"].tolist() for one in venv.step([1, 1])[0]]
        assert states == [[1, 1], [7, 3]]
        with pytest.raises(EnvError, match="no such task"):
            venv.reconfigure_env_fns([partial(Arm, -1)], id=[1])
        with pytest.raises(EnvError, match="there is no env"):
            venv.reset(id=1)
        venv.reconfigure_env_fns([partial(Arm, 8)], id=[1])
        with pytest.raises(ValueError, match="expected 2"):
            venv.step([1])
        with pytest.raises(EnvError, match="ended with code 3"):
            venv.step([101], id=[1])
        with pytest.raises(EnvError, match="has ended"):
            venv.reset(id=[1])
    finally:
        venv.close()


def test_an_env_that_cannot_be_made():
    with pytest.raises(EnvError, match="no such task"):
        ReconfigureSubprocEnv([partial(Arm, 1), partial(Arm, -1)])


def test_a_killed_process_whose_child_lives_on_is_told_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("CHILD_OF_ARM", str(tmp_path / "pid"))
    venv = ReconfigureSubprocEnv([partial(Arm, 1)])
    begun = time.monotonic()
    with pytest.raises(EnvError, match="has ended with code -9"):
        venv.set_init_state(["leave a child and die"])
    venv.close()
    child = int((tmp_path / "pid").read_text())
    os.kill(child, signal.SIGKILL)  # it is there
    assert time.monotonic() - begun < 30


class Unknown:
    """Cannot be unpickled anywhere."""

    def __reduce__(self):
        return open, ("no such file",)


def test_what_cannot_go_between_processes_is_told_in_one_line():
    with pytest.raises(EnvError, match=r"^what was given to reconfigure of an env cannot be pickl"):
        ReconfigureSubprocEnv([partial(Arm, threading.Lock())])
    venv = ReconfigureSubprocEnv([partial(Arm, 1), partial(Arm, 2)])
    try:
        for attribute, value, told in (
            ("lock", threading.Lock(), "what was given to setattr of an env cannot be pickled"),
            ("far", Unknown(), "what was given to an env cannot be unpickled in its process"),
        ):
            with pytest.raises(EnvError, match=f"^{told}: [^\n]*$"):
                venv.set_env_attr(attribute, value)
        with pytest.raises(EnvError, match=r"^what getattr of an env returned cannot be pickled: "):
            venv.get_env_attr("lock")
        with pytest.raises(EnvError, match=r"^what an env returned cannot be unpickled outside "):
            venv.get_env_attr("unknown")
        with pytest.raises(EnvError, match="what was given to step of an env cannot be pickled"):
            venv.step([1, threading.Lock()])
        for action, joint in ((50, "elbow"), (51, "wrist")):
            with pytest.raises(EnvError, match=f"^Jammed: {joint} is jammed\n"):
                venv.step([action, 1])
        assert venv.get_env_attr("task") == [1, 2]  # they live on, and answer what they are asked
    finally:
        venv.close()
