"""Looks for what keeps a cluster from working, and says what to do: `rlightning doctor`."""

from __future__ import annotations

import asyncio
import errno
import json
import resource
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from rlightning.buffer.remote_buffer import BufferClient
from rlightning.cluster.camera_fit import camera_fits
from rlightning.cluster.diagnosis import Diagnosis, Finding, text_of
from rlightning.cluster.display import make_console, print_table
from rlightning.cluster.past_runs import outcome_of
from rlightning.cluster.prepare import prepare
from rlightning.cluster.process import label_of
from rlightning.cluster.progress import duration
from rlightning.cluster.runs import RUNNING
from rlightning.cluster.sight import Sight, sight_of_config
from rlightning.cluster.snapshot import ROLES, Role
from rlightning.cluster.targets import Target, replicas_of, targets_of
from rlightning.env.hosting import group_name
from rlightning.env.remote_client import EnvClient, EnvStatus
from rlightning.errors import (
    ConfigError,
    InvalidRequestError,
    PermissionDeniedError,
    RemoteError,
    UnauthenticatedError,
)
from rlightning.latency import Offset
from rlightning.latency.clock import DRIFT_LIMIT
from rlightning.policy import PolicyClient, PolicyDescription
from rlightning.rpc.channel import connect
from rlightning.rpc.health import OVERALL, ServingStatus, list_statuses
from rlightning.rpc.link import Clocks, Link, measure_link
from rlightning.rpc.protocol import LIBRARY_VERSION, PROTOCOL_VERSION
from rlightning.rpc.spec import diff_spec, needed_bytes
from rlightning.types import EnvMeta
from rlightning.utils.config import (
    DEFAULT_POLICY,
    ClientAuthConfig,
    EnvConfig,
    MainConfig,
    RpcConfig,
    keys_without_effect,
)
from rlightning.utils.waiting import wait_within

_TIMEOUT_S = 5.0
_WALL_OFFSET_S = 0.1
_FEW_FILES = 4096
_LITTLE_DISK = 2**30
# What an examination takes, meanwhile clocks drift.
_LONGEST_S = 60.0


def sight_to_examine(config: MainConfig, auth: ClientAuthConfig | None = None) -> Sight:
    """Returns the services of a config: where it names no addresses, those of a run that goes on.

    The run is the last one of the config in any case, for its logs.
    """
    sight = sight_of_config(config, auth)
    if sight.run is None or outcome_of(sight.run) == RUNNING:
        return sight
    return Sight(targets_of(config, auth), sight.run)


def doctor(config: MainConfig, sight: Sight, *, as_json: bool) -> Diagnosis:
    """Examines a cluster and shows what it found.

    Args:
        config: Its config.
        sight: Its services.
        as_json: Print one JSON object instead of text.
    """
    diagnosis = asyncio.run(examine(config, sight))
    if as_json:
        typer.echo(json.dumps(diagnosis.to_dict(), allow_nan=False))
    else:
        print_table(make_console(), text_of(diagnosis), soft_wrap=True)
    return diagnosis


async def examine(config: MainConfig, sight: Sight) -> Diagnosis:
    """Examines a cluster; takes about 3 s for each service.

    Args:
        config: Its config.
        sight: Its services.
    """
    return await _Examination(config, sight).run()


class _Examination:
    """One examination; what it finds is in `findings`."""

    def __init__(self, config: MainConfig, sight: Sight) -> None:
        self._config = config
        self._sight = sight
        self._findings: list[Finding] = []
        self._links: dict[str, Link] = {}
        self._envs: dict[str, EnvStatus] = {}
        self._policies: dict[str, PolicyDescription] = {}
        self._clocks: dict[str, Offset] = {}

    async def run(self) -> Diagnosis:
        self._findings += look_at_config(self._config)
        self._findings += look_at_machine(self._config)
        named = {target.section for target in self._sight.targets}
        for role in ("policy", "buffer", "env"):
            if role not in named:
                self._note(
                    *("reach", role, f"the {label_of(role)} has no address yet"),
                    fix="rlightning serve or train starts it; or set "
                    f"services.{role}.address where it runs elsewhere",
                )
        for target in self._sight.targets:
            for replica in await replicas_of(target, timeout_s=_TIMEOUT_S):
                await self._examine(replica)  # one by one: each has the machine for itself
        for name, env in self._envs.items():
            self._findings += look_at_envs(name, env, self._config, list(self._policies.values()))
            self._findings += look_at_clocks(name, env, self._clocks)
        link = next((link for name, link in self._links.items() if name in self._envs), None)
        cameras = [] if link is None else camera_fits(link.up_mbit_s)
        return Diagnosis(self._findings, self._links, cameras)

    def _note(self, check: str, where: str, message: str, *, fix: str) -> None:
        self._findings.append(Finding("note", check, where, message, fix))

    async def _examine(self, target: Target) -> None:
        where = f"{target.name} {target.address}"
        async with connect(target.address, rpc=target.rpc, auth=target.auth) as channel:
            try:
                statuses = await list_statuses(channel, timeout_s=_TIMEOUT_S)
            except RemoteError as error:
                self._findings.append(await unreachable(target, where, error))
                return
            role = next((ROLES[name] for name in statuses if name in ROLES), None)
            wanted = target.section
            if role is None or role != wanted:
                found = "no service of this library" if role is None else f"the {label_of(role)}"
                fix = f"correct services.{wanted}.address"
                self._findings.append(Finding("error", "reach", where, f"{found} is there", fix))
                return
            self._findings.append(Finding("ok", "reach", where, "answers"))
            await self._describe(target, where, role)
            self._health(where, role, statuses.get(OVERALL, ServingStatus.UNKNOWN))
            try:
                link = await measure_link(channel)
            except (UnauthenticatedError, PermissionDeniedError):
                return  # said before
            except RemoteError as error:
                fix = "run one version of the library everywhere"
                message = f"cannot be measured: {error}"
                self._findings.append(Finding("warning", "link", where, message, fix))
                return
            self._links[target.name] = link
            self._findings += look_at_link(where, link)

    async def _describe(self, target: Target, where: str, role: Role) -> None:
        options: dict[str, Any] = {"rpc": target.rpc, "auth": target.auth}
        try:
            if role == "env":
                async with EnvClient(target.address, **options) as env:
                    self._envs[target.name] = await env.describe(
                        max_episodes=1, max_traces=1, timeout_s=_TIMEOUT_S
                    )
                    clock = env.offset
            elif role == "policy":
                async with PolicyClient(target.address, **options) as policy:
                    self._policies[target.name] = await policy.describe(timeout_s=_TIMEOUT_S)
                    clock = policy.offset
            else:
                async with BufferClient(target.address, **options) as buffer:
                    await buffer.describe(timeout_s=_TIMEOUT_S)
                    clock = buffer.offset
            offset = clock.estimate()
            if offset is not None:
                self._clocks[target.name] = offset
        except (UnauthenticatedError, PermissionDeniedError) as error:
            fix = f"give --token-file, or services.{role}.auth.token_file, one with scope learner"
            self._findings.append(Finding("error", "access", where, str(error), fix))
        except RemoteError as error:
            fix = f"run doctor again; if it stays so, the log of the {label_of(role)} says why"
            self._note("health", where, f"tells nothing of itself: {error}", fix=fix)

    def _health(self, where: str, role: Role, status: ServingStatus) -> None:
        if status is ServingStatus.SERVING:
            self._findings.append(Finding("ok", "health", where, "SERVING"))
            return
        versions = [policy.policy_version for policy in self._policies.values()]
        if role == "policy" and versions == [0] and self._config.policy.initial_weights == "none":
            fix = "start the learner, or set policy.initial_weights: random"
            self._note("health", where, "waits for its first weights", fix=fix)
            return
        self._findings.append(
            Finding("warning", "health", where, status.name, "it starts or stops: see its log")
        )


async def unreachable(target: Target, where: str, error: RemoteError) -> Finding:
    """Returns why a service does not answer, as far as its port tells."""
    role = target.section
    address, message = target.address, str(error)
    start = (
        "is it running? rlightning serve CONFIG starts it, or python -m "
        f"rlightning.services.{role}_server"
    )
    fix = start
    if address.startswith(("unix:", "unix-abstract:")):
        return Finding("error", "reach", where, message, fix)
    host, _, port = address.rpartition(":")
    try:
        opening = asyncio.open_connection(host.strip("[]"), int(port))
        _, writer = await wait_within(opening, _TIMEOUT_S)
    except socket.gaierror as failure:
        message = f"the name {host} is not known: {failure.strerror}"
        fix = f"correct services.{role}.address, or the names of this machine"
    except asyncio.TimeoutError:
        message = f"nothing answers at {address} within {_TIMEOUT_S:g} s"
        fix = "a firewall, or another network? try: ping " + host
    except OSError as failure:
        if failure.errno == errno.ECONNREFUSED:
            message = f"nobody listens on {address}"
            fix = f"{start}; it listens on loopback unless services.{role}.listen says otherwise"
        else:
            message = f"cannot connect: {failure.strerror or failure}"
    else:
        writer.close()
        auth = target.auth
        if auth is not None and auth.with_tls:
            fix = (
                "does it have TLS, with a certificate of this CA and for this name? see "
                f"services.{role}.auth.ca_file and server_name"
            )
        else:
            fix = f"does it want TLS? set services.{role}.auth.ca_file, or give --ca"
        message = f"somebody listens there, and does not answer: {error}"
    return Finding("error", "reach", where, message, fix)


def look_at_config(config: MainConfig) -> Iterator[Finding]:
    """Yields what a config by itself tells."""
    try:
        prepare(config)
    except ConfigError as error:
        fix = "change the keys that it names; rlightning config schema tells what each takes"
        yield Finding("error", "config", "", str(error), fix)
    else:
        yield Finding("ok", "config", "", "its sections fit together")
    for key in keys_without_effect(config):
        yield Finding("note", "config", key, "has no effect here", "leave it out")


def look_at_machine(config: MainConfig) -> Iterator[Finding]:
    """Yields what this machine allows."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _FEW_FILES:
        fix = f"ulimit -n {min(most, 65536) if most > 0 else 65536}"
        message = f"{files} open files are allowed; each client of a service takes one or two"
        yield Finding("warning", "limits", "", message, fix)
    folders = {"log.log_dir": config.log.log_dir, "buffer.data_dir": config.buffer.data_dir}
    for key, folder in folders.items():
        if folder is None:
            continue
        free = shutil.disk_usage(_existing(Path(folder))).free
        message = f"{free / 2**30:.1f} GiB are free at {folder}"
        if free > _LITTLE_DISK:
            yield Finding("ok", "limits", key, message)
        else:
            yield Finding("warning", "limits", key, message, "make room, or name another disk")


def look_at_link(where: str, link: Link) -> Iterator[Finding]:
    """Yields what a measured link and the answers on it tell."""
    if link.protocol_version != PROTOCOL_VERSION:
        message = f"it speaks protocol {link.protocol_version}, this machine {PROTOCOL_VERSION}"
        fix = "install one version of the library on both"
        yield Finding("error", "version", where, message, fix)
    elif link.library_version != LIBRARY_VERSION:
        message = f"it runs {link.library_version}, this machine {LIBRARY_VERSION}"
        fix = "they understand each other; one version everywhere is easier to reason about"
        yield Finding("warning", "version", where, message, fix)
    else:
        yield Finding("ok", "version", where, f"{LIBRARY_VERSION}, as here")
    yield from _clock(where, link.clocks)
    yield Finding(
        "ok",
        "link",
        where,
        f"round trip {duration(link.rtt_s)} (least {duration(link.rtt_min_s)}), jitter "
        f"{duration(link.jitter_s)}, {_rate(link.up_mbit_s)} Mbit/s up, {_rate(link.down_mbit_s)} "
        "down",
    )


def _rate(mbit_s: float) -> str:
    return f"{mbit_s:,.0f}" if mbit_s >= 100 else f"{mbit_s:.3g}"


def _clock(where: str, clocks: Clocks | None) -> Iterator[Finding]:
    if clocks is None:
        fix = "run one version of the library on both, over a link that answers within a second"
        yield Finding("warning", "clock", where, "the offset of its clock cannot be known", fix)
        return
    offset_s, within_s = clocks.wall_offset_s, clocks.uncertainty_s
    off = (
        f"its wall clock is {duration(abs(offset_s))} {'ahead' if offset_s > 0 else 'behind'}, "
        f"\u00b1{duration(within_s)}"
    )
    same = "; it is this machine" if clocks.same_machine else ""
    if abs(offset_s) - within_s <= _WALL_OFFSET_S:
        yield Finding("ok", "clock", where, off + same)
        return
    yield Finding(
        "warning",
        "clock",
        where,
        f"{off}: latencies shown allow for it, compute_sent_latency and times in files do not",
        "synchronise both clocks, by NTP or PTP",
    )


def look_at_envs(
    name: str, env: EnvStatus, config: MainConfig, policies: Sequence[PolicyDescription]
) -> Iterator[Finding]:
    """Yields whether the envs fit each other, the policy, the config and the message caps."""
    acted: dict[str, list[EnvMeta]] = {}
    for meta in env.envs:
        if meta.env_id not in env.external_env_ids:
            acted.setdefault(_policy_of(meta, config), []).append(meta)
    differences = [
        f"{meta.env_id}: {line}"
        for metas in acted.values()
        for meta in metas[1:]
        for line in diff_spec(replace(metas[0], num_envs=None), meta)
    ]
    specs = [policy.spec for policy in policies if policy.spec is not None]  # of the default one
    for spec in specs if DEFAULT_POLICY in acted else ():
        first = acted[DEFAULT_POLICY][0]
        differences += [f"policy server: {line}" for line in diff_spec(spec, first)]
    for line in differences:
        fix = (
            "one policy acts for all: give these envs the same spaces, or restart the policy server"
        )
        yield Finding("error", "spec", name, line, fix)
    if acted and not differences:
        whom = "each other and the policy" if specs else "each other; no policy acted yet"
        groups = sum(map(len, acted.values()))
        yield Finding("ok", "spec", name, f"the spaces of {groups} groups fit {whom}")
    ids = [str(meta.env_id) for meta in env.envs]
    for wanted in config.env:
        if wanted.num_workers and not any(_is_of(one, wanted) for one in ids):
            fix = "it runs another config: restart it with this one"
            yield Finding("warning", "envs", name, f"it hosts no env {wanted.name!r}", fix)
    for env_id, error in (env.stats.get("last_errors") or {}).items():
        yield Finding("error", "envs", name, f"{env_id}: {error}", "its log tells more")
    services = config.services
    for role, rpc in (("policy", services.policy.rpc), ("buffer", services.buffer.rpc)):
        yield from _caps(name, role, rpc, env)


def look_at_clocks(name: str, env: EnvStatus, clocks: Mapping[str, Offset]) -> Iterator[Finding]:
    """Yields which clock is another one than an env server takes it for.

    Args:
        name: The env server.
        env: What it tells; its own offsets are among that.
        clocks: Each service's clock minus the one here, by name. Of several servers of a kind
            nobody tells which of them an env server means: they are left out.
    """
    if name not in clocks:
        return
    for other, summary in (env.stats.get("clocks") or {}).items():
        told = Offset.of_summary(summary)
        if told is None or other not in clocks:
            continue
        seen = clocks[name].inverse().then(clocks[other])
        off_s = abs(seen.offset_ns - told.offset_ns) / 1e9
        within_s = (seen.uncertainty_ns + told.uncertainty_ns) / 1e9 + DRIFT_LIMIT * _LONGEST_S
        if off_s > within_s:
            yield Finding(
                "warning",
                "clock",
                name,
                f"it takes the clock of the {label_of(other)} for one that is {duration(off_s)} "
                f"off, \u00b1{duration(within_s)}: latencies between them are wrong by as much",
                "machines cloned from one snapshot share a boot id, and not a clock: reboot one; "
                "else restart the env server",
            )


def _policy_of(meta: EnvMeta, config: MainConfig) -> str:
    """Returns which policy acts for a group: that of its env in the config."""
    hosted = (env for env in config.env if _is_of(str(meta.env_id), env))
    return next((env.policy for env in hosted), DEFAULT_POLICY)


def _is_of(env_id: str, env: EnvConfig) -> bool:
    return env_id.startswith(f"{group_name(env.name)}-")


def _caps(name: str, role: str, rpc: RpcConfig, env: EnvStatus) -> Iterator[Finding]:
    key = f"services.{role}.rpc.max_message_bytes"
    largest, of = 0, ""
    for meta in env.envs:
        try:
            needed = needed_bytes(meta, rpc)
        except InvalidRequestError as error:
            fix = "give that space max_bytes"
            yield Finding("error", "limits", name, f"{meta.env_id}: {error}", fix)
            continue
        if needed > largest:
            largest, of = needed, str(meta.env_id)
    if largest > rpc.max_message_bytes:
        message = f"a step of {of} may take {largest} bytes, {key} allows {rpc.max_message_bytes}"
        fix = f"raise {key} on both sides, or step fewer rows in one group"
        yield Finding("error", "limits", name, message, fix)
    elif largest:
        message = f"a step takes at most {largest / 2**20:.3g} MiB of {key}"
        yield Finding("ok", "limits", name, f"{message}, {rpc.max_message_bytes / 2**20:.3g} MiB")


def _existing(folder: Path) -> Path:
    """Returns a folder, or the nearest one above that exists."""
    for one in (folder.absolute(), *folder.absolute().parents):
        if one.exists():
            return one
    return Path.cwd()
