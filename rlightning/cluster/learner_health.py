"""Tells whoever watches over a learner whether it goes on, as a service's health tells of that."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time

from typing_extensions import Self

from rlightning.errors import ConfigError, DeadlineExceededError
from rlightning.rpc.health import Health
from rlightning.rpc.health_server import HealthServer
from rlightning.rpc.loop import shared_loop

_LOOK_S = 0.5
_CLOSE_S = 5.0

STILL_S = 30.0
"""Seconds without a round of the learner's loop after which it is NOT_SERVING."""


class LearnerHealth:
    """Serves the health of the learner of this process. Use as a context manager.

    `readiness` is SERVING once the learner has published its first weights, and for as long as its
    loop comes round: it asks for data, learns, or has come to its end and keeps the services up.
    `liveness` is SERVING before that, too. What stops both is a learner that is stuck, not one that
    waits for data, however long: that is for the health of the services, and for alerts. A round
    with an update, or a checkpoint, that takes longer than `STILL_S` stops both until it is over;
    how long is too long is for whoever asks to say.

    Args:
        address: HOST:PORT; None: nothing is served.

    Raises:
        ConfigError: Nobody can listen there; on entering.
    """

    def __init__(self, address: str | None) -> None:
        self.address = address
        self._health = Health(())
        self._server = HealthServer(self._health)
        self._last_round: float | None = None
        self._watching: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> Self:
        if self.address is not None:
            try:
                self.address = shared_loop().run(self._server.start(self.address))
            except ConfigError as error:
                raise ConfigError(f"learner.health: {error}") from error
            self._watching = shared_loop().submit(self._watch())
        return self

    def __exit__(self, *exception: object) -> None:
        if self._watching is None:
            return
        self._watching.cancel()
        with contextlib.suppress(DeadlineExceededError):
            shared_loop().run(self._server.stop(), _CLOSE_S)

    def came_round(self) -> None:
        """Notes that the loop goes on; cheap, and may be called from any thread."""
        self._last_round = time.monotonic()

    async def _watch(self) -> None:
        while True:
            last = self._last_round
            moves = last is not None and time.monotonic() - last < STILL_S
            self._health.set_alive(last is None or moves)
            self._health.set_ready(moves)
            await asyncio.sleep(_LOOK_S)
