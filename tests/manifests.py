"""The manifests of deploy/kubernetes, as kubectl renders them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from rlightning.cluster.prepare import prepare
from rlightning.utils.config import MainConfig, diff_configs

KUBERNETES = Path(__file__).resolve().parents[1] / "deploy" / "kubernetes"
KUBECTL = Path(sys.executable).parent / "kubectl"
OVERLAYS = ("base", "overlays/gpu", "overlays/torchrun", "overlays/monitoring", "overlays/all")

Manifest = Mapping[str, Any]


@lru_cache
def render(overlay: str) -> tuple[Manifest, ...]:
    """Returns the manifests of a folder with a kustomization."""
    done = subprocess.run(
        [KUBECTL, "kustomize", KUBERNETES / overlay],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def find(overlay: str, kind: str) -> dict[str, Manifest]:
    """Returns the manifests of a kind by name."""
    return {m["metadata"]["name"]: m for m in render(overlay) if m["kind"] == kind}


def pods(overlay: str) -> Iterator[tuple[str, Manifest]]:
    """Yields the name and the template of whatever makes pods."""
    for manifest in render(overlay):
        if manifest["kind"] in {"Deployment", "StatefulSet", "Job"}:
            yield manifest["metadata"]["name"], manifest["spec"]["template"]


def matches(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """Says whether a selector that only has `matchLabels` takes these labels."""
    assert selector.keys() <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()


def left_to_the_run(config: MainConfig) -> list[tuple[str, Any, Any]]:
    """Returns the keys that a run fills in, but for seeds: a service that it does not start never gets to know."""
    prepared = prepare(config)
    return [
        difference
        for difference in diff_configs(config, prepared)
        if not difference[0].endswith(".seed")
    ]
