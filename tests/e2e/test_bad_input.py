"""What people get wrong: one clear line each, an exit code, no traceback."""

import socket

import pytest

from tests.e2e.command import CARTPOLE, SMALL, run, settings

pytestmark = pytest.mark.slow


def train(tmp_path, *overrides, debug=False):
    options = ["--debug"] if debug else []
    return run("train", CARTPOLE, *settings(*SMALL, *overrides), *options, cwd=tmp_path)


@pytest.mark.parametrize(
    ("override", "code", "line"),
    [
        ("env.num_env=3", 2, "unknown key 'env.num_env'; did you mean 'env.num_envs'?"),
        ("train.lr=fast", 2, "'train.lr': expected a valid number, got 'fast'"),
        ("env.backend=gym", 2, "env.backend: no env backend 'gym' is registered; known: "),
        (
            "train.batch_size=33",
            2,
            "train.batch_size: expected at most 32, the rows of one rollout",
        ),
        ("env.task=CartPoel-v1", 1, "env server: env.task 'CartPoel-v1': gymnasium has no env"),
        ("policy.type=no_module:X", 1, "policy server: policy.type 'no_module:X' cannot be loaded"),
        ("policy.model_cfg.activation=x", 1, "policy.model_cfg.activation: 'x' is none of"),
        ("services.buffer.listen=0.0.0.0:0", 1, "buffer server: listener 0.0.0.0:0 is reachable"),
    ],
)
def test_one_clear_line(tmp_path, override, code, line):
    got, out, err = train(tmp_path, override)
    assert got == code
    assert line in err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert "Traceback" not in out + err


def test_a_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = train(tmp_path, f"services.policy.listen=127.0.0.1:{port}")
    assert code == 1
    assert err.startswith(f"error: policy server: cannot listen on 127.0.0.1:{port}")
    assert len(err.splitlines()) == 1


def test_an_unreachable_peer(tmp_path):
    code, out, err = train(
        tmp_path, "services.policy.address=127.0.0.1:1", "services.start_timeout_s=2"
    )
    assert code == 1
    assert out == "waiting up to 2 s for the policy server at 127.0.0.1:1 ...\n"
    # On a busy machine the others may not have written anything by then.
    said, _, logs = err.partition("; ")
    assert said.strip() == (
        "error: the policy server at 127.0.0.1:1 is not SERVING after 2 s "
        "(services.start_timeout_s): cannot connect: connection refused"
    )
    assert logs in {"", "logs in runs/cartpole/1/logs\n"}


def test_services_that_nobody_has_started(tmp_path):
    addresses = [f"services.{name}.address=127.0.0.1:1" for name in ("env", "policy", "buffer")]
    code, out, err = train(tmp_path, *addresses, "services.start_timeout_s=2")
    assert code == 1
    assert out.splitlines() == [
        f"waiting up to 2 s for the {name} server at 127.0.0.1:1 ..."
        for name in ("policy", "buffer", "env")
    ]
    assert err.startswith("error: the policy server at 127.0.0.1:1 is not SERVING after 2 s")
    assert not any((tmp_path / "runs" / "cartpole").iterdir())  # nothing was written, or begun


@pytest.mark.parametrize("first", [0, 5], ids=["at reset", "later"])
def test_an_observation_outside_the_declared_space(tmp_path, first):
    (tmp_path / "lying.py").write_text(
        "import gymnasium, numpy\n"
        "class Lying(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(0, 1, (3,), numpy.float32)\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def observe(self):\n"
        f"        return numpy.zeros(4 if self.steps >= {first} else 3, numpy.float32)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        self.steps = 0\n"
        "        return self.observe(), {}\n"
        "    def step(self, action):\n"
        "        self.steps += 1\n"
        "        return self.observe(), 0.0, False, False, {}\n"
        "gymnasium.register('Lying-v0', Lying)\n"
    )
    code, out, err = train(tmp_path, "env.task=lying:Lying-v0")
    assert code == 1
    assert err.startswith("error: env server: ")
    assert "expected float32[3], got float32[4]" in err
    assert len(err.splitlines()) == 1
    assert "Traceback" not in out + err


def test_debug_shows_the_traceback(tmp_path):
    code, _, err = train(tmp_path, "env.num_env=3", debug=True)
    assert code == 1
    assert "Traceback" in err
    assert "ConfigError" in err
