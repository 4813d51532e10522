"""Runs the proof of a new chat template in a child process with operating-system limits on time and memory.

Jinja's sandbox limits what a template can access, not what it costs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NoReturn

from tokentrue import errors
from tokentrue.json_types import JsonValue
from tokentrue.records import record

MAX_FILES = 1 << 20
PARALLELISM = "TOKENIZERS_PARALLELISM"


@record
class ProcessLimits:
    """A proof takes about 0.1 s of processor time and a few megabytes."""

    cpu_s: int = 8
    wall_s: float = 120.0
    memory_bytes: int = 1 << 30  # beyond what the process has when it starts


def run_confined(work: Callable[[], JsonValue], limits: ProcessLimits | None = None) -> JsonValue:
    """Runs `work` in a child process and returns its JSON result. A TokenTrueError of `work` is raised here;
    TemplateLimitError if the child exceeded a limit.
    """
    limits = limits or ProcessLimits()
    fork = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe(duplex=False)
    child = fork.Process(target=_run_child, args=(work, writer, limits))
    with _without_parallel_tokenizers():
        child.start()
    writer.close()
    try:
        answer = reader.recv_bytes() if reader.poll(limits.wall_s) else b""
    except EOFError:
        answer = b""
    finally:
        reader.close()
        child.kill()
        child.join()
    if not answer:
        raise errors.TemplateLimitError(
            f"chat_template: to load it takes more than {limits.cpu_s} s of processor time, {limits.wall_s:g} s or "
            f"{limits.memory_bytes >> 20} MiB of memory; correct the template"
        )
    kind, value = json.loads(answer)
    if kind == "result":
        return value
    if kind == "defect":
        raise RuntimeError(f"the proof of a template failed:\n{value}")
    raise getattr(errors, kind)(value)


@contextmanager
def _without_parallel_tokenizers() -> Generator[None, None, None]:
    """The tokenizers thread pool has no threads in a forked child. This variable disables it and its warning."""
    before = os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[PARALLELISM]
        else:
            os.environ[PARALLELISM] = before


def _run_child(work: Callable[[], JsonValue], writer: Connection, limits: ProcessLimits) -> NoReturn:
    try:
        os.environ[PARALLELISM] = "false"
        os.closerange(3, writer.fileno())  # sockets and pipes of the parent, whose other ends wait for them to close
        os.closerange(writer.fileno() + 1, MAX_FILES)
        for number in (signal.SIGINT, signal.SIGTERM):  # the handlers are the parent's
            signal.signal(number, signal.SIG_DFL)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_CPU, limits.cpu_s)
        if (size := _address_space()) is not None:
            _limit(resource.RLIMIT_AS, size + limits.memory_bytes)
        answer = ("result", work())
    except (MemoryError, errors.TemplateLimitError):
        os._exit(1)
    except errors.TokenTrueError as error:
        answer = (type(error).__name__, str(error))
    except BaseException:
        answer = ("defect", traceback.format_exc())
    try:
        writer.send_bytes(json.dumps(answer).encode())
    finally:
        os._exit(0)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _address_space() -> int | None:
    """Bytes mapped by this process; None on systems that do not report it (they have no such limit either)."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return None
