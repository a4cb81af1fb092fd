"""A simulated Piper arm that speaks CAN frames, for the real SDK to be tested against.

The frames are those of AgileX's protocol V2 as `piper_sdk` writes and reads them: 8 bytes,
big-endian, standard ids. What the arm does between them is simple: every joint moves towards its
target at a constant speed. Limits, faults and timing of a real arm are not simulated.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import time
import tty
from typing import Any, NamedTuple

from typing_extensions import Self

_MODE, _ENABLE, _GRIPPER, _CONFIG = 0x151, 0x471, 0x159, 0x472
_TARGETS = {0x155: 0, 0x156: 2, 0x157: 4}
_JOINTS = (0x2A5, 0x2A6, 0x2A7)
_STATUS, _GRIPPER_STATE, _DRIVER, _FIRMWARE = 0x2A1, 0x2A8, 0x261, 0x4AF
_FULL_SPEED = 180_000.0  # millidegrees per second
_GRIPPER_SPEED = 100_000.0  # micrometres per second
_PERIOD_S = 0.005


class Frame(NamedTuple):
    """A CAN frame with a standard id."""

    id: int
    data: bytes


class PiperArm:
    """State of the arm, frames in and out; knows neither threads nor clocks.

    Args:
        speed: Factor on the speed of all motions.

    Attributes:
        joints: Six angles in millidegrees.
        gripper: Opening in micrometres.
        targets: Where the joints move to.
        commanded: Every set of six targets that was asked for, in order.
        enabled: Whether each motor is enabled.
    """

    def __init__(self, speed: float = 1.0) -> None:
        self.joints = [0.0] * 6
        self.gripper = 0.0
        self.targets = [0.0] * 6
        self.gripper_target = 0.0
        self.commanded: list[tuple[int, ...]] = []
        self.enabled = [False] * 6
        self._speed = speed
        self._rate = 0.0
        self._asked = [0] * 6

    def receive(self, frame: Frame) -> list[Frame]:
        """Obeys a frame; returns what the arm answers at once."""
        if frame.id == _MODE:
            # Only in CAN control does the arm move.
            self._rate = frame.data[2] / 100 if frame.data[0] == 0x01 else 0.0
        elif frame.id in _TARGETS:
            first = _TARGETS[frame.id]
            self._asked[first : first + 2] = struct.unpack(">ii", frame.data)
            if first == 4:  # the last of three
                self.commanded.append(tuple(self._asked))
                self.targets = [float(target) for target in self._asked]
        elif frame.id == _GRIPPER:
            self.gripper_target = float(struct.unpack(">i", frame.data[:4])[0])
        elif frame.id == _ENABLE:
            chosen = range(6) if frame.data[0] == 7 else [frame.data[0] - 1]
            for motor in chosen:
                self.enabled[motor] = frame.data[1] == 2
        elif frame.id == _CONFIG:
            if frame.data[1] == 1:
                return [Frame(0x473, struct.pack(">BhhHx", frame.data[0], 1500, -1500, 3000))]
            return [Frame(0x47C, struct.pack(">BH5x", frame.data[0], 500))]
        elif frame.id == _FIRMWARE:
            return [Frame(_FIRMWARE, b"S-V1.8-2")]
        return []

    def advance(self, seconds: float) -> None:
        """Moves for a while."""
        for i, target in enumerate(self.targets):
            if self.enabled[i]:
                reach = _FULL_SPEED * self._rate * self._speed * seconds
                self.joints[i] += max(-reach, min(reach, target - self.joints[i]))
        reach = _GRIPPER_SPEED * self._speed * seconds
        self.gripper += max(-reach, min(reach, self.gripper_target - self.gripper))

    def feedback(self) -> list[Frame]:
        """Returns what the arm tells of itself, many times a second."""
        frames = [Frame(_STATUS, bytes([0x01, 0, 0x01, 0, 0, 0, 0, 0]))]
        for i, id in enumerate(_JOINTS):
            pair = (round(angle) for angle in self.joints[2 * i : 2 * i + 2])
            frames.append(Frame(id, struct.pack(">ii", *pair)))
        frames.append(Frame(_GRIPPER_STATE, struct.pack(">ihBB", round(self.gripper), 0, 0x40, 0)))
        for i, enabled in enumerate(self.enabled):
            flags = 0x40 if enabled else 0
            frames.append(Frame(_DRIVER + i, struct.pack(">HhbBH", 240, 30, 30, flags, 0)))
        return frames

    @property
    def is_moving(self) -> bool:
        """Whether a joint is not where it is to be."""
        pairs = zip(self.joints, self.targets, strict=True)
        return any(abs(angle - target) >= 1 for angle, target in pairs)


class SimulatedPiper:
    """A `PiperArm` on a CAN channel, in a thread; use as a context manager.

    With `virtual` the channel is one of python-can's that only this process has. With `slcan` it is
    the serial port of a CAN adapter, a pseudo-terminal that other processes can open as well.

    Args:
        bus: `virtual` or `slcan`.
        speed: Factor on the speed of all motions.

    Attributes:
        arm: The arm; look at it under `lock`.
        lock: Guards it.
        channel: What to open; there within the `with`.
        mute: When set, the arm goes on but tells nothing any more.
    """

    channel: str

    def __init__(self, bus: str = "virtual", speed: float = 1.0) -> None:
        self.arm = PiperArm(speed)
        self.lock = threading.Lock()
        self.mute = threading.Event()
        self._kind = bus
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        if self._kind == "virtual":
            import can

            self.channel = f"piper-{id(self)}"
            self._line: Any = _VirtualLine(can.Bus(channel=self.channel, interface="virtual"))
        else:
            self._line = _SerialLine()
            self.channel = self._line.path
        for work in (self._listen, self._live):
            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._line.close()

    def _listen(self) -> None:
        while not self._ended.is_set():
            for frame in self._line.receive(0.05):
                with self.lock:
                    answers = self.arm.receive(frame)
                self._tell(answers)

    def _live(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(_PERIOD_S):
            now = time.monotonic()
            with self.lock:
                self.arm.advance(now - last)
                frames = self.arm.feedback()
            last = now
            self._tell(frames)

    def _tell(self, frames: list[Frame]) -> None:
        if frames and not self.mute.is_set():
            self._line.send(frames)


class _VirtualLine:
    """A bus of python-can."""

    def __init__(self, bus: Any) -> None:
        self._bus = bus

    def receive(self, timeout_s: float) -> list[Frame]:
        message = self._bus.recv(timeout_s)
        return [] if message is None else [Frame(message.arbitration_id, bytes(message.data))]

    def send(self, frames: list[Frame]) -> None:
        import can

        for frame in frames:
            message = can.Message(arbitration_id=frame.id, data=frame.data, is_extended_id=False)
            self._bus.send(message)

    def close(self) -> None:
        self._bus.shutdown()


class _SerialLine:
    """The far end of a serial CAN adapter that speaks Lawicel's ASCII protocol: `tIIILDD...`."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        tty.setraw(self._master)
        self.path = os.ttyname(slave)
        self._slave = slave  # kept open, or the master would read an error between two openings
        self._rest = b""
        os.set_blocking(self._master, False)

    def receive(self, timeout_s: float) -> list[Frame]:
        if not select.select([self._master], [], [], timeout_s)[0]:
            return []
        *lines, self._rest = (self._rest + os.read(self._master, 4096)).split(b"\r")
        frames = []
        for line in lines:
            if line[:1] == b"t":  # all others set the adapter up
                count = int(line[4:5], 16)
                frames.append(
                    Frame(int(line[1:4], 16), bytes.fromhex(line[5 : 5 + 2 * count].decode()))
                )
        return frames

    def send(self, frames: list[Frame]) -> None:
        lines = (f"t{id:03X}{len(data)}{data.hex().upper()}\r" for id, data in frames)
        # Nobody reads: like an adapter, it drops what does not fit.
        with contextlib.suppress(BlockingIOError):
            os.write(self._master, "".join(lines).encode())

    def close(self) -> None:
        os.close(self._master)
        os.close(self._slave)
