"""Prints what an extra of this package needs, one requirement a line: `requirements.py buffer`.

Images install that before they copy the source, so that a change of the source leaves the layers
with the dependencies as they are. The base install is part of every extra.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

PROJECT = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]


def needs(extras: str) -> Iterator[str]:
    """Yields the requirements of comma-separated extras; an extra may name others."""
    for extra in extras.split(","):
        for requirement in PROJECT["optional-dependencies"][extra]:
            ours = re.fullmatch(rf"{PROJECT['name']}\[(.+)\]", requirement)
            if ours is None:
                yield requirement
            else:
                yield from needs(ours[1])


every = [*PROJECT["dependencies"], *needs(sys.argv[1])]
sys.stdout.writelines(f"{requirement}\n" for requirement in dict.fromkeys(every))
