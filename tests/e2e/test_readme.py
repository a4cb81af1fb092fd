"""The Python of the README runs as it stands there."""

import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlightning.cluster import LocalCluster
from rlightning.testing import wait_until
from tests.e2e.command import CARTPOLE

ROOT = Path(__file__).parents[2]
SNIPPETS = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_a_snippet_that_attaches_runs(tmp_path):
    with LocalCluster(CARTPOLE, overrides=[f"log.log_dir={tmp_path}"]) as cluster:
        host, _, port = cluster.config.services.env.dial_address.rpartition(":")
        (snippet,) = (snippet for snippet in SNIPPETS if "10.0.0.1" in snippet)
        snippet = snippet.replace('"10.0.0.1", 50051', f'"{host}", {port}')
        with subprocess.Popen([sys.executable, "-c", snippet], cwd=tmp_path) as process:
            try:
                wait_until(
                    lambda: cluster.env.describe().stats["groups_attached"] == 1, 60, "not attached"
                )
                process.send_signal(signal.SIGINT)
                process.wait(20)
                # At once, or once its lease and the time to come back are over.
                wait_until(
                    lambda: cluster.env.describe().stats["groups_attached"] == 0, 60, "not gone"
                )
            finally:
                process.kill()


@pytest.mark.parametrize("word", ["LocalCluster", "ReplayBuffer"])
def test_a_snippet_runs(tmp_path, word):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (snippet,) = (
        snippet for snippet in SNIPPETS if f"import {word}" in snippet or f", {word}" in snippet
    )
    (tmp_path / "snippet.py").write_text(snippet)
    subprocess.run([sys.executable, "snippet.py"], cwd=tmp_path, check=True)
