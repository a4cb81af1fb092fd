"""Several items in one message of a writer: a message costs much the same whatever it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlightning.v1 import buffer_service_pb2 as pb
from rlightning.wire import Writer
from rlightning.wire.shared import SharedMemory
from rlightning.wire.splice import varint
from rlightning.wire.tensor import take_out

_INSERT = bytes((pb.InsertRequest.INSERT_FIELD_NUMBER << 3 | 2,))
_ITEM = bytes((pb.InsertItems.ITEMS_FIELD_NUMBER << 3 | 2,))
# What a message has beside its items and the name of the table: number, epoch, lengths, stamps.
_ENVELOPE_BYTES = 256


class InsertMessage:
    """The items of the next message, encoded.

    Attributes:
        items: How many there are.
        leaves: How many values they hold.
        item_bytes: Size of all of them, in bytes.
        keys: Of those that have tensors in shared memory, under which key.
        shared_bytes: Size of those tensors, in bytes.
    """

    def __init__(self) -> None:
        self._name = ""
        self._table = b""
        self._parts: list[Any] = []
        self.items = self.leaves = self.item_bytes = self.shared_bytes = 0
        self.keys: list[int] = []

    @property
    def nbytes(self) -> int:
        """Size of the items and of what they have in shared memory, in bytes."""
        return self.item_bytes + self.shared_bytes

    @property
    def envelope_bytes(self) -> int:
        """What the message has beside its items at most, in bytes."""
        return _ENVELOPE_BYTES + len(self._table)

    @property
    def table(self) -> str:
        """The table that all items go to; empty means those of the hello."""
        return self._name

    @table.setter
    def table(self, name: str) -> None:
        assert not self.items
        self._name, self._table = name, pb.InsertItems(table=name).SerializeToString()

    def add(self, item: Sequence[Any], nbytes: int, leaves: int) -> None:
        """Adds an item.

        Args:
            item: The encoded item in pieces, which must not change before `freeze` or `take`.
            nbytes: Size of all of them.
            leaves: How many values it holds.
        """
        head = _ITEM + varint(nbytes)
        self._parts.append(head)
        self._parts.extend(item)
        self.item_bytes += len(head) + nbytes
        self.items += 1
        self.leaves += leaves

    def share(self, key: int, nbytes: int) -> None:
        """Takes note that the item that was added last has tensors in shared memory."""
        self.keys.append(key)
        self.shared_bytes += nbytes

    def take_out(self, memory: SharedMemory) -> None:
        """Puts the tensors of the items that lie in shared memory into them."""
        if self.keys:
            items = pb.InsertItems.FromString(b"".join(self._parts))
            w = Writer()
            take_out(items, memory, w)
            data = w.finish(items)
            self._parts, self.item_bytes = [data], len(data)
            self.keys.clear()
            self.shared_bytes = 0

    def freeze(self) -> None:
        """Copies what was added, which may change from now on."""
        self._parts = [b"".join(self._parts)]

    def take(self, request: pb.InsertRequest, seq: int, epoch: int) -> bytes:
        """Returns the encoded message, and begins the next one.

        Args:
            request: Its stamps.
            seq: Its number.
            epoch: The session's.
        """
        numbers = pb.InsertItems(seq=seq, epoch=epoch).SerializeToString()
        length = len(numbers) + self.item_bytes + len(self._table)
        head = (_INSERT, varint(length), numbers)
        data = b"".join((*head, *self._parts, self._table, request.SerializeToString()))
        self._parts.clear()
        self.items = self.leaves = self.item_bytes = self.shared_bytes = 0
        self.keys.clear()
        return data
