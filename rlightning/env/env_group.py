"""Several envs behind one interface."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from rlightning.env.auto_reset import AutoReset, limit_of
from rlightning.env.base_env import BaseEnv
from rlightning.env.env_server import RemoteEnvServer
from rlightning.env.step_counter import EnvStepCounter
from rlightning.env.throughput import ThroughputTracker
from rlightning.env.utils.backends import make_base_env
from rlightning.env.utils.spaces import same_structure, structure
from rlightning.env.utils.utils import default_env_preprocess_fn
from rlightning.latency import SlidingHistogram
from rlightning.types import BatchedData, EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import EnvConfig

__all__ = ["EnvGroup", "EnvStepCounter", "ThroughputTracker", "build_env_group"]

PreprocessFn = Callable[[PolicyResponse], Any]


class EnvGroup:
    """Resets and steps several envs, some or all at a time.

    `step` runs the envs one after the other in the calling thread. `step_async` hands each to a
    worker of its own, so that `collect_async` gets the fast ones while a slow one still steps.

    An env server (backend `env_server`) stands for the envs behind it: each is reset and stepped
    under an id of its own, `<server>/<name>`, from the `init` or `reset` on that found it there,
    all of one server at the same time. See `RemoteEnvServer`.

    Args:
        env_cfg_list: One config per env; `num_workers` is not looked at (see `build_env_group`).
        preprocess_fn: Makes the action of a response: one for all envs, or a list of one per env.

    Attributes:
        env_list: The local envs.
        env_servers: The env servers.
        env_ids: Their ids, local envs first; for a server those of the envs behind it, once they
            are known.
        id_to_env: The envs by id.
        env_to_id: The ids by env.
        id_to_num_envs: Rows by id.
        throughput: Env steps per second of this group.

    Raises:
        ValueError: No config, or not as many functions as configs.
    """

    # The documented name; each group has its own.
    throughput = ThroughputTracker()

    def __init__(
        self,
        env_cfg_list: list[EnvConfig],
        preprocess_fn: PreprocessFn | list[PreprocessFn] | None = default_env_preprocess_fn,
    ) -> None:
        if not env_cfg_list:
            raise ValueError("env_cfg_list is empty")
        functions = _one_per_env(preprocess_fn, len(env_cfg_list))
        self.env_list: list[BaseEnv] = []
        self.env_servers: list[RemoteEnvServer] = []
        try:
            for index, pair in enumerate(zip(env_cfg_list, functions, strict=True)):
                env, _ = self.build_env(*pair, index)
                if isinstance(env, RemoteEnvServer):
                    self.env_servers.append(env)
                else:
                    self.env_list.append(env)
        except BaseException:
            for env in (*self.env_list, *self.env_servers):
                with suppress(Exception):  # what is told is why one could not be made
                    env.close()
            raise
        envs = [*self.env_list, *self.env_servers]
        self.env_ids = [env.get_env_id() for env in envs]
        self.id_to_env = dict(zip(self.env_ids, envs, strict=True))
        self.env_to_id = dict(zip(envs, self.env_ids, strict=True))
        self.id_to_num_envs = {env.get_env_id(): env.num_envs for env in envs}
        self._server_of: dict[str, RemoteEnvServer] = {}
        self.throughput = ThroughputTracker()
        self._auto_reset = AutoReset()
        self._workers: dict[str, ThreadPoolExecutor] = {}
        self._pending: dict[str, Future[EnvRet]] = {}

    @classmethod
    def build_env(
        cls,
        env_cfg: EnvConfig,
        preprocess_fn: PreprocessFn | None = default_env_preprocess_fn,
        worker_index: int | None = None,
    ) -> tuple[BaseEnv, bool]:
        """Makes the env of a config.

        Args:
            env_cfg: Its `backend` names the class: a key of `ENVS`, or `module:Class`.
            preprocess_fn: Makes the action of a response.
            worker_index: Number of the env among those of its group or server.

        Returns:
            The env, and whether it is an env server.

        Raises:
            ConfigError: There is no such backend.
        """
        env = make_base_env(env_cfg, worker_index, preprocess_fn)
        return env, env_cfg.backend == "env_server"

    def __len__(self) -> int:
        return len(self.env_list) + len(self.env_servers)

    def __getitem__(self, env_id: str) -> BaseEnv:
        return self._server_of.get(env_id) or self.id_to_env[env_id]

    @property
    def step_counter(self) -> EnvStepCounter | None:
        """Counts steps within `auto_reset`; else None."""
        return self._auto_reset.counter

    def size(self) -> int:
        """Returns the number of local envs."""
        return len(self.env_list)

    def init(self) -> list[EnvMeta]:
        """Prepares every env; waits for those that env servers want there.

        Returns:
            The metadata of each; of a server those of the envs behind it.

        Raises:
            ValueError: Their spaces differ in structure or shape.
            DeadlineExceededError: The envs behind a server did not come in time.
        """
        metas = [env.init() for env in self.env_list]
        for server in self.env_servers:
            server.init()
            metas.extend(server.metas().values())
        self._take_note_of_members()
        for meta in metas[1:]:
            _check_same_spaces(metas[0], meta)
        return metas

    def get_observation_spaces(self) -> list[Any]:
        """Returns the observation space of each local env."""
        return [env.get_observation_space() for env in self.env_list]

    def get_action_spaces(self) -> list[Any]:
        """Returns the action space of each local env."""
        return [env.get_action_space() for env in self.env_list]

    def reset(self, *args: Any, **kwargs: Any) -> tuple[BatchedData, list[bool]]:
        """Resets every env.

        Args:
            *args: For the reset of each env.
            **kwargs: For the reset of each env.

        Returns:
            What each returned, and for each False: no episode was truncated.

        Raises:
            ValueError: An env still steps.
        """
        self._check_idle(self.env_ids)
        env_rets = [env._reset(*args, **kwargs) for env in self.env_list]
        for server in self.env_servers:
            env_rets.extend(server.reset(*args, **kwargs))
        self._take_note_of_members()
        for env_id in self.env_ids:
            self._auto_reset.record_reset(env_id)
        return BatchedData(self.env_ids, env_rets), [False] * len(self.env_ids)

    def step(self, batched_policy_resp: BatchedData) -> tuple[BatchedData, list[bool] | None]:
        """Steps the envs that have a response, local ones one after the other.

        Within `auto_reset`, an env that is due is reset instead and its response takes no part.

        Args:
            batched_policy_resp: Responses by env id; what follows a "/" in the id of a local env is
                for the env.

        Returns:
            What the envs returned, under the same ids in the same order, and for each whether its
            episode reached the limit of `auto_reset`; None outside of it.

        Raises:
            ValueError: An env still steps, or has two responses.
        """
        env_ids = self._env_ids(batched_policy_resp)
        pairs = list(zip(env_ids, batched_policy_resp.values(), strict=True))
        # Those elsewhere step while the local ones do.
        remote = {
            env_id: self._submit(env_id, response)
            for env_id, response in pairs
            if env_id in self._server_of
        }
        env_rets = []
        for env_id, response in pairs:
            if env_id in remote:
                env_ret = remote[env_id].result()
            else:
                env_ret = self._task(env_id, response)()
            self._record(env_id, env_ret)
            env_rets.append(env_ret)
        self.throughput.record("env_throughput_sync", self._rows(env_ids, env_rets))
        truncations = self._auto_reset.truncations(env_ids)
        return BatchedData(batched_policy_resp.ids(), env_rets), truncations

    def step_async(self, batched_policy_resp: BatchedData) -> None:
        """Hands responses to the workers of their envs and returns at once.

        Args:
            batched_policy_resp: Responses by env id, as for `step`.

        Raises:
            ValueError: An env still steps, or has two responses.
        """
        env_ids = self._env_ids(batched_policy_resp)
        for env_id, response in zip(env_ids, batched_policy_resp.values(), strict=True):
            if env_id in self._server_of:
                self._pending[env_id] = self._submit(env_id, response)
                continue
            worker = self._workers.get(env_id)
            if worker is None:
                worker = ThreadPoolExecutor(1, thread_name_prefix=f"env-{env_id}")
                self._workers[env_id] = worker
            self._pending[env_id] = worker.submit(self._task(env_id, response))

    def collect_async(
        self, timeout: float | None = None, wait_all: bool = False
    ) -> tuple[BatchedData, list[bool]]:
        """Waits for the first env that has stepped and returns all that have by then.

        Args:
            timeout: Seconds from now until which more are waited for; None takes what is there.
            wait_all: Wait for every env that was handed a response; `timeout` takes no part.

        Returns:
            What the envs returned, in the order in which they were done, and for each whether its
            episode reached the limit of `auto_reset`; False outside of it.

        Raises:
            ValueError: `timeout` is not above 0.
            Exception: What an env raised; the others can still be collected.
        """
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout must be above 0, got {timeout}")
        if not self._pending:
            warnings.warn("collect_async without a step_async before", UserWarning, stacklevel=2)
            return BatchedData([], []), []
        if wait_all and timeout is not None:
            warnings.warn("wait_all is given: timeout takes no part", UserWarning, stacklevel=2)
        env_ids, env_rets = [], []
        completed = self._completed(timeout, wait_all)
        for env_id in completed:
            if self._pending[env_id].exception() is not None:
                self._pending.pop(env_id).result()  # raises
        for env_id in completed:
            env_ret = self._pending.pop(env_id).result()
            self._record(env_id, env_ret)
            env_ids.append(env_id)
            env_rets.append(env_ret)
        self.throughput.record_async("env_throughput_async", self._rows(env_ids, env_rets))
        truncations = self._auto_reset.truncations(env_ids)
        return BatchedData(env_ids, env_rets), truncations or [False] * len(env_ids)

    @contextmanager
    def auto_reset(
        self, max_episode_steps: int | None = None, *, reset_on_done: bool = False
    ) -> Generator[None, None, None]:
        """Resets an env, in place of its next step, when its episode has reached a limit.

        An episode of `n` steps gives `n + 1` returns, that of its reset included. An env that was
        reset before is taken to be at its reset; one that never was is reset by its first step.

        Args:
            max_episode_steps: The limit for every env; None: each env's own.
            reset_on_done: Do so, too, when the env said that its episode has ended; rows of an env
                with several reset themselves, as do envs behind a server.

        Raises:
            ValueError: The limit is no positive integer, or an env has none of its own.
        """
        owns = [self[env_id].get_max_episode_steps() for env_id in self.env_ids]
        limits = [
            limit_of(env_id, own, max_episode_steps, stacklevel=4)
            for env_id, own in zip(self.env_ids, owns, strict=True)
        ]
        self._auto_reset.begin(
            self.env_ids, limits, max_episode_steps=max_episode_steps, reset_on_done=reset_on_done
        )
        try:
            yield
        finally:
            self._auto_reset.end()

    def get_env_stats(self, reset: bool = False) -> dict[str, float]:
        """Returns the mean of each statistic over the finished episodes of all envs.

        This ends a rollout: `finish_rollout` of every env is called, too.

        Args:
            reset: Let every env begin again from nothing.
        """
        totals: dict[str, list[float]] = {}
        for env in self.id_to_env.values():
            for key, (value, count) in env.get_env_stats(reset=reset).items():
                pair = totals.setdefault(key, [0.0, 0])
                pair[0] += value
                pair[1] += count
            env.finish_rollout()
        return {key: value / count for key, (value, count) in totals.items() if count}

    def get_stats(self) -> dict[str, float]:
        """Returns env steps per second over the last 5 s or more, and how long steps took.

        Keys are `env_throughput_sync` and `env_throughput_async`, with every row counted; one is
        absent until its first window has closed. After the first step there are `env_step_count`,
        `env_step_mean_s`, `env_step_p50_s`, `env_step_p90_s`, `env_step_p99_s` and
        `env_step_max_s`, of the steps of all envs in the last minute.
        """
        steps = SlidingHistogram()
        for env in self.id_to_env.values():
            steps.merge(env.latency["step"])
        stats, summary = self.throughput.get_stats(), steps.summary()
        if summary["count"]:
            stats["env_step_count"] = summary.pop("count")
            stats |= {f"env_step_{name}_s": value for name, value in summary.items()}
        return stats

    def print_timing_summary(self, reset: bool = False) -> None:
        """Logs how long the resets and steps of each env took, at level DEBUG.

        Args:
            reset: Begin again from nothing.
        """
        for env in self.id_to_env.values():
            env.print_timing_summary(reset=reset)

    def offload(self) -> None:
        """Lets every env free its device memory."""
        for env in self.id_to_env.values():
            env.offload()

    def reload(self) -> None:
        """Lets every env take its device memory again."""
        for env in self.id_to_env.values():
            env.reload()

    def apply_evaluate_cfg(self) -> None:
        """Applies the `evaluate_cfg` of every env; reset them then."""
        for env in self.id_to_env.values():
            env.apply_evaluate_cfg()

    def restore_evaluate_cfg(self) -> None:
        """Undoes `apply_evaluate_cfg` of every env; reset them then."""
        for env in self.id_to_env.values():
            env.restore_evaluate_cfg()

    def close(self) -> None:
        """Waits for the envs that still step, then closes every env.

        Raises:
            Exception: What an env raised; the others are closed all the same.
        """
        for worker in self._workers.values():
            worker.shutdown(wait=True)
        self._workers.clear()
        self._pending.clear()
        with ExitStack() as closing:
            for env in self.id_to_env.values():
                closing.callback(env.close)

    def _env_ids(self, batched_policy_resp: BatchedData) -> list[str]:
        """Returns the env of each response, if every one of them can be stepped."""
        env_ids = [
            str(env_id) if env_id in self._server_of else str(env_id).split("/", 1)[0]
            for env_id in batched_policy_resp.ids()
        ]
        servers = {server.get_env_id() for server in self.env_servers}
        for env_id in env_ids:
            if env_id in servers:
                known = list(self._server_of) or "none; reset it first"
                raise ValueError(f"a response for env server {env_id!r}: its envs are {known}")
            if env_id not in self.id_to_env and env_id not in self._server_of:
                raise ValueError(f"no env {env_id!r} in this group")
        if len(set(env_ids)) != len(env_ids):
            twice = next(env_id for env_id in env_ids if env_ids.count(env_id) > 1)
            raise ValueError(f"env {twice!r} has two responses in one batch")
        self._check_idle(env_ids)
        return env_ids

    def _check_idle(self, env_ids: Sequence[str]) -> None:
        for env_id in env_ids:
            if env_id in self._pending:
                raise ValueError(f"env {env_id!r} still steps: collect it first")

    def _task(self, env_id: str, response: PolicyResponse) -> Callable[[], EnvRet]:
        """Returns what a local env has to do now: a step, or the reset that is due."""
        env = self.id_to_env[env_id]
        return env._reset if self._auto_reset.is_due(env_id) else lambda: env._step(response)

    def _submit(self, env_id: str, response: PolicyResponse) -> Future[EnvRet]:
        """Begins what an env behind a server has to do now."""
        server = self._server_of[env_id]
        if self._auto_reset.is_due(env_id):
            return server.submit_reset(env_id)
        return server.submit(env_id, response)

    def _take_note_of_members(self) -> None:
        """Learns which envs are behind the servers now."""
        self.env_ids = [env.get_env_id() for env in self.env_list]
        self._server_of = {}
        for server in self.env_servers:
            for env_id, meta in server.metas().items():
                self._server_of[env_id] = server
                self.id_to_num_envs[env_id] = meta.num_envs or 1
            self.env_ids.extend(server.metas() or [server.get_env_id()])
        if self.step_counter is not None:
            given = self._auto_reset.max_episode_steps
            for env_id, server in self._server_of.items():
                own = server.get_max_episode_steps()
                self.step_counter.add(env_id, limit_of(env_id, own, given, stacklevel=3))

    def _record(self, env_id: str, env_ret: EnvRet) -> None:
        """Takes note of a step that is complete."""
        resets_itself = self.id_to_num_envs[env_id] > 1 or env_id in self._server_of
        self._auto_reset.record(env_id, env_ret, resets_itself=resets_itself)

    def _completed(self, timeout: float | None, wait_all: bool) -> list[str]:
        """Waits, and returns the envs whose step is complete, in the order of completion."""
        by_future = {future: env_id for env_id, future in self._pending.items()}
        order: list[Future[EnvRet]] = []
        deadline = None if timeout is None else time.monotonic() + timeout
        left: float | None = None
        while len(order) < len(by_future):
            waiting = [future for future in by_future if future not in order]
            done, _ = wait(waiting, timeout=left, return_when=FIRST_COMPLETED)
            order.extend(future for future in waiting if future in done)
            if not wait_all:
                left = 0.0 if deadline is None else max(0.0, deadline - time.monotonic())
                if not done:
                    break
        return [by_future[future] for future in order]

    def _rows(self, env_ids: Iterable[str], env_rets: Iterable[EnvRet]) -> int:
        """Returns how many rows have stepped: of some envs not all do at a time."""
        return sum(
            self.id_to_num_envs[env_id] if env_ret.rows is None else len(env_ret.rows)
            for env_id, env_ret in zip(env_ids, env_rets, strict=True)
        )


def build_env_group(
    env_cfg_list: EnvConfig | list[EnvConfig],
    preprocess_fn: PreprocessFn | list[PreprocessFn] | None = default_env_preprocess_fn,
) -> EnvGroup:
    """Makes a group with `num_workers` envs of each config.

    Args:
        env_cfg_list: The configs, or one.
        preprocess_fn: Makes the action of a response: one for all, or a list of one per config.

    Raises:
        ValueError: No config, or not as many functions as configs.
    """
    configs = [env_cfg_list] if isinstance(env_cfg_list, EnvConfig) else list(env_cfg_list)
    functions = _one_per_env(preprocess_fn, len(configs))
    pairs = [
        pair for pair in zip(configs, functions, strict=True) for _ in range(pair[0].num_workers)
    ]
    return EnvGroup([config for config, _ in pairs], [function for _, function in pairs])


def _one_per_env(
    preprocess_fn: PreprocessFn | list[PreprocessFn] | None, count: int
) -> list[PreprocessFn]:
    if callable(preprocess_fn):
        return [preprocess_fn] * count
    if not isinstance(preprocess_fn, (list, tuple)) or len(preprocess_fn) != count:
        raise ValueError(f"preprocess_fn: expected a function or a list of {count} functions")
    return list(preprocess_fn)


def _check_same_spaces(first: EnvMeta, other: EnvMeta) -> None:
    for name in ("action_space", "observation_space"):
        expected, got = structure(getattr(first, name)), structure(getattr(other, name))
        if not same_structure(expected, got, rows=(first.num_envs or 1, other.num_envs or 1)):
            raise ValueError(
                f"envs of one group need {name}s alike: {first.env_id!r} has {expected}, "
                f"{other.env_id!r} has {got}"
            )
