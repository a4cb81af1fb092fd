"""A whole cluster of servers on this machine, each a process of its own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rlightning.cluster.process import MALLOC_ENV
from rlightning.testing import ServerProcess, free_address

PATIENCE_S = 120.0


@contextmanager
def servers(config: Mapping[str, Any], **section: Any) -> Iterator[str]:
    """Runs an env, a policy and a buffer server; yields the address of the env server.

    Args:
        config: Sections `env`, `policy` and `buffer`.
        **section: `services.env`.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        addresses = {name: free_address() for name in ("policy", "buffer", "env")}
        services: dict[str, Any] = {name: {"address": addresses[name]} for name in addresses}
        services["env"] = section
        running = []
        for name, address in addresses.items():
            place = folder / name
            place.mkdir()
            (place / "config.yaml").write_text(json.dumps({**config, "services": services}))
            command = ["-m", f"rlightning.services.{name}_server"]
            command += ["--config", str(place / "config.yaml"), "--listen", address]
            process = ServerProcess(command, place, environment=MALLOC_ENV)
            running.append(stack.enter_context(process))
        for server in running:
            server.address(PATIENCE_S)
        yield addresses["env"]
