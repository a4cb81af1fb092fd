"""What one group of rows sends, checked against what it declared and sent before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlightning.buffer.utils.layout import Array, Layout, as_array, check_keys
from rlightning.buffer.utils.utils import outcome_of
from rlightning.errors import ConfigError, InvalidRowError
from rlightning.types import ActionSource, EnvRet
from rlightning.wire import Limits

NO_VERSION = -1
"""What `policy_version` holds where the policy counts none."""

RESERVED = frozenset(
    {
        "observation",
        "next_observation",
        "reward",
        "terminated",
        "truncated",
        "cut",
        "policy_action",
        "action_source",
        "policy_version",
        "episode_id",
        "step",
        "action_age",
        "sample_index",
        "sample_generation",
        "sample_weight",
    }
)
"""Columns that the buffer itself adds; no policy output or extra field may be called so."""


_MAX_ROWS = Limits().max_rows  # as many as an env may declare
# Sizes of a transition's own columns: reward and two flags for each agent; and all others.
_REWARD_BYTES = 4 + 1 + 1
_OWN_BYTES = 8 + 8 + 8 + 1 + 1  # episode_id, step, policy_version, action_source, cut

_AGE_BYTES = 4
_TEXT_ID_BYTES = 4


@dataclass(frozen=True)
class Schema:
    """What every item of a group looks like; grows until all of it was seen once.

    Attributes:
        rows: Rows of the group.
        batched: Whether arrays have a leading axis of rows; a lone env may send none.
        observation: Layout of one row's observation.
        extras: Layouts of the EnvRets' extra fields.
        outputs: Layouts of the policy's outputs; None before the first response.
        agents: Names of the agents where rewards and flags are dicts; None until a dict came.
        executed: Layout of `executed_action`; None until one came.
        plain: An EnvRet came without `executed_action` where it could have had one.
        scalar: An EnvRet came with numbers for reward where it could have had a dict by agent.
        aged: Whether the age of actions is stored.
        outcomes: Extra fields `last_X` that tell of the step before, as `last_reward` does, by the
            name X of the column that has them with that step. Empty where they are not stored.
    """

    rows: int
    batched: bool
    observation: Layout
    extras: Mapping[str, Layout]
    outputs: Mapping[str, Layout] | None = None
    agents: tuple[str, ...] | None = None
    executed: Layout | None = None
    plain: bool = False
    scalar: bool = False
    aged: bool = False
    outcomes: Mapping[str, str] = field(default_factory=dict)

    def lead(self, count: int) -> tuple[int, ...]:
        """Returns the leading axes of the arrays of `count` rows."""
        return (count,) if self.batched else ()

    @property
    def action(self) -> Layout | None:
        """Layout of the column `action`; None while it is not known."""
        if self.executed is not None or not self.plain:
            return self.executed
        return (self.outputs or {}).get("action")

    @cached_property
    def row_bytes(self) -> int:
        """Size in bytes of one transition of one row, in all columns."""
        parts = self._further()
        if self.executed is not None:
            parts.append(self.executed)
        observations = 2 * self.observation.nbytes  # that of the step, and the next one
        rewards = _REWARD_BYTES * (1 if self.agents is None else len(self.agents))
        own = _OWN_BYTES + (_AGE_BYTES if self.aged else 0)
        return observations + rewards + own + sum(layout.nbytes for layout in parts)

    @property
    def text_bytes(self) -> int:
        """What a ring saves of `row_bytes`: it keeps numbers of texts outside the observation."""
        layouts = self._further()
        leaves = [leaf for layout in layouts for leaf in layout.leaves if leaf.text]
        return sum(leaf.nbytes - _TEXT_ID_BYTES for leaf in leaves)

    def _further(self) -> list[Layout]:
        """Returns the layouts of the columns of extra fields and outputs."""
        outcomes = [self.extras[name] for name in self.outcomes.values()]
        return [*self.extras.values(), *outcomes, *(self.outputs or {}).values()]

    def derived(self) -> dict[str, str]:
        """Returns what `outcomes` are where they are stored."""
        taken = {*RESERVED, *self.extras, *(self.outputs or {})}
        named = ((outcome_of(name, taken), name) for name in self.extras)
        return {outcome: name for outcome, name in named if outcome is not None}

    def difference(self, other: Schema) -> str | None:
        """Says what keeps rows of `other` from being stored beside these; None if nothing."""
        try:
            check_keys(self.extras, other.extras, "extra fields")
            if self.outputs is not None and other.outputs is not None:
                check_keys(self.outputs, other.outputs, "policy outputs")
                check_keys(self.outcomes, other.outcomes, "columns of extra fields `last_...`")
        except InvalidRowError as error:
            return str(error)
        pairs = [(self.observation, other.observation)]
        pairs += [(layout, other.extras[name]) for name, layout in self.extras.items()]
        if self.outputs is not None and other.outputs is not None:
            pairs += [(layout, other.outputs[name]) for name, layout in self.outputs.items()]
        if self.action is not None and other.action is not None:
            pairs.append((self.action, other.action))
        return next(filter(None, (mine.difference(theirs) for mine, theirs in pairs)), None)


@dataclass(slots=True)
class Step:
    """One item after preprocessing: an EnvRet, the answer to it, or both.

    Attributes:
        env_ret: The EnvRet, for what says where it belongs; None for a lone response.
        observation: Preprocessed observation.
        final_observation: Preprocessed last observations of the rows in `info["final_rows"]`.
        reward: Preprocessed reward.
        terminated: As in the EnvRet.
        truncated: As in the EnvRet.
        extras: Extra fields, stored with the observation.
        outputs: The policy's outputs; None without a response.
        policy_version: Version of the weights that answered.
        new_segment: Nothing before this item is joined to it.
        cut_rows: Rows whose open episode is cut after this item.
        action_age: How many steps before it the executed action was asked for; None where that is
            not stored.
        outcomes: Whether extra fields `last_X` are stored as `X` of the step before, too.
    """

    env_ret: EnvRet | None = None
    observation: Any = None
    final_observation: Any = None
    reward: Any = 0.0
    terminated: Any = False
    truncated: Any = False
    extras: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] | None = None
    policy_version: int = NO_VERSION
    new_segment: bool = False
    cut_rows: Sequence[int] = ()
    action_age: int | None = None
    outcomes: bool = True


class Final(NamedTuple):
    """Rows that ended an episode and show the first observation of the next one."""

    positions: npt.NDArray[np.intp]
    """Where they are among the rows of the item."""
    observation: list[Array]
    """Their last observations, [k, ...]."""


@dataclass(slots=True)
class Observed:
    """A checked EnvRet of `count` rows; every array is [count, ...].

    Attributes:
        rows: Which rows; None for all of the group.
        final: Rows that ended an episode and began the next one; None if none did.
        done: Rows that ended an episode.
    """

    rows: npt.NDArray[np.intp] | None
    count: int
    observation: list[Array]
    final: Final | None
    reward: list[Array]
    terminated: list[Array]
    truncated: list[Array]
    done: npt.NDArray[np.bool_]
    extras: dict[str, list[Array]]
    executed: list[Array] | None
    action_source: Array | int
    episode_id: Array | None
    step: Array | None
    action_age: int | None


@dataclass(slots=True)
class CheckedStep:
    """A step that fits; applying it cannot fail."""

    schema: Schema
    observed: Observed | None
    outputs: dict[str, list[Array]] | None
    policy_version: int
    new_segment: bool
    cut_rows: npt.NDArray[np.intp] | None


def check_step(
    step: Step,
    schema: Schema | None,
    *,
    rows: int | None,
    declared: Layout | None,
    awaiting: int,
    action_space: Any = None,
) -> CheckedStep:
    """Checks one item against what its group declared and sent before.

    Args:
        step: The item.
        schema: What earlier items looked like; None for the first.
        rows: Rows of the group, if the env declared how many it has.
        declared: Layout of one row's observation, if the env declared it.
        awaiting: Rows that a lone response answers.
        action_space: Of the env, if it declared it.

    Raises:
        InvalidRowError: Something does not fit; the message names the field.
    """
    observed: Observed | None = None
    count = awaiting
    if step.env_ret is not None:
        if schema is None:
            schema = _first_schema(step, step.env_ret, rows, declared)
        schema, observed = _check_env_ret(step, step.env_ret, schema, action_space)
        count = observed.count
    if schema is None:
        raise InvalidRowError("a response came before any observation")
    outputs: dict[str, list[Array]] | None = None
    if step.outputs is not None:
        if schema.outputs is None:
            layouts = _layouts(step.outputs, schema, schema.extras)
            schema = replace(schema, outputs=layouts)
            if step.outcomes:
                schema = replace(schema, outcomes=schema.derived())
        assert schema.outputs is not None
        outputs = _flatten(step.outputs, schema.outputs, schema.lead(count), "policy outputs")
    return CheckedStep(
        schema,
        observed,
        outputs,
        step.policy_version,
        step.new_segment,
        _row_numbers(step.cut_rows, schema.rows, "cut_rows") if len(step.cut_rows) else None,
    )


def _first_schema(step: Step, env_ret: EnvRet, rows: int | None, declared: Layout | None) -> Schema:
    batched = is_batched(env_ret, rows, declared)
    layout = declared or Layout.of_value(step.observation, "observation", lead=int(batched))
    if rows is None:
        if env_ret.rows is not None:
            raise InvalidRowError("rows: the env has to declare num_envs to send some of its rows")
        rows = env_ret.row_count() if batched else 1
        if rows > _MAX_ROWS:
            raise InvalidRowError(f"observation: expected at most {_MAX_ROWS} rows, got {rows}")
    if rows != 1 and not batched:
        raise InvalidRowError(f"observation: expected a leading axis of {rows} rows")
    schema = Schema(rows, batched, layout, {}, aged=step.action_age is not None)
    return replace(schema, extras=_layouts(step.extras, schema, {}))


def is_batched(
    env_ret: EnvRet, num_envs: int | None = None, declared: Layout | None = None
) -> bool:
    """Tells whether the arrays of an EnvRet have a leading axis of rows.

    Args:
        env_ret: What the env returned.
        num_envs: Number of rows, if the env declared it.
        declared: Layout of one row's observation, if the env declared it.
    """
    if env_ret.rows is not None or env_ret.episode_id is not None or (num_envs or 1) > 1:
        return True
    if declared is not None:
        return declared.is_batched(env_ret.observation)
    reward = env_ret.last_reward
    if isinstance(reward, Mapping):
        reward = next(iter(reward.values()), 0.0)
    return np.ndim(reward) > 0


def _layouts(
    values: Mapping[str, Any], schema: Schema, taken: Mapping[str, Any]
) -> dict[str, Layout]:
    for name in values:
        if name in RESERVED or name in taken:
            raise InvalidRowError(f"{name}: the buffer has a column of this name; rename the field")
    return {
        name: Layout.of_value(value, name, lead=int(schema.batched))
        for name, value in values.items()
    }


def _flatten(
    values: Mapping[str, Any], layouts: Mapping[str, Layout], lead: tuple[int, ...], what: str
) -> dict[str, list[Array]]:
    check_keys(layouts, values, what)
    return {name: layout.flatten(values[name], lead) for name, layout in layouts.items()}


def _check_env_ret(
    step: Step, env_ret: EnvRet, schema: Schema, action_space: Any
) -> tuple[Schema, Observed]:
    rows, count = None, schema.rows
    if env_ret.rows is not None:
        rows = _row_numbers(env_ret.rows, schema.rows, "rows")
        count = len(rows)
        if count == schema.rows:
            rows = None
    lead = schema.lead(count)
    schema = _with_agents(schema, step.reward)
    agents = schema.agents
    terminated = _numbers(step.terminated, "last_terminated", "biu", agents, count)
    truncated = _numbers(step.truncated, "last_truncated", "biu", agents, count)
    executed = None
    if env_ret.executed_action is not None:
        if schema.executed is None:
            schema = _with_executed(schema, env_ret.executed_action, action_space)
        assert schema.executed is not None
        executed = schema.executed.flatten(env_ret.executed_action, lead)
    elif not schema.plain and schema.outputs is not None:
        schema = replace(schema, plain=True)
    return schema, Observed(
        rows=rows,
        count=count,
        observation=schema.observation.flatten(step.observation, lead),
        final=_final(step, env_ret, schema, count),
        reward=_numbers(step.reward, "last_reward", "fiub", agents, count),
        terminated=terminated,
        truncated=truncated,
        done=_done(terminated, truncated),
        extras=_flatten(step.extras, schema.extras, lead, "extra fields"),
        executed=executed,
        action_source=_sources(env_ret.action_source, count),
        episode_id=_counters(env_ret.episode_id, "episode_id", count),
        step=_counters(env_ret.step, "step", count),
        action_age=step.action_age,
    )


def _with_agents(schema: Schema, reward: Any) -> Schema:
    if schema.agents is not None or (schema.scalar and type(reward) is np.ndarray):
        return schema
    if isinstance(reward, Mapping):
        if schema.scalar:
            raise InvalidRowError("last_reward: expected numbers, as before, got a dict")
        return replace(schema, agents=tuple(reward))
    if not schema.scalar and schema.outputs is not None:
        return replace(schema, scalar=True)
    return schema


def _with_executed(schema: Schema, executed: Any, space: Any) -> Schema:
    layout = Layout.of_value(executed, "executed_action", lead=int(schema.batched))
    own = (schema.outputs or {}).get("action")
    fits = own is not None and own.difference(layout) is None
    if not fits and (said := _declared_difference(space, layout)):
        raise InvalidRowError(f"{said}, as the action space of the env has it")
    schema = replace(schema, executed=layout)
    if schema.plain and actions_differ(schema):
        raise InvalidRowError(
            "executed_action: its layout is not that of the policy's action, so every EnvRet of a "
            "step must have one from the first on"
        )
    return schema


def _declared_difference(space: Any, layout: Layout) -> str | None:
    """Says in what an executed action is none of a space; None if it is one."""
    if space is None:
        return None
    try:
        return Layout.of_space(space, "executed_action").difference(layout)
    except ConfigError:  # a space of no fixed shape, whose values are what comes
        return None


def actions_differ(schema: Schema) -> bool:
    """Tells whether executed actions look otherwise than the policy's, as with action chunks."""
    own = (schema.outputs or {}).get("action")
    if own is None or schema.executed is None:
        return own is not schema.executed
    return own.difference(schema.executed) is not None


def _row_numbers(rows: Any, total: int, name: str) -> npt.NDArray[np.intp]:
    numbers = np.asarray(rows)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or not len(numbers):
        raise InvalidRowError(f"{name}: expected row numbers, got {rows!r:.60}")
    falls = np.count_nonzero(numbers[1:] <= numbers[:-1])
    if falls or numbers[0] < 0 or numbers[-1] >= total:
        raise InvalidRowError(f"{name}: expected ascending numbers below {total}, got {rows!r:.60}")
    return numbers.astype(np.intp)


def _numbers(
    value: Any, name: str, kinds: str, agents: tuple[str, ...] | None, count: int
) -> list[Array]:
    """Returns one array [count] per agent, or a single one."""
    if type(value) is not np.ndarray and isinstance(value, Mapping):
        if agents is None:
            raise InvalidRowError(f"{name}: expected numbers, as in last_reward, got a dict")
        check_keys(dict.fromkeys(agents), value, name)
        return [_row_values(value[agent], f"{name}.{agent}", kinds, count) for agent in agents]
    array = _row_values(value, name, kinds, count)
    return [array] * (1 if agents is None else len(agents))


def _row_values(value: Any, name: str, kinds: str, count: int) -> Array:
    array = value if type(value) is np.ndarray else as_array(value, name)
    if array.dtype.kind not in kinds:
        wanted = "booleans" if kinds[0] == "b" else "real numbers"
        raise InvalidRowError(f"{name}: expected {wanted}, got {array.dtype}")
    if array.ndim == 0:
        return np.broadcast_to(array, (count,))
    if array.shape != (count,):
        raise InvalidRowError(f"{name}: expected shape {[count]}, got {list(array.shape)}")
    return array


def _done(terminated: list[Array], truncated: list[Array]) -> npt.NDArray[np.bool_]:
    done = np.logical_or(terminated[0], truncated[0])
    for term, trunc in zip(terminated[1:], truncated[1:], strict=True):
        # The episode of a row ends when it has ended for each of its agents.
        done &= np.logical_or(term, trunc)
    return done


def _final(step: Step, env_ret: EnvRet, schema: Schema, count: int) -> Final | None:
    positions = env_ret.info.get("final_rows") if env_ret.info else None
    if positions is None or not np.size(positions):
        return None
    numbers = _row_numbers(positions, count, "final_rows")
    if step.final_observation is None:
        raise InvalidRowError("final_observation: missing, although final_rows names rows")
    arrays = schema.observation.flatten(step.final_observation, (len(numbers),))
    return Final(numbers, arrays)


def _sources(value: Any, count: int) -> Array | int:
    if value is None:
        return int(ActionSource.POLICY)
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or array.size not in (1, count) or array.ndim > 1:
        raise InvalidRowError(f"action_source: expected one or {count} sources, got {value!r:.60}")
    if array.min() < min(ActionSource) or array.max() > max(ActionSource):
        raise InvalidRowError(f"action_source: unknown source in {value!r:.60}")
    return int(array.reshape(-1)[0]) if array.size == 1 else array


def _counters(value: Any, name: str, count: int) -> Array | None:
    if value is None:
        return None
    array = value if type(value) is np.ndarray else np.asarray(value)
    if array.ndim == 0:
        array = array[np.newaxis]
    if array.dtype.kind not in "iu" or array.shape != (count,):
        raise InvalidRowError(f"{name}: expected {count} integers, got {value!r:.60}")
    return array
