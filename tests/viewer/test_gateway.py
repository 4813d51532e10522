"""The viewer of a real `tokentrue serve`: `/view` behind the admin key, live in a browser; and `tokentrue view URL`
over its HTTP."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.gateway.world import Server, scripted_server, ten_turns
from tests.viewer.browser import SIZE, Watched, open_browser
from tokentrue.errors import ConfigError, SessionNotFound
from tokentrue.gateway.app import view_routes
from tokentrue.gateway.asgi import HttpError
from tokentrue.gateway.auth import ApiKeys
from tokentrue.samples import sample_from_json
from tokentrue.viewer import GatewayData, SampleList, ViewerData

KEY = "the-admin-key"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = scripted_server(
        tmp_path_factory.mktemp("view"), ten_turns(), "--set", "engine.options.loop=true", admin_key=KEY
    )
    yield made
    made.stop()


def chat(server: Server, session: Any, history: list[Any]) -> list[Any]:
    status, answer = server.ask(
        "POST", f"/sessions/{session.session_id}/v1/chat/completions", {"model": "m", "messages": history}
    )
    assert status == 200, answer
    return [*history, answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]


def fetch(url: str, **headers: str) -> tuple[int, Any, bytes]:
    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *args: Any, **kwargs: Any) -> None:
            return None

    request = urllib.request.Request(url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.build_opener(Stay).open(request, timeout=30) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anyone:{password}".encode()).decode()


@pytest.mark.parametrize("path", ["/", "/view"])
def test_the_address_of_the_gateway_leads_to_the_page(server: Server, path: str) -> None:
    status, answered, _ = fetch(server.url + path)
    assert status == 307 and answered["location"] == "view/"


@pytest.mark.parametrize("path", ["/view/", "/view/data/index?offset=0", "/view/static/app.js", "/view/anything"])
def test_nothing_is_shown_without_the_admin_key(server: Server, path: str) -> None:
    own = server.session().api_key
    for headers in (
        {},
        {"authorization": basic("wrong")},
        {"authorization": f"Bearer {own}"},
        {"authorization": "Basic ???"},
    ):
        status, answered, body = fetch(server.url + path, **headers)
        assert status in {401, 403} and b"sessions" not in body
        assert answered["www-authenticate"].startswith("Basic ")


def test_the_page_needs_the_key_and_other_paths_do_not_take_it_as_a_password(server: Server) -> None:
    status, headers, _ = fetch(f"{server.url}/view")
    assert status == 307 and headers["location"] == "view/"
    status, headers, _ = fetch(f"{server.url}/view/", authorization=basic(KEY))
    assert status == 200 and "script-src 'self'" in headers["content-security-policy"]
    assert fetch(f"{server.url}/view/data/index?offset=0", authorization=f"Bearer {KEY}")[0] == 200
    assert (
        fetch(f"{server.url}/sessions", authorization=basic(KEY))[0] == 401
    )  # a browser would send it for any page's form
    assert server.ask("POST", "/view/", {})[0] == 405


def test_an_agent_is_watched_while_it_runs(server: Server) -> None:
    session = server.session(session_id="watched", group="live")
    history = chat(server, session, [{"role": "user", "content": "Begin."}])
    with open_browser() as browser:
        context = browser.new_context(viewport=SIZE, http_credentials={"username": "anyone", "password": KEY})
        seen = Watched(context.new_page(), server.url)
        page = seen.open("view/#/session/watched")
        expect(page.locator(".tree li")).to_have_count(1)
        tokens = page.locator(".t.sampled")
        expect(tokens.first).to_be_visible()
        history = chat(server, session, history)
        expect(page.locator(".tree li")).to_have_count(2)
        expect(page.locator(".row.head", has_text="turn 2").first).to_be_visible()
        page.get_by_role("tab", name="What would have broken").click()
        expect(page.locator(".breaks")).to_be_visible()
        server.ask("POST", "/sessions/watched/reward", {"reward": 0.25})
        expect(page.locator(".session-head")).to_contain_text("0.250")
        seen.check()
        context.close()


def test_a_gateway_is_read_over_its_public_http(server: Server) -> None:
    session = server.session(session_id="read", group="over-http")
    history = chat(server, session, [{"role": "user", "content": "Begin."}])
    chat(server, session, history)
    data = GatewayData(server.url, key=KEY)
    row = next(one for one in data.ask("index")["sessions"] if one["session_id"] == "read")
    assert (row["turns"], row["group"], row["trained"]) == (2, "over-http", row["sampled"])
    shown = data.ask("session", session="read")
    names = {"session": "read", "sample": shown["branches"][0]["sample_id"]}
    branch = data.ask("branch", **names)
    assert [block["role"] for block in branch["blocks"] if block["kind"] == "sampled"] == ["assistant", "assistant"]
    assert branch["token_ids"] == server.samples("read")["samples"][0]["token_ids"]
    assert branch["blocks"][0]["message"]["content"] == "Begin." and row["task"] == "Begin."
    assert data.ask("breaks", **names)["mode"] == "render"
    assert data.ask("search", text="Begin")["matches"]
    assert len(data.ask("group", group="over-http")["rollouts"]) == 1
    with pytest.raises(SessionNotFound):
        data.ask("session", session="nobody")
    with pytest.raises(ConfigError, match="--trainer-logprobs"):
        data.ask("mismatch")
    data.close()
    with pytest.raises(ConfigError, match="TOKENTRUE_ADMIN_KEY"):
        GatewayData(server.url, key="wrong")


def test_every_source_and_view_shows_one_reward(server: Server) -> None:
    """The mean over samples, also where a leaf has a reward of its own: over HTTP, in the gateway's own page (a store)
    and of a file."""
    session = server.session(session_id="leaves", group="leaves")
    chat(server, session, chat(server, session, [{"role": "user", "content": "Begin."}]))
    chat(server, session, [{"role": "user", "content": "Another one."}])
    over_http = GatewayData(server.url, key=KEY)
    assert server.ask("POST", "/sessions/leaves/reward", {"reward": 1.0})[0] == 200
    leaf = over_http.ask("session", session="leaves")["branches"][0]["leaf"]
    assert server.ask("POST", "/sessions/leaves/reward", {"reward": 0.25, "leaf": leaf})[0] == 200
    samples = [sample_from_json(item) for item in server.samples("leaves")["samples"]]
    assert sorted(sample.reward or 0.0 for sample in samples) == [0.25, 1.0]

    def own_page(path: str) -> Any:
        return json.loads(fetch(f"{server.url}/view/data/{path}", authorization=f"Bearer {KEY}")[2])

    answers = [(own_page("index?offset=0"), own_page("session?session=leaves"))]
    for data in (over_http, ViewerData(SampleList(samples, name="file"))):
        answers.append((data.ask("index"), data.ask("session", session="leaves")))
    over_http.close()
    rows = [
        one
        for index, shown in answers
        for one in (*index["sessions"], shown["session"])
        if one["session_id"] == "leaves"
    ]
    seen = [
        json.dumps({key: row[key] for key in sorted(row.keys() - {"state", "created", "task"})}) for row in rows
    ]  # a file has none of them; a task is read from a store alone
    assert len(seen) == 6 and set(seen) == {seen[0]}
    assert [rows[0][key] for key in ("reward", "turns", "branches", "forks")] == [0.625, 3, 2, 1]


def test_a_page_that_would_change_something_is_never_asked_to() -> None:
    """A browser repeats a Basic password by itself, also for a form on another site's page."""
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.testclient import TestClient

    routes = view_routes(ApiKeys(admin_key=KEY), lambda: PlainTextResponse("changed"))
    client = TestClient(Starlette(routes=routes))
    assert client.get("/view/", headers={"authorization": basic(KEY)}).text == "changed"
    with pytest.raises(HttpError, match="use GET"):
        client.post("/view/", headers={"authorization": basic(KEY)})


def test_a_store_is_read_while_its_server_runs(server: Server, tmp_path: Path) -> None:
    chat(server, server.session(session_id="both"), [{"role": "user", "content": "Begin."}])
    target = tmp_path / "page.html"
    store = f"sqlite:{server.log.parent / 'journal.sqlite'}"
    command = [sys.executable, "-m", "tokentrue", "view", store, "--export", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert "both" in target.read_text(encoding="utf-8")


def test_a_gateway_starts_without_the_viewer() -> None:
    code = (
        "import sys; from tokentrue.app.wiring import ServeConfig, view_for; import tokentrue.gateway.app; "
        "view_for(ServeConfig(), None, None); print('tokentrue.viewer' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
