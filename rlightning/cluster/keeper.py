"""Decides which weights of a training run are kept as checkpoints."""

from __future__ import annotations

import time
from pathlib import Path

from rlightning.cluster.backend import Backend
from rlightning.cluster.monitor import Monitor
from rlightning.cluster.runs import Run
from rlightning.errors import ClusterError, RLightningError
from rlightning.learner.checkpoints import Checkpoints
from rlightning.learner.loop import Algorithm, LearnerStats
from rlightning.utils.config import MainConfig

# Writing each of many small improvements would hold the learner up.
_BEST_EVERY_S = 1.0


class Keeper:
    """Keeps the latest checkpoint, to go on from, and the weights of the best mean return.

    The mean is that of the last `train.target_episodes` episodes, so it belongs to the versions
    that acted in them; the weights are the newest ones at that moment.

    Args:
        config: Config of the run.
        run: Its folder.
        backend: Whose buffer writes checkpoints of its own.
        monitor: Knows the mean return.
        algorithm: What learns.
        resumed: The buffer's checkpoint that this run goes on from, if it does: it is kept until a
            checkpoint of this run takes its place.
    """

    def __init__(
        self,
        config: MainConfig,
        run: Run,
        backend: Backend,
        monitor: Monitor,
        algorithm: Algorithm,
        resumed: str | None = None,
    ) -> None:
        save_dir = config.train.save_dir
        self._checkpoints = Checkpoints(
            run.checkpoints if save_dir is None else Path(save_dir), config.train.save_keep
        )
        self._resumed = [] if resumed is None else [resumed]
        self._saved = -1  # updates up to the last checkpoint
        self._replays = config.sampled.type == "ReplayBuffer"
        self._backend = backend
        self._monitor = monitor
        self._algorithm = algorithm
        self._best: float | None = None
        self._next_best = 0.0

    def published(self, stats: LearnerStats, weights: bytes) -> None:
        """Keeps weights that were published if the mean return is the best so far."""
        mean = self._monitor.mean_return
        better = mean is not None and (self._best is None or mean > self._best)
        if better and time.monotonic() >= self._next_best:
            self._keep_best(stats, weights, mean)

    def save(self, stats: LearnerStats, weights: bytes) -> None:
        """Writes a checkpoint to go on from, unless nothing was learned since the last one.

        Raises:
            ClusterError: A library, such as torch for a GPU, could not give what is to be written
                while the run was being stopped.
        """
        if stats.updates == self._saved:
            return
        mean = self._monitor.mean_return
        self._checkpoints.save(
            stats,
            weights,
            self._state(),
            mean_return=mean,
            buffer_checkpoint=self._checkpoint_buffer(),
        )
        self._saved = stats.updates
        self._resumed = []
        if mean is not None and (self._best is None or mean > self._best):
            self._keep_best(stats, weights, mean)

    def _state(self) -> bytes:
        from rlightning.learner.state_file import dump_state  # not before now: it loads torch

        try:
            return dump_state(self._algorithm.state())
        except RuntimeError as error:
            if isinstance(error.__context__, KeyboardInterrupt):  # or it would be taken for that
                raise ClusterError(f"no checkpoint was written: {error}") from error
            raise

    def _keep_best(self, stats: LearnerStats, weights: bytes, mean: float | None) -> None:
        self._checkpoints.save(stats, weights, link="best", mean_return=mean)
        self._best = mean
        self._next_best = time.monotonic() + _BEST_EVERY_S

    def _checkpoint_buffer(self) -> str | None:
        if not self._replays:
            return None
        try:
            return self._backend.checkpoint_buffer([*self._resumed, *self._checkpoints.of_buffer])
        except RLightningError:  # a learner that saves in its end must save all the same
            return None
