"""Packs what somebody needs who looks for a fault: configs without secrets, versions, last logs."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from rlightning._version import __version__
from rlightning.cluster.diagnosis import Diagnosis
from rlightning.cluster.runs import PROGRESS_FILE
from rlightning.errors import ConfigError
from rlightning.utils.config import Config, MainConfig, load_config

REMOVED = "<removed>"
"""What stands where a secret was."""

_LEAST_DIGITS = 6
_LOG_BYTES = 256 * 2**10
_SECRET = re.compile(r"token|secret|passw|api_?key|credential|private_?key", re.IGNORECASE)
# The name of a file tells nobody what is in it.
_PATH = re.compile(r"(_file|_dir|_path|tokens)$", re.IGNORECASE)
# Nothing open-ended before what is looked for: a long line without it would take for ever.
_IN_TEXT = re.compile(
    r"""(?i)(\bbearer\s+|(?:token|secret|passw\w{0,8}|api_?key|credential)s?=)[^\s"',]+"""
)
# In logs, also as YAML, JSON and Python write it.
_IN_LOGS = re.compile(
    r"""(?i)((?:token|secret|passw\w{0,8}|api_?key|credential)["']?\s{0,3}[=:]\s{0,3}["']?)[^\s"',]+"""
)
_IN_URLS = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s/@:]{0,100}:)[^\s/@]{1,200}(?=@)")
# Of an option whose value is a word of its own.
_IN_WORDS = re.compile(r"(?i)(--(?:token|password|secret|api-key)\"?[\s,]+\"?)[^\s\"',]+")


def check_bundle_name(file: Path) -> None:
    """Checks that a file has a name that says how to pack it.

    Raises:
        ConfigError: It ends with neither .zip nor .tar.gz nor .tgz.
    """
    if not file.name.endswith((".zip", ".tar.gz", ".tgz")):
        raise ConfigError(f"--bundle: expected a name that ends with .zip or .tar.gz, got {file}")


def write_bundle(file: Path, config: MainConfig, diagnosis: Diagnosis, run: Path | None) -> None:
    """Writes a bundle that only this user may read, at once or not at all.

    It has `config.yaml`, `doctor.json`, `versions.json` and, of the run, its config, manifest,
    progress and the end of each log. Tokens and what is named like a secret are replaced, also
    where they stand in logs; files with tokens and keys are not read into it.

    Args:
        file: What to write; its name ends with `.zip`, `.tar.gz` or `.tgz`.
        config: The config of the cluster.
        diagnosis: What was found.
        run: Folder of the run whose logs go with it; None: none.

    Raises:
        ConfigError: The name says no format.
        OSError: It cannot be written.
    """
    check_bundle_name(file)
    configs = {"config.yaml": config}
    if run is not None and (run / "config.yaml").is_file():
        configs["run/config.yaml"] = load_config(run / "config.yaml", environ={})
    secrets = {secret for one in configs.values() for secret in _secrets_of(one)}
    texts = {name: _without_secrets(one.to_dict()) for name, one in configs.items()}
    parts = {name: yaml.safe_dump(text, sort_keys=False) for name, text in texts.items()}
    parts["doctor.json"] = json.dumps(diagnosis.to_dict(), indent=1, default=str)
    parts["versions.json"] = json.dumps(_versions(), indent=1)
    if run is not None:
        parts |= dict(_of_run(run))
    packed = {name: _cleaned(text, secrets, name).encode() for name, text in parts.items()}
    descriptor, temporary = tempfile.mkstemp(dir=file.absolute().parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            (_zip if file.name.endswith(".zip") else _tar)(stream, packed)
        Path(temporary).replace(file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _of_run(run: Path) -> Iterator[tuple[str, str]]:
    for name in ("manifest.json", PROGRESS_FILE):
        if (run / name).is_file():
            yield f"run/{name}", (run / name).read_text(encoding="utf-8", errors="replace")
    for log in sorted((run / "logs").glob("*.log")):
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - _LOG_BYTES))
            yield f"run/logs/{log.name}", stream.read().decode("utf-8", errors="replace")


def _versions() -> dict[str, Any]:
    packages = {}
    for requirement in metadata.requires("rlightning") or ():
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "rlightning": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": dict(sorted(packages.items())),
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _is_secret(key: object, value: object) -> bool:
    """Whether a value is named like a secret: a text, or texts in a list or a dict, or a number."""
    if not isinstance(key, str) or not _SECRET.search(key) or isinstance(value, bool):
        return False
    if isinstance(value, (Mapping, list, tuple)):
        return any(isinstance(text, str) for text in _scalars(value))
    if isinstance(value, (int, float)) and "token" in key.lower():
        return False  # it counts them
    return isinstance(value, (str, int, float)) and bool(value) and not _PATH.search(key)


def _scalars(value: Any) -> Iterator[Any]:
    if isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _scalars(item)
    else:
        yield value


def _without_secrets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: REMOVED if _is_secret(key, item) else _without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_without_secrets(item) for item in value]
    return value


def _secrets_of(config: Config) -> Iterator[str]:
    """Yields every secret of a config, also those in the files that it names."""

    def walk(value: Any) -> Iterator[str]:
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, Mapping):
            items = value.items()
        elif isinstance(value, (list, tuple)):
            items = enumerate(value)
        for key, item in items:
            if _is_secret(key, item):
                # What is short would be found in many other words and numbers.
                yield from (
                    str(one) for one in _scalars(item) if isinstance(item, str) or _long(one)
                )
            elif key == "token_file" and isinstance(item, str):
                yield _read(item).strip()
            elif key == "tokens" and isinstance(item, str):
                yield from re.findall(r"token\"?:\s*\"?([^\s\"',}]+)", _read(item))
            else:
                yield from walk(item)

    return walk(config.to_dict())


def _long(value: object) -> bool:
    return len(str(value)) >= _LEAST_DIGITS


def _read(file: str) -> str:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cleaned(text: str, secrets: Iterable[str], name: str) -> str:
    for secret in sorted(secrets, key=len, reverse=True):
        if secret:
            text = text.replace(secret, REMOVED)
    patterns = [_IN_TEXT, _IN_WORDS, _IN_URLS]
    for pattern in (*patterns, _IN_LOGS) if name.endswith(".log") else patterns:
        text = pattern.sub(rf"\1{REMOVED}", text)
    return text


def _zip(stream: Any, parts: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


def _tar(stream: Any, parts: Mapping[str, bytes]) -> None:
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, data in parts.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o600
            archive.addfile(entry, io.BytesIO(data))
