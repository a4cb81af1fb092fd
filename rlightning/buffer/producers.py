"""The writers of a table as its learners see them: who keeps them waiting."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlightning.buffer.rendezvous import Rendezvous


@dataclass
class Producer:
    """A writer and when it was last heard.

    Attributes:
        env_id: Id of the env whose rows it writes.
        writer_id: Id of the writer.
        heard_ns: When something of it came last, by the monotonic clock.
        waiting: Messages of it that wait for room.
        held_by: Of the table whose rate limiter they wait for; None if it is none.
    """

    env_id: str
    writer_id: str
    heard_ns: int = field(default_factory=time.monotonic_ns)
    waiting: int = 0
    held_by: Rendezvous | None = None


class Producers(Mapping[str, Producer]):
    """The writers by env id.

    Args:
        timeout_s: After how long a silent one is complained about, in seconds.
        all_needed: Whether a batch needs all of them, rather than any.
    """

    def __init__(self, timeout_s: float, *, all_needed: bool) -> None:
        self.timeout_ns = int(timeout_s * 1e9)
        self._all_needed = all_needed
        self._by_env: dict[str, Producer] = {}
        # Who wrote last when nobody does any more.
        self._last = Producer("", "")

    def __getitem__(self, env_id: str) -> Producer:
        return self._by_env[env_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_env)

    def __len__(self) -> int:
        return len(self._by_env)

    def add(self, env_id: str, writer_id: str) -> None:
        """Takes note of a writer, who takes over from the one before it."""
        self._by_env[env_id] = Producer(env_id, writer_id)

    def remove(self, env_id: str) -> None:
        """Takes note that a writer will not come back."""
        self._last = self._by_env.pop(env_id)

    def orphan(self) -> None:
        """Takes note that the writers of before are gone: whoever comes in their place is another.

        What they left open stays until somebody closes it, or comes.
        """
        for env_id in self._by_env:
            self._by_env[env_id] = Producer(env_id, "")

    def clear(self) -> None:
        """Forgets all writers."""
        self._by_env.clear()
        self._last = Producer("", "")

    def of(self, env_id: str, writer_id: str) -> Producer | None:
        """Returns the producer that a writer is; None if another one has taken over."""
        producer = self._by_env.get(env_id)
        return producer if producer is not None and producer.writer_id == writer_id else None

    def held_for(self, own: Rendezvous) -> list[Rendezvous]:
        """Returns whose limiters keep everything from coming to a table; none if something may."""
        holders = [producer.held_by for producer in self._by_env.values()]
        if own in holders:
            return [own]
        found = [holder for holder in holders if holder is not None]
        return found if len(found) == len(holders) else []

    def silent_at(self) -> int:
        """Returns when there is something to complain about, by the monotonic clock."""
        heard = [producer.heard_ns for producer in self._by_env.values() if not producer.waiting]
        if not self._by_env:
            since = self._last.heard_ns
        elif not heard or (len(heard) < len(self._by_env) and not self._all_needed):
            since = time.monotonic_ns()
        else:
            # Every producer holds a rollout up; samples go on as long as one of them writes.
            since = min(heard) if self._all_needed else max(heard)
        return since + self.timeout_ns

    def silence(self, name: str) -> str:
        """Tells which writers of the table of this name are silent, and since when."""
        now = time.monotonic_ns()
        if not self._by_env:
            who = (
                f"the last one was {_name(self._last)}, heard {_ago(now, self._last)} ago"
                if self._last.env_id
                else "there has been none since the start"
            )
            return f"no producer writes to table '{name}'; {who}"
        silent = [
            f"{_name(producer)}, last heard {_ago(now, producer)} ago"
            for producer in self._by_env.values()
            if not producer.waiting and now - producer.heard_ns >= self.timeout_ns
        ]
        return f"table '{name}' waits for silent producers: {'; '.join(silent)}"

    def stats(self) -> dict[str, Any]:
        """Returns the state of each, for people."""
        now = time.monotonic_ns()
        return {
            env_id: {
                "writer_id": producer.writer_id,
                "heard_s": (now - producer.heard_ns) / 1e9,
                "waiting": producer.waiting,
            }
            for env_id, producer in self._by_env.items()
        }


def _name(producer: Producer) -> str:
    return f"env {producer.env_id!r} (writer {producer.writer_id})"


def _ago(now: int, producer: Producer) -> str:
    return f"{(now - producer.heard_ns) / 1e9:.1f} s"
