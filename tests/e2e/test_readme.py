"""The Python of the README runs as it stands there."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SNIPPETS = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_there_are_snippets():
    assert len(SNIPPETS) == 2


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["services", "buffer"])
def test_a_snippet_runs(tmp_path, snippet):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "snippet.py").write_text(snippet)
    subprocess.run([sys.executable, "snippet.py"], cwd=tmp_path, check=True)
