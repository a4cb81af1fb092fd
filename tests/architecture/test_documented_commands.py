"""Commands in the documents have the options, the files and the config keys that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from rlightning.cli.app import app
from rlightning.utils.config import MainConfig
from rlightning.utils.config.strict import unknown_keys

ROOT = Path(__file__).resolve().parents[2]
DOCS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "services").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    ROOT / "project" / "README.md",
]
RLIGHTNING = typer.main.get_command(app)
SERVICE_OPTIONS = {"--config", "--listen", "--set", "--insecure", "--log-level", "--log-json"}
_CALL = re.compile(r"(?<![\w/])rlightning((?:\.services\.[a-z_]+)?)(?= |$)([^#|&]*)")


def commands(doc: Path) -> list[tuple[str, str]]:
    """Calls of the library in a document: of which service, '' for the command, and with what."""
    text = doc.read_text().replace("\\\n", " ")
    fenced = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    blocks = [block for language, block in fenced.findall(text) if language == "sh"]
    lines = [line for block in blocks for line in block.splitlines()]
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", fenced.sub("", text))]
    runs = [line for line in lines if re.match(r"(rlightning|python|torchrun|docker run)\b", line)]
    return [(call[1], call[2].strip()) for line in runs for call in _CALL.finditer(line)]


def section(key: str, value: object) -> dict[str, object]:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value  # type: ignore[return-value]


def options_of(arguments: str) -> set[str] | None:
    """The options of the command that the first words name; None where there is no such command."""
    command = RLIGHTNING
    for word in arguments.split():
        if not hasattr(command, "commands"):
            break
        if word not in command.commands:
            return None
        command = command.commands[word]
    return {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: str(doc.relative_to(ROOT)))
def test_commands_are_valid(doc: Path) -> None:
    problems = []
    for service, arguments in commands(doc):
        options = SERVICE_OPTIONS if service else options_of(arguments)
        if options is None:
            problems.append(f"no command: {arguments}")
            continue
        named = set(re.findall(r"(?<!\S)--[a-z][a-z-]*", arguments))
        problems += [f"no option {option}: {arguments}" for option in named - options]
        for key in re.findall(r"--set '?([a-z_.]+)=", arguments):
            unknown = unknown_keys(MainConfig, section(key, 0))
            problems += [f"no key {'.'.join(path)}" for path, _ in unknown]
        files = re.findall(r"(?<!\S)(?:configs|examples)/\S+\.yaml", arguments)
        problems += [f"no file {file}" for file in files if not (ROOT / file).exists()]
    assert problems == []


def test_documents_have_commands() -> None:
    found = [command for doc in DOCS for command in commands(doc)]
    assert len([arguments for service, arguments in found if not service and arguments]) > 60
    assert {service for service, _ in found} >= {".services.env_server", ".services.policy_server"}
