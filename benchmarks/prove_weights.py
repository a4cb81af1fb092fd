"""Publishes and pulls weights of more than 1 GB, and looks at memory: `python -m benchmarks.prove_weights MEGABYTES`.

Exits 1 when what comes back differs, or when server or client take more memory than they may: beside what was there
before, the server what came and the tensors that are made of it, the client what came. Both have some 1/8 more, since
what grows is allocated with a reserve.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from benchmarks.harness import machine, scratch_folder
from rlightning.policy import BasePolicy, PolicyClient, dump_weights
from rlightning.testing.processes import ServerProcess
from rlightning.types import EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.config import RpcConfig

PART_BYTES = 64 * 2**20
SERVER_MOST, CLIENT_MOST = 2.5, 1.5
SPACE = gym.spaces.Box(-1, 1, (4,), np.float32)


class Heavy(BasePolicy):
    """Weights of as many parts as `policy.model_cfg.parts` says, each of 64 MiB; acts with none."""

    def construct_network(self, env_meta: EnvMeta, **kwargs: Any) -> None:
        """Makes the parts without drawing any numbers."""
        parts = int(self.config.model_cfg.get("parts", 1))
        self.net = nn.ParameterList(
            nn.Parameter(torch.zeros(PART_BYTES // 4)) for _ in range(parts)
        )

    def rollout_step(self, env_ret: EnvRet) -> PolicyResponse:
        """Answers with a number of the observation."""
        return PolicyResponse(env_ret.env_id, action=env_ret.observation[:, 0])


def memory(pid: int | str, what: str) -> int:
    """A size of a process in bytes: VmRSS is the current one, VmHWM the largest since `forget`."""
    (kib,) = re.findall(
        rf"^{what}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
    )
    return int(kib) * 1024


def forget(pid: int | str) -> None:
    """Lets VmHWM begin again at what there is now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def make_weights(parts: int, value: float) -> bytes:
    tensors = {f"net.{i}": torch.full((PART_BYTES // 4,), value + i) for i in range(parts)}
    return dump_weights(tensors)


async def prove(parts: int, folder: Path) -> bool:
    config = folder / "config.yaml"
    own = f"type: 'benchmarks.prove_weights:Heavy', device: cpu, model_cfg: {{parts: {parts}}}"
    config.write_text(
        f"policy: {{{own}, initial_weights: random}}\nservices: {{python_path: [.]}}\n"
    )
    command = ["-m", "rlightning.services.policy_server", "--config", str(config)]
    with ServerProcess(command, folder) as process:
        address, pid = await asyncio.to_thread(process.address), process.child.pid
        spec = EnvMeta("env", gym.spaces.Discrete(2), SPACE, 1)
        async with PolicyClient(address, spec=spec, rpc=RpcConfig()) as client:
            env_ret = EnvRet("env", np.zeros((1, 4), np.float32))
            await client.act(env_ret)
            lines, good = [], True
            for version in (1, 2):
                data = await asyncio.to_thread(make_weights, parts, float(version))
                size, digest = len(data), hashlib.sha256(data).hexdigest()
                before = memory(pid, "VmRSS")
                forget(pid)
                begun = time.monotonic()
                await client.publish_weights(version, data, timeout_s=600)
                took_s = time.monotonic() - begun
                more = (memory(pid, "VmHWM") - before) / size
                acted = (await client.act(env_ret)).policy_version
                good &= acted == version and more <= SERVER_MOST
                lines.append((f"publish version {version}", "server", size, took_s, more))
                del data
                before = memory("self", "VmRSS")
                forget("self")
                begun = time.monotonic()
                got, data = await client.pull_weights(version, timeout_s=600)
                took_s = time.monotonic() - begun
                more = (memory("self", "VmHWM") - before) / size
                same = (got, hashlib.sha256(data).hexdigest()) == (version, digest)
                good &= same and more <= CLIENT_MOST
                lines.append((f"pull version {version}", "client", size, took_s, more))
                del data
    print("| | MB | s | most memory beside what was there, of the size of the weights | asked |")
    print("|---|---|---|---|---|")
    for name, who, size, took_s, more in lines:
        most = SERVER_MOST if who == "server" else CLIENT_MOST
        print(f"| {name} | {size / 1e6:,.0f} | {took_s:.1f} | {who}: {more:.2f} | <= {most} |")
    print(
        f"\nwhat came back was what was sent, and acted: {'yes' if good else 'NO, or too much memory'}"
    )
    return good


def main() -> int:
    megabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 1200.0
    parts = max(1, round(megabytes * 1e6 / PART_BYTES))
    print(machine())
    with scratch_folder() as folder:
        return 0 if asyncio.run(prove(parts, Path(folder).resolve())) else 1


if __name__ == "__main__":
    raise SystemExit(main())
