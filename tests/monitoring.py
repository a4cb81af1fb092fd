"""What deploy/ asks Prometheus for: the expressions of alerts, panels and autoscalers, and the series they name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).resolve().parents[1] / "deploy" / "monitoring"
ADAPTER = MONITORING.parent / "kubernetes" / "components" / "autoscaling" / "adapter.yaml"
DASHBOARD = MONITORING / "grafana" / "dashboards" / "rlightning.json"
# Those that Prometheus itself makes: of its targets, and of its alerts.
OF_PROMETHEUS = {"up", "ALERTS"}

# Whatever is no function, aggregation or word of PromQL, number, unit or variable of Grafana.
_SELECTOR = re.compile(r"(?<![\w.$])([a-zA-Z_:][\w:]*)\b(?!\s*\()(?:\{([^}]*)\})?")
_WORDS = {"and", "or", "unless", "bool", "offset", "group_left", "group_right", "inf", "nan"}
# Lists of labels, and what the adapter of autoscalers fills in.
_NO_SERIES = re.compile(
    r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)|<<[^>]*>>", re.IGNORECASE
)
_MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')


def alerts() -> list[dict[str, Any]]:
    """Returns the alerts."""
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """Returns the panels of the dashboard."""
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """Yields where an expression is from, and the expression."""
    for alert in alerts():
        yield f"alert {alert['alert']}", alert["expr"]
    for panel in panels():
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for metric in scaling():
        yield f"autoscaler {metric['name']['as']}", metric["seriesQuery"]
        yield f"autoscaler {metric['name']['as']}", metric["metricsQuery"]


def scaling() -> list[dict[str, Any]]:
    """Returns the metrics that autoscalers go by."""
    rules = yaml.safe_load(ADAPTER.read_text())["rules"]
    return [*rules["custom"], *rules["external"]]


def selectors(expression: str) -> list[tuple[str, dict[str, str]]]:
    """Returns the names of series in an expression, each with patterns of its labels."""
    return [
        (
            name,
            {
                label: value if operator == "=~" else re.escape(value)
                for label, operator, value in _MATCHER.findall(matchers)
            },
        )
        for name, matchers in _SELECTOR.findall(_NO_SERIES.sub("", expression))
        if name.lower() not in _WORDS
    ]


def unmatched(
    expression: str, series: Iterable[tuple[str, Mapping[str, str]]]
) -> list[tuple[str, dict[str, str]]]:
    """Returns the selectors of an expression that none of the series fulfils.

    Each alternative of a pattern such as `queue|inference` must be there.
    """
    known: dict[str, list[Mapping[str, str]]] = {}
    for name, labels in series:
        known.setdefault(name, []).append(labels)
    return [
        (name, {**patterns, label: one})
        for name, patterns in selectors(expression)
        if name not in OF_PROMETHEUS
        for label, pattern in patterns.items() or [("", "")]
        for one in pattern.split("|")
        if not any(
            all(
                re.fullmatch(each, labels.get(key, ""))
                for key, each in {**patterns, label: one}.items()
            )
            for labels in known.get(name, ())
        )
    ]
