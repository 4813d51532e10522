"""Gateways in network namespaces of their own, as on machines of their own: one link to the agents and the engine, one
to the database.

Needs root and iproute2. A link that is down loses every packet without a word: no connection is refused or reset.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

FRONT, BACK = "10.77.1", "10.77.2"  # agents and engine; database


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@dataclass(frozen=True, slots=True)
class Namespace:
    name: str
    address: str  # where agents reach it
    front: str  # the host's ends of its links
    back: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Before a command: runs it inside."""
        return ("ip", "netns", "exec", self.name)

    def cut(self, *, front: bool) -> None:
        """From the database; with `front` from everything."""
        for link in [self.back, *([self.front] if front else [])]:
            ip("link", "set", link, "down")

    def mend(self) -> None:
        for link in (self.back, self.front):
            ip("link", "set", link, "up")


@contextmanager
def make_namespaces(count: int) -> Iterator[list[Namespace]]:
    mark = f"tt{os.getpid() % 100_000}"
    bridges = {f"{mark}f": FRONT, f"{mark}b": BACK}
    made: list[Namespace] = []
    try:
        for bridge, net in bridges.items():
            ip("link", "add", bridge, "type", "bridge")
            ip("addr", "add", f"{net}.1/24", "dev", bridge)
            ip("link", "set", bridge, "up")
        for number in range(count):
            space = Namespace(f"{mark}n{number}", f"{FRONT}.{number + 2}", f"{mark}f{number}", f"{mark}b{number}")
            ip("netns", "add", space.name)
            made.append(space)
            ip("-n", space.name, "link", "set", "lo", "up")
            for link, (bridge, net) in zip((space.front, space.back), bridges.items(), strict=True):
                inside = f"eth{net[-1]}"
                ip("link", "add", link, "type", "veth", "peer", "name", inside, "netns", space.name)
                ip("link", "set", link, "master", bridge, "up")
                ip("-n", space.name, "addr", "add", f"{net}.{number + 2}/24", "dev", inside)
                ip("-n", space.name, "link", "set", inside, "up")
        yield made
    finally:
        for space in made:
            ip("netns", "del", space.name)
        for bridge in bridges:
            subprocess.run(["ip", "link", "del", bridge], capture_output=True)
