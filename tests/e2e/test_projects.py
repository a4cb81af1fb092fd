"""What `rlightning init` writes, the example script, and LocalCluster."""

import json
import runpy
import subprocess
import sys

import numpy as np
import pytest

from rlightning.cluster import LocalCluster
from rlightning.policy import build_policy, dump_weights, policy_weights
from rlightning.types import EnvMeta, EnvRet
from tests.e2e.command import CARTPOLE, ROOT, SMALL, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    code, out, _ = run("init", folder, cwd=tmp_path)
    assert code == 0
    assert "config.yaml" in out
    return folder


def test_the_written_tests_pass_whatever_the_folder_above_wants(project):
    options = '[tool.pytest.ini_options]\naddopts = "--strict-config"\nno_such_option = 1\n'
    (project.parent / "pyproject.toml").write_text(options)
    subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=project, check=True)


def test_the_written_config_reaches_its_target(project, tmp_path):
    # From another folder: the services find my_env and my_policy beside the config all the same.
    code, out, err = run("train", "project/config.yaml", "--json", cwd=tmp_path, timeout_s=120)
    assert code == 0, err
    assert json.loads(out)["outcome"] == "solved"


def test_init_overwrites_nothing(project, tmp_path):
    code, _, err = run("init", project, cwd=tmp_path)
    assert code == 2
    assert "already; nothing was written: name another folder" in err


def test_the_example_trains(tmp_path, monkeypatch):
    script = ROOT / "examples" / "cleanrl_like.py"
    assert len(script.read_text().splitlines()) < 40
    monkeypatch.setattr(sys, "argv", [str(script)])
    with pytest.raises(SystemExit, match="`python examples/cleanrl_like.py CONFIG`"):
        runpy.run_path(str(script), run_name="__main__")
    config = tmp_path / "config.yaml"
    config.write_text(CARTPOLE.read_text().replace("target_return: 475", "target_return: 150"))
    subprocess.run([sys.executable, str(script), str(config)], cwd=tmp_path, check=True)


def test_local_cluster(tmp_path):
    overrides = [*SMALL, f"log.log_dir={tmp_path}"]
    with LocalCluster(CARTPOLE, overrides=overrides) as cluster:
        assert cluster.run_dir == tmp_path / "cartpole" / "1"
        meta = cluster.env.metas()[0]
        batch = cluster.buffer.next_batch(timeout_s=30)
        assert batch.columns["observation"].shape == (8, 4, 4)
        assert cluster.policy.version == 0
        assert cluster.buffer.describe().tables["default"].inserted_total >= 32
        spec = EnvMeta("mine", meta.action_space, meta.observation_space, 3)
        own = EnvRet("mine", np.zeros((3, 4), np.float32))
        first, second = cluster.policy.act(own, spec), cluster.policy.act(own, spec)
        np.testing.assert_array_equal(first.action, second.action)
        policy = build_policy(cluster.config.policy, "train")
        policy.init_train(env_meta=meta)
        for version, name in ((1, "default"), (2, "")):  # which are the same one
            cluster.policy.publish(version, dump_weights(policy_weights(policy)), policy=name)
            assert cluster.policy.version == version
        cluster.env.pause()
        assert not cluster.env.describe().actor_running
        cluster.env.resume()
        assert cluster.env.describe().actor_running
    manifest = json.loads((cluster.run_dir / "manifest.json").read_text())
    assert manifest["outcome"] == "finished"
