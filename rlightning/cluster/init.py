"""Writes a project to start from."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from rlightning.errors import ConfigError

_SUFFIX = ".tmpl"


def write_project(folder: Path) -> list[Path]:
    """Writes a config, an env, a policy and a test into a folder, which is made if absent.

    What else is in the folder stays as it is.

    Returns:
        The files.

    Raises:
        ConfigError: One of the files is there already, or the folder cannot be written; then none
            is.
    """
    templates = resources.files("rlightning.cluster") / "templates"
    files = {
        folder / template.name.removesuffix(_SUFFIX): template.read_text(encoding="utf-8")
        for template in templates.iterdir()
        if template.name.endswith(_SUFFIX)
    }
    taken = [path.name for path in sorted(files) if path.exists()]
    if taken:
        raise ConfigError(
            f"{folder} holds {', '.join(taken)} already; nothing was written: name another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}") from error
    return sorted(files)
