"""Learners: what turns rollouts into better weights. Everything here needs the extra `learn`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from rlightning.utils.garbage import uncollected
from rlightning.utils.lazy import lazy_names

if TYPE_CHECKING:
    from rlightning.learner.builder import build_learner
    from rlightning.learner.checkpoints import Checkpoint, Checkpoints
    from rlightning.learner.dqn import DQN
    from rlightning.learner.loop import LearnerStats, Update, train_loop
    from rlightning.learner.ppo import PPO
    from rlightning.learner.replay_loop import train_from_replay
    from rlightning.learner.sac import SAC
    from rlightning.learner.vtrace import VTracePPO

_MODULES = {
    "DQN": "dqn",
    "PPO": "ppo",
    "SAC": "sac",
    "Checkpoint": "checkpoints",
    "Checkpoints": "checkpoints",
    "LearnerStats": "loop",
    "Update": "loop",
    "VTracePPO": "vtrace",
    "build_learner": "builder",
    "train_from_replay": "replay_loop",
    "train_loop": "loop",
}

__all__ = [
    "DQN",
    "PPO",
    "SAC",
    "Checkpoint",
    "Checkpoints",
    "LearnerStats",
    "Update",
    "VTracePPO",
    "build_learner",
    "preload",
    "train_from_replay",
    "train_loop",
]


def preload() -> None:
    """Imports what learning needs, which takes seconds: for a thread beside other start-up work.

    Raises:
        ImportError: The extra `learn` is not installed.
    """
    with uncollected():
        for module in sorted(set(_MODULES.values())):
            import_module(f"{__name__}.{module}")


__getattr__ = lazy_names(
    __name__,
    _MODULES,
    extra="learn",
    libraries={"torch", "tensordict", "torchrl", "safetensors"},
)
