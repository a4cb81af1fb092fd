"""What `rlightning doctor` makes of what it sees, and what it packs."""

import ast
import asyncio
import json
import stat
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from rlightning import cluster
from rlightning.cli.app import app
from rlightning.cluster.bundle import REMOVED, write_bundle
from rlightning.cluster.camera_fit import SHARE, bytes_per_pixel, camera_fits, scene
from rlightning.cluster.diagnosis import Diagnosis, Finding
from rlightning.cluster.doctor import (
    look_at_clocks,
    look_at_config,
    look_at_envs,
    look_at_link,
    sight_to_examine,
    unreachable,
)
from rlightning.cluster.runs import Run
from rlightning.cluster.targets import Target
from rlightning.env.remote_client import EnvStatus
from rlightning.errors import ConfigError, UnavailableError
from rlightning.latency import ClockOffset, Offset
from rlightning.policy import PolicyDescription
from rlightning.rpc.link import Clocks, Link
from rlightning.rpc.protocol import LIBRARY_VERSION, PROTOCOL_VERSION
from rlightning.testing import free_address
from rlightning.types import EnvMeta
from rlightning.utils.config import ClientAuthConfig, MainConfig

CART = {"name": "cart", "backend": "gymnasium", "task": "CartPole-v1"}


def make_config(**sections):
    return MainConfig.from_dict({"env": CART, **sections})


def make_meta(env_id="cart-0-0", shape=(4,), dtype=np.float32, rows=8):
    low = 0 if dtype == np.uint8 else -1
    return EnvMeta(env_id, spaces.Discrete(2), spaces.Box(low, 1, shape, dtype), rows)


def make_env(*metas, **stats):
    return EnvStatus(LIBRARY_VERSION, list(metas), [], True, 0, [], 0, stats)


def make_link(**changes):
    clocks = Clocks(same_machine=False, wall_offset_s=0.001, uncertainty_s=0.002)
    link = Link(PROTOCOL_VERSION, LIBRARY_VERSION, 0.01, 0.009, 0.001, 20.0, 40.0, clocks)
    return replace(link, **changes)


def found(findings, check):
    return [(one.status, one.message) for one in findings if one.check == check]


@pytest.mark.parametrize("status", ["note", "warning", "error"])
def test_what_is_not_ok_always_has_a_fix(status):
    with pytest.raises(ValueError, match="needs a fix: it is bad"):
        Finding(status, "reach", "env", "it is bad")
    assert Finding("ok", "reach", "env", "it is good").fix == ""


def test_no_line_of_the_doctor_makes_a_finding_that_lacks_its_fix():
    """Those of rare faults too, which no test brings about."""
    calls = [
        node
        for file in Path(cluster.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding"
    ]
    assert len(calls) > 20
    for call in calls:
        status = ast.unparse(call.args[0])
        assert status == "'ok'" or len(call.args) == 5, f"line {call.lineno}: {ast.unparse(call)}"


def test_a_good_link_is_told_in_figures():
    findings = list(look_at_link("env h:1", make_link()))
    assert [one.status for one in findings] == ["ok"] * 3
    assert "20 Mbit/s up, 40 down" in findings[-1].message
    assert "1 ms ahead, ±2 ms" in findings[1].message


@pytest.mark.parametrize(
    ("changes", "check", "status", "text"),
    [
        ({"protocol_version": 7}, "version", "error", "protocol 7"),
        ({"library_version": "0.0.1"}, "version", "warning", "0.0.1"),
        ({"clocks": Clocks(False, -5.0, 0.02)}, "clock", "warning", "5 s behind, ±20 ms"),
        ({"clocks": Clocks(False, 0.15, 0.2)}, "clock", "ok", "150 ms ahead, ±200 ms"),
        ({"clocks": None}, "clock", "warning", "cannot be known"),
    ],
)
def test_what_is_wrong_between_two_machines(changes, check, status, text):
    ((got, message),) = found(look_at_link("x", make_link(**changes)), check)
    assert got == status
    assert text in message


def test_envs_that_fit_one_policy():
    env = make_env(make_meta(), make_meta("cart-0-1", rows=2))
    spec = make_meta(None, rows=None)
    policy = PolicyDescription(LIBRARY_VERSION, 1, 2, True, {}, spec=spec)
    findings = list(look_at_envs("env", env, make_config(), [policy]))
    assert {one.status for one in findings} == {"ok"}
    assert "fit each other and the policy" in found(findings, "spec")[0][1]
    findings = list(look_at_envs("env", env, make_config(), [replace(policy, spec=None)]))
    assert "no policy acted yet" in found(findings, "spec")[0][1]


def test_envs_that_differ_are_named_with_the_field():
    env = make_env(make_meta(), make_meta("robot/r", shape=(5,)))
    policy = PolicyDescription(
        LIBRARY_VERSION, 1, 2, True, {}, spec=make_meta(None, (3,), rows=None)
    )
    told = found(look_at_envs("env", env, make_config(), [policy]), "spec")
    assert [status for status, _ in told] == ["error", "error"]
    assert told[0][1].startswith("robot/r: observation_space")
    assert told[1][1].startswith("policy server: observation_space")


def test_envs_of_another_policy_may_have_other_spaces():
    env = make_env(make_meta(), make_meta("rival-0-0", shape=(5,)))
    policy = PolicyDescription(LIBRARY_VERSION, 1, 2, True, {}, spec=make_meta(None, rows=None))
    rival = {**CART, "name": "rival", "policy": "frozen"}
    config = make_config(env=[CART, rival], policy={"named": {"frozen": {}}})
    (told,) = found(look_at_envs("env", env, config, [policy]), "spec")
    assert told == ("ok", "the spaces of 2 groups fit each other and the policy")
    config = make_config(env=[CART, {**rival, "policy": "default"}])
    assert found(look_at_envs("env", env, config, [policy]), "spec")[0][0] == "error"


def test_a_name_that_is_no_part_of_an_id_is_known_as_it_is_in_ids():
    env = make_env(make_meta("ALE_Pong-v5-0-0"))
    config = make_config(env={**CART, "name": "ALE/Pong-v5"})
    assert found(look_at_envs("env", env, config, []), "envs") == []


def test_another_config_errors_of_envs_and_steps_that_are_too_large():
    big = make_meta("other-0-0", (480, 640, 3), np.uint8)
    env = make_env(big, last_errors={"other-0-0": "the arm fell off"})
    small = {"rpc": {"max_message_bytes": 4 * 2**20}}
    config = make_config(services={"policy": small, "buffer": small})
    findings = list(look_at_envs("env", env, config, []))
    assert found(findings, "envs") == [
        ("warning", "it hosts no env 'cart'"),
        ("error", "other-0-0: the arm fell off"),
    ]
    limits = [one for one in findings if one.check == "limits"]
    assert [one.status for one in limits] == ["error", "error"]
    needed = 8 * (2 * 480 * 640 * 3 + 8) + 2**20
    assert f"may take {needed} bytes, services.policy.rpc.max_message_bytes" in limits[0].message
    assert "raise services.policy.rpc.max_message_bytes" in limits[0].fix


@pytest.mark.parametrize("ahead_s", [-5.0, 0.0, 5.0])
def test_a_clock_that_an_env_server_takes_for_another_is_named(ahead_s):
    """From here to the env server and on: that it shares a clock with the policy server is wrong."""
    hour, ms = 3600 * 10**9, 10**6
    shared = ClockOffset()
    shared.set_peer("policy", same_clock=True)
    env = make_env(make_meta(), clocks={"policy": shared.summary(), "buffer": {"epoch": 1}})
    ahead_ns = int(ahead_s * 1e9)
    clocks = {
        "env": Offset(hour, 3 * ms),
        "policy": Offset(hour + ahead_ns + 2 * ms, 4 * ms),
        "buffer": Offset(0, 0),
    }
    told = list(look_at_clocks("env", env, clocks))
    if ahead_s:
        (finding,) = told
        assert (finding.status, finding.check) == ("warning", "clock")
        assert "takes the clock of the policy server for one that is 5 s off, ±19 ms" in (
            finding.message
        )
        assert "share a boot id" in finding.fix
    else:
        assert told == []
    assert list(look_at_clocks("env", env, {"env": Offset(0, 0)})) == []
    assert list(look_at_clocks("env-1", env, clocks)) == []


def test_a_config_that_does_not_fit_together_is_an_error():
    assert found(look_at_config(make_config()), "config")[0][0] == "ok"
    bad = make_config(env={**CART, "driver": "external"})
    ((status, message),) = found(look_at_config(bad), "config")
    assert status == "error"
    assert "driver" in message


async def test_nobody_listens():
    target = Target("env", free_address(), "env")
    finding = await unreachable(target, "env", UnavailableError("no"))
    assert finding.message == f"nobody listens on {target.address}"
    assert "rlightning serve" in finding.fix


@pytest.mark.parametrize(
    ("auth", "fix"), [(None, "give --ca"), (ClientAuthConfig(tls=True), "does it have TLS")]
)
async def test_somebody_listens_who_speaks_something_else(auth, fix):
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        target = Target("env", address, "env", auth=auth)
        finding = await unreachable(target, "", UnavailableError("no"))
    assert "does not answer" in finding.message
    assert fix in finding.fix


def test_frames_that_fit_follow_from_the_link():
    fits = {(fit.width, fit.encoding): fit for fit in camera_fits(100.0)}
    raw = fits[640, "none"]
    assert raw.frame_bytes == 640 * 480 * 3
    assert raw.max_fps == pytest.approx(SHARE * 100e6 / (640 * 480 * 24))
    assert raw.frame_s == pytest.approx(640 * 480 * 24 / 100e6)
    assert fits[320, "none"].max_fps == pytest.approx(4 * raw.max_fps)


def test_encoded_pictures_are_measured():
    sizes = bytes_per_pixel()
    assert 3.0 == sizes["none"] > sizes["png"] > sizes["jpeg:90"] > sizes["jpeg:80"] > 0.1
    picture = scene(64, 48)
    assert (picture.shape, picture.dtype) == ((48, 64, 3), np.uint8)
    assert picture.std() > 20


SECRETS = (
    "own-token-0123456789",
    "token-in-a-file-0123",
    "a-password-of-an-env",
    "listed-token-01234",
)


@pytest.mark.parametrize("name", ["b.zip", "b.tar.gz"])
def test_a_bundle_has_configs_logs_and_no_secret(tmp_path, name):
    (tmp_path / "token").write_text(SECRETS[1] + "\n")
    tokens = [{"name": "us", "token": SECRETS[3], "scopes": ["admin"]}]
    (tmp_path / "tokens.yaml").write_text(json.dumps(tokens))
    config = make_config(
        env={**CART, "env_kwargs": {"password": SECRETS[2], "tokenizer_size": 5}},
        log={"log_dir": str(tmp_path / "runs")},
        services={
            "policy": {"auth": {"token": SECRETS[0]}},
            "buffer": {"auth": {"token_file": str(tmp_path / "token")}},
            "env": {"listen": {"address": "h:1", "tokens": str(tmp_path / "tokens.yaml")}},
        },
    )
    run = Run.create(config, command=["rlightning", "top", "--token", "typed-token-0123"])
    words = " ".join(SECRETS)
    (run.logs / "env_server.log").write_text("x" * 300_000 + f"\nlast: {words} Bearer abcdef\n")
    file = tmp_path / name
    diagnosis = Diagnosis([Finding("note", "reach", "env", f"said {SECRETS[0]}", "do so")])
    write_bundle(file, config, diagnosis, run.path)
    if name.endswith(".zip"):
        with zipfile.ZipFile(file) as archive:
            parts = {one: archive.read(one).decode() for one in archive.namelist()}
    else:
        with tarfile.open(file) as archive:
            parts = {one: archive.extractfile(one).read().decode() for one in archive.getnames()}
    assert set(parts) == {
        *("config.yaml", "doctor.json", "versions.json"),
        *("run/config.yaml", "run/manifest.json", "run/logs/env_server.log"),
    }
    everything = "".join(parts.values())
    for secret in (*SECRETS, "typed-token-0123", "abcdef"):
        assert secret not in everything
    assert parts["run/logs/env_server.log"].endswith(
        f"last: {' '.join([REMOVED] * 4)} Bearer {REMOVED}\n"
    )
    assert len(parts["run/logs/env_server.log"]) < 2**19
    assert "tokenizer_size: 5" in parts["config.yaml"]
    assert str(tmp_path / "tokens.yaml") in parts["config.yaml"]  # a name is no secret
    assert json.loads(parts["versions.json"])["packages"]["numpy"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not list(tmp_path.glob(".b.*"))


def test_secrets_in_other_forms_are_left_out_of_a_bundle(tmp_path):
    kwargs = {
        "password": 271828182,
        "api_keys": ["key-one-01", "key-two-02"],
        "credentials": {"user": "me-0123", "pin": 314159265},
        "url": "https://me:in-a-url@host/x",
        "save_token": True,
        "token_counts": {"a": 1},
    }
    config = make_config(
        env={**CART, "env_kwargs": kwargs}, log={"log_dir": str(tmp_path / "runs")}
    )
    run = Run.create(config, command=["rlightning"])
    log = (
        "logged 271828182 and key-two-02\n"
        "token: sk-yaml\n{\"token\": \"sk-json\"}\n{'api_key': 'sk-python'}\n"
        "password = sk-spaces\nredis://:sk-url@host tokens: file.yaml\n"
    )
    (run.logs / "env_server.log").write_text(log)
    file = tmp_path / "b.zip"
    write_bundle(file, config, Diagnosis([]), run.path)
    with zipfile.ZipFile(file) as archive:
        everything = "".join(archive.read(one).decode() for one in archive.namelist())
    for secret in ("271828182", "key-one", "key-two", "me-0123", "314159265", "in-a-url", "sk-"):
        assert secret not in everything, secret
    assert "save_token: true" in everything
    assert "a: 1" in everything
    assert "tokens: file.yaml" in everything


def test_a_bundle_needs_a_name_that_says_its_format(tmp_path):
    with pytest.raises(ConfigError, match=r"\.zip or \.tar\.gz"):
        write_bundle(tmp_path / "b.rar", make_config(), Diagnosis([]), None)


def test_a_run_that_is_over_is_not_asked_for_but_its_logs_are_there(tmp_path):
    listen = {name: {"listen": f"h:{i}"} for i, name in enumerate(("env", "policy", "buffer"), 1)}
    log = {"log_dir": str(tmp_path)}
    run = Run.create(make_config(log=log, services=listen), command=[])
    run.begin()
    config = make_config(log=log)
    assert len(sight_to_examine(config).targets) == 3
    run.finish("stopped")
    sight = sight_to_examine(config)
    assert list(sight.targets) == []
    assert sight.run == run.path.resolve()


def test_the_command_tells_what_is_not_there_yet_and_packs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(make_config().to_yaml())
    code = app(["doctor", "config.yaml", "--json", "--bundle", "b.zip"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert (code, told["ok"]) == (0, True)
    assert [one["where"] for one in told["findings"] if one["check"] == "reach"] == [
        *("policy", "buffer", "env"),
    ]
    assert zipfile.is_zipfile("b.zip")
    here = free_address()
    address = f"services.env.address={here}"
    code = app(["doctor", "config.yaml", "--set", address], standalone_mode=False)
    assert code == 1
    assert f"error   reach   env {here}: nobody listens on {here}" in capsys.readouterr().out
