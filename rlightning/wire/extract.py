"""Large tensors out of encoded messages before protobuf decodes them; see `splice`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeAlias

from google.protobuf.descriptor import FieldDescriptor

from rlightning.errors import CodecError
from rlightning.wire.splice import (
    PLACEHOLDER_BYTES,
    Buffer,
    NotPlainError,
    placeholder,
    read_varint,
    varint,
)

_Descriptor: TypeAlias = Any  # upb's own class at run time, another in the stubs

# Fields that are taken out where they are large.
_LARGE = frozenset({"rlightning.v1.Tensor.data", "rlightning.v1.SampleChunk.data"})

# upb refuses deeper messages; below it, the walk leaves the answer to upb.
_MAX_MESSAGE_DEPTH = 100


class Plan:
    """Which fields of a message type lead to tensors, by tag.

    Attributes:
        large: Tags of the fields worth descending into; None stands for large data itself.
        messages: Tags of all fields that hold messages.
        packed: Tags of repeated numbers.
    """

    __slots__ = ("large", "messages", "packed")

    def __init__(self) -> None:
        self.large: dict[int, Plan | None] = {}
        self.messages: dict[int, Plan] = {}
        self.packed: frozenset[int] = frozenset()


_plans: dict[str, Plan] = {}


def plan_of(descriptor: _Descriptor) -> Plan:
    """Returns the plan of a message type, made once per process."""
    plan = _plans.get(descriptor.full_name)
    if plan is None:
        made: dict[str, Plan] = {}
        plan = _make_plan(descriptor, made)
        _find_tensors(made.values())
        # Published whole, so that another thread never sees half a plan.
        _plans.update(made)
    return plan


def _make_plan(descriptor: _Descriptor, made: dict[str, Plan]) -> Plan:
    plan = made.get(descriptor.full_name)
    if plan is not None:
        return plan
    plan = made[descriptor.full_name] = Plan()
    packed = set()
    for field in descriptor.fields:
        tag = field.number << 3 | 2
        if field.message_type is not None:
            plan.messages[tag] = _make_plan(field.message_type, made)
        elif field.is_repeated and field.type not in (
            FieldDescriptor.TYPE_STRING,
            FieldDescriptor.TYPE_BYTES,
        ):
            packed.add(tag)
        if field.full_name in _LARGE:
            plan.large[tag] = None
    plan.packed = frozenset(packed)
    return plan


def _find_tensors(plans: Collection[Plan]) -> None:
    """Fills `large` of every plan with the fields from which a tensor can be reached."""
    grown = True
    while grown:
        grown = False
        for plan in plans:
            for tag, sub in plan.messages.items():
                if sub.large and tag not in plan.large:
                    plan.large[tag] = sub
                    grown = True


def extract(
    data: Buffer, plan: Plan, *, splice_bytes: int, max_fields: int
) -> tuple[Buffer, list[tuple[int, int]]]:
    """Takes the large tensors out of an encoded message.

    Args:
        data: The message as it came.
        plan: The plan of its type.
        splice_bytes: How large a `Tensor.data` must be to be taken out.
        max_fields: How many fields to look at.

    Returns:
        The message with placeholders, and (offset, length) in `data` of what each stands for.
        `data` itself and no ranges when there is nothing to take out, or when the bytes are so
        unusual that upb must decide about them whole.

    Raises:
        CodecError: There are more fields.
    """
    extractor = _Extractor(data, splice_bytes, max_fields)
    try:
        extractor.level(0, len(data), plan, 0)
    except (NotPlainError, IndexError):
        return data, []
    if not extractor.ranges:
        return data, []
    return b"".join(extractor.out), extractor.ranges


class _Extractor:
    """Walks down to each large tensor, skipping every field that is too small to hold one."""

    def __init__(self, data: Buffer, splice_bytes: int, max_fields: int) -> None:
        self._data = data
        self._view = memoryview(data)
        self._splice_bytes = splice_bytes
        self._max_fields = max_fields
        self._fields_left = max_fields
        self.out: list[Buffer] = []
        self.ranges: list[tuple[int, int]] = []

    def level(self, pos: int, end: int, plan: Plan, depth: int) -> int:
        """Emits the fields between two positions with placeholders; returns their new length."""
        if depth > _MAX_MESSAGE_DEPTH:
            raise NotPlainError
        data, view, out, large = self._data, self._view, self.out, plan.large
        fields_left = self._fields_left
        copied = pos
        size = 0
        last = end - self._splice_bytes
        while pos < end:
            if pos > last:  # what is left is too short to hold a large tensor
                pos = end
                break
            fields_left -= 1
            if fields_left < 0:
                raise _too_many(self._max_fields)
            tag = data[pos]
            pos += 1
            if tag > 0x7F:
                tag, pos = read_varint(data, pos - 1)
            kind = tag & 7
            if kind == 2:
                tag_end = pos
                length, pos = read_varint(data, pos)
                if length > 0x7F and data[pos - 1] == 0:
                    raise NotPlainError  # padded: upb may refuse it, so it must not be mended here
                start, pos = pos, pos + length
                if length < self._splice_bytes or tag not in large:
                    continue
                if pos > end:
                    raise NotPlainError
                out.append(view[copied:tag_end])
                size += tag_end - copied
                header = len(out)
                out.append(b"")
                sub = large[tag]
                if sub is None:
                    out.append(placeholder(len(self.ranges)))
                    self.ranges.append((start, length))
                    inner = PLACEHOLDER_BYTES
                else:
                    self._fields_left = fields_left
                    inner = self.level(start, pos, sub, depth + 1)
                    fields_left = self._fields_left
                out[header] = varint(inner)
                size += len(out[header]) + inner
                copied = pos
            elif kind == 0:
                while data[pos] > 0x7F:
                    pos += 1
                pos += 1
            elif kind == 5:
                pos += 4
            elif kind == 1:
                pos += 8
            else:  # groups, which nothing here uses
                raise NotPlainError
        if pos != end:
            raise NotPlainError
        self._fields_left = fields_left
        out.append(view[copied:end])
        return size + end - copied


def check_expansion(data: Buffer, plan: Plan, *, max_fields: int, max_numbers: int) -> None:
    """Refuses bytes that upb would turn into far more memory than they are.

    A message of two bytes takes upb dozens; so does a number of one byte in a repeated field.

    Args:
        data: An encoded message without its large tensors.
        plan: The plan of its type.
        max_fields: How many fields it may hold at all levels together.
        max_numbers: How many elements its repeated numbers may have together.

    Raises:
        CodecError: It holds more, or is malformed.
    """
    fields = numbers = 0
    todo = [(0, len(data), plan)]
    try:
        while todo:
            pos, end, plan = todo.pop()
            while pos < end:
                tag, pos = read_varint(data, pos)
                kind = tag & 7
                fields += 1
                if kind == 2:
                    length, pos = read_varint(data, pos)
                    sub = plan.messages.get(tag)
                    if sub is not None:
                        todo.append((pos, min(pos + length, end), sub))
                    elif tag in plan.packed:
                        numbers += length
                    pos += length
                elif kind == 0:
                    _, pos = read_varint(data, pos)
                elif kind == 1:
                    pos += 8
                elif kind == 5:
                    pos += 4
                if fields > max_fields:
                    raise _too_many(max_fields)
                if numbers > max_numbers:
                    raise CodecError(f"more than {max_numbers} numbers in one message")
    except (NotPlainError, IndexError):
        raise CodecError("no valid message: cut short, or a number that is too long") from None


def _too_many(max_fields: int) -> CodecError:
    return CodecError(f"more than {max_fields} fields in one message")
