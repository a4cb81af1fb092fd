"""What a policy answers to an EnvRet."""

from __future__ import annotations

import copyreg
import time
from collections.abc import Callable, KeysView, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from rlightning.types.sent import Sent, sent_latency
from rlightning.utils.conversions import to_device, to_numpy

if TYPE_CHECKING:
    from typing_extensions import Self

    from rlightning.utils.conversions import Device

# Attributes that say whose answer this is and when it was made; all others are outputs.
_NOT_DATA = frozenset({"env_id", "ts_policy_sent_ns", "policy_version", "seq"})


class PolicyResponse(Sent, SimpleNamespace):
    """The action for one env or group of rows, and what the policy adds to it.

    Args:
        env_id: Id of the env or group that is answered.
        **data: The policy's outputs: `action` and, by policy, `log_prob`, `value`, ... Leaves have
            the leading dimension of the EnvRet that is answered.

    `_fields` and `to_dict` are the policy's outputs alone: what it returned, and what is stored of
    it. `env_id`, `ts_policy_sent_ns`, `policy_version` and `seq` are none of them: they say whose
    answer this is, when it was sent, by which weights and to which request, and whoever carries the
    answer sets them. The buffer stores `policy_version` in a column of its own, with which an
    output of that name would clash.

    Attributes:
        policy_version: Version of the weights that answered; absent if the policy counts none.
        seq: The act request that was answered; absent for a policy in the same process.
        ts_policy_sent_ns: When this left the policy; absent before `mark_policy_sent`.
    """

    __slots__ = ("__weakref__", "_left")

    env_id: str

    def __init__(self, env_id: str, **data: Any) -> None:
        super().__init__(**data)
        self.env_id = env_id

    # SimpleNamespace would call the class without its required argument to copy it.
    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self),), self.__getstate__()  # type: ignore[attr-defined]

    @staticmethod
    def make_example(
        action_space: gym.Space[Any], env_id: str | None = None, **data: Any
    ) -> PolicyResponse:
        """Returns a response with an action drawn from a space.

        Args:
            action_space: Any gymnasium space; its own generator draws.
            env_id: Id of the env.
            **data: Further outputs; not `action`.
        """
        return PolicyResponse(env_id, action=action_space.sample(), **data)  # type: ignore[arg-type]

    @property
    def _fields(self) -> KeysView[str]:
        """Names of the policy's outputs, in the order in which they were set; equal to a set."""
        return self.to_dict().keys()

    def to_dict(self) -> dict[str, Any]:
        """Returns the policy's outputs by name, in the order in which they were set; not copied."""
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_DATA}

    def copy(self) -> Self:
        """Returns a new response with the same values, to convert without changing this one."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        if hasattr(self, "_left"):
            other._left = self._left
        return other

    def mark_policy_sent(self) -> Self:
        """Stamps this as sent now; returns itself."""
        self.ts_policy_sent_ns = time.time_ns()
        self._left = time.monotonic_ns(), 0
        return self

    def compute_sent_latency(self, now_ns: int | None = None) -> float:
        """Returns the seconds since `ts_env_sent_ns` if that is set, else since this was sent.

        By wall clocks, which two machines need not agree on: `corrected_latency` is the figure that
        is right between machines, too.

        Args:
            now_ns: Unix time in nanoseconds; now if None.

        Returns:
            Seconds, at least 0.0; 0.0 too without a valid stamp.
        """
        stamps = self.__dict__
        sent_ns = stamps.get("ts_env_sent_ns")
        return sent_latency(stamps.get("ts_policy_sent_ns") if sent_ns is None else sent_ns, now_ns)

    def numpy(self) -> Self:
        """Makes numpy arrays of the tensors here; returns itself."""
        return self._convert(to_numpy)

    def cpu(self) -> Self:
        """Makes torch tensors on the CPU of the tensors and arrays here; returns itself.

        Without torch installed, arrays stay as they are.
        """
        return self._convert(lambda data: to_device(data, "cpu"))

    def cuda(self, device: Device | None = None) -> Self:
        """Makes torch tensors on a CUDA device of the tensors and arrays here; returns itself.

        Args:
            device: Index or name; `cuda` if None.

        Raises:
            ImportError: torch is not installed.
        """
        return self._convert(lambda data: to_device(data, "cuda" if device is None else device))

    def _convert(self, convert: Callable[[Any], Any]) -> Self:
        self.__dict__.update(convert(self.to_dict()))
        return self


class MultiAgentPolicyResponse(PolicyResponse):
    """The actions of several agents: `action` is a dict by agent."""

    @staticmethod
    def make_example(  # type: ignore[override]  # the documented signature
        action_spaces: Mapping[str, gym.Space[Any]], env_id: str | None = None, **data: Any
    ) -> MultiAgentPolicyResponse:
        """Returns a response with an action for each agent, drawn from its space.

        Args:
            action_spaces: Spaces by agent: a dict or a `gymnasium.spaces.Dict`.
            env_id: Id of the env.
            **data: Further outputs; not `action`.
        """
        action = {agent: space.sample() for agent, space in action_spaces.items()}
        return MultiAgentPolicyResponse(env_id, action=action, **data)  # type: ignore[arg-type]
