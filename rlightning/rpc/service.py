"""What a service is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rlightning.rpc.handlers import Handler


class Service(Protocol):
    """One gRPC service; `serve` and `run_server` run it.

    Attributes:
        name: Full name, such as `rlightning.v1.PolicyService`.
        scopes: By method name, the token scope that may call it: `env`, `actor`, `learner` or
            `admin`, or several of them between blanks. A method that is not here wants `admin`; a
            token of that scope may call all.

    A service may also have an attribute `early_methods`, a collection of method names that are
    served while it starts. All others wait for the start, for a bounded time, and then end with
    UNAVAILABLE. And it may have an attribute `failure`, an `asyncio.Future` that gets an exception
    when the service cannot go on: `run_server` then stops it in order, with exit status 1. And it
    may have a method `use_health`, called before `start` with the `Health` of its server, to say
    with `set_ready` when it cannot work for a while after it has started, and a method
    `measure(metrics)` that adds what it counts to a `rlightning.rpc.metrics` `Metrics`, on the
    event loop.
    """

    name: str
    scopes: Mapping[str, str]

    def handlers(self) -> Mapping[str, Handler]:
        """Returns the handler of each method by its short name; called once, before `start`."""
        ...

    async def start(self) -> None:
        """Returns when the service is ready: warm, replayed, reset.

        The port is bound and the health service answers meanwhile, so this must not block the event
        loop: imports and loads that take longer than some milliseconds belong into a thread.
        Raising ends the server.
        """
        ...

    async def drain(self, deadline_s: float) -> None:
        """Finishes what is in flight; returns at the latest after `deadline_s` seconds.

        Clients have been told by then that they should send nothing new; when this returns, their
        streams are ended.
        """
        ...

    async def close(self) -> None:
        """Releases everything; called once, after the last stream, also after a failed start."""
        ...
