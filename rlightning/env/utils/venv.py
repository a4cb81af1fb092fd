"""Envs of any interface in worker processes, which can be told to make another env."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import CloudpickleWrapper

from rlightning.errors import ConfigError, EnvError, RLightningError

EnvFn = Callable[[], Any]
Id = int | Sequence[int] | npt.NDArray[np.integer[Any]] | None

# Methods that are called by name, with whatever arguments: of a robot simulator's env, or of a
# `BaseEnv`.
_METHODS = (
    "step",
    "reset",
    "render",
    "seed",
    "check_success",
    "get_segmentation_of_interest",
    "get_sim_state",
    "set_init_state",
    "init",
    "get_metadata",
    "finish_rollout",
    "offload",
    "reload",
    "apply_evaluate_cfg",
    "restore_evaluate_cfg",
)
_CLOSE_S = 5.0
_LOOK_S = 0.1


class ReconfigureSubprocEnvWorker:
    """One env in a process of its own.

    `send` and `recv` are the two halves of each call, so that several workers step at once.

    Args:
        env_fn: Makes the env, in the process; the first `recv` returns when it is made. Pickled
            by cloudpickle.

    Attributes:
        pipe: To the process; readable when there is something to be received, and when it has
            ended.

    Raises:
        EnvError: `env_fn` cannot be pickled.
    """

    def __init__(self, env_fn: EnvFn) -> None:
        # Spawned: a fork of a process with threads, or with a simulator loaded, may stand still.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.send("reconfigure", CloudpickleWrapper(env_fn))
        except BaseException:
            self.close(0.0)
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the process is there no longer."""
        return not self._process.is_alive()

    def send(self, command: str, *args: Any, **kwargs: Any) -> None:
        """Begins a call.

        Args:
            command: A method of the env, `getattr`, `setattr` or `reconfigure`.
            *args: For it.
            **kwargs: For it.

        Raises:
            EnvError: The process has ended, or the arguments cannot be pickled.
        """
        message = _pickled((command, args, kwargs), f"what was given to {command} of an env")
        try:
            self.pipe.send_bytes(message)
        except OSError as error:
            raise self._ended() from error

    def recv(self) -> Any:
        """Waits for the outcome of the call.

        Raises:
            EnvError: The env raised, what it returned cannot be pickled, or the process has ended;
                one of this library's own errors is raised as it is.
        """
        try:
            message = self.pipe.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        failed, outcome = _unpickled(message, "what an env returned", "outside")
        if failed:
            raise outcome if isinstance(outcome, RLightningError) else EnvError(outcome)
        return outcome

    def call(self, command: str, *args: Any, **kwargs: Any) -> Any:
        """Calls and waits; see `send` and `recv`."""
        self.send(command, *args, **kwargs)
        return self.recv()

    def get_env_attr(self, key: str) -> Any:
        """Returns an attribute of the env."""
        return self.call("getattr", key)

    def set_env_attr(self, key: str, value: Any) -> None:
        """Sets an attribute of the env."""
        self.call("setattr", key, value)

    def reconfigure_env_fn(self, env_fn: EnvFn) -> None:
        """Closes the env and makes another one in the same process."""
        self.call("reconfigure", CloudpickleWrapper(env_fn))

    def begin_close(self) -> None:
        """Lets the process end once it has done what it was told."""
        with contextlib.suppress(OSError):  # it may have ended before
            self.pipe.send(("close", (), {}))

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Closes the env and ends the process, one that is still busy after `timeout_s` as well."""
        self.begin_close()
        self._join(timeout_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.pipe.close()

    def _ended(self) -> EnvError:
        self._join(_CLOSE_S)
        return EnvError(f"the process of an env has ended with code {self._process.exitcode}")

    def _join(self, timeout_s: float) -> None:
        # By short looks: what an env has forked keeps a single long one from seeing the end.
        deadline = time.monotonic() + timeout_s
        while self._process.is_alive() and (left_s := deadline - time.monotonic()) > 0:
            self._process.join(min(left_s, _LOOK_S))


class ReconfigureSubprocEnv:
    """Several envs, each in a process of its own, stepped at once.

    The envs may have any interface; what they return is handed on: one entry per env, as an array
    where the entries are arrays of one shape, else as an array of objects.

    Args:
        env_fns: Makes each env, in its process.

    Raises:
        EnvError: An env could not be made.
    """

    def __init__(self, env_fns: Sequence[EnvFn]) -> None:
        self.workers = start_all(env_fns)

    def __len__(self) -> int:
        return len(self.workers)

    def reset(self, id: Id = None, **kwargs: Any) -> Any:
        """Resets some envs.

        Args:
            id: Which; None: all.
            **kwargs: For the reset of each.
        """
        return _together(self._each("reset", id, **kwargs))

    def step(self, action: Sequence[Any] | npt.NDArray[Any], id: Id = None) -> tuple[Any, ...]:
        """Steps some envs.

        Args:
            action: One for each of them.
            id: Which; None: all.

        Returns:
            What their steps return, value by value: one array for each.
        """
        chosen = self._chosen(id)
        if len(action) != len(chosen):
            raise ValueError(f"action: expected {len(chosen)}, one for each env, got {len(action)}")
        outcomes = self._call("step", chosen, action)
        return tuple(map(_together, map(list, zip(*outcomes, strict=True))))

    def seed(self, seed: int | Sequence[int | None] | None = None) -> list[Any]:
        """Seeds every env; one number is that of the first, those after it follow on."""
        if seed is None or isinstance(seed, int):
            seeds = [None if seed is None else seed + i for i in range(len(self))]
        else:
            seeds = list(seed)
        return [worker.call("seed", one) for worker, one in zip(self.workers, seeds, strict=True)]

    def set_init_state(self, init_state: Sequence[Any], id: Id = None) -> Any:
        """Puts some envs into given states; returns their observations."""
        return _together(self._call("set_init_state", self._chosen(id), init_state))

    def check_success(self, id: Id = None) -> list[bool]:
        """Returns whether the task of each is done."""
        return [bool(done) for done in self._each("check_success", id)]

    def get_sim_state(self, id: Id = None) -> list[Any]:
        """Returns the state of each simulator."""
        return self._each("get_sim_state", id)

    def get_segmentation_of_interest(self, segmentation_images: Sequence[Any]) -> list[Any]:
        """Returns the segmentation of the objects of interest in one image of each env."""
        pairs = zip(self.workers, segmentation_images, strict=True)
        return [worker.call("get_segmentation_of_interest", image) for worker, image in pairs]

    def render(self, id: Id = None, **kwargs: Any) -> list[Any]:
        """Renders some envs."""
        return self._each("render", id, **kwargs)

    def get_env_attr(self, key: str, id: Id = None) -> list[Any]:
        """Returns an attribute of some envs."""
        return self._each("getattr", id, key)

    def set_env_attr(self, key: str, value: Any, id: Id = None) -> None:
        """Sets an attribute of some envs."""
        self._each("setattr", id, key, value)

    def reconfigure_env_fns(self, env_fns: Sequence[EnvFn], id: Id = None) -> None:
        """Closes some envs and makes others in their processes, which keep what they have loaded.

        Args:
            env_fns: Makes the new env of each.
            id: Which; None: all.

        Raises:
            EnvError: An env could not be made; that worker has none until it is reconfigured.
            ValueError: Not as many functions as envs.
        """
        chosen = self._chosen(id)
        if len(env_fns) != len(chosen):
            raise ValueError(f"env_fns: expected {len(chosen)}, got {len(env_fns)}")
        self._call("reconfigure", chosen, [CloudpickleWrapper(env_fn) for env_fn in env_fns])

    def close(self) -> None:
        """Closes the envs and ends their processes."""
        close_all(self.workers)
        self.workers.clear()

    def _chosen(self, id: Id) -> list[int]:
        if id is None:
            return list(range(len(self.workers)))
        return [int(i) for i in np.atleast_1d(id)]

    def _each(self, command: str, id: Id, *args: Any, **kwargs: Any) -> list[Any]:
        chosen = self._chosen(id)
        return call_all(command, [(self.workers[i], args, kwargs) for i in chosen])

    def _call(self, command: str, chosen: Sequence[int], arguments: Iterable[Any]) -> list[Any]:
        """Calls a method of some envs, each with an argument of its own."""
        pairs = zip(chosen, arguments, strict=True)
        return call_all(command, [(self.workers[i], (one,), {}) for i, one in pairs])


def start_all(env_fns: Iterable[EnvFn]) -> list[ReconfigureSubprocEnvWorker]:
    """Starts a worker for each env; returns when all envs are made.

    Raises:
        EnvError: An env could not be made; there is no worker then.
    """
    workers: list[ReconfigureSubprocEnvWorker] = []
    try:
        for env_fn in env_fns:
            workers.append(ReconfigureSubprocEnvWorker(env_fn))  # noqa: PERF401 - to be closed
        receive_all(workers)
    except BaseException:
        close_all(workers)
        raise
    return workers


def call_all(
    command: str,
    calls: Iterable[tuple[ReconfigureSubprocEnvWorker, tuple[Any, ...], dict[str, Any]]],
) -> list[Any]:
    """Begins calls of several workers, and waits for what comes of them.

    Also of those before one that could not be begun: what came of them would be taken for the
    outcome of the next call.

    Args:
        command: As of `ReconfigureSubprocEnvWorker.send`.
        calls: Each worker with its arguments, by position and by name.

    Raises:
        EnvError: A call could not be begun, or failed.
    """
    called: list[ReconfigureSubprocEnvWorker] = []
    failure: EnvError | None = None
    for worker, args, kwargs in calls:
        try:
            worker.send(command, *args, **kwargs)
        except EnvError as error:
            failure = error
            break
        called.append(worker)
    outcomes = receive_all(called)
    if failure is not None:
        raise failure
    return outcomes


def receive_all(workers: Iterable[ReconfigureSubprocEnvWorker]) -> list[Any]:
    """Waits for what came of a call of each worker, also when one of them failed.

    Raises:
        EnvError: That of the first one that failed.
    """
    outcomes, failures = [], []
    for worker in workers:
        try:
            outcomes.append(worker.recv())
        except RLightningError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return outcomes


def close_all(workers: Iterable[ReconfigureSubprocEnvWorker]) -> None:
    """Closes the envs of several workers at the same time, and ends their processes."""
    deadline = time.monotonic() + _CLOSE_S
    workers = list(workers)
    for worker in workers:
        worker.begin_close()
    for worker in workers:
        worker.close(max(0.0, deadline - time.monotonic()))


def _together(items: list[Any]) -> Any:
    """Returns one array of what several envs gave."""
    arrays = all(isinstance(item, (np.ndarray, np.generic, bool, int, float)) for item in items)
    if arrays and len({np.shape(item) for item in items}) == 1:
        return np.stack([np.asarray(item) for item in items])
    objects = np.empty(len(items), object)
    objects[:] = items
    return objects


def _work(pipe: Connection) -> None:
    """Serves the commands of a parent until it says close, or has ended."""
    if sys.platform != "win32":
        # The parent sees by its end of the pipe that this process is gone, unless what the env has
        # started holds this one open.
        os.set_inheritable(pipe.fileno(), False)
        os.register_at_fork(after_in_child=pipe.close)
    env: Any = None
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):  # the parent ends, or has
        while True:
            message = pipe.recv_bytes()
            try:
                command, args, kwargs = _unpickled(message, "what was given to an env", "in")
                if command == "close":
                    break
                if command == "reconfigure":
                    if env is not None:
                        env.close()
                    env, outcome = None, None
                    env = args[0].fn()
                else:
                    outcome = _obey(env, command, args, kwargs)
                answer = _pickled((False, outcome), f"what {command} of an env returned")
            except Exception as error:
                answer = _failure(error)
            pipe.send_bytes(answer)
    if env is not None:
        env.close()
    pipe.close()


def _failure(error: Exception) -> memoryview:
    """Pickles what an env raised: this library's errors as they are if they can be, else the text.

    Call it where the error is handled.
    """
    if isinstance(error, (ConfigError, EnvError)):
        with contextlib.suppress(Exception):  # whatever an env's own class of them raises
            answer = ForkingPickler.dumps((True, error))
            ForkingPickler.loads(answer)
            return answer
    detail = traceback.format_exc(limit=-3)
    return ForkingPickler.dumps((True, f"{_told(error)}\n{detail}"))


def _pickled(message: tuple[Any, ...], what: str) -> memoryview:
    """Pickles what goes to the other side.

    Raises:
        EnvError: It cannot be pickled; says so of `what`.
    """
    try:
        return ForkingPickler.dumps(message)
    except Exception as error:  # whatever the classes in it raise
        raise EnvError(f"{what} cannot be pickled: {_told(error)}") from error


def _unpickled(message: bytes, what: str, where: str) -> Any:
    """Undoes `_pickled`.

    Raises:
        EnvError: It cannot be unpickled; says so of `what`, in or outside of the env's process.
    """
    try:
        return ForkingPickler.loads(message)
    except Exception as error:
        raise EnvError(f"{what} cannot be unpickled {where} its process: {_told(error)}") from error


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _obey(env: Any, command: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if env is None:
        raise EnvError("there is no env: the last one could not be made")
    if command == "getattr":
        return getattr(env, args[0])
    if command == "setattr":
        return setattr(env, *args)
    if command not in _METHODS:
        raise EnvError(f"there is no command '{command}'")
    return getattr(env, command)(*args, **kwargs)
