"""The only network connection of a confined agent: a loopback port that leads to the gateway.

`ENTER` runs in the sandbox before the agent: it listens on the sandbox's own loopback interface, passes the listening
socket to this process through a Unix socket and execs the agent. Connections are thus accepted here, outside: no helper
runs inside that the agent could stop or replace."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

PORT = 47321  # on the agent's loopback
INSIDE = Path("/run/gateway")  # where the folder of the Unix socket is mounted
NAME = "socket"
CONNECTIONS = 128  # concurrent connections of one agent; each takes two file descriptors of this process
ENTER = f"""
import os, socket, sys
server = socket.create_server(("127.0.0.1", {PORT}))
with socket.socket(socket.AF_UNIX) as host:
    host.connect("{INSIDE / NAME}")
    socket.send_fds(host, [b"s"], [server.fileno()])
    host.recv(1)
server.close()
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.exit(print(f"cannot start {{sys.argv[1]}}: {{error.strerror}}", file=sys.stderr) or 127)
"""


@asynccontextmanager
async def open_bridge(folder: Path, url: str) -> AsyncGenerator[None]:
    """Connects the sandbox in which `folder` is mounted at `INSIDE` with the gateway at `url`."""
    target = urlsplit(url)
    is_tls = target.scheme == "https"
    slots = asyncio.Semaphore(CONNECTIONS)
    folder.mkdir()
    folder.chmod(0o755)
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{handle}/{NAME}")  # the folder's path may be too long for a socket
        os.close(handle)
        (folder / NAME).chmod(0o777)
        listener.listen(1)
        listener.setblocking(False)

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                if not slots.locked():
                    async with slots:
                        port = target.port or (443 if is_tls else 80)
                        theirs = await asyncio.open_connection(target.hostname, port, ssl=is_tls or None)
                        await exchange((reader, writer), theirs)
            writer.close()

        async def adopt() -> None:
            """The first caller is `ENTER`: the agent is not started before it has its answer."""
            loop = asyncio.get_running_loop()
            caller, _ = await loop.sock_accept(listener)
            with caller:
                caller.settimeout(10)
                _, fds, _, _ = await asyncio.to_thread(socket.recv_fds, caller, 1, 1)
                server = await asyncio.start_server(forward, sock=socket.socket(fileno=fds[0]))
                caller.send(b"r")
            listener.close()
            try:
                await asyncio.Event().wait()
            finally:
                server.close()

        serving = asyncio.create_task(adopt())
        try:
            yield
        finally:
            serving.cancel()
            await asyncio.wait([serving])


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def exchange(ours: Connection, theirs: Connection) -> None:
    try:
        await asyncio.gather(copy(ours[0], theirs[1]), copy(theirs[0], ours[1]))
    finally:
        theirs[1].close()


async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while piece := await source.read(65536):
        sink.write(piece)
        await sink.drain()
    if sink.can_write_eof():  # TLS cannot
        sink.write_eof()
    else:
        sink.close()
