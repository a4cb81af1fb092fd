"""What can be said of the page without a browser."""

import re
from pathlib import Path

import pytest

from rlightning.cluster.dashboard import server

PAGE = Path(server.__file__).parent / "page"
HTML, CSS, SCRIPT = ((PAGE / name).read_text() for name in ("index.html", "app.css", "app.js"))
LIGHT, DARK = (
    dict(re.findall(r"(--[\w-]+): (#\w{6})", block)) for block in CSS.split("@media", 2)[:2]
)
# Text and what it stands on, and lines of charts, which need less.
TEXTS = [
    *(("--text", ground) for ground in ("--page", "--card", "--bad-soft", "--info-soft")),
    *((text, "--card") for text in ("--soft", "--bad", "--one")),
    ("--soft", "--page"),
    ("--page", "--one"),
]
LINES = [(name, "--card") for name in ("--one", "--two", "--three", "--good", "--warn")]


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, two):
    """Contrast ratio as WCAG 2.2 defines it."""
    dark, light = sorted((luminance(one), luminance(two)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_all_can_be_read(scheme):
    assert set(scheme) == set(LIGHT)
    for pairs, needed in ((TEXTS, 4.5), (LINES, 3.0)):
        for one, two in pairs:
            assert contrast(scheme[one], scheme[two]) >= needed, (one, two)


def test_the_script_finds_what_it_looks_for():
    ids = set(re.findall(r'\bid="([\w-]+)"', HTML))
    assert set(re.findall(r'\$\("([\w-]+)"\)', SCRIPT)) <= ids
    assert {f"node-{role}" for role in ("env", "policy", "buffer", "learner")} <= ids
    assert set(re.findall(r'aria-labelledby="([\w-]+)"', HTML)) <= ids


def test_nothing_of_what_is_told_becomes_markup():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", SCRIPT)
    assert not re.search(r"\bon\w+=|<script>|style=", HTML)


def test_the_chart_library_is_the_one_that_the_docs_name():
    (version,) = re.findall(
        r"uPlot \(v([\d.]+)\)", (PAGE / "uplot" / "uPlot.iife.min.js").read_text()[:200]
    )
    docs = Path(__file__).parents[3] / "docs" / "dashboard.md"
    assert f"(https://github.com/leeoniya/uPlot) {version}," in docs.read_text()
    assert "MIT License" in (PAGE / "uplot" / "LICENSE").read_text()
