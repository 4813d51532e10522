"""`/view`: a read-only web page behind the admin key. The page is an ASGI application of the wiring's, made when it is
first asked for.

A browser cannot send a bearer token when it opens an address, so this path, and no other, also takes the admin key as
the password of
HTTP Basic authentication. Only GET and HEAD are answered: a browser repeats such a password by itself, so nothing here
may change anything.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tokentrue.gateway.auth import ApiKeys, Headers
from tokentrue.gateway.problems import HttpError

LoadPage = Callable[[], ASGIApp]
CHALLENGE = 'Basic realm="tokentrue: any user name, the admin key as password", charset="UTF-8"'


def view_routes(keys: ApiKeys, load: LoadPage) -> list[BaseRoute]:
    async def redirect(request: Request) -> Response:
        return RedirectResponse("view/")

    return [Route("/view", redirect), Mount("/view", AdminPage(keys, load))]


class AdminPage:
    """Answers with the page where the admin key is presented, and asks for it where it is not."""

    def __init__(self, keys: ApiKeys, load: LoadPage) -> None:
        self._keys, self._load = keys, load
        self._page: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in {"GET", "HEAD"}:
            raise HttpError(405, "method_not_allowed", "use GET")
        try:
            self._keys.require_admin(with_basic_password(scope["headers"]))
        except HttpError as error:
            refused = PlainTextResponse(f"{error}\n", error.problem.status, headers={"www-authenticate": CHALLENGE})
            await refused(scope, receive, send)
            return
        if self._page is None:
            self._page = await asyncio.to_thread(self._load)
        await self._page(scope, receive, send)


def with_basic_password(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers, with the password of Basic authentication as a bearer token."""
    found: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name == b"authorization" and value[:6].lower() == b"basic ":
            try:
                _, _, password = base64.b64decode(value[6:], validate=True).partition(b":")
            except (binascii.Error, ValueError):
                password = b""
            found.append((name, b"Bearer " + password))
        else:
            found.append((name, value))
    return found
