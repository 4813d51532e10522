"""The supervisor of several workers: starts them, starts one again that died, and ends them with itself.

Workers share one listening socket, and each listens to the others on a Unix socket in a private folder. The sessions of
a worker that was started again come back from the journal, and what the administrator set (`AdminState`) from the
supervisor. Workers whose supervisor is killed end themselves.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from tokentrue.gateway.workers.admin_state import AdminState

RESTARTS_PER_MINUTE = 10
LOG = logging.getLogger("tokentrue.gateway")


def supervise(
    start: Callable[..., None], settings: Any, public: socket.socket, workers: int, *, ready: Callable[[], None]
) -> int:
    """Starts `start(settings, public, me, workers, folder, state, up)` once per worker, and again when one dies."""
    context = multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp(prefix="tokentrue-")
    state, up = AdminState(), context.Semaphore(0)
    running: dict[int, Any] = {}
    stopping = False

    def launch(me: int) -> None:
        arguments = (settings, public, me, workers, folder, state, up)
        running[me] = context.Process(target=start, args=arguments, name=f"tokentrue-worker-{me}")
        running[me].start()

    def stop(*_: Any) -> None:
        nonlocal stopping
        stopping = True

    try:
        for me in range(workers):
            launch(me)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        if not _await_start(running, up, workers, lambda: stopping):
            return 2
        ready()
        return _restart_dead(running, launch, lambda: stopping)
    finally:
        _end(running)
        shutil.rmtree(folder, ignore_errors=True)


def end_with_supervisor(drain_s: float) -> None:
    """In a worker: a thread that ends this process when its supervisor is gone."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(drain_s + 5)
        os._exit(1)

    threading.Thread(target=watch, name="supervisor-watch", daemon=True).start()


def _await_start(running: dict[int, Any], up: Any, workers: int, stopping: Callable[[], bool]) -> bool:
    started = 0
    while started < workers:
        if up.acquire(timeout=0.2):
            started += 1
        elif stopping() or any(process.exitcode is not None for process in running.values()):
            return False  # the worker has printed why
    return True


def _restart_dead(running: dict[int, Any], launch: Callable[[int], None], stopping: Callable[[], bool]) -> int:
    restarts: list[float] = []
    while not stopping():
        time.sleep(0.1)
        for me, process in list(running.items()):
            if process.exitcode is None or stopping():
                continue
            restarts = [moment for moment in restarts if moment > time.monotonic() - 60]
            if len(restarts) >= RESTARTS_PER_MINUTE:
                LOG.error("workers die as fast as they start; giving up")
                return 1
            restarts.append(time.monotonic())
            LOG.warning("worker %d ended with %s; starting it again", me, process.exitcode)
            launch(me)
    return 0


def _end(running: dict[int, Any]) -> None:
    for process in running.values():
        if process.exitcode is None:
            process.terminate()
    for process in running.values():
        process.join()
