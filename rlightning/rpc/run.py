"""The main function of a service's process."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import select
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlightning.rpc.loop import close_loop
from rlightning.rpc.metrics import Metrics, MetricsServer
from rlightning.rpc.running import serve
from rlightning.rpc.service import Service
from rlightning.utils.config.rpc import ListenConfig, RpcConfig

logger = logging.getLogger(__name__)

EXIT_STUCK = 70
"""Exit status of a process that did not stop within its grace period."""
EXIT_NOW = 75
"""Exit status of a process that was told twice to stop."""

# What the steps of a stop may need beyond the grace period before the process is taken for stuck.
_MARGIN_S = 2.0
# Within this, signals are one request: `timeout` and supervisors tell the process and its group.
_TOGETHER_S = 0.1
# What tasks may need after the stop to end by themselves.
_LAST_STEPS_S = 1.0
_TOLD = (signal.SIGTERM, signal.SIGINT)
_HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none


def run_server(
    make_service: Callable[[], Service],
    *,
    listen: Sequence[ListenConfig] = (ListenConfig(),),
    rpc: RpcConfig | None = None,
    reflection: bool = False,
    grace_s: float = 10.0,
    announce: Path | None = None,
    name: str = "server",
    metrics: str | None = None,
) -> int:
    """Runs a service until SIGTERM or SIGINT; call it in the main thread, as the last thing.

    A signal drains the service and stops it within `grace_s`; a later one ends the process now. So
    does a thread of its own, two seconds after the end of the grace period. SIGHUP is such a signal
    where the caller has a handler for it.

    Args:
        make_service: Makes the service, inside the event loop.
        listen: Where to listen.
        rpc: Limits and times; default: those of `RpcConfig`.
        reflection: Let clients ask which RPCs there are.
        grace_s: Seconds for drain and stop.
        announce: File that is written as soon as the ports are bound: JSON with `service`,
            `address`, `addresses`, `pid` and, where there are any, `metrics`.
        name: Name of the service in logs and in the announcement.
        metrics: HOST:PORT where Prometheus finds its metrics; None: nowhere.

    Returns:
        Exit status: 0 after an orderly stop, 1 if the service did not start or could not go on.

    Raises:
        ConfigError: A listener is not allowed, its port is taken, or a file it names is unusable.
    """
    loop = _new_loop()
    try:
        with _Signals(loop, grace_s) as signals:
            return loop.run_until_complete(
                _main(
                    make_service,
                    signals,
                    listen=listen,
                    rpc=rpc or RpcConfig(),
                    reflection=reflection,
                    grace_s=grace_s,
                    announce=announce,
                    name=name,
                    metrics=metrics,
                )
            )
    finally:
        close_loop(loop)


def _new_loop() -> asyncio.AbstractEventLoop:
    """Makes the loop of a server: uvloop's where it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


async def _main(
    make_service: Callable[[], Service],
    signals: _Signals,
    *,
    listen: Sequence[ListenConfig],
    rpc: RpcConfig,
    reflection: bool,
    grace_s: float,
    announce: Path | None,
    name: str,
    metrics: str | None,
) -> int:
    signals.listen()
    service = make_service()
    # First, since a listener that cannot be must end the process before anybody relies on it.
    measures = [getattr(service, "measure", lambda metrics: None)]
    shown = None if metrics is None else _show_metrics(measures, metrics)
    server = await serve(service, listen=listen, rpc=rpc, reflection=reflection)
    measures.append(server.measure)
    logger.info("%s listens on %s", name, ", ".join(server.addresses))
    if announce is not None:
        _announce(announce, name, server.addresses, None if shown is None else shown.address)
    ready = asyncio.ensure_future(server.ready())
    told = asyncio.ensure_future(signals.told.wait())
    await asyncio.wait({ready, told}, return_when=asyncio.FIRST_COMPLETED)
    failure, what = ready.exception() if ready.done() else None, "did not start"
    if failure is None:
        broken: asyncio.Future[Any] = getattr(service, "failure", None) or asyncio.Future()
        endings: set[asyncio.Future[Any]] = {told, broken}
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        failure, what = broken.exception() if broken.done() else None, "cannot go on"
    if failure is None:
        logger.info("%s stops", name)
    else:
        logger.error(
            "%s %s: %s",
            name,
            what,
            failure,
            exc_info=failure if logger.isEnabledFor(logging.DEBUG) else None,
        )
        told.cancel()
    await server.stop(grace_s=grace_s)
    if shown is not None:
        await asyncio.to_thread(shown.close)
    await asyncio.gather(ready, told, return_exceptions=True)
    # gRPC's own, of calls that it has just ended, would log a traceback if they were cancelled.
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=_LAST_STEPS_S)
    return 0 if failure is None else 1


def _show_metrics(measures: Sequence[Callable[[Metrics], None]], address: str) -> MetricsServer:
    def measure(metrics: Metrics) -> None:
        for add in measures:
            add(metrics)

    shown = MetricsServer(address, measure, loop=asyncio.get_running_loop())
    logger.info("metrics at http://%s/metrics", shown.address)
    return shown


def _announce(path: Path, name: str, addresses: list[str], metrics: str | None) -> None:
    """Writes the file at once or not at all, for who polls it."""
    content: dict[str, Any] = {
        "service": name,
        "address": addresses[0],
        "addresses": addresses,
        "pid": os.getpid(),
    }
    if metrics is not None:
        content["metrics"] = metrics
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "w") as file:
        json.dump(content, file)
    Path(temporary).replace(path)


class _Signals:
    """Turns SIGTERM and SIGINT into an event, with a thread that ends a process that hangs.

    The thread reads what the interpreter writes the moment a signal comes, in whichever thread; a
    handler would wait until the main thread is back from what it does. So even a process whose
    event loop is blocked gets the grace period and no more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, grace_s: float) -> None:
        self.told = asyncio.Event()
        self._loop = loop
        self._patience_s = grace_s + _MARGIN_S
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._numbers: tuple[signal.Signals, ...] = _TOLD
        if _HANGUP is not None and callable(signal.getsignal(_HANGUP)):
            self._numbers += (_HANGUP,)
        self._before: dict[signal.Signals, object] = {}
        self._wakeup_before = -1
        self._over = False

    def __enter__(self) -> _Signals:
        threading.Thread(target=self._watch, name="rlightning-signals", daemon=True).start()
        self._wakeup_before = self.listen()
        for number in self._numbers:
            self._before[number] = signal.signal(number, lambda number, frame: None)
        return self

    def __exit__(self, *error: object) -> None:
        if not self.told.is_set():  # else the thread goes on until the process has ended
            for number, handler in self._before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            signal.set_wakeup_fd(self._wakeup_before)
            self._over = True
            os.close(self._write)

    def listen(self) -> int:
        """Has signals told to the thread; in the loop once more, since uvloop hears them itself."""
        return signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def _watch(self) -> None:
        if not self._heard(None):
            os.close(self._read)
            return
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.told.set)
        together = time.monotonic() + _TOGETHER_S
        while (left_s := together - time.monotonic()) > 0 and self._heard(left_s):
            pass
        if self._heard(self._patience_s):
            logger.error("told twice to stop: ending now")
            os._exit(EXIT_NOW)
        if self._over:  # it came after the loop had ended, and so did this
            os.close(self._read)
            return
        logger.critical("not stopped after %.0f s: ending now", self._patience_s)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(EXIT_STUCK)

    def _heard(self, timeout_s: float | None) -> bool:
        """Waits for a signal that tells to stop; False when time is up, or nothing more comes."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._read], [], [], left_s)
            numbers = os.read(self._read, 1) if readable else b""
            if not numbers or numbers[0] in self._numbers:
                return bool(numbers)
            with suppress(RuntimeError):  # another signal: its handler needs the loop to turn
                self._loop.call_soon_threadsafe(lambda: None)
