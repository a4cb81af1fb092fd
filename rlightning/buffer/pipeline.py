"""From what a caller adds to one step of a group: the preprocess functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlightning.buffer.checks import NO_VERSION, RESERVED, Step, is_batched
from rlightning.buffer.utils.preprocessors import Preprocessor
from rlightning.buffer.utils.utils import (
    default_env_ret_preprocess_fn,
    default_obs_preprocessor,
    default_policy_resp_preprocess_fn,
    default_preprocess_fn,
    default_reward_preprocessor,
)
from rlightning.errors import InvalidRowError
from rlightning.types import EnvMeta, EnvRet, PolicyResponse

# Names that an EnvRet gives to the preprocessed data of a step.
_TAKEN = RESERVED.union(EnvRet.fields()) - {"policy_version"}


class Item(NamedTuple):
    """What one group of rows saw and what was answered.

    Attributes:
        env_ret: What the env returned; None for a response that comes alone.
        response: The policy's answer to it; None if there is none, or it comes later.
        new_segment: Nothing before this item is joined to it.
        cut_rows: Rows whose open episode is cut after this item, from outside the env.
    """

    env_ret: EnvRet | None
    response: PolicyResponse | None = None
    new_segment: bool = False
    cut_rows: Sequence[int] = ()


class Pipeline:
    """The preprocess functions of one buffer; None stands for the default.

    Args:
        observe: Transforms observations; a `Preprocessor` is called with single ones, or with
            `batch_transform` where an env has several rows.
        score: Transforms rewards, likewise.
        env_ret_fn: In place of `default_env_ret_preprocess_fn`.
        policy_resp_fn: In place of `default_policy_resp_preprocess_fn`.
        preprocess_fn: In place of `default_preprocess_fn`.
        columns: Which of `ts_observed_ns` and `action_age` are stored too.

    Attributes:
        from_space: Whether observations are stored as the env's space declares them.
        outcomes: Whether extra fields `last_X` are stored as `X` of the step before, too. False
            beside rows of a version that did not.

    Raises:
        ValueError: Functions were given that exclude each other.
    """

    def __init__(
        self,
        observe: Callable[[Any], Any] | None,
        score: Callable[[Any], Any] | None,
        env_ret_fn: Callable[..., dict[str, Any]] | None,
        policy_resp_fn: Callable[..., dict[str, Any]] | None,
        preprocess_fn: Callable[..., dict[str, Any]] | None,
        columns: Collection[str] = (),
    ) -> None:
        self._observe = observe or default_obs_preprocessor
        self._score = score or default_reward_preprocessor
        self._env_ret_fn = env_ret_fn or default_env_ret_preprocess_fn
        self._policy_resp_fn = policy_resp_fn or default_policy_resp_preprocess_fn
        self._preprocess_fn = preprocess_fn or default_preprocess_fn
        self._columns = columns
        own_observe = self._observe is not default_obs_preprocessor
        own_preprocessor = own_observe or self._score is not default_reward_preprocessor
        own_env_fn = self._env_ret_fn is not default_env_ret_preprocess_fn
        own_policy_fn = self._policy_resp_fn is not default_policy_resp_preprocess_fn
        own_fn = self._preprocess_fn is not default_preprocess_fn
        for clash, names in (
            (own_preprocessor and own_env_fn, "obs/reward_preprocessor and env_ret_preprocess_fn"),
            (own_preprocessor and own_fn, "obs/reward_preprocessor and preprocess_fn"),
            (own_env_fn and own_fn, "env_ret_preprocess_fn and preprocess_fn"),
            (own_policy_fn and own_fn, "policy_resp_preprocess_fn and preprocess_fn"),
        ):
            if clash:
                raise ValueError(f"{names} exclude each other: the second would ignore the first")
        self.from_space = not (own_observe or own_env_fn or own_fn)
        # Which function of the user makes observations, if one does.
        makers = {
            "obs_preprocessor": own_observe,
            "env_ret_preprocess_fn": own_env_fn,
            "preprocess_fn": own_fn,
        }
        self._maker = next((name for name, own in makers.items() if own), None)
        self.outcomes = True

    def step(self, item: Item, meta: EnvMeta) -> Step:
        """Returns one item as a step of its group.

        Args:
            item: The item; not changed.
            meta: What its env declared.

        Raises:
            ValueError: EnvRet and response are of different envs, an output of the policy has the
                name of something else in the transition, or a function of the user made
                observations of another number of rows than it got.
            TypeError: Either is of another type.
        """
        env_ret, response = item.env_ret, item.response
        observe, score = self._observe, self._score
        batched = env_ret is not None and is_batched(env_ret, meta.num_envs)
        if batched:
            observe, score = _for_rows(observe), _for_rows(score)
        data = self._preprocess_fn(
            {}, env_ret, response, observe, score, self._env_ret_fn, self._policy_resp_fn
        )
        step = Step(env_ret, new_segment=item.new_segment, cut_rows=item.cut_rows)
        step.outcomes = self.outcomes
        if response is not None:
            _check_names(response, env_ret)
            version = response.__dict__.get("policy_version")
            step.policy_version = NO_VERSION if version is None else version
        if env_ret is not None:
            step.observation = data.pop("observation")
            step.reward = data.pop("last_reward", 0.0)
            step.terminated = data.pop("last_terminated", False)
            step.truncated = data.pop("last_truncated", False)
            data.pop("info", None)
            final = env_ret.info.get("final_observation") if env_ret.info else None
            step.final_observation = None if final is None else observe(final)
            if response is None:
                step.extras, data = data, {}
            elif env_ret._extra:
                step.extras = {name: data.pop(name) for name in env_ret._extra if name in data}
            if "ts_observed_ns" in self._columns:
                step.extras = {**step.extras, "ts_observed_ns": _observed_ns(env_ret, meta)}
            if "action_age" in self._columns:
                step.action_age = env_ret.chunk_index
            if batched and self._maker is not None:
                _check_rows(step.observation, env_ret.row_count(), f"{self._maker}: observation")
                if final is not None:
                    finals = np.size(env_ret.info.get("final_rows", ()))
                    _check_rows(step.final_observation, finals, f"{self._maker}: final_observation")
        if response is not None:
            step.outputs = data
        return step


def _observed_ns(env_ret: EnvRet, meta: EnvMeta) -> Any:
    stamp = np.int64(env_ret.ts_observed_ns)
    if is_batched(env_ret, meta.num_envs):
        return np.full(len(env_ret.row_ids()), stamp)
    return stamp


def _for_rows(preprocessor: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if isinstance(preprocessor, Preprocessor):
        return preprocessor.batch_transform
    return preprocessor


def _check_rows(made: Any, rows: int, what: str) -> None:
    """Checks the leading axis of every leaf of observations that a function of the user made.

    Raises:
        InvalidRowError: One is no axis of so many rows.
    """
    if isinstance(made, Mapping):
        for name, value in made.items():
            _check_rows(value, rows, f"{what}.{name}")
    elif isinstance(made, (tuple, list)) and not (made and all(isinstance(v, str) for v in made)):
        for position, value in enumerate(made):
            _check_rows(value, rows, f"{what}.{position}")
    elif (shape := np.shape(made))[:1] != (rows,):
        raise InvalidRowError(
            f"{what}: expected a leading axis of {rows}, as many rows as the function got, came "
            f"the shape {list(shape)}"
        )


def _check_names(response: PolicyResponse, env_ret: EnvRet | None) -> None:
    names = response.__dict__
    taken = _TAKEN
    if env_ret is not None and env_ret._extra:
        taken = taken.union(env_ret._extra)
    if not taken.isdisjoint(names):
        clash = ", ".join(sorted(taken.intersection(names)))
        raise InvalidRowError(
            f"{clash}: the transition has a field of this name already; rename the policy's output"
        )
