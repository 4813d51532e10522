"""The page as one self-contained HTML file.

Modules become `data:` URLs in an import map; the responses of the data API are embedded as JSON.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import orjson

from tokentrue.errors import ConfigError, FileFormatError
from tokentrue.json_types import JsonObject, JsonValue
from tokentrue.viewer.data import PAGE, ViewerData

STATIC = Path(__file__).parent / "static"
MOST_TOKENS = 1_000_000
_IMPORT = re.compile(r"""((?:from|import)\s*)(["'])\.{1,2}/([\w./-]+)\2""")
_LINK = re.compile(r'<link rel="stylesheet" href="static/([\w./-]+)">')
_SCRIPT = re.compile(r'<script type="module" src="static/([\w./-]+)"></script>')
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
)


def encode_json(value: JsonValue) -> bytes:
    """JSON as `JSON.stringify` writes it: the page looks up an export's responses by that text."""
    try:
        return orjson.dumps(value)
    except TypeError:  # orjson refuses lone surrogates and integers beyond 64 bits; a sample may hold both
        plain = json.loads(json.dumps(value), parse_constant=lambda _: None)
        return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def write_export(data: ViewerData, path: str | Path, *, most_tokens: int = MOST_TOKENS) -> int:
    """Writes the first sessions that together fit into `most_tokens`; returns their number."""
    answers, count = collect_answers(data, most_tokens=most_tokens)
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page_with(answers), encoding="utf-8")
    except OSError as error:
        raise FileFormatError(f"cannot write {target}: {error.strerror or error}") from error
    return count


def collect_answers(data: ViewerData, *, most_tokens: int) -> tuple[JsonObject, int]:
    """The responses that the page will request, by `answer_key`, and the number of sessions."""
    index = data.index(limit=PAGE)
    answers: JsonObject = {}
    kept: list[JsonValue] = []
    tokens = 0
    for row in index["sessions"]:
        tokens += row["tokens"]
        if kept and tokens > most_tokens:
            break
        kept.append(_add_session(data, row["session_id"], answers, has_text=index["has_text"]))
    for group in {row["group"] for row in kept if row["group"] is not None}:
        answers[answer_key("group", group)] = data.group(group)
    if index["has_trainer"]:
        answers[answer_key("mismatch")] = data.mismatch()
    if index["has_report"]:
        answers[answer_key("report")] = data.report()
    source = {**index["source"], "live": False}
    answers[answer_key("index", "0")] = {
        **index,
        "source": source,
        "sessions": kept,
        "left_out": index["total"] - len(kept),
    }
    return answers, len(kept)


def _add_session(data: ViewerData, session_id: str, answers: JsonObject, *, has_text: bool) -> JsonValue:
    """Returns its row of the list."""
    answers[answer_key("session", session_id)] = session = data.session(session_id)
    for head in session["branches"]:
        sample_id = head["sample_id"]
        answers[answer_key("branch", session_id, sample_id)] = data.branch(session_id, sample_id)
        if has_text:
            answers[answer_key("breaks", session_id, sample_id)] = data.breaks(session_id, sample_id)
    return session["session"]


def answer_key(view: str, *arguments: str) -> str:
    return encode_json([view, *arguments]).decode()


def page_with(answers: JsonObject) -> str:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    entry = _SCRIPT.search(page)
    if entry is None:
        raise ConfigError("the viewer's index.html has no module script")
    modules = {file.relative_to(STATIC).as_posix(): _module(file) for file in sorted(STATIC.rglob("*.js"))}
    imports = encode_json({"imports": {f"tokentrue/{name}": url for name, url in modules.items()}}).decode()
    values = encode_json(answers).decode().replace("<", "\\u003c")
    scripts = (
        f'<script type="importmap">{imports}</script>\n<script type="application/json" id="answers">{values}</script>\n'
        f'<script type="module">import "tokentrue/{entry[1]}"</script>'
    )
    page = page.replace(entry[0], "").replace("</body>", f"{scripts}\n</body>")
    page = page.replace("<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{POLICY}">')
    return _LINK.sub(lambda link: f"<style>{(STATIC / link[1]).read_text(encoding='utf-8')}</style>", page)


def _module(file: Path) -> str:
    """A `data:` URL, with relative imports renamed to the import map's keys."""

    def absolute(found: re.Match[str]) -> str:
        start = file.parent if not found[0].endswith(f"../{found[3]}{found[2]}") else file.parent.parent
        return f"{found[1]}{found[2]}tokentrue/{(start / found[3]).relative_to(STATIC).as_posix()}{found[2]}"

    source = _IMPORT.sub(absolute, file.read_text(encoding="utf-8"))
    return "data:text/javascript;base64," + base64.b64encode(source.encode()).decode()
