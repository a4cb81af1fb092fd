"""The simulated arm, frame by frame."""

from __future__ import annotations

import struct

from rlightning.testing.piper_arm import Frame, PiperArm


def ask(arm, *targets):
    for i, id in enumerate((0x155, 0x156, 0x157)):
        arm.receive(Frame(id, struct.pack(">ii", *targets[2 * i : 2 * i + 2])))


def told(arm):
    return {frame.id: frame.data for frame in arm.feedback()}


def test_it_moves_when_it_is_enabled_and_controlled_over_can():
    arm = PiperArm()
    ask(arm, 9_000, 1, 2, 3, 4, 5)
    assert arm.commanded == [(9_000, 1, 2, 3, 4, 5)]
    arm.advance(1.0)
    assert arm.joints == [0.0] * 6
    arm.receive(Frame(0x471, bytes([7, 2, 0, 0, 0, 0, 0, 0])))
    arm.advance(1.0)
    assert arm.joints == [0.0] * 6  # no mode yet
    arm.receive(Frame(0x151, bytes([1, 1, 10, 0, 0, 0, 0, 0])))
    arm.advance(0.25)
    assert arm.joints == [4_500, 1, 2, 3, 4, 5]  # a tenth of 180 degrees a second
    assert arm.is_moving
    arm.advance(1.0)
    assert arm.joints == [9_000, 1, 2, 3, 4, 5]
    assert not arm.is_moving
    assert told(arm)[0x2A5] == struct.pack(">ii", 9_000, 1)
    assert told(arm)[0x2A7] == struct.pack(">ii", 4, 5)
    assert all(told(arm)[0x261 + i][5] & 0x40 for i in range(6))
    arm.receive(Frame(0x471, bytes([7, 1, 0, 0, 0, 0, 0, 0])))
    ask(arm, 0, 0, 0, 0, 0, 0)
    arm.advance(1.0)
    assert arm.joints[0] == 9_000
    assert told(arm)[0x261][5] == 0


def test_it_answers_what_it_is_asked():
    arm = PiperArm()
    (limits,) = arm.receive(Frame(0x472, bytes([3, 1, 0, 0, 0, 0, 0, 0])))
    assert (limits.id, len(limits.data), limits.data[0]) == (0x473, 8, 3)
    (firmware,) = arm.receive(Frame(0x4AF, bytes(8)))
    assert firmware.data.startswith(b"S-V")
    arm.receive(Frame(0x159, struct.pack(">ihBB", 50_000, 1000, 1, 0)))
    arm.advance(0.1)
    assert struct.unpack(">i", told(arm)[0x2A8][:4]) == (10_000,)
