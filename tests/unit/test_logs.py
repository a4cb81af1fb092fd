"""Lines of logs: their formats, their fields, and which format is for whom."""

import asyncio
import json
import logging
import os
import pty
import re
import subprocess
import sys

import pytest

from rlightning.cluster.logs import HumanFormatter, JsonFormatter, readable
from rlightning.rpc.trace_context import parse_traceparent, trace_of, use_trace
from rlightning.utils.log_fields import add_log_fields

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


def make_record(text="got %d", *args, **attributes):
    record = logging.LogRecord("a.b", logging.INFO, "f", 1, text, args or (3,), None)
    vars(record).update(attributes)
    return record


def test_a_line_of_json_has_what_it_belongs_to():
    line = JsonFormatter("env_server").format(make_record())
    assert '"level": "INFO", "service": "env_server", "logger": "a.b", "message": "got 3"' in line
    counted = {"seq": 0}

    async def session():
        add_log_fields(session_id="s", env_id=None, level="no", seq=lambda: counted["seq"])
        counted["seq"] = 7
        started = asyncio.create_task(inner())
        own = JsonFormatter("x").format(make_record(fields={"epoch": 2}))
        return json.loads(own), await started

    async def inner():
        add_log_fields(env_id="e")
        return json.loads(JsonFormatter("x").format(make_record()))

    own, inherited = asyncio.run(session())
    assert {key: own[key] for key in ("session_id", "seq", "epoch", "level")} == {
        "session_id": "s",
        "seq": 7,
        "epoch": 2,
        "level": "INFO",
    }
    assert "env_id" not in own
    assert (inherited["session_id"], inherited["env_id"]) == ("s", "e")
    assert "session_id" not in json.loads(JsonFormatter("x").format(make_record()))


def test_one_event_is_one_line_of_json():
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        record = make_record("a\nb", exc_info=sys.exc_info(), args=())
    line = JsonFormatter("x").format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert told["message"] == "a\nb"
    assert "ValueError: first" in told["exception"]


def test_people_see_session_env_number_and_trace_of_a_line():
    async def session(env_id):
        use_trace(parse_traceparent(TRACEPARENT))
        add_log_fields(method="/a/B", session_id="7eb7", env_id=env_id, seq=lambda: 189)
        record = make_record()
        human = HumanFormatter().format(record)
        assert readable(JsonFormatter("x").format(record))[12:] == human[12:]
        return human

    ids = f"session=7eb7 env=cartpole-0-1 seq=189 trace={TRACE}"
    assert asyncio.run(session("cartpole-0-1")).endswith(f" INFO    a.b: got 3 [{ids}]")
    # Clients name their envs: no name is read as another field, or as another line.
    forged = asyncio.run(session("a seq=7\nb\x1b"))
    assert r' env="a seq=7\nb\u001b" seq=189 ' in forged
    assert len(forged.splitlines()) == 1
    assert HumanFormatter().format(make_record()).endswith(" INFO    a.b: got 3")


def test_json_is_read_like_other_lines():
    line = JsonFormatter("x").format(make_record("it did not start: %s", "no"))
    assert readable(line).endswith(" INFO    a.b: it did not start: no")
    for text in ("plain", "{not json", "{}", '{"ts": 3}'):
        assert readable(text) == text


def test_a_peer_can_forge_no_line_and_move_no_terminal():
    text = "extra: a\n03:00:00.000 ERROR   a.b: forged\r\x1b[2J\x85\ttab é"
    shown = "extra: a\n    03:00:00.000 ERROR   a.b: forged\\r\\x1b[2J\\x85\ttab é"
    record = make_record("%s", text)
    assert HumanFormatter().format(record).endswith(f" a.b: {shown}")
    assert readable(JsonFormatter("x").format(record)).endswith(f" a.b: {shown}")
    assert json.loads(JsonFormatter("x").format(record))["message"] == text


@pytest.mark.parametrize(
    ("into", "is_json"), [("file", False), ("pipe", True), ("terminal", False)]
)
def test_json_is_for_who_reads_a_pipe(tmp_path, into, is_json):
    code = (
        "import logging; from rlightning.cluster.logs import configure_logging as c;"
        "c('INFO', service='s'); logging.info('hello')"
    )
    file = tmp_path / "log"
    screen, terminal = pty.openpty()
    with file.open("wb") as stream:
        stderr = {"file": stream, "pipe": subprocess.PIPE, "terminal": terminal}[into]
        done = subprocess.run([sys.executable, "-c", code], check=True, stderr=stderr)
    try:
        if into == "terminal":
            written = os.read(screen, 4096).decode()
        else:
            written = file.read_text() if into == "file" else done.stderr.decode()
    finally:
        os.close(screen)
        os.close(terminal)
    assert written.startswith("{") is is_json
    if is_json:
        assert json.loads(written)["message"] == "hello"
    else:
        assert re.fullmatch(r"[\d:.]{12} INFO    root: hello\s+", written)


def test_a_trace_context_is_what_the_standard_says():
    assert parse_traceparent(TRACEPARENT) == (TRACE, PARENT, True)
    assert parse_traceparent(TRACEPARENT).traceparent == TRACEPARENT
    assert parse_traceparent(f"00-{TRACE}-{PARENT}-00").sampled is False
    assert parse_traceparent(f"cc-{TRACE}-{PARENT}-01-later").trace_id == TRACE


@pytest.mark.parametrize(
    "value",
    [
        "",
        None,
        b"00",
        TRACEPARENT.upper(),
        f"{TRACEPARENT}\n",
        f"{TRACEPARENT}-more",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{PARENT}-01",
    ],
)
def test_a_trace_context_that_is_not_valid_is_none(value):
    assert parse_traceparent(value) is None


def test_two_trace_contexts_are_none():
    assert trace_of([("a", "b"), ("traceparent", TRACEPARENT)]).trace_id == TRACE
    assert trace_of([("traceparent", TRACEPARENT)] * 2) is None
    assert trace_of(None) is None
