"""Who may publish weights: one learner at a time."""

from __future__ import annotations

import math
import time

from rlightning.errors import AlreadyExistsError, InvalidRequestError

_MAX_ID = 128


class PublishLease:
    """The right to publish the weights of one policy; a learner keeps it by being heard.

    Args:
        lease_s: After how much silence it ends, in seconds.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._learner_id = ""
        self._until = 0.0

    @property
    def holder(self) -> str | None:
        """Id of the learner that holds it; None if nobody does."""
        return self._learner_id if time.monotonic() < self._until else None

    def keep(self, learner_id: str) -> None:
        """Gives the lease to a learner, or lets it keep it.

        Raises:
            AlreadyExistsError: Another one holds it; says for how long at the most.
            InvalidRequestError: It is no name to be shown to people.
        """
        if len(learner_id) > _MAX_ID or not learner_id.isprintable():
            raise InvalidRequestError(
                f"learner_id: expected at most {_MAX_ID} printable characters, got "
                f"{len(learner_id)}: {learner_id[:40]!r}"
            )
        now = time.monotonic()
        if learner_id != self._learner_id and now < self._until:
            left_s = math.ceil(self._until - now)
            raise AlreadyExistsError(
                f"learner {self._learner_id!r} holds the lease on publishing, {learner_id!r} may "
                f"not publish meanwhile; retry in {left_s} s",
                reason="LEASE_HELD",
            )
        self._learner_id, self._until = learner_id, now + self._lease_s

    def leave(self, learner_id: str) -> None:
        """Takes the lease from a learner that gives it up; others keep theirs."""
        if learner_id == self._learner_id:
            self._until = 0.0
