"""Stores the steps of an attached env about which nobody was asked."""

from __future__ import annotations

import logging
from collections import deque

from rlightning.actor import BufferPort
from rlightning.chunks import blank_of
from rlightning.types import EnvRet, PolicyResponse

_LOG = logging.getLogger(__name__)

# Steps that wait for the first answer, of which nobody knows yet what it looks like.
_MAX_EARLY = 1024


class UnaskedSteps:
    """Between an actor and a buffer: stores what a client did by itself as transitions, too.

    A step that nobody answered is a transition if the one after it says which action was executed.
    It gets an answer of zeros, in the form of the policy's, without a version: `action` is then
    what was executed, `action_source` who chose it, and `policy_version` that of no weights. So a
    step is held back until the next one comes, and until the policy has answered for the first
    time. One whose action nobody names is joined to nothing.

    Args:
        buffer: Where all goes, in order.
    """

    def __init__(self, buffer: BufferPort) -> None:
        self._buffer = buffer
        self._blank: PolicyResponse | None = None
        self._waiting: deque[tuple[EnvRet, PolicyResponse | None]] = deque()

    async def insert(
        self, env_ret: EnvRet, response: PolicyResponse | None, *, new_segment: bool = False
    ) -> None:
        """Stores a step that was answered, after those before it.

        One without an answer is where the actor ended. More may have come after it by then: the
        group hands it over once more, and what follows, when it drains.
        """
        if response is None:
            return
        if self._blank is None:
            self._blank = blank_of(response)
        await self._flush(None if new_segment else env_ret)
        await self._buffer.insert(env_ret, response, new_segment=new_segment)

    async def store(self, env_ret: EnvRet, response: PolicyResponse | None = None) -> None:
        """Takes a step about which nobody was asked here.

        Args:
            env_ret: The step.
            response: The answer that somebody else gave to it, if one did.
        """
        if response is not None and self._blank is None:
            self._blank = blank_of(response)
        if self._blank is not None or len(self._waiting) >= _MAX_EARLY:
            await self._flush(env_ret)
        self._waiting.append((env_ret, response))

    async def finish(self) -> None:
        """Stores what is held back; nothing follows."""
        if self._blank is None and len(self._waiting) > 1:
            _LOG.warning(
                "%s: %d steps came before the policy's first answer, and nobody has seen what "
                "one looks like: they are no transitions",
                *(self._waiting[0][0].env_id, len(self._waiting)),
            )
        await self._flush(None)

    async def _flush(self, following: EnvRet | None) -> None:
        while self._waiting:
            env_ret, response = self._waiting.popleft()
            after = self._waiting[0][0] if self._waiting else following
            if response is None and after is not None and after.executed_action is not None:
                response = self._blank
            await self._buffer.insert(env_ret, response)
