"""`top` and `doctor` of a service behind TLS and tokens, with keys as `rlightning keys` makes them."""

import json

import pytest
import yaml

from rlightning.rpc.health import check_health
from rlightning.testing import wait_until
from rlightning.utils.config import ClientAuthConfig
from tests.e2e.command import run
from tests.service_processes import Services

pytestmark = pytest.mark.slow

CONFIG = """
env: {name: cart, backend: gymnasium, task: CartPole-v1}
buffer: {type: RolloutBuffer, rollout_length: 8}
services:
  buffer:
    listen:
      address: 127.0.0.1:0
      tls: {cert_file: KEYS/server.pem, key_file: KEYS/server.key}
      tokens: KEYS/tokens.yaml
"""


def test_top_and_doctor_look_through_tls_with_a_token(tmp_path):
    assert run("keys", "--host", "localhost", "--out", "keys", cwd=tmp_path)[0] == 0
    keys = tmp_path / "keys"
    ca, token = keys / "ca.pem", keys / "learner.token"
    config = CONFIG.replace("KEYS", str(keys))
    with Services(tmp_path, config, names=["buffer"]) as services:
        address = services.addresses["buffer"]
        auth = ClientAuthConfig(ca_file=str(ca))
        wait_until(lambda: check_health(address, auth=auth), 60, "not SERVING")

        def top(*options):
            look = ("--once", "--json", "--interval", "0.1")
            code, out, err = run("top", address, *look, "--ca", ca, *options, cwd=tmp_path)
            assert err == ""
            (service,) = json.loads(out)["services"]
            return code, service

        code, shown = top("--token-file", token)
        assert (code, shown["state"], shown["role"], shown["error"]) == (
            0,
            "SERVING",
            "buffer",
            None,
        )
        assert shown["tables"]["default"]["writers"] == 0
        code, shown = top()  # health needs no token
        assert (code, shown["state"], shown["tables"]) == (0, "SERVING", {})
        assert "this server wants a token" in shown["error"]

        shown = yaml.safe_load(config)
        del shown["services"]["buffer"]["listen"]
        shown["services"]["buffer"]["address"] = address
        shown["services"]["buffer"]["auth"] = {"ca_file": str(ca), "token_file": str(token)}
        (tmp_path / "robot.yaml").write_text(yaml.safe_dump(shown))

        code, out, err = run("doctor", "robot.yaml", "--json", cwd=tmp_path)
        assert (code, err) == (0, "")
        told = json.loads(out)
        found = [one for one in told["findings"] if one["where"] == f"buffer {address}"]
        assert {one["check"]: one["status"] for one in found} == dict.fromkeys(
            ("reach", "health", "version", "clock", "link"), "ok"
        )
        assert told["links"]["buffer"]["up_mbit_s"] > 1
        assert token.read_text().strip() not in out
