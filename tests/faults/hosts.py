"""Two hosts on this one: network namespaces joined by a pair of virtual interfaces."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import uuid

PREFIX = "tsr"


def ip(*words, check=True) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


def reason_not_possible() -> str | None:
    """Why namespaces cannot be had here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"{PREFIX}-{os.getpid()}-probe"
    try:
        made = ip("netns", "add", name, check=False)
    except FileNotFoundError:
        return "the program ip (iproute2) is missing"
    if made.returncode != 0:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    ip("netns", "del", name, check=False)
    return None


def remove_stale() -> None:
    """Removes namespaces whose driver is gone: their names hold its pid."""
    for line in ip("netns", "list").stdout.splitlines():
        name = line.split()[0]
        owner = re.match(rf"{PREFIX}-(\d+)-", name)
        if owner and not pathlib.Path(f"/proc/{owner[1]}").exists():
            ip("netns", "del", name, check=False)


class TwoHosts:
    """Hosts 0 and 1 with the addresses 10.97.0.1 and 10.97.0.2."""

    addresses = ("10.97.0.1", "10.97.0.2")

    def __enter__(self) -> TwoHosts:
        remove_stale()
        tag = uuid.uuid4().hex[:6]
        self.names = [f"{PREFIX}-{os.getpid()}-{tag}-{host}" for host in (0, 1)]
        self.links = [f"v{tag}{host}" for host in (0, 1)]
        try:
            for name in self.names:
                ip("netns", "add", name)
            ip(
                "link",
                "add",
                self.links[0],
                "netns",
                self.names[0],
                "type",
                "veth",
                "peer",
                "name",
                self.links[1],
                "netns",
                self.names[1],
            )
            for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
                ip("-n", name, "link", "set", link, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for name in self.names:
            ip("netns", "del", name, check=False)

    def inside(self, host: int) -> list[str]:
        """The words that run a command on a host; the process id stays the same."""
        return ["ip", "netns", "exec", self.names[host]]

    def cut(self) -> None:
        ip("-n", self.names[1], "link", "set", self.links[1], "down")

    def slow_down(self, rate: str) -> None:
        """Limits what each host sends."""
        for host in (0, 1):
            subprocess.run(
                [
                    *self.inside(host),
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    self.links[host],
                    "root",
                    "tbf",
                    "rate",
                    rate,
                    "burst",
                    "16kb",
                    "latency",
                    "200ms",
                ],
                check=True,
                capture_output=True,
            )
