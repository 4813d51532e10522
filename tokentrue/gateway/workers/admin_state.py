"""What the administrator has set, the pause and the policy version, in memory that a parent process shares with the
gateways it starts: it survives their restarts.

A worker writes an operation here, and then asks the others to apply it. A worker that starts reads this when it listens
to the others and before it serves a request: each operation is either read here, or asked for on its socket.
"""

from __future__ import annotations

from multiprocessing.sharedctypes import RawArray

from tokentrue.types import UNVERSIONED


class AdminState:
    """No lock: a worker that is killed would keep it. Each value is one aligned word, which is written whole."""

    def __init__(self) -> None:
        self._words = RawArray("q", [False, UNVERSIONED])

    @property
    def paused(self) -> bool:
        return bool(self._words[0])

    @paused.setter
    def paused(self, value: bool) -> None:
        self._words[0] = value

    @property
    def version(self) -> int:
        return self._words[1]

    @version.setter
    def version(self, value: int) -> None:
        self._words[1] = value
