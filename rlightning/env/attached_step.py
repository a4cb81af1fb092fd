"""What a client sends of its env: each step is checked before anybody else gets to see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rlightning.env.utils.agents import one_space
from rlightning.env.utils.spaces import all_finite, mismatch
from rlightning.errors import InvalidRequestError
from rlightning.rpc.protocol import Arrival
from rlightning.types import EnvMeta, EnvRet, MultiAgentEnvRet, PolicyResponse
from rlightning.v1 import env_service_pb2 as pb
from rlightning.wire import Reader, read_policy_response


@dataclass
class ArrivedStep:
    """A step as it came.

    Attributes:
        seq: Its number.
        env_ret: What the env returned; checked.
        wants_action: Whether the client waits for an answer.
        dropped: Steps right before it that the client had no room for.
        arrival: Stamps of the message that brought it last.
        response: The answer that another server gave to it.
    """

    seq: int
    env_ret: EnvRet
    wants_action: bool
    dropped: int
    arrival: Arrival
    response: PolicyResponse | None = None


class StepChecker:
    """Checks the steps of one client against the spec of its hello.

    Args:
        spec: Of the hello.
        env_id: Id of its group here.

    Attributes:
        spec: Of the hello.
        space: That of an observation; of several agents a Dict.
        rows: How many the env has.

    Raises:
        InvalidRequestError: The client did not say its spaces and rows.
    """

    def __init__(self, spec: EnvMeta | None, env_id: str) -> None:
        if spec is None or not spec.num_envs or spec.num_envs < 1:
            raise InvalidRequestError("hello needs a spec with the number of rows, num_envs")
        space = one_space(spec.observation_space)
        if space is None or one_space(spec.action_space) is None:
            raise InvalidRequestError("hello needs a spec with an observation and an action space")
        by_agent = spec.observation_space
        self.spec = spec
        self.space: gym.Space[Any] = space
        self.rows = spec.num_envs
        self._env_id = env_id
        self._agents = by_agent.keys() if isinstance(by_agent, dict) else None

    def check(self, seq: int, env_ret: EnvRet) -> None:
        """Checks what the env returned, and puts its numbers in the dtypes of rows.

        Raises:
            InvalidRequestError: It is not what the spec says, or holds NaN.
        """
        rows = self.rows
        if env_ret.rows is not None:
            if env_ret.rows[-1] >= self.rows:
                raise InvalidRequestError(
                    f"step {seq}: rows: expected some of {self.rows}, got {env_ret.rows[-1]}"
                )
            rows = len(env_ret.rows)
        final = env_ret.info.get("final_observation")
        difference = mismatch(self.space, env_ret.observation, rows=rows, exact=True)
        if difference is None and final is not None:
            ended, name = len(env_ret.info["final_rows"]), "final_observation"
            difference = mismatch(self.space, final, rows=ended, name=name, exact=True)
        if difference is not None:
            raise InvalidRequestError(f"step {seq}: {difference}")
        # One such number from anybody would spoil the update that everybody's rows share.
        for name, value in (
            ("observation", env_ret.observation),
            ("final_observation", final),
            ("executed_action", env_ret.executed_action),
        ):
            if not all_finite(value):
                raise InvalidRequestError(f"step {seq}: {name}: NaN or infinite")
        env_ret.env_id = self._env_id
        if isinstance(env_ret, MultiAgentEnvRet) is (self._agents is None):
            what = "no" if self._agents is None else "a"
            raise InvalidRequestError(f"step {seq}: expected {what} return of several agents")
        for name, dtype in (
            ("last_reward", np.float32),
            ("last_terminated", np.bool_),
            ("last_truncated", np.bool_),
        ):
            setattr(env_ret, name, self._of_agents(getattr(env_ret, name), dtype, name, rows))
        if not all_finite(env_ret.last_reward):
            raise InvalidRequestError(f"step {seq}: last_reward: NaN or infinite as float32")
        executed = env_ret.executed_action
        if self._agents is not None and executed is not None:
            expected = sorted(self._agents)
            got = sorted(executed) if isinstance(executed, Mapping) else type(executed).__name__
            if got != expected:
                raise InvalidRequestError(
                    f"step {seq}: executed_action: expected agents {expected}, got {got}"
                )
        for name in ("episode_id", "step"):
            value = getattr(env_ret, name)
            if value is not None:
                setattr(env_ret, name, self._of_rows(value, np.int64, name, rows))

    def response_of(self, step: pb.AttachStep, reader: Reader[pb.AttachRequest]) -> PolicyResponse:
        """Returns the answer that another server gave to a step.

        Raises:
            InvalidRequestError: It holds NaN.
        """
        response = read_policy_response(step.response, reader)
        if not all_finite(response.to_dict()):
            raise InvalidRequestError(f"step {step.seq}: response: NaN or infinite")
        response.env_id = self._env_id
        return response

    def _of_agents(self, value: Any, dtype: type[Any], name: str, rows: int) -> Any:
        """Returns what came as an array of the rows, or one for each agent."""
        if self._agents is None:
            return self._of_rows(value, dtype, name, rows)
        if not isinstance(value, Mapping):  # a default that was left out
            value = dict.fromkeys(self._agents, value)
        if value.keys() != self._agents:
            expected, got = sorted(self._agents), sorted(value)
            raise InvalidRequestError(f"{name}: expected agents {expected}, got {got}")
        return {
            agent: self._of_rows(value[agent], dtype, f"{name}.{agent}", rows)
            for agent in self._agents
        }

    @staticmethod
    def _of_rows(value: Any, dtype: type[Any], name: str, rows: int) -> npt.NDArray[Any]:
        try:
            array = np.asarray(value)
        except ValueError:  # nested lists of different lengths
            raise InvalidRequestError(f"{name}: expected an array [{rows}]") from None
        if array.shape not in {(rows,), ()} or array.dtype.kind not in "biuf":
            raise InvalidRequestError(
                f"{name}: expected [{rows}], got {array.dtype}{list(array.shape)}"
            )
        with np.errstate(over="ignore"):
            # A scalar is a default that was left out.
            return np.broadcast_to(array, rows).astype(dtype)
