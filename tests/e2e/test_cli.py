"""Commands that start nothing."""

import json
import re
import resource
import signal
import socketserver
import struct
import subprocess
import sys
import threading

from tests.e2e.command import CARTPOLE, Command, run


def test_help_answers_at_once(tmp_path):
    durations = []
    for _ in range(3):
        start = cpu_seconds()
        code, out, _ = run("--help", cwd=tmp_path)
        durations.append(cpu_seconds() - start)
        assert code == 0
        assert all(name in out for name in ("serve", "train", "health", "init", "config"))
    assert min(durations) < 0.4


def cpu_seconds():
    """Processor time of ended children: unlike the wall clock, no matter of who else is busy."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_version(tmp_path):
    code, out, _ = run("--version", cwd=tmp_path)
    assert (code, out.split()[0]) == (0, "rlightning")


def test_the_commands_load_no_torch():
    script = (
        "import sys, rlightning.cli.app, rlightning.cluster.train, rlightning.cluster.local_cluster;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'tensordict')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_sigterm_ends_a_command_as_ctrl_c_does(tmp_path):
    address = "127.0.0.1:1"  # where nobody is, so that it would go on
    with Command("attach", "CartPole-v1", "--server", address, cwd=tmp_path) as command:
        command.wait_for("^attaching CartPole-v1")
        command.process.send_signal(signal.SIGTERM)
        assert command.wait() == 130
        assert command.stderr.endswith("interrupted\n")


def test_config_show_prints_what_loads_again(tmp_path):
    code, out, _ = run("config", "show", CARTPOLE, "--set", "train.lr=1e-4", cwd=tmp_path)
    assert code == 0
    (tmp_path / "shown.yaml").write_text(out)
    assert run("config", "show", "shown.yaml", cwd=tmp_path)[1] == out
    code, out, _ = run("config", "diff", CARTPOLE, "shown.yaml", cwd=tmp_path)
    assert code == 1
    assert re.fullmatch(r"train\.lr: \S+ -> 0\.0001\n", out)


def test_config_diff_of_equal_configs(tmp_path):
    assert run("config", "diff", CARTPOLE, CARTPOLE, cwd=tmp_path)[:2] == (0, "")


def test_config_schema_is_json(tmp_path):
    code, out, _ = run("config", "schema", cwd=tmp_path)
    assert code == 0
    schema = json.loads(out)
    assert schema["$defs"]["BufferConfig"]["additionalProperties"] is False


def test_no_config_is_one_line(tmp_path):
    code, out, err = run("train", cwd=tmp_path)
    assert (code, out) == (2, "")
    assert err == (
        "error: no config given; name a YAML file, or make one with: rlightning init DIR\n"
    )


def test_health_of_nobody(tmp_path):
    code, _, err = run("health", "127.0.0.1:1", "--check", "readiness", cwd=tmp_path)
    assert code == 1
    assert err.startswith("error: 127.0.0.1:1: ")


def test_grpc_prints_nothing_of_its_own(tmp_path):
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    goaway = b"\x00\x00\x08\x07\x00\x00\x00\x00\x00" + struct.pack(">II", 0, 2)  # internal error

    class SendsAway(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(24)
            self.request.sendall(settings + goaway)
            while self.request.recv(4096):  # until the client hangs up
                pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), SendsAway) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = "{}:{}".format(*server.server_address)
        code, _, err = run("health", address, "--timeout", "1", cwd=tmp_path)
        server.shutdown()
    assert code == 1
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
