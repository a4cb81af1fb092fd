"""Hosts envs for the actor loop: groups of rows that never block the event loop for long."""

from __future__ import annotations

import asyncio
import logging
import re
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np

from rlightning.env.base_env import BaseEnv
from rlightning.env.episodes import EpisodeLog, RowCounter
from rlightning.env.replica import replica_seed
from rlightning.env.scalar_row import ScalarRow
from rlightning.env.utils.agents import one_space, team_outcome
from rlightning.env.utils.backends import make_base_env
from rlightning.env.utils.spaces import mismatch
from rlightning.errors import ConfigError, EnvError, ObservationError, ResetNeededError
from rlightning.rpc.activity import Activity
from rlightning.types import EnvMeta, EnvRet, MultiAgentEnvRet, PolicyResponse
from rlightning.utils.config import EnvConfig

_LOG = logging.getLogger(__name__)

_T = TypeVar("_T")


class HostedGroup:
    """One group of rows: the env that steps them, their episodes, and the thread they live in.

    The env is made and stepped in one thread of its own, so that stepping blocks nobody. Steps that
    are known to take less than a thread switch is worth run on the event loop instead (see
    `StepPlacement`). An env of one row is given the leading dimension 1 and reset when its episode
    has ended, so that all groups look alike. A multi-agent env, which needs `driver: external`, is
    handed on as it is. Belongs to one event loop.

    Args:
        config: Of the env; `num_envs` is the number of rows.
        env_id: Id of the group; the env gets it, too.
        worker_index: Number of the group among those of its process.
        log: Takes finished episodes.
        inline_below_us: Steps whose median is below this run on the event loop; 0: none does.
        make: Makes the env; None: the class that `config.backend` names.
        thread: Runs one call at a time, always in the same thread; None: a thread of its own.

    Attributes:
        config: Of the env.
        env_id: Id of the group.
        meta: Spaces and number of rows; there after `start`.
        env_steps: Steps so far; every row counts.
        placement: Whether steps run on the event loop now.
        activity: Whether it steps or resets, and since when.
    """

    meta: EnvMeta

    def __init__(
        self,
        config: EnvConfig,
        env_id: str,
        *,
        worker_index: int,
        log: EpisodeLog,
        inline_below_us: int = 200,
        make: Callable[[], BaseEnv] | None = None,
        thread: Executor | None = None,
    ) -> None:
        self.config = config
        self.env_id = env_id
        self.env_steps = 0
        self.placement = StepPlacement(inline_below_us)
        self.activity = Activity()
        self._worker_index = worker_index
        self._log = log
        self._make = make
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix=f"env-{env_id}")
        self._env: BaseEnv | None = None
        self._first: EnvRet | None = None

    async def start(self) -> None:
        """Makes the env.

        Raises:
            ConfigError: The config names no env, or one that does not take its arguments.
            EnvError: The env could not be made.
        """
        make = self._make or partial(make_base_env, self.config, self._worker_index)
        self._env = await self._in_thread("construction", make)
        self._env.env_id = self.env_id
        self.meta = await self._in_thread("init", self._env.init)
        space = self.meta.observation_space
        self._of_agents = isinstance(space, dict) and self.config.driver == "external"
        checked = space if self._of_agents else one_space(space)
        if checked is None or not self.meta.num_envs:
            raise EnvError(f"env {self.env_id!r}: init gave no observation space or no num_envs")
        self._space: Any = checked
        self._rows = self.meta.num_envs
        # A driver gets the rewards of a scalar env as they are; the buffer's are float32.
        self._reward_dtype = np.float64 if self.config.driver == "external" else np.float32
        one = self._rows == 1 and not self._of_agents
        self._group = ScalarRow(self._env, self.activity) if one else _Rows(self._env)
        self._counter = RowCounter(self.env_id, self._rows, self._log, self._env.row_seeds)
        self._policy_version = 0

    async def prepare(self) -> None:
        """Resets the env; the next `reset` returns what this one gave.

        Raises:
            EnvError: The reset raised, or its observation is not in the declared space.
        """
        self._first = await self.reset()

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> EnvRet:
        """Begins a new episode in every row; running ones are recorded as cut.

        Args:
            seed: Seed of the env; None: it goes on with its own.
            options: Options of the env; None: none.

        Returns:
            The first observations, with `episode_id` and `step`.

        Raises:
            EnvError: The reset raised, or its observation is not in the declared space.
        """
        first, self._first = self._first, None
        given = {"seed": seed, "options": None if options is None else dict(options)}
        given = {name: value for name, value in given.items() if value is not None}
        if first is not None and not given:
            return first
        start = time.perf_counter()
        with self.activity.resetting():
            env_ret = await self._in_thread("reset", partial(self._group.reset, **given))
        self.placement.record_reset(time.perf_counter() - start)
        return self._begun(env_ret)

    def count_episodes_from(self, episode_id: int) -> None:
        """Gives the first episode of the next reset this id, and those after it the following."""
        self._counter.count_from(episode_id)

    def reset_here(self) -> EnvRet:
        """Does as `reset`, in the calling thread, which has to be that of the env."""
        with self.activity.resetting():
            env_ret = self._guarded("reset", self._group.reset)
        return self._begun(env_ret)

    async def step(self, response: PolicyResponse, *, autoreset: bool = True) -> EnvRet:
        """Executes the actions of a response; rows that end begin their next episode.

        Args:
            response: Leaves have the leading dimension of the rows of the last EnvRet.
            autoreset: False: an env of one row that ends is left to be reset by the caller.

        Returns:
            The next observations with `episode_id` and `step`, of all rows or of those that
            `EnvRet.rows` names; reward float32 [rows], flags bool [rows], or dicts of them by
            agent. Rewards of an env with `driver: external` are float64 [rows].

        Raises:
            ResetNeededError: There was no reset before.
            EnvError: The env raised, or broke its contract; it must be reset.
        """
        if self._env is None or self._first is not None:
            raise ResetNeededError(f"env {self.env_id!r}: reset it before the first step")
        resets_itself = autoreset or self._rows > 1
        if self.placement.inline:
            env_ret = self._timed_step(response, resets_itself)
        else:
            loop = asyncio.get_running_loop()
            with self.activity.stepping():
                env_ret = await loop.run_in_executor(
                    self._thread, self._timed_step, response, resets_itself
                )
        return self._stepped(env_ret, response, resets_itself)

    def step_here(self, response: PolicyResponse) -> EnvRet:
        """Does as `step`, in the calling thread, which has to be that of the env."""
        with self.activity.stepping():
            env_ret = self._timed_step(response, True)
        return self._stepped(env_ret, response, True)

    def begin_episode(self, env_ret: EnvRet) -> None:
        """Counts what comes, from this observation on, as a new episode of every row.

        Args:
            env_ret: What the env returned last; gets the new `episode_id` and `step`.
        """
        self._counter.cut(self._policy_version, "truncated")
        self._counter.begin()
        self._numbered(env_ret)

    def _begun(self, env_ret: EnvRet) -> EnvRet:
        """Checks what a reset returned, and numbers it."""
        if self._of_agents:
            return self._checked_agents(env_ret)
        difference = mismatch(self._space, env_ret.observation, rows=self._rows)
        if difference is not None:
            raise ObservationError(f"env {self.env_id!r}: not in the declared space: {difference}")
        self._counter.cut(self._policy_version)
        self._counter.begin()
        env_ret.last_reward = self._zeros(np.float32)
        env_ret.last_terminated = self._zeros(np.bool_)
        env_ret.last_truncated = self._zeros(np.bool_)
        return self._numbered(env_ret)

    def _stepped(self, env_ret: EnvRet, response: PolicyResponse, resets_itself: bool) -> EnvRet:
        """Checks what a step returned, counts and numbers it."""
        self._policy_version = getattr(response, "policy_version", 0)
        rows = self._rows if env_ret.rows is None else len(env_ret.rows)
        if self._of_agents:
            self.env_steps += rows
            return self._checked_agents(env_ret)
        reward = self._of_rows(env_ret.last_reward, self._reward_dtype, rows, "last_reward")
        terminated = self._of_rows(env_ret.last_terminated, np.bool_, rows, "last_terminated")
        truncated = self._of_rows(env_ret.last_truncated, np.bool_, rows, "last_truncated")
        env_ret.last_reward = reward
        env_ret.last_terminated, env_ret.last_truncated = terminated, truncated
        self.env_steps += rows
        outcome = team_outcome(reward, terminated, truncated)
        if not resets_itself:  # its last observation is still of this episode
            env_ret.episode_id, env_ret.step = self._counter.episode_id, self._counter.step + 1
            self._counter.advance(*outcome, self._policy_version)
            return env_ret
        ended = self._counter.advance(*outcome, self._policy_version, env_ret.rows)
        if ended.size and "final_observation" not in env_ret.info:
            raise EnvError(
                f"env {self.env_id!r}: rows {ended.tolist()} ended without final_rows and "
                "final_observation in info"
            )
        return self._numbered(env_ret)

    async def call(self, function: Callable[[BaseEnv], None]) -> None:
        """Calls a function with the env, in the group's thread; the env must not be stepping.

        Raises:
            EnvError: It raised.
        """
        if self._env is not None:
            await self._in_thread("a command", function, self._env)

    async def close(self) -> None:
        """Closes the env and ends its thread.

        Raises:
            EnvError: The close raised; the thread ends all the same.
        """
        env, self._env = self._env, None
        try:
            if env is not None:
                await self._in_thread("close", env.close)
        finally:
            self._thread.shutdown(wait=False)

    def _checked_agents(self, env_ret: EnvRet) -> EnvRet:
        """Checks what a multi-agent env returned; who drives it resets it and counts its steps."""
        if not isinstance(env_ret, MultiAgentEnvRet) or not isinstance(env_ret.observation, dict):
            raise ObservationError(f"env {self.env_id!r}: expected a MultiAgentEnvRet")
        for agent, observation in env_ret.observation.items():
            if agent not in self._space:
                raise ObservationError(f"env {self.env_id!r}: agent {agent!r} has no space")
            if difference := mismatch(self._space[agent], observation, name=agent):
                raise ObservationError(
                    f"env {self.env_id!r}: not in the declared space: {difference}"
                )
        return env_ret

    def _numbered(self, env_ret: EnvRet) -> EnvRet:
        env_ret.episode_id, env_ret.step = self._counter.episode_id, self._counter.step
        if env_ret.rows is not None:
            env_ret.episode_id = env_ret.episode_id[env_ret.rows]
            env_ret.step = env_ret.step[env_ret.rows]
        return env_ret

    def _zeros(self, dtype: type[Any]) -> Any:
        zeros = np.zeros(self._rows, dtype)
        by_agent = self.meta.observation_space
        return {a: zeros.copy() for a in by_agent} if isinstance(by_agent, dict) else zeros

    def _of_rows(self, value: Any, dtype: type[Any], rows: int, name: str) -> Any:
        if isinstance(value, Mapping):
            return {
                agent: self._of_rows(one, dtype, rows, f"{name}.{agent}")
                for agent, one in value.items()
            }
        array = np.asarray(value, dtype)
        if array.shape != (rows,):
            raise EnvError(
                f"env {self.env_id!r}: {name}: expected [{rows}], got {list(array.shape)}"
            )
        return array

    def _timed_step(self, response: PolicyResponse, resets_itself: bool) -> EnvRet:
        start = time.perf_counter()
        env_ret = self._guarded("step", self._group.step, response, resets_itself)
        self.placement.record(time.perf_counter() - start)
        return env_ret

    async def _in_thread(self, what: str, function: Callable[..., _T], *args: Any) -> _T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._guarded, what, function, *args)

    def _guarded(self, what: str, function: Callable[..., _T], *args: Any) -> _T:
        """Calls into the env, which is code of others, and says whose error it was."""
        try:
            return function(*args)
        except (EnvError, ConfigError):
            raise
        except Exception as error:
            raise EnvError(
                f"env {self.env_id!r}: {what} raised {type(error).__name__}: {error}"
            ) from error


class StepPlacement:
    """Decides from measured steps whether they run on the event loop or in a thread.

    Handing a step to a thread and back costs about 50 us of two threads' time, and more when they
    contend for the interpreter's lock; a step that takes less would only be slowed down by it. A
    single step of more than 10 times the limit moves the group back to its thread at once; a step
    or reset of more than 0.5 s does so for good, since the end of the next episode may stop the
    loop, and with it all heartbeats, for as long again.

    Args:
        inline_below_us: The limit for the median of the last steps, in microseconds.

    Attributes:
        inline: Whether the next step should run on the event loop.
    """

    WINDOW = 32
    STALL_S = 0.5

    def __init__(self, inline_below_us: int) -> None:
        self.inline = False
        self._limit_s = inline_below_us / 1e6
        self._last: deque[float] = deque(maxlen=self.WINDOW)
        self._until_next = self.WINDOW

    def record(self, seconds: float) -> None:
        """Takes the duration of a step."""
        self.record_reset(seconds)
        self._last.append(seconds)
        self._until_next -= 1
        if self.inline and seconds > 10 * self._limit_s:
            self.inline = False
            self._until_next = self.WINDOW
        elif self._until_next <= 0:
            self.inline = statistics.median(self._last) < self._limit_s
            self._until_next = self.WINDOW

    def record_reset(self, seconds: float) -> None:
        """Takes the duration of a reset, such as envs do within a step when an episode ends."""
        if seconds > self.STALL_S:
            self.inline = False
            self._limit_s = 0.0


class _Rows:
    """An env of several rows, as `ScalarRow` is one of one row."""

    def __init__(self, env: BaseEnv) -> None:
        self._env = env

    def reset(self, **kwargs: Any) -> EnvRet:
        return self._env._reset(**kwargs)

    def step(self, response: PolicyResponse, autoreset: bool = True) -> EnvRet:
        return self._env._step(response)


async def host_envs(
    configs: Sequence[EnvConfig],
    *,
    pipeline_depth: int = 2,
    seed: int | None = None,
    log: EpisodeLog | None = None,
    inline_below_us: int = 200,
    replica: str | None = None,
) -> list[HostedGroup]:
    """Makes and resets the groups of a list of configs.

    Each of `num_workers` workers has `num_envs` rows, split into `pipeline_depth` groups of nearly
    equal size: while one waits for its answer, another steps. With `driver: external` a worker is
    one group. Ids are `NAME-WORKER-GROUP`, or `NAME-REPLICA-WORKER-GROUP`.

    Args:
        configs: The `env` section.
        pipeline_depth: Groups in one worker; never more than it has rows.
        seed: Seed of envs whose config has none.
        log: Takes finished episodes.
        inline_below_us: Steps whose median is below this run on the event loop; 0: none does.
        replica: Name of this process among several with the same configs, whose ids and seeds it
            tells apart; None: it is the only one.

    Returns:
        The groups, reset; close them in the end.

    Raises:
        ConfigError: A config names no env, or one that does not take its arguments.
        EnvError: An env could not be made or reset.
    """
    episodes = EpisodeLog() if log is None else log
    groups: list[HostedGroup] = []
    workers: Counter[str] = Counter()
    try:
        for config in configs:
            if config.backend == "env_server":
                raise ConfigError(
                    "env.backend 'env_server' is for an EnvGroup; a server hosts other backends"
                )
            name = group_name(config.name)
            common = seed if config.seed is None else config.seed
            own = common if common is None or replica is None else replica_seed(common, replica)
            prefix = name if replica is None else f"{name}-{replica}"
            depth = 1 if config.driver == "external" else pipeline_depth
            for _ in range(config.num_workers):
                sizes = _sizes(config.num_envs, depth)
                for index, rows in enumerate(sizes):
                    update = {
                        "num_envs": rows,
                        "num_workers": 1,
                        "seed": own,
                    }
                    group = HostedGroup(
                        config.model_copy(update=update),
                        f"{prefix}-{workers[name]}-{index}",
                        worker_index=len(groups),
                        log=episodes,
                        inline_below_us=inline_below_us,
                    )
                    groups.append(group)
                    # One after the other: simulators are seldom safe to be made at once.
                    await group.start()
                workers[name] += 1
        await asyncio.gather(*(group.prepare() for group in groups))
    except BaseException:
        await asyncio.gather(*(group.close() for group in groups), return_exceptions=True)
        raise
    return groups


async def close_groups(groups: Iterable[HostedGroup]) -> None:
    """Closes groups one after the other, also after one that could not be: the log says which."""
    for group in groups:
        try:
            await group.close()
        except EnvError as error:
            _LOG.warning("%s", error)


def group_name(name: str) -> str:
    """Returns a config's name as a part of ids: `[A-Za-z0-9._-]`, at most 40 characters."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:40] or "env"


def _sizes(rows: int, pipeline_depth: int) -> list[int]:
    groups = min(pipeline_depth, rows)
    return [rows // groups + (index < rows % groups) for index in range(groups)]
