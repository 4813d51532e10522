"""The viewer as a Starlette application: the page, its assets and the data API. Read-only, mountable at any path.

No request leaves the machine: the content security policy allows only this server and no inline script.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokentrue.errors import InputError, SessionNotFound, TokenTrueError
from tokentrue.json_types import JsonValue
from tokentrue.viewer.data import PAGE, ViewerData
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
STATUS: Mapping[type[TokenTrueError], int] = {SessionNotFound: 404, InputError: 422, TokenTrueError: 500}


def create_app(data: ViewerData) -> ASGIApp:
    views: dict[str, Callable[[Request], JsonValue]] = {
        "index": lambda request: data.index(
            offset=_whole(request, "offset", 0), limit=min(_whole(request, "limit", PAGE), PAGE)
        ),
        "search": lambda request: data.search(_text(request, "text"), offset=_whole(request, "offset", 0)),
        "session": lambda request: data.session(_text(request, "session")),
        "branch": lambda request: data.branch(_text(request, "session"), _text(request, "sample")),
        "breaks": lambda request: data.breaks(_text(request, "session"), _text(request, "sample")),
        "image": lambda request: data.image(_text(request, "session"), _text(request, "sha256")),
        "group": lambda request: data.group(_text(request, "group")),
        "mismatch": lambda request: data.mismatch(),
    }

    def answer(request: Request) -> Response:  # a plain function: Starlette runs it in a thread
        view = views.get(request.path_params["view"])
        try:
            if view is None:
                raise SessionNotFound(f"no such view; one of {', '.join(views)}")
            return Response(encode_json(view(request)), media_type="application/json")
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


def _text(request: Request, name: str) -> str:
    value = request.query_params.get(name)
    if value is None:
        raise InputError(f"{name}: missing")
    return value


def _whole(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise InputError(f"{name}: must be a whole number from 0 up")
    return int(text)
