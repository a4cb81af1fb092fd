"""Setting scalar fields of a message from whatever Python holds."""

from __future__ import annotations

from google.protobuf.message import Message

from rlightning.errors import CodecError


def set_text(pb: Message, field: str, value: str) -> None:
    """Sets a string field.

    Raises:
        CodecError: It is no text, or holds half of a surrogate pair, which no peer could read.
    """
    if not isinstance(value, str):  # protobuf takes bytes for text too
        raise CodecError(f"expected text, got {value!r:.60}", path=field)
    try:
        setattr(pb, field, value)
    except UnicodeEncodeError as error:
        raise not_unicode(error, path=field) from error


def set_int(pb: Message, field: str, value: int) -> None:
    """Sets an integer field.

    Raises:
        CodecError: It is no integer, or does not fit.
    """
    try:
        setattr(pb, field, value)
    except (TypeError, ValueError):
        raise CodecError(f"expected an integer that fits, got {value!r:.60}", path=field) from None


def not_unicode(error: UnicodeEncodeError, path: str = "") -> CodecError:
    """Returns what to raise for text that protobuf does not encode."""
    return CodecError(f"text that is no valid Unicode: {error.reason}", path=path)
