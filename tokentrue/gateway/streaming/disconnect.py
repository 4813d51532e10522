"""Cancels the work for a client that disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from tokentrue.gateway.asgi import ClientGone, Receive


@contextmanager
def cancel_on_disconnect(receive: Receive) -> Generator[None, None, None]:
    """Cancels the block when the client disconnects and raises `ClientGone`. The body must have been read before."""
    work = asyncio.current_task()
    assert work is not None
    disconnected = False

    async def watch() -> None:
        nonlocal disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        disconnected = True
        work.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not disconnected:
            raise
        work.uncancel()
        raise ClientGone from None
    finally:
        watcher.cancel()
