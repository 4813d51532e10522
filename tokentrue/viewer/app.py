"""The viewer as a Starlette application: the page, its assets and the data API. Read-only, mountable at any path. The
content security policy allows only this server and no inline script."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokentrue.errors import AuditError, InputError, SessionNotFound, TokenTrueError
from tokentrue.viewer.data import GatewayData, ViewerData
from tokentrue.viewer.page import STATIC, encode_json

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]
STATUS: Mapping[type[TokenTrueError], int] = {
    SessionNotFound: 404,
    InputError: 422,
    AuditError: 422,
    TokenTrueError: 500,
}


def create_app(data: ViewerData | GatewayData) -> ASGIApp:
    def answer(request: Request) -> Response:  # a plain function: Starlette runs it in a thread
        try:
            found = data.ask(request.path_params["view"], **request.query_params)
            return Response(encode_json(found), media_type="application/json")
        except TokenTrueError as error:
            status = next(status for kind, status in STATUS.items() if isinstance(error, kind))
            return Response(encode_json({"error": str(error)}), status, media_type="application/json")

    def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html")

    app = Starlette(
        routes=[Route("/", page), Route("/data/{view}", answer), Mount("/static", StaticFiles(directory=STATIC))]
    )

    async def with_headers(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS]}
            await send(message)

        await app(scope, receive, send_guarded)

    return with_headers
