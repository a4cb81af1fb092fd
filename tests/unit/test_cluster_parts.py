"""Small parts of the cluster: exit codes, seeds, state folders, reasons of a death."""

import errno
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import typer

from rlightning.cli import main
from rlightning.cluster.guard import (
    add_import_paths,
    one_line_errors,
    put_current_folder_last,
    require,
)
from rlightning.cluster.init import write_project
from rlightning.cluster.interrupt import interruptible
from rlightning.cluster.keeper import Keeper
from rlightning.cluster.launcher import LocalLauncher, last_words, written_reason
from rlightning.cluster.prepare import (
    check_batch_size,
    check_learner,
    check_lockstep,
    check_ranks,
    check_table,
    make_save_dir,
    own_state,
    prepare,
)
from rlightning.cluster.runs import Run
from rlightning.cluster.scalars import Scalars
from rlightning.errors import ClusterError, ConfigError, RemoteError, UnavailableError
from rlightning.learner.loop import LearnerStats
from rlightning.rpc.health import ServingStatus
from rlightning.utils.config import MainConfig
from rlightning.utils.config.environment import (
    child_environment,
    keep_grpc_to_errors,
    process_environment,
)

ENV = {"name": "e", "backend": "gymnasium", "task": "CartPole-v1"}
INDEPENDENT = {**ENV, "vectorization_mode": "independent"}


def make_config(**sections):
    return MainConfig.from_dict({"env": [ENV, ENV], **sections})


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("bad key"), 2, "error: bad key\n"),
        (ClusterError("died"), 1, "error: died\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "error: No space left on device\n"),
        (OSError(errno.EROFS, "Read-only", "runs/e"), 1, "error: runs/e: Read-only\n"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(capsys, error, code, text):
    with pytest.raises(typer.Exit) as caught, one_line_errors(debug=False):
        raise error
    assert caught.value.exit_code == code
    assert capsys.readouterr().err == text
    with pytest.raises(type(error)), one_line_errors(debug=True):
        raise error


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGHUP, 130)])
@pytest.mark.parametrize("debug", [False, True])
def test_a_stop_that_was_asked_for_may_exit_with_0(number, code, debug):
    with pytest.raises((typer.Exit, KeyboardInterrupt)) as caught:
        with one_line_errors(debug=debug, stop_is_ok=True), interruptible():
            signal.raise_signal(number)
    assert getattr(caught.value, "exit_code", 130) == code


@pytest.mark.parametrize("bug", [ZeroDivisionError(), OSError(errno.EBADF, "Bad file descriptor")])
def test_bugs_keep_their_traceback(bug):
    with pytest.raises(type(bug)), one_line_errors(debug=False):
        raise bug


def test_import_paths_come_last_and_once(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", ["/first"])
    monkeypatch.chdir(tmp_path)
    add_import_paths(["/a", "/first"])
    add_import_paths(["/a"])
    assert sys.path == ["/first", str(tmp_path), "/a"]


@pytest.mark.parametrize("path", [["/lib"], ["/lib", "HERE"], ["HERE", "/lib"]])
def test_the_current_folder_shadows_nothing(monkeypatch, tmp_path, path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path) if one == "HERE" else one for one in path])
    put_current_folder_last()
    assert sys.path == ["/lib", str(tmp_path)][: len(path)]


def test_a_library_that_is_not_installed_is_named_with_its_extra():
    require("all", "dev", "sys", "typer")
    with pytest.raises(ConfigError) as caught:
        require("the policy server", "policy", "sys", "no_such_library")
    assert str(caught.value) == (
        "the policy server needs no_such_library: pip install 'rlightning[policy]'"
    )


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (UnavailableError("handshake failed", peer="h:1"), "handshake failed"),
        (UnavailableError("gone", peer="10.0.0.2:1"), "10.0.0.2:1: gone"),
        (ServingStatus.NOT_SERVING, "it says NOT_SERVING"),
    ],
)
def test_why_a_service_is_not_serving_in_time_is_told(tmp_path, monkeypatch, answer, reason):
    async def check_replicas(*_, **__) -> dict[str, ServingStatus | RemoteError]:
        return {"h:1": answer}

    monkeypatch.setattr("rlightning.rpc.health.check_replicas", check_replicas)
    services = {name: {"address": "h:1"} for name in ("policy", "buffer", "env")}
    config = make_config(services={**services, "start_timeout_s": 0.1})
    with pytest.raises(ClusterError) as caught:
        LocalLauncher(config, Run(tmp_path), report=lambda _: None).start()
    assert str(caught.value) == (
        f"the policy server at h:1 is not SERVING after 0.1 s (services.start_timeout_s): {reason}"
    )


def test_rows_of_another_policy_are_not_learned_from():
    envs = [
        {"name": name, "backend": "gymnasium", "task": "CartPole-v1", "policy": policy}
        for name, policy in (("left", "default"), ("right", "opponent"))
    ]
    sections = {"env": envs, "policy": {"named": {"opponent": {}}}}
    config = MainConfig.from_dict(sections)
    prepared = prepare(config)
    assert prepared.policy.named["opponent"].seed == prepared.policy.seed is not None
    with pytest.raises(ConfigError, match=r"env.1.policy: rows in which 'opponent' acts"):
        check_learner(config)
    tables = {"default": {"envs": ["left-*"]}, "rest": {"envs": ["right-*"]}}
    check_learner(MainConfig.from_dict({**sections, "buffer": {"tables": tables}}))
    with pytest.raises(ConfigError, match=r"env.1.policy: expected one of default \(policy"):
        prepare(MainConfig.from_dict({"env": envs}))
    with pytest.raises(ConfigError, match="'default' is the policy of the section itself"):
        MainConfig.from_dict({"env": envs, "policy": {"named": {"default": {}}}})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_ends_of_a_command_are_like_ctrl_c(number):
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_other_ends_of_a_command_come_to_what_handles_ctrl_c():
    handled = []
    before = signal.signal(signal.SIGINT, lambda number, frame: handled.append(number))
    try:
        with interruptible():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGINT, before)
    assert handled == [signal.SIGINT]


def test_a_handler_that_was_set_meanwhile_stays():
    before = signal.getsignal(signal.SIGTERM)
    try:
        with interruptible():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_where_there_is_no_sighup_sigterm_interrupts(monkeypatch):
    monkeypatch.delattr(signal, "SIGHUP")  # as on Windows
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGTERM)


def test_an_interrupt_that_a_library_turns_into_its_own_error_is_one():
    def update():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            raise RuntimeError("no bool of this")

    with pytest.raises(KeyboardInterrupt), interruptible():
        update()
    with pytest.raises(RuntimeError, match="alone"), interruptible():
        raise RuntimeError("alone")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_before_a_command_began_is_one_line(monkeypatch, capsys, number):
    codes = []
    monkeypatch.setattr("rlightning.cli.app.app", lambda **_: signal.raise_signal(number))
    monkeypatch.setattr("logging.shutdown", lambda: None)
    monkeypatch.setattr("os._exit", codes.append)
    main()
    assert codes == [130]
    assert capsys.readouterr().err == "interrupted\n"


def test_a_run_that_is_stopped_while_it_is_made_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("rlightning.cluster.runs._git_sha", partial(signal.raise_signal, 15))
    config = make_config(log={"log_dir": str(tmp_path)})
    with pytest.raises(KeyboardInterrupt), interruptible():
        Run.create(config, command=["rlightning"])
    assert list((tmp_path / "e").iterdir()) == []


def test_a_save_that_fails_is_told_also_after_an_interrupt(tmp_path):
    def state():
        raise RuntimeError("CUDA error: out of memory")

    learned = SimpleNamespace(state=state)
    seen = SimpleNamespace(mean_return=None)
    keeper = Keeper(make_config(), Run(tmp_path), None, seen, learned)

    def learn():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            keeper.save(LearnerStats(), b"")

    with pytest.raises(ClusterError, match="no checkpoint was written: CUDA"), interruptible():
        learn()
    with pytest.raises(RuntimeError, match="^CUDA error"), interruptible():
        keeper.save(LearnerStats(), b"")


def test_a_process_ends_with_the_one_that_started_it():
    script = (
        "import time; from rlightning.cluster.interrupt import *; interrupt_without_parent(); "
        "print('up', flush=True); time.sleep(60)"
    )
    # A shell that is killed leaves its child behind.
    shell = subprocess.Popen(
        ["sh", "-c", '"$0" -c "$1" & echo $!; wait', sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert shell.stdout is not None
    with shell.stdout as out:
        assert int(out.readline()) > 0
        assert out.readline() == "up\n"
        shell.kill()
        shell.wait()
        assert out.read() == ""  # which ends with the child


def test_nohup_keeps_a_command_running():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_folder_for_checkpoints_that_cannot_be_is_found_at_once(tmp_path):
    make_save_dir(make_config())
    wanted = tmp_path / "new" / "folder"
    make_save_dir(make_config(train={"save_dir": str(wanted)}))
    assert list(wanted.iterdir()) == []
    (tmp_path / "file").touch()
    for folder, reason in (("file", "File exists"), ("file/below", "Not a directory")):
        with pytest.raises(ConfigError, match=rf"^train.save_dir '.*{folder}': {reason}$"):
            make_save_dir(make_config(train={"save_dir": str(tmp_path / folder)}))


def test_open_seeds_come_from_the_root_seed():
    first, again = prepare(make_config()), prepare(make_config())
    other = prepare(make_config(train={"seed": 1}))
    seeds = {first.policy.seed, *(env.seed for env in first.env)}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert first == again
    assert seeds.isdisjoint({other.policy.seed, *(env.seed for env in other.env)})
    assert prepare(make_config(policy={"seed": 5})).policy.seed == 5


def test_a_run_needs_an_env():
    with pytest.raises(ConfigError, match="no env"):
        prepare(MainConfig())


def test_a_backend_that_nothing_here_hosts():
    env = {"name": "e", "backend": "arcade", "task": "t"}
    elsewhere = {"env": {"address": "10.0.0.1:50051"}}
    with pytest.warns(UserWarning, match="unknown env backend 'arcade'"):
        here, there = make_config(env=env), make_config(env=env, services=elsewhere)
    with pytest.raises(ConfigError, match="no env backend 'arcade' is registered; known: ale, "):
        prepare(here)
    assert prepare(there)
    own = {**env, "backend": "my_env:Env"}
    assert prepare(make_config(env=own))


def test_a_minibatch_fits_into_a_rollout():
    sections = {"buffer": {"type": "RolloutBuffer", "rollout_length": 16}}
    check_batch_size(make_config(**sections, train={"batch_size": 32}))
    with pytest.raises(ConfigError, match=r"train.batch_size: expected at most 32, .* got 33"):
        check_batch_size(make_config(**sections, train={"batch_size": 33}))
    # Who starts the env server elsewhere may have more envs there.
    sections["services"] = {"env": {"address": "10.0.0.1:50051"}}
    check_batch_size(make_config(**sections, train={"batch_size": 33}))


def test_a_run_needs_the_table_that_it_samples():
    check_table(make_config())
    check_table(make_config(buffer={"tables": {"default": {}, "real": {}}}))
    real = make_config(buffer={"tables": {"real": {}}}, learner={"table": "real"})
    check_table(real)
    assert real.sampled is real.buffer.tables["real"]
    with pytest.raises(ConfigError, match=r"^learner.table: expected one of real, got 'default'"):
        check_table(make_config(buffer={"tables": {"real": {}}}))
    with pytest.raises(ConfigError, match=r"^learner.table: expected one of default, got 'real'"):
        check_table(make_config(learner={"table": "real"}))


def test_algorithm_and_sampled_table_belong_together():
    tables = {"now": {"rollout_length": 8}, "all": {"type": "ReplayBuffer", "capacity": 10_000}}
    check_learner(make_config(buffer={"tables": tables}, learner={"table": "now"}))
    with pytest.raises(ConfigError, match="'ppo' needs buffer.type RolloutBuffer"):
        check_learner(make_config(buffer={"tables": tables}, learner={"table": "all"}))


@pytest.mark.parametrize(
    ("sections", "world_size", "in_process", "said"),
    [
        ({"train": {"parallel": "ddp"}}, 0, False, "start it with torchrun"),
        ({}, 2, True, "not --launcher in-process"),
        ({"buffer": {"storage": {"type": "sharded", "num_shards": 2}}}, 2, False, "storage.type"),
    ],
)
def test_several_learners_need_what_they_can_share(sections, world_size, in_process, said):
    check_ranks(make_config(), 2, in_process=False)
    check_ranks(make_config(train={"parallel": "ddp"}), 1, in_process=True)
    with pytest.raises(ConfigError, match=said):
        check_ranks(make_config(**sections), world_size, in_process=in_process)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"services": {"policy": {"address": "h:1"}}}, "services.policy.address"),
        ({"services": {"policy": {"replicas": 2}}}, "services.policy.replicas"),
        ({"services": {"policy": {"addresses": ["h:1", "h:2"]}}}, "services.policy.addresses"),
        ({"policy": {"named": {"frozen": {}}}}, "policy.named"),
        ({"env": INDEPENDENT}, "env.vectorization_mode independent"),
        ({"services": {"env": {"min_clients": 1}}}, "services.env.min_clients"),
        ({"services": {"env": {"replicas": 2}}}, "services.env.replicas"),
        ({"services": {"env": {"addresses": ["h:1", "h:2"]}}}, "services.env.addresses"),
        ({"buffer": {"tables": {"default": {}}}}, "buffer.tables"),
        ({"buffer": {"storage": {"type": "sharded", "num_shards": 2}}}, "buffer.storage.type"),
        (
            {"buffer": {"type": "ReplayBuffer", "capacity": 9, "rate_limiter": {"min_size": 2}}},
            "buffer.rate_limiter",
        ),
    ],
)
def test_lockstep_refuses_what_comes_when_it_comes(sections, key):
    check_lockstep(make_config(**sections))
    with pytest.raises(ConfigError, match=rf"^train.lockstep: .*{key}"):
        check_lockstep(make_config(**sections, train={"lockstep": True}))


def test_weights_are_kept_in_the_runs_own_folder(tmp_path):
    config = make_config(log={"log_dir": str(tmp_path)})
    first, second = (Run.create(config, command=[]) for _ in range(2))
    own_state(config, first.path)
    assert config.policy.state_dir == str(first.path / "policy")
    own_state(config, second.path)  # as when the first run's config trains again
    assert config.policy.state_dir == str(second.path / "policy")
    config.policy.state_dir = str(tmp_path / "chosen")
    own_state(config, second.path)
    assert config.policy.state_dir == str(tmp_path / "chosen")


class DeadService:
    """What the launcher asks of a process that has ended."""

    label = "env server"
    log = "x.log"

    def __init__(self, *lines):
        self._lines = list(lines)

    def tail(self):
        return self._lines

    def obituary(self):
        return "the env server exited with code 1 after 0.1 s"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["error: no such key"], "env server: no such key"),
        (["12:00 ERROR x: env_server did not start: no env", "bye"], "env server: no env"),
        (["12:00 ERROR x: env_server cannot go on: gave up"], "env server: gave up"),
        (["Segmentation fault"], None),
        ([], None),
    ],
)
def test_the_reason_of_a_death_is_what_the_service_wrote(lines, reason):
    service = DeadService(*lines)
    assert written_reason(service) == reason
    if reason is None:
        words = last_words(service)
        assert words.startswith("the env server exited with code 1 after 0.1 s; last lines of")
        assert all(f"\n  | {line}" in words for line in lines)
    else:
        assert last_words(service) == reason


def test_children_read_no_overrides(monkeypatch):
    monkeypatch.setenv("RLIGHTNING__TRAIN__LR", "1")
    monkeypatch.setenv("KEPT", "yes")
    environment = child_environment({"EXTRA": "too"})
    assert "RLIGHTNING__TRAIN__LR" not in environment
    assert (environment["KEPT"], environment["EXTRA"]) == ("yes", "too")


def test_what_grpc_prints_here_is_not_for_children(monkeypatch):
    monkeypatch.setattr("rlightning.utils.config.environment._OWN", set())
    monkeypatch.setenv("GRPC_VERBOSITY", "INFO")
    keep_grpc_to_errors()
    assert child_environment({})["GRPC_VERBOSITY"] == "INFO"
    monkeypatch.delenv("GRPC_VERBOSITY")
    keep_grpc_to_errors()
    assert process_environment()["GRPC_VERBOSITY"] == "ERROR"
    assert "GRPC_VERBOSITY" not in child_environment({})


def test_a_project_is_written_once(tmp_path):
    written = write_project(tmp_path / "new")
    names = {"config.yaml", "my_env.py", "my_policy.py", "pytest.ini", "test_my_project.py"}
    assert {path.name for path in written} == names
    for name in names - {"my_env.py"}:
        (tmp_path / "new" / name).unlink()
    with pytest.raises(ConfigError, match=r"new holds my_env.py already; nothing was written"):
        write_project(tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["my_env.py"]
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "notes.txt").write_text("mine")
    write_project(tmp_path / "begun")
    assert (tmp_path / "begun" / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        write_project(tmp_path / "file" / "below")


def test_scalars_without_a_folder_go_nowhere():
    with Scalars(None) as scalars:
        scalars.add({"a": 1.0}, 0)


def test_a_listener_with_tls_wants_others_that_dial_with_tls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tls = {"cert_file": "server.pem", "key_file": "server.key"}
    listen = [{"address": "127.0.0.1:0", "tls": tls}]
    config = MainConfig.from_dict({"services": {"buffer": {"listen": listen}}})
    launcher = LocalLauncher(config, Run.create(config, command="x"), report=print)
    with pytest.raises(ConfigError, match=r"services\.buffer\.auth: expected ca_file, or tls"):
        launcher.start()
