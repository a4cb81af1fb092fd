"""Where in a nesting an error lies: built only when there is one, from the leaf outwards."""

from __future__ import annotations

from rlightning.errors import CodecError

# A key may come from the network and be of any length.
_MAX_PART = 60


def under(error: CodecError, part: str | int) -> CodecError:
    """Puts a key or index in front of the path of an error.

    Args:
        error: What was raised below `part`; changed in place, so that its traceback stays.
        part: A key or a field name, or the index of an element.

    Returns:
        The same error.
    """
    old = error.path
    detail = str(error)[len(old) + 2 :] if old else str(error)
    if isinstance(part, int):
        head = f"[{part}]"
    else:
        head = part if len(part) <= _MAX_PART else f"{part[:_MAX_PART]}..."
    error.path = head + old if not old or old.startswith("[") else f"{head}.{old}"
    error.args = (f"{error.path}: {detail}",)
    return error
