"""The echo service as a process of its own: `python -m tests.integration.rpc.echo_main`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import time
from collections import deque
from pathlib import Path

from rlightning.errors import ConfigError
from rlightning.rpc.server import run_server
from rlightning.utils.config.rpc import ListenConfig, RpcConfig
from tests.integration.rpc.echo import EchoService
from tests.integration.rpc.harness import FAST


class Service(EchoService):
    def __init__(self, mode: str, rpc: RpcConfig) -> None:
        super().__init__(rpc)
        # For tests in its own process; here they would only grow.
        self.handler.opened = self.handler.closed = self.handler.seqs = deque(maxlen=0)
        self.mode = mode

    async def start(self) -> None:
        if self.mode == "fail":
            raise ConfigError("the model is missing")
        if self.mode == "slow-start":
            await asyncio.to_thread(time.sleep, 1.5)
        if self.mode == "block":
            asyncio.get_running_loop().call_later(0.1, sleep_deaf)
        await super().start()

    async def close(self) -> None:
        await super().close()
        if self.mode == "slow-end":
            self.last_step = asyncio.create_task(self.take_last_step())

    async def take_last_step(self) -> None:
        await asyncio.sleep(0.3)
        print("last step taken", flush=True)

    async def drain(self, deadline_s: float) -> None:
        if self.mode == "hang":
            await asyncio.Event().wait()
        if self.mode == "block-drain":
            while True:
                pass
        print("drained", flush=True)


def sleep_deaf() -> None:
    """Blocks; a signal does not interrupt it, as one does not that comes right before a sleep."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    time.sleep(60)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--announce", type=Path)
    parser.add_argument("--mode", default="")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop")
    parser.add_argument("--grace", type=float, default=30.0)
    parser.add_argument("--rpc", type=RpcConfig.model_validate_json, default=FAST)
    arguments = parser.parse_args()
    if arguments.loop == "asyncio":
        sys.modules["uvloop"] = None  # as if it were not installed
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    try:
        return run_server(
            lambda: Service(arguments.mode, arguments.rpc),
            listen=[ListenConfig(address=arguments.listen, plaintext=True)],
            rpc=arguments.rpc,
            grace_s=arguments.grace,
            announce=arguments.announce,
            name="echo",
        )
    except ConfigError as error:
        print(f"error: {error}", flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
