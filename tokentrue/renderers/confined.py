"""Proves a new chat template in a child process with operating-system limits on time and memory. Jinja's sandbox limits
what a template can access, not what it costs."""

import json
import os
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
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
    """The JSON result of `work`. Its TokenTrueErrors are raised here; TemplateLimitError if the child exceeded a limit."""
    limits = limits or ProcessLimits()
    reader, writer = os.pipe()
    with _without_parallel_tokenizers():
        child = os.fork()  # workers of multiprocessing may have no children of its kind
    if child == 0:
        _run_child(work, writer, limits)
    os.close(writer)
    try:
        answer = _read_line(reader, time.monotonic() + limits.wall_s)
    finally:
        os.close(reader)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):  # a caller that reaps all children was faster
            os.waitpid(child, 0)
    if answer is None:
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
def _without_parallel_tokenizers() -> Generator[None]:
    """The tokenizers thread pool has no threads in a forked child."""
    before = os.environ.get(PARALLELISM)
    os.environ[PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[PARALLELISM]
        else:
            os.environ[PARALLELISM] = before


def _run_child(work: Callable[[], JsonValue], writer: int, limits: ProcessLimits) -> NoReturn:
    try:
        os.environ[PARALLELISM] = "false"
        os.closerange(3, writer)  # sockets and pipes of the parent, whose other ends wait for them to close
        os.closerange(writer + 1, MAX_FILES)
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
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(json.dumps(answer).encode() + b"\n")
    finally:
        os._exit(0)


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _address_space() -> int | None:
    """In bytes; None on systems that do not report it."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return None


def _read_line(reader: int, deadline: float) -> bytes | None:
    poll, received = select.poll(), bytearray()
    poll.register(reader, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0 and poll.poll(left * 1000):
        piece = os.read(reader, 1 << 16)
        received += piece
        if received.endswith(b"\n"):
            return bytes(received)
        if not piece:
            return None
    return None
