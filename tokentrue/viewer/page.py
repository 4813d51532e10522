"""The viewer's page: as a read-only Starlette application; as one HTML file; and with the report of a command."""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokentrue.errors import AuditError, FileFormatError, InputError, SessionNotFound, TokenTrueError
from tokentrue.json_types import JsonObject, JsonValue
from tokentrue.records import record
from tokentrue.samples.trainer_logprobs import TrainerLogprobs
from tokentrue.viewer.data import GatewayData, ViewerData
from tokentrue.viewer.records import RecordSource, ViewRenderer
from tokentrue.viewer.sources import SessionList

STATIC = Path(__file__).parent / "static"
MOST_TOKENS = 1_000_000
MOST_IMAGE_BYTES = 50_000_000
IMPORT = re.compile(r"""(["'])\./(?:vendor/)?([\w-]+\.js)\1""")
LINK = re.compile(r'<link rel="stylesheet" href="static/([\w./-]+)">')
SCRIPT = '<script type="module" src="static/app.js"></script>'
FILE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
)
# Only this server, and no inline script.
SERVED_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"content-security-policy", SERVED_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
]
STATUS: Mapping[type[Exception], int] = {SessionNotFound: 404, InputError: 422, AuditError: 422, TokenTrueError: 500}


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


def encode_json(value: JsonValue) -> bytes:
    """As `JSON.stringify` writes it: the page looks up an export's responses by that text."""
    try:
        return orjson.dumps(value)
    except TypeError:  # orjson refuses lone surrogates and integers beyond 64 bits; a sample may hold both
        plain = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def write_export(
    data: ViewerData | GatewayData, path: str | Path, *, most_tokens: int = MOST_TOKENS, report: "Report | None" = None
) -> int:
    answers, count = collect_answers(data, most_tokens=most_tokens)
    if report is not None:
        answers[answer_key("report")] = asdict(report)
        answers[answer_key("index", "0")]["has_report"] = True
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page_with(answers), encoding="utf-8")
    except OSError as error:
        raise FileFormatError(f"cannot write {target}: {error.strerror or error}") from error
    return count


def collect_answers(data: ViewerData | GatewayData, *, most_tokens: int) -> tuple[JsonObject, int]:
    index = data.ask("index")
    answers: JsonObject = {}
    kept: list[JsonValue] = []
    tokens = image_bytes = 0
    for row in index["sessions"]:
        tokens += row["tokens"]
        if kept and tokens > most_tokens:
            break
        name = row["session_id"]
        answers[answer_key("session", name)] = session = data.ask("session", session=name)
        kept.append(session["session"])
        for sample in (head["sample_id"] for head in session["branches"]):
            answers[answer_key("branch", name, sample)] = branch = data.ask("branch", session=name, sample=sample)
            for sha256 in {image[2] for image in branch["images"]}:
                with suppress(TokenTrueError):  # the page says that it is not here
                    shown = data.ask("image", session=name, sha256=sha256)
                    image_bytes += len(shown["url"])
                    if image_bytes <= MOST_IMAGE_BYTES:
                        answers[answer_key("image", name, sha256)] = shown
            if index["has_text"]:
                answers[answer_key("breaks", name, sample)] = data.ask("breaks", session=name, sample=sample)
    for group in {row["group"] for row in kept if row["group"] is not None}:
        answers[answer_key("group", group)] = data.ask("group", group=group)
    if index["has_trainer"]:
        answers[answer_key("mismatch")] = data.ask("mismatch")
    shown = {"source": {**index["source"], "live": False}, "sessions": kept, "left_out": index["total"] - len(kept)}
    answers[answer_key("index", "0")] = {**index, **shown}
    return answers, len(kept)


def answer_key(view: str, *arguments: str) -> str:
    return encode_json([view, *arguments]).decode()


def page_with(answers: JsonObject) -> str:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    imports: dict[str, str] = {}
    for file in sorted(STATIC.rglob("*.js")):
        source = IMPORT.sub(r'"tokentrue/\2"', file.read_text(encoding="utf-8"))  # a key of the import map
        imports[f"tokentrue/{file.name}"] = f"data:text/javascript;base64,{base64.b64encode(source.encode()).decode()}"
    modules = encode_json({"imports": imports}).decode()
    values = encode_json(answers).decode().replace("<", "\\u003c")
    scripts = (
        f'<script type="importmap">{modules}</script>\n<script type="application/json" id="answers">{values}</script>\n'
        '<script type="module">import "tokentrue/app.js"</script>'
    )
    page = page.replace(SCRIPT, scripts)
    page = page.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{FILE_POLICY}">')
    return LINK.sub(lambda link: f"<style>{(STATIC / link[1]).read_text(encoding='utf-8')}</style>", page)


@record
class Chart:
    """`series`: by name, values over `x`; None is a gap. `labels` name bars instead of numbers."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[float | None]]
    x: Sequence[float] = ()
    labels: Sequence[str] = ()
    kind: Literal["line", "bars"] = "line"
    log_y: bool = False


@record
class ReportTable:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | int]]


@record
class Report:
    """`facts` are label and value; `verdict` is one sentence, `ok` whether it is good."""

    title: str
    verdict: str = ""
    ok: bool = True
    facts: Sequence[tuple[str, str]] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[ReportTable] = ()
    note: str = ""
    highlights: Sequence[tuple[str, str]] = ()  # the few numbers to read first


def write_report(
    path: str | Path,
    report: Report,
    source: RecordSource | None = None,
    *,
    renderer: ViewRenderer | None = None,
    trainer: Mapping[str, TrainerLogprobs] | None = None,
    most_tokens: int = MOST_TOKENS,
) -> None:
    rollouts = source or SessionList((), name=report.title)
    data = ViewerData(rollouts, renderer=renderer, trainer=trainer)
    write_export(data, path, most_tokens=most_tokens, report=report)
