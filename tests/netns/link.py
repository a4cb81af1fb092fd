"""A machine of its own at the other end of a cable, as the kernel has it: a network namespace and a veth pair."""

from __future__ import annotations

import os
import random
import subprocess
from ipaddress import IPv4Address

# Set aside for tests of networks (RFC 2544); every link takes four addresses.
_FIRST = IPv4Address("198.18.0.0")
_LINKS = range(2**15)
_ATTEMPTS = 20


def run(*command: str) -> str:
    """Runs a command and returns its stdout."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


class Link:
    """The cable, and the namespace beyond it, for the time of a `with`.

    The namespace has no name, so it lives as long as a process is in it. The one that holds it ends
    with this process at the latest, however this one ends, and the cable goes with the namespace.

    Attributes:
        name: The near end of the cable.
        near: Address of the near end.
        host: Address of the far end.
        prefix: What to run a command with so that it runs in the namespace; it dies with this process.
    """

    def __enter__(self) -> Link:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat >&2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert self._holder.stdout.readline() == b"up\n", (
                "no namespace: this needs root, iproute2"
            )
            enter = ["nsenter", "--net", "--target", str(self._holder.pid)]
            self.prefix = ["setpriv", "--pdeathsig", "KILL", *enter]
            near, far = self._plug()
            self.near, self.host = str(near), str(far)
            run("ip", "address", "add", f"{near}/30", "dev", self.name)
            run("ip", "link", "set", self.name, "up")
            self.inside("ip", "address", "add", f"{far}/30", "dev", "eth0")
            self.up()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            run("ip", "link", "delete", self.name)  # the kernel would do it a little later
        finally:
            self._release()

    def _plug(self) -> tuple[IPv4Address, IPv4Address]:
        pid = str(self._holder.pid)
        for number in random.SystemRandom().sample(_LINKS, _ATTEMPTS):
            self.name = f"rlnet{number}"
            peer = ["type", "veth", "peer", "name", "eth0", "netns", pid]
            try:
                run("ip", "link", "add", self.name, *peer)  # fails if another run has that name
            except AssertionError as error:
                failure = error
                continue
            return _FIRST + 4 * number + 1, _FIRST + 4 * number + 2
        raise failure

    def _release(self) -> None:
        self._holder.kill()
        self._holder.wait()
        self._holder.stdin.close()
        self._holder.stdout.close()

    def inside(self, *command: str) -> str:
        """Runs a command in the namespace."""
        return run(*self.prefix, *command)

    def down(self) -> None:
        """Pulls the cable; the near end loses its carrier."""
        self.inside("ip", "link", "set", "eth0", "down")

    def up(self) -> None:
        """Plugs it in again."""
        self.inside("ip", "link", "set", "eth0", "up")

    def shape(self, rate: str) -> None:
        """Makes the far end send no faster than this, such as `20mbit`."""
        queue = ["tbf", "rate", rate, "burst", "32kb", "latency", "400ms"]
        self.inside("tc", "qdisc", "add", "dev", "eth0", "root", *queue)

    def swallow_after(self, count: int, chain: str) -> None:
        """Drops packets without a word once so many bytes have passed INPUT or OUTPUT of the far end."""
        self.inside(
            "iptables", "-w", "-A", chain, "-m", "quota", "--quota", str(count), "-j", "ACCEPT"
        )
        self.inside("iptables", "-w", "-A", chain, "-j", "DROP")

    def swallowed(self, chain: str) -> int:
        """How many packets were dropped."""
        listing = self.inside("iptables", "-w", "-nvxL", chain)
        return sum(int(row.split()[0]) for row in listing.splitlines() if " DROP " in row)

    def restore(self) -> None:
        """Lets all packets pass again."""
        self.inside("iptables", "-w", "-F")


def links() -> set[str]:
    """The near ends of all links of this machine."""
    return {name for name in os.listdir("/sys/class/net") if name.startswith("rlnet")}
