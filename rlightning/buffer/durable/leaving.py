"""The state of rollouts, and of batches that leave a table, as nested values and back."""

from __future__ import annotations

import numpy as np

from rlightning.buffer.durable.state import State, dump_group, load_group
from rlightning.buffer.lending import Lending, QueueLending, Returned, RolloutLending
from rlightning.buffer.rollout_storage import RolloutStorage
from rlightning.buffer.rollouts import Rollout, RolloutGroup
from rlightning.buffer.shares import Shared, SharedRollouts
from rlightning.buffer.take_once import QueuedRows
from rlightning.buffer.taken import Taken, taken_of
from rlightning.buffer.utils.storage import Storage
from rlightning.wire import decode_env_meta


def dump_rollouts(storage: Storage) -> State | None:
    """Returns the rollouts of a storage, those under collection included; None if it has none."""
    if not isinstance(storage, RolloutStorage):
        return None
    rollouts = storage.rollouts
    groups = [*rollouts.alive()]
    numbers = {id(group): number for number, group in enumerate(groups)}
    ready = {rollout.index for rollout in rollouts._ready}
    return {
        "formed": rollouts.formed,
        "groups": [{**dump_group(group, group._length), "start": group._start} for group in groups],
        "collecting": [numbers[id(group)] for group in rollouts.groups.values()],
        "held": [
            {
                "index": rollout.index,
                "groups": [numbers[id(group)] for group in rollout.groups],
                "plain": [numbers[id(group)] for group in rollout.plain()],
                "ready": rollout.index in ready,
            }
            for rollout in rollouts._held.values()
        ],
    }


def load_rollouts(storage: Storage, state: State | None) -> None:
    """Puts into an empty storage what `dump_rollouts` returned of another."""
    if not isinstance(storage, RolloutStorage) or state is None:
        return
    rollouts = storage.rollouts
    rollouts.formed = state["formed"]
    groups = []
    for one in state["groups"]:
        meta = decode_env_meta(one["meta"])
        group = RolloutGroup(meta, rollouts, from_space=storage._pipeline.from_space)
        group._start = one["start"]
        load_group(group, one)
        groups.append(group)
    for number in state["collecting"]:
        group = groups[number]
        rollouts.groups[group.env_id] = storage._groups[group.env_id] = group
    for one in state["held"]:
        mine, plain = ([groups[number] for number in one[key]] for key in ("groups", "plain"))
        rollout = rollouts._held[one["index"]] = Rollout(one["index"], mine, plain)
        if one["ready"]:
            rollouts._ready.append(rollout)


def dump_lending(lending: Lending) -> State:
    """Returns what is known of batches that leave a table."""
    state: State = {
        "lent": [
            {
                "rank": taken.rank,
                "world_size": taken.world_size,
                "learner": taken.learner,
                "batch_id": taken.batch_id,
                "queued": None if taken.queued is None else _dump_queued(taken.queued),
            }
            for taken in lending.lent.values()
        ],
        "returned": [
            {
                "rank": rank,
                "world_size": world_size,
                "learners": list(returned.learners),
                "batch_id": number,
                "queued": None if returned.queued is None else _dump_queued(returned.queued),
            }
            for (rank, world_size, number), returned in lending.returned.items()
        ],
    }
    if isinstance(lending, QueueLending):
        waiting = _dump_queued(lending.queue.order())
        state |= {"waiting": waiting, "last_number": lending.last_number}
    if isinstance(lending, RolloutLending) and lending.shares is not None:
        state["shares"] = {
            "world_size": lending.shares.world_size,
            "open": [
                [index, sorted(one.taken), sorted(one.released)]
                for index, one in lending.shares._open.items()
            ],
        }
    return state


def load_lending(lending: Lending, state: State) -> None:
    """Tells what lends the batches of a table, which is loaded, what `dump_lending` returned."""
    for one in state.get("returned", ()):
        # Format 1 had those of queues, by number, and did not say whose they were.
        known = one if isinstance(one, dict) else {"batch_id": one[0], "queued": one[1]}
        rows = known["queued"]
        key = known.get("rank", 0), known.get("world_size", 1), known["batch_id"]
        lending.returned[key] = Returned(
            tuple(known.get("learners", ())), None if rows is None else _load_queued(rows)
        )
    if isinstance(lending, QueueLending):
        _load_queue(lending, state)
    elif isinstance(lending, RolloutLending):
        held = lending.rollouts._held
        if (shared := state.get("shares")) is not None:
            lending.shares = SharedRollouts(lending.rollouts, shared["world_size"])
            for index, taken, released in shared["open"]:
                lending.shares._open[index] = Shared(held[index], set(taken), set(released))
        for one in state["lent"]:
            rank, rollout = one["rank"], held[one["batch_id"] - 1]
            lent = taken_of(rollout, rank, one["world_size"], one["learner"])
            lending.lent[rank, lent.batch_id] = lent


def _load_queue(lending: QueueLending, state: State) -> None:
    lending.last_number = state["last_number"]
    for one in state["lent"]:
        rows = _load_queued(one["queued"])
        count, number = len(rows.slots), one["batch_id"]
        lending.lent[one["rank"], number] = Taken(
            count, {}, queued=rows, units=count, batch_id=number, learner=one["learner"]
        )
    taken = [one.queued for one in lending.lent.values() if one.queued is not None]
    lending.queue.restore(_load_queued(state["waiting"]), taken)


def _dump_queued(rows: QueuedRows) -> State:
    return {"slots": rows.slots.astype(np.int64), "numbers": rows.numbers.astype(np.int64)}


def _load_queued(state: State) -> QueuedRows:
    return QueuedRows(np.array(state["slots"], np.intp), np.array(state["numbers"], np.int64))
