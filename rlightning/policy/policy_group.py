"""Policies in this process, driven by hand: the documented, synchronous interface."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlightning.errors import PolicyError
from rlightning.policy.base_policy import BasePolicy
from rlightning.policy.inference import Inference, Part
from rlightning.policy.layout import InputLayout
from rlightning.policy.weights import load_weights, policy_weights
from rlightning.types import BatchedData, EnvMeta, Mode, PolicyResponse
from rlightning.utils.config import Config, PolicyConfig, TrainConfig


class PolicyGroup:
    """Policies that train and policies that act, with the weights of the first trained one.

    Everything runs in the calling thread.

    Args:
        train_list: Policies of role `train`; may be empty.
        eval_list: Policies of role `eval`; may be empty.
        config: Section `policy`.
    """

    def __init__(
        self,
        train_list: Sequence[BasePolicy],
        eval_list: Sequence[BasePolicy],
        config: PolicyConfig,
    ) -> None:
        self.config = config
        self._train_list = list(train_list)
        self._eval_list = list(eval_list)
        self._layout: InputLayout | None = None
        self._inferences: list[Inference] = []

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

    def init_train(
        self, train_config: TrainConfig | None = None, env_meta: EnvMeta | None = None
    ) -> None:
        """Makes the networks and optimizers of the policies that train."""
        for policy in self._train_list:
            policy.init_train(train_config, env_meta)

    def init_eval(self, eval_config: Config | None = None, env_meta: EnvMeta | None = None) -> None:
        """Makes the networks of the policies that act."""
        if env_meta is None or env_meta.observation_space is None:
            raise PolicyError("init_eval needs an env_meta with an observation space")
        for policy in self._eval_list:
            policy.init_eval(eval_config, env_meta)
        layout = InputLayout(env_meta.observation_space)
        self._layout = layout
        self._inferences = [Inference(policy, layout) for policy in self._eval_list]

    def rollout_batch(
        self, batched_env_ret: BatchedData, *, mode: Mode = Mode.EXPLORE
    ) -> BatchedData:
        """Returns a PolicyResponse for each EnvRet, in order, under the same ids.

        EnvRets may be of one env each, or of groups with a leading dimension; all those of one
        policy share one inference.

        Raises:
            PolicyError: `init_eval` was not called, or the policy broke its contract.
            InvalidRequestError: An observation is not in the declared space.
        """
        if self._layout is None or not self._inferences:
            raise PolicyError("rollout_batch needs init_eval, and a policy of role 'eval'")
        parts: list[Part] = []
        for env_ret in batched_env_ret.values():
            values, rows = self._layout.flatten(env_ret)
            parts.append(Part(env_ret.env_id, values, rows))
        share = -(-len(parts) // len(self._inferences))
        responses: list[PolicyResponse] = []
        for i, inference in enumerate(self._inferences):
            if own := parts[i * share : (i + 1) * share]:
                responses += inference.run(own, mode)
        for response in responses:
            response.mark_policy_sent()
        return BatchedData(batched_env_ret.ids(), responses)

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
        policy = self._first(self._eval_list, "eval")
        results = [policy.postprocess(*pair) for pair in zip(env_rets, responses, strict=True)]
        return BatchedData(given.ids(), results)

    def update_dataset(self, data: Sequence[Any]) -> None:
        """Gives each policy that trains its sample: one entry per policy.

        Raises:
            ValueError: There are more or fewer entries than policies.
        """
        for policy, one in zip(self._train_list, data, strict=True):
            policy.update_dataset(one)

    def train(self) -> dict[str, float] | None:
        """Trains every policy once and returns what the first one reports."""
        reports = [policy.train() for policy in self._train_list]
        return reports[0] if reports else None

    def sync_weights(self) -> None:
        """Gives the weights of the first trained policy to those that act, at once."""
        weights = policy_weights(self._first(self._train_list, "train"))
        for policy in self._eval_list:
            load_weights(policy, weights)

    def verify_eval_weight_consistency(self, rtol: float = 1e-3) -> bool:
        """Returns whether the acting policies have the weights of the first trained one."""
        expected = self._first(self._train_list, "train").get_param_fingerprint()
        return all(
            got.keys() == expected.keys()
            and all(abs(got[k] - v) <= rtol * abs(v) for k, v in expected.items())
            for got in (policy.get_param_fingerprint() for policy in self._eval_list)
        )

    def save_checkpoint(self, path: str | Path) -> None:
        """Writes the weights of the first trained policy as a safetensors file."""
        self._first(self._train_list, "train").save_checkpoint(path)

    def shutdown(self) -> None:
        """Lets go of every policy; the group cannot be used afterwards."""
        self._train_list.clear()
        self._eval_list.clear()
        self._inferences.clear()

    @staticmethod
    def _first(policies: Sequence[BasePolicy], role: str) -> BasePolicy:
        if not policies:
            raise PolicyError(f"the group has no policy of role '{role}'")
        return policies[0]
