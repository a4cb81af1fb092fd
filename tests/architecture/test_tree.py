"""What the tree itself promises: packages, layers' neighbours, banned constructs, docs that name what exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    p
    for folder in ("rlightning", "services")
    for p in (ROOT / folder).rglob("*.py")
    if "_pb2" not in p.name
]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_every_package_is_in_the_wheel() -> None:
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    there = {
        ".".join(p.parent.relative_to(ROOT).parts)
        for p in (ROOT / "rlightning").rglob("__init__.py")
    }
    there |= {
        ".".join(("rlightning", *p.parent.relative_to(ROOT).parts))
        for p in (ROOT / "services").rglob("__init__.py")
    }
    assert listed == there


@pytest.mark.parametrize(
    "pattern",
    [
        r"^\s*(import|from) (pickle|cloudpickle|dill)\b",
        r"(?<!safetensors\.)torch\.load\(",
        r"allow_pickle\s*=\s*True",
        r"""get_context\(["']fork""",
        r"os\.fork\(",
        r"add_insecure_port\(.*0\.0\.0\.0",
    ],
)
def test_nothing_unpickles_or_forks(pattern: str) -> None:
    hits = [
        f"{p.relative_to(ROOT)}" for p in SOURCES if re.search(pattern, p.read_text(), re.MULTILINE)
    ]
    assert not hits


def test_only_two_places_read_the_environment() -> None:
    allowed = {Path("rlightning/utils/utils.py")}
    readers = [
        p.relative_to(ROOT)
        for p in SOURCES
        if re.search(r"os\.(environ|getenv)", p.read_text())
        and p.relative_to(ROOT) not in allowed
        and not p.is_relative_to(ROOT / "rlightning" / "utils" / "config")
    ]
    assert not readers


@pytest.mark.parametrize(
    "module",
    ["", ".types", ".wire", ".rpc", ".env", ".buffer", ".policy", ".actor", ".cluster", ".cli"],
)
def test_importing_costs_no_heavy_library(module: str) -> None:
    code = f"import sys, rlightning{module}; print(sorted({{'torch', 'tensordict', 'torchrl'}} & set(sys.modules)))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert out.stdout.strip() == "[]"


def anchors(doc: Path) -> set[str]:
    """What may stand behind # in a link to a document: its headings, as GitHub makes anchors of them."""
    text = re.sub(r"^```.*?^```", "", doc.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_documents_lead_somewhere() -> None:
    docs = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/*.md")]
    docs += [*ROOT.glob("services/*/*.md"), *ROOT.glob("examples/*/*.md")]
    broken = []
    for doc in docs:
        for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", doc.read_text()):
            there = doc.parent / target if target else doc
            if not there.exists() or (anchor and anchor not in anchors(there)):
                broken.append(f"{doc.relative_to(ROOT)} -> {target}#{anchor}")
    assert broken == []


def test_every_document_is_listed() -> None:
    def links(doc: Path) -> set[Path]:
        targets = re.findall(r"\]\(([^)#:]+)", doc.read_text())
        return {(doc.parent / target).resolve() for target in targets}

    decisions = ROOT / "docs" / "adr"
    listed = links(ROOT / "README.md") | links(decisions / "README.md")
    documents = {*(ROOT / "docs").rglob("*.md"), *(ROOT / "services").rglob("README.md")}
    assert sorted(documents - listed) == []


def test_make_knows_every_target_that_is_named() -> None:
    makefile = (ROOT / "Makefile").read_text()
    rules = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    (phony,) = re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    assert set(phony.replace("\\\n", " ").split()) == rules
    for doc in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        named = set(re.findall(r"`make ([a-z][a-z -]*)`", doc.read_text()))
        assert set(" ".join(named).split()) <= rules, doc


def test_the_readme_calls_what_there_is() -> None:
    from rlightning.cluster import local_cluster

    calls = re.findall(r"\bcluster\.(env|policy|buffer)\.(\w+)\(", (ROOT / "README.md").read_text())
    assert len(calls) >= 3
    for part, method in calls:
        assert hasattr(getattr(local_cluster, f"Cluster{part.capitalize()}"), method), method
