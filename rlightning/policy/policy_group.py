"""Policies driven by hand: the documented interface of those that train and those that act."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from rlightning.errors import PolicyError
from rlightning.latency import LatencyStats
from rlightning.policy.base_policy import BasePolicy, PolicyRole
from rlightning.policy.members import LocalMember, Member, RemoteMember
from rlightning.policy.routing import LeastLoaded, Router, Sticky
from rlightning.policy.weights import load_weights, policy_weights
from rlightning.types import BatchedData, EnvMeta, EnvRet, Mode, PolicyResponse
from rlightning.utils.config import Config, PolicyConfig, TrainConfig

_LOG = logging.getLogger(__name__)


class PolicyGroup:
    """Policies that train and policies that act, with the weights of the first trained one.

    With `policy.rollout_mode: sync` everything runs in the calling thread. With `async` each acting
    policy has a thread of its own, and `rollout_batch` returns futures. Which policy answers an env
    is for `policy.router_type`: `simple` takes the one with the fewest requests to answer,
    `node_affinity` always the same one, as it is for policies that keep state, and for policy
    servers, in any case. Methods are for one thread.

    Args:
        train_list: Policies of role `train`; may be empty.
        eval_list: Policies of role `eval`, or addresses `HOST:PORT` of policy servers (a
            `RemoteMember` where they need a token); may be empty.
        config: Section `policy`.

    Attributes:
        config: As given.
        latency: How long what was called took, by name, in the last minute.
    """

    def __init__(
        self,
        train_list: Sequence[BasePolicy],
        eval_list: Sequence[BasePolicy | RemoteMember | str],
        config: PolicyConfig,
    ) -> None:
        self.config = config
        self.latency = LatencyStats()
        self._train_list = list(train_list)
        self._members = [_member(one, config) for one in eval_list]
        self._router: Router | None = None
        self._version = 0
        self._swaps: list[Future[None]] = []
        self._pushed: dict[PolicyRole, list[list[dict[str, Tensor]]]] = {}
        self._away = False

    def init(
        self,
        train_config: TrainConfig | None = None,
        env_meta: EnvMeta | None = None,
        eval_config: Config | None = None,
    ) -> None:
        """Makes every network; the acting policies get the weights of the first trained one."""
        self.init_train(train_config, env_meta)
        self.init_eval(eval_config, env_meta)
        if self._train_list:
            self.sync_weights()
            self.wait_for_eval_weight_update()

    def init_train(
        self, train_config: TrainConfig | None = None, env_meta: EnvMeta | None = None
    ) -> None:
        """Makes the networks and optimizers of the policies that train."""
        for policy in self._train_list:
            policy.init_train(train_config, env_meta)

    def init_eval(self, eval_config: Config | None = None, env_meta: EnvMeta | None = None) -> None:
        """Makes the networks of the policies that act, and finds the policy servers.

        Raises:
            PolicyError: `env_meta` names no observation space.
            UnavailableError: A policy server does not answer.
        """
        if env_meta is None or env_meta.observation_space is None:
            raise PolicyError("init_eval needs an env_meta with an observation space")
        for member in self._members:
            member.init(eval_config, env_meta)
        sticky = self.config.router_type == "node_affinity"
        sticky = sticky or any(member.sticky for member in self._members)
        self._router = Sticky() if sticky else LeastLoaded()

    def reset_training_state(
        self,
        train_config: TrainConfig | None = None,
        env_meta: EnvMeta | None = None,
        seed: int | None = None,
    ) -> None:
        """Lets every policy that trains begin anew; see `BasePolicy.reset_training_state`."""
        for policy in self._train_list:
            policy.reset_training_state(train_config, env_meta, seed)

    def rollout_batch(
        self,
        batched_env_ret: BatchedData,
        *,
        mode: Mode = Mode.EXPLORE,
        reset_state: bool = False,
    ) -> BatchedData:
        """Returns a PolicyResponse for each EnvRet, in order, under the same ids.

        EnvRets may be of one env each, or of groups with a leading dimension; all those of one
        policy share one inference. With `policy.rollout_mode: async` the responses are futures,
        whose `result()` raises what is below.

        Args:
            batched_env_ret: The EnvRets.
            mode: Explore or exploit.
            reset_state: Policies that keep state begin with a fresh one for all these rows, as
                after a reset of the envs.

        Raises:
            PolicyError: `init_eval` was not called, the policies are offloaded, or one broke its
                contract.
            InvalidRequestError: An observation is not in the declared space.
        """
        env_rets: tuple[EnvRet, ...] = batched_env_ret.values()
        router = self._router
        if router is None or not self._members:
            raise PolicyError("rollout_batch needs init_eval, and a policy of role 'eval'")
        if self._away:
            raise PolicyError("the acting policies are offloaded: call reload first")
        with self._timed("rollout_batch"):
            loads = [member.load for member in self._members]
            routed: dict[int, list[int]] = {}
            for position, env_ret in enumerate(env_rets):
                index = router.choose(env_ret.env_id, loads)
                loads[index] += 1
                routed.setdefault(index, []).append(position)
            answers: list[Any] = [None] * len(env_rets)
            for index, positions in routed.items():
                own = [env_rets[position] for position in positions]
                future = self._members[index].submit(own, mode, reset_state=reset_state)
                for i, position in enumerate(positions):
                    answers[position] = _Answer(future, i)
            if self.config.rollout_mode == "sync":
                answers = [answer.result() for answer in answers]
        return BatchedData(batched_env_ret.ids(), answers)

    def postprocess(
        self,
        batched_env_ret: BatchedData | None = None,
        batched_policy_resp: BatchedData | None = None,
    ) -> BatchedData | None:
        """Returns what the policy's `postprocess` makes of each pair, under the same ids."""
        given = batched_env_ret if batched_policy_resp is None else batched_policy_resp
        if given is None:
            return None
        nothing: tuple[Any, ...] = (None,) * len(given)
        env_rets = nothing if batched_env_ret is None else batched_env_ret.values()
        responses = nothing if batched_policy_resp is None else batched_policy_resp.values()
        policy = self._first(self._local, "eval")
        with self._timed("postprocess"):
            results = [policy.postprocess(*pair) for pair in zip(env_rets, responses, strict=True)]
        return BatchedData(given.ids(), results)

    def update_dataset(self, data: Sequence[Any]) -> None:
        """Gives each policy that trains its sample: one entry per policy.

        Raises:
            ValueError: There are more or fewer entries than policies.
        """
        with self._timed("update_dataset"):
            for policy, one in zip(self._train_list, data, strict=True):
                policy.update_dataset(one)

    def train(self) -> dict[str, float] | None:
        """Trains every policy once and returns what the first one reports."""
        with self._timed("train"):
            reports = [policy.train() for policy in self._train_list]
        return reports[0] if reports else None

    def send_weights(self) -> None:
        """Copies the weights of the first trained policy to those that act, which go on as before.

        Raises:
            InvalidRequestError: They do not fit an acting policy of this process.
        """
        weights = policy_weights(self._first(self._train_list, "train"))
        self._version += 1
        with self._timed("send_weights"):
            for member in self._members:
                member.receive(weights, self._version)

    def notify_update_weights(self) -> None:
        """Lets the acting policies use what was sent, each from its next batch on."""
        self._swaps += [member.swap() for member in self._members]

    def sync_weights(self) -> None:
        """Gives the weights of the first trained policy to those that act: sends, then notifies.

        With `policy.rollout_mode: sync` policies of this process use them when this returns; for
        others see `wait_for_eval_weight_update`.
        """
        self.send_weights()
        self.notify_update_weights()

    def wait_for_eval_weight_update(self, timeout: float = 60.0) -> bool:
        """Returns whether the acting policies use what was sent, once they do.

        Args:
            timeout: How long to wait, in seconds.

        Raises:
            RLightningError: One could not take it.
        """
        if wait(self._swaps, timeout).not_done:
            return False
        swaps, self._swaps = self._swaps, []
        for swap in swaps:
            swap.result()
        return True

    def verify_eval_weight_consistency(self, rtol: float = 1e-3) -> bool:
        """Returns whether the acting policies have the weights of the first trained one."""
        expected = self._first(self._train_list, "train").get_param_fingerprint()
        return all(
            got.keys() == expected.keys()
            and all(abs(got[k] - v) <= rtol * abs(v) for k, v in expected.items())
            for got in (member.fingerprint() for member in self._members)
        )

    def get_num_requests(self) -> list[int]:
        """Returns how many requests each acting policy has to answer; each env's is one."""
        return [member.load for member in self._members]

    def check_idle(self) -> bool:
        """Returns whether no acting policy has anything to answer."""
        return not any(self.get_num_requests())

    def save_checkpoint(self, path: str | Path) -> None:
        """Writes the weights of the first trained policy as a safetensors file."""
        self._first(self._train_list, "train").save_checkpoint(path)

    def load_checkpoint(self, path: str | Path) -> None:
        """Gives the weights that `save_checkpoint` wrote to the policies that train, or else act.

        `sync_weights` gives those of the trained ones to those that act.

        Raises:
            InvalidRequestError: The file holds something else, or they do not fit.
        """
        for policy in self._train_list or self._local:
            policy.load_checkpoint(path)

    def push(self, role: PolicyRole | str) -> None:
        """Sets a copy of the weights of every policy of a role aside, until `pop`."""
        role = PolicyRole(role)
        copies = [
            {name: tensor.detach().clone() for name, tensor in policy_weights(policy).items()}
            for policy in self._of(role)
        ]
        self._pushed.setdefault(role, []).append(copies)

    def pop(self, role: PolicyRole | str) -> None:
        """Takes back the weights that the last `push` of a role set aside.

        Raises:
            PolicyError: There is none.
        """
        role = PolicyRole(role)
        if not self._pushed.get(role):
            raise PolicyError(f"pop of role '{role.value}' without a push")
        copies = self._pushed[role].pop()
        for policy, weights in zip(self._of(role), copies, strict=True):
            load_weights(policy, weights)

    def offload(self, role: PolicyRole | str | None = None) -> None:
        """Moves the policies of a role, or all, to the CPU; `reload` those that shall act again."""
        self._move(role, away=True)

    def reload(self, role: PolicyRole | str | None = None) -> None:
        """Moves the policies of a role, or all, back to their device."""
        self._move(role, away=False)

    def print_timing_summary(self, reset: bool = False) -> None:
        """Logs how long what was called took in the last minute, at level DEBUG.

        Args:
            reset: Begin again from nothing.
        """
        for name, figures in self.latency.summary().items():
            _LOG.debug("policy group %s: %s", name, figures)
        if reset:
            self.latency = LatencyStats()

    def shutdown(self) -> None:
        """Lets go of every policy; the group cannot be used afterwards."""
        for member in self._members:
            member.close()
        self._train_list.clear()
        self._members.clear()

    @property
    def _local(self) -> list[BasePolicy]:
        return [member.policy for member in self._members if isinstance(member, LocalMember)]

    def _of(self, role: PolicyRole) -> list[BasePolicy]:
        return self._train_list if role is PolicyRole.TRAIN else self._local

    def _move(self, role: PolicyRole | str | None, *, away: bool) -> None:
        roles = tuple(PolicyRole) if role is None else (PolicyRole(role),)
        if PolicyRole.TRAIN in roles:
            for policy in self._train_list:
                (policy.offload if away else policy.reload)()
        if PolicyRole.EVAL in roles:
            for member in self._members:
                if isinstance(member, LocalMember):
                    member.move(away=away)
            self._away = away

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.latency.record(name, time.perf_counter() - begun)

    @staticmethod
    def _first(policies: Sequence[BasePolicy], role: str) -> BasePolicy:
        if not policies:
            raise PolicyError(f"the group has no policy of role '{role}'")
        return policies[0]


class _Answer:
    """The response to one env, once its policy has answered: a future."""

    def __init__(self, future: Future[list[PolicyResponse]], index: int) -> None:
        self._future = future
        self._index = index

    def done(self) -> bool:
        """Returns whether it is there."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> PolicyResponse:
        """Waits for it; raises what the policy raised."""
        return self._future.result(timeout)[self._index]


def _member(one: BasePolicy | RemoteMember | str, config: PolicyConfig) -> Member:
    if isinstance(one, BasePolicy):
        return LocalMember(one, threaded=config.rollout_mode == "async")
    return RemoteMember(one) if isinstance(one, str) else one
