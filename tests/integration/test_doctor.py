"""An examination of real servers."""

import json

from rlightning.cluster.doctor import examine
from rlightning.cluster.sight import Sight
from rlightning.cluster.targets import Target
from rlightning.rpc import link
from rlightning.rpc.server import serve
from rlightning.services.buffer_server.servicer import BufferService
from rlightning.services.env_server.servicer import EnvService
from rlightning.utils.config import ListenConfig, MainConfig

NOWHERE = "127.0.0.1:1"


async def test_what_is_there_is_measured_and_what_is_not_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(link, "_LOAD_S", 0.1)
    tokens = tmp_path / "tokens.json"
    entry = {"name": "us", "token": "of-this-test-and-it-only", "scopes": ["learner"]}
    tokens.write_text(json.dumps([entry]))
    config = MainConfig.from_dict(
        {
            "env": {"name": "cart", "backend": "gymnasium", "task": "CartPole-v1", "num_envs": 4},
            "buffer": {"type": "RolloutBuffer", "rollout_length": 8},
            "services": {"policy": {"address": NOWHERE}, "buffer": {"address": NOWHERE}},
        }
    )
    guarded = [ListenConfig(tokens=str(tokens))]
    buffer = await serve(BufferService(config), listen=guarded)
    env = await serve(EnvService(config))
    try:
        await buffer.ready()
        await env.ready()
        targets = [
            Target("policy", env.address, "policy"),
            Target("buffer", buffer.address, "buffer"),
            Target("env", env.address, "env"),
        ]
        diagnosis = await examine(config, Sight(targets))
    finally:
        await env.stop(grace_s=0)
        await buffer.stop(grace_s=0)
    told = {
        (one.where.partition(" ")[0], one.check): (one.status, one.message)
        for one in diagnosis.findings
    }
    assert told["policy", "reach"] == ("error", "the env server is there")
    assert told["buffer", "reach"] == ("ok", "answers")
    assert told["buffer", "access"][0] == "error"
    assert "wants a token" in told["buffer", "access"][1]
    for check in ("reach", "health", "version", "clock", "link", "spec", "limits"):
        assert told["env", check][0] == "ok"
    assert "it is this machine" in told["env", "clock"][1]
    assert not diagnosis.ok
    assert set(diagnosis.links) == {"env"}
    measured = diagnosis.links["env"]
    assert measured.up_mbit_s > 1
    assert measured.down_mbit_s > 1
    raw = next(fit for fit in diagnosis.cameras if (fit.width, fit.encoding) == (640, "none"))
    assert raw.max_fps * raw.frame_bytes * 8 / 1e6 < measured.up_mbit_s
    json.dumps(diagnosis.to_dict(), allow_nan=False)
