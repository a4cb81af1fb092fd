"""Follows a training run: counts, records episodes, and tells when the target is reached."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from math import inf

from rlightning.cluster.backend import Backend
from rlightning.cluster.display import Display
from rlightning.cluster.progress import Progress, describe_run, find_latencies
from rlightning.cluster.runs import RUNNING, Run
from rlightning.cluster.scalars import Scalars
from rlightning.env.episodes import EpisodeRecord
from rlightning.errors import RemoteError
from rlightning.learner.loop import LearnerStats, Update
from rlightning.utils.config import TrainConfig

_PERIOD_S = 0.5
_RATE_WINDOW = 11  # looks, so that the rate is that of the last 5 s


class Monitor:
    """Looks at the services every half second, on a thread of its own.

    Use as a context manager; leaving it takes a last look.

    Attributes:
        progress: The state at the last look.
        reached: Set when the mean return of the last `train.target_episodes` episodes reached
            `train.target_return`.
        failed: Set when looking raised something else than the absence of a service; `check` raises
            it.
    """

    def __init__(
        self,
        backend: Backend,
        learner: LearnerStats,
        *,
        run: Run,
        display: Display,
        scalars: Scalars,
        train: TrainConfig,
    ) -> None:
        self.progress = Progress()
        self.reached = threading.Event()
        self.failed = threading.Event()
        self._backend = backend
        self._learner = learner
        self._steps_before = learner.env_steps  # of the run that this one goes on from
        self._run = run
        self._display = display
        self._scalars = scalars
        self._train = train
        self._error: Exception | None = None
        self._started = time.monotonic()
        self._returns: deque[float] = deque(maxlen=train.target_episodes)
        self._lengths: deque[int] = deque(maxlen=train.target_episodes)
        self._episodes = 0
        self._told_of_cut = False
        self._rates: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)
        self._staleness: float | None = None
        self._reached: tuple[float, int] | None = None  # mean return and env steps
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def mean_return(self) -> float | None:
        """Mean return of the last `train.target_episodes` episodes; None before so many ended."""
        full = len(self._returns) == self._train.target_episodes
        return self.progress.mean_return if full else None

    def updated(self, update: Update) -> None:
        """Takes note of one update of the learner; called by its loop."""
        self._staleness = update.staleness
        ages = {
            "charts/max_staleness": update.max_staleness,
            "charts/staleness_s": update.staleness_s,
        }
        self._scalars.add({**update.metrics, **ages}, self._learner.env_steps)

    def check(self) -> None:
        """Raises what ended the look-out, if anything did."""
        if self._error is not None:
            raise self._error

    def _follow(self) -> None:
        try:
            while not self._stop.is_set():
                self._look()
                self._stop.wait(_PERIOD_S)
            self._look(final=True)
        except Exception as error:
            # Handed to the thread that trains: `check` raises it there.
            self._error = error
            self.failed.set()

    def _look(self, *, final: bool = False) -> None:
        try:
            state = self._backend.observe()
        except RemoteError:
            # A service is away; whether the run waits for it is the launcher's decision.
            return
        now = time.monotonic() - self._started
        self._run.append_episodes(state.episodes)
        self._run.append_traces(state.traces)
        # An episode that was cut off from outside says nothing about the policy.
        ended = [episode for episode in state.episodes if episode.reason != "cut"]
        self._tell_of_cut(state.episodes)
        self._returns.extend(episode.episode_return for episode in ended)
        self._lengths.extend(episode.length for episode in ended)
        self._episodes += len(state.episodes)
        self._rates.append((now, state.env_steps))
        (then, steps_then), elapsed = self._rates[0], now - self._rates[0][0]
        learning = find_latencies(self._learner.latency.summary(), "learner.")
        mean = sum(self._returns) / len(self._returns) if self._returns else None
        env_steps = self._steps_before + state.env_steps
        if self._reached is None and mean is not None and self._is_enough(mean):
            self._reached = mean, env_steps
        reached_return, reached_steps = self._reached or (None, None)
        self.progress = Progress(
            elapsed_s=now,
            env_steps=env_steps,
            steps_before=self._steps_before,
            steps_per_s=(state.env_steps - steps_then) / elapsed if now > then else 0.0,
            episodes=self._episodes,
            mean_return=mean,
            reached_return=reached_return,
            reached_steps=reached_steps,
            updates=self._learner.updates,
            policy_version=state.policy_version,
            staleness=self._staleness,
            max_staleness=self._learner.max_staleness,
            staleness_versions=self._learner.staleness.summary(),
            rows_learned=self._learner.rows,
            rows_skipped=self._learner.skipped_rows,
            latencies={**state.latencies, **dict(learning)},
        )
        self._record()
        self._run.save_progress(describe_run(self.progress, RUNNING))
        self._display.update(self.progress, final=final)
        if self._reached is not None:
            self.reached.set()

    def _is_enough(self, mean: float) -> bool:
        target = self._train.target_return
        full = len(self._returns) == self._train.target_episodes
        return target is not None and full and inf > mean >= target

    def _tell_of_cut(self, episodes: Sequence[EpisodeRecord]) -> None:
        """Says once that an env fails, which only its log and `episodes.csv` would tell."""
        cut = next((episode for episode in episodes if episode.reason == "cut"), None)
        if cut is None or self._told_of_cut:
            return
        self._told_of_cut = True
        self._display.message(
            f"env {cut.env_id} failed in the middle of an episode and was reset; the log of its "
            "server says why, and episodes.csv has each such episode as 'cut'"
        )

    def _record(self) -> None:
        progress = self.progress
        lengths = sum(self._lengths) / len(self._lengths) if self._lengths else None
        values = {
            "charts/episodic_return": progress.mean_return,
            "charts/episodic_length": lengths,
            "charts/SPS": progress.steps_per_s,
            "charts/policy_version": float(progress.policy_version),
            "charts/staleness": progress.staleness,
        }
        for key in ("p50", "p90", "p99"):
            values[f"charts/staleness_{key}"] = progress.staleness_versions.get(key)
        for name, summary in progress.latencies.items():
            values |= {f"latency/{name}/{key}": summary.get(key) for key in ("p50", "p99")}
        self._scalars.add(values, progress.env_steps)
