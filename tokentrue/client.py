"""A gateway from Python.

with tt.Client("http://127.0.0.1:8000", admin_key) as client, client.session(group="task-7") as s:
    reply = s.openai().chat.completions.create(model="policy", messages=[{"role": "user", "content": "2+2?"}])
    s.reward(1.0)
    samples = s.samples()"""

import asyncio
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict, Unpack
from urllib.parse import quote

import httpx
import orjson

from tokentrue.errors import (
    ConfigError,
    GatewayError,
    GatewayUnreachable,
    MessageError,
    SessionConflict,
    SessionNotFound,
)
from tokentrue.json_types import JsonMapping, JsonObject, JsonValue
from tokentrue.plain_json import dumps, freeze, is_utf8
from tokentrue.samples import Assembly
from tokentrue.samples.shape import decode, sample_from_json
from tokentrue.types import Coverage, Sample

if TYPE_CHECKING:
    from anthropic import Anthropic, AsyncAnthropic
    from openai import AsyncOpenAI, OpenAI

ADMIN_KEY = "TOKENTRUE_ADMIN_KEY"
BY_STATUS: Mapping[int, type[Exception]] = {404: SessionNotFound, 409: SessionConflict}


Request = tuple[str, str, JsonMapping | None]  # method, path and body


class SessionSettings(TypedDict, total=False):
    """`training=False` admits sampling that no trainer can score; `pin=["system"]` keeps each conversation's first
    system prompt; `side_requests="train"` trains what a harness asks beside the task."""

    session_id: str | None
    group: str | None
    metadata: JsonMapping | None
    sampling: JsonMapping | None
    history: str | None
    training: bool | None
    pin: Sequence[str] | None
    side_requests: str | None


def _connection_options(url: str, admin_key: str | None, timeout_s: float) -> dict[str, Any]:
    base_url, key = url.rstrip("/"), admin_key or os.environ.get(ADMIN_KEY)
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{url!r} is not the URL of a gateway; `tokentrue serve` prints one such as http://127.0.0.1:8000"
        )
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return {"base_url": base_url, "timeout": timeout_s, "headers": headers}


def _raise_unreachable(url: httpx.URL, error: Exception) -> NoReturn:
    if isinstance(error, GatewayUnreachable):  # it responded, with an error status
        raise error
    raise GatewayUnreachable(
        f"no gateway is reachable at {str(url).rstrip('/')}: {error or type(error).__name__}; "
        "is `tokentrue serve` running?"
    ) from error


def _open_request(settings: SessionSettings) -> Request:
    return "POST", "/sessions", _without_none(settings)


def _encode_body(body: JsonMapping | None) -> JsonObject:
    if body is None:
        return {}
    content = dumps({name: freeze(value, name) for name, value in body.items()})
    return {"content": content, "headers": {"content-type": "application/json"}}


def _decode_answer(method: str, path: str, response: httpx.Response) -> JsonValue:
    if response.is_success:
        if response.headers.get("content-type", "").startswith("image/"):
            return response.content
        return orjson.loads(response.content) if response.content else None
    try:
        message = orjson.loads(response.content)["error"]["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = response.text[:300]
    problem = f"{method} {path}: the gateway answered {response.status_code}: {message}"
    if response.status_code in (401, 403):
        raise ConfigError(f"{problem}; set {ADMIN_KEY} to the key that the gateway has (in Python: admin_key=)")
    if response.status_code >= 500:
        raise GatewayUnreachable(problem)
    raise BY_STATUS.get(response.status_code, GatewayError)(problem)


def _list_request(limit: int, offset: int, group: str | None, after: JsonMapping | None) -> Request:
    path = f"/sessions?limit={limit}&offset={offset}"
    if group:
        path += f"&group={_quote(group, 'group')}"
    if after is not None:
        path += f"&after={after['created']!r},{_quote(after['session_id'], 'after')}"
    return "GET", path, None


def _reward_request(session_id: str, **fields: JsonValue) -> Request:
    return "POST", f"{session_path(session_id)}/reward", _without_none(fields)


def _image_path(session_id: str, sha256: str) -> str:
    return f"{session_path(session_id)}/images/{_quote(sha256, 'sha256')}"


def _end_request(session_id: str, *, purge: bool) -> Request:
    return "DELETE", session_path(session_id) + ("?purge=true" if purge else ""), None


def session_path(session_id: str) -> str:
    quoted = _quote(session_id, "session_id")
    return "/sessions/" + (quoted.replace(".", "%2E") if quoted in {".", ".."} else quoted)  # no step in the path


def _quote(text: str, field: str) -> str:
    if not is_utf8(text):
        raise MessageError(f"must be Unicode text without lone surrogates, got {text!r}", field=field)
    return quote(text, safe="")


def _without_none(fields: JsonMapping) -> JsonObject:
    return {name: value for name, value in fields.items() if value is not None}


def _samples_from(answer: JsonMapping) -> Assembly:
    coverage = decode(answer["coverage"], Coverage, "coverage")
    return Assembly(samples=[sample_from_json(sample) for sample in answer["samples"]], coverage=coverage)


class _SessionAddress:
    def __init__(self, opened: JsonMapping) -> None:
        self.id: str = opened["session_id"]
        self.api_key: str = opened["api_key"]
        self.base_url: str = opened["base_url"]
        self.anthropic_base_url: str = self.base_url.removesuffix("/v1")
        self.google_base_url: str = self.anthropic_base_url
        self._sdks: list[Any] = []  # closed with the session

    def _sdk(self, module: str, name: str, options: JsonMapping) -> Any:
        try:
            kind = getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            raise ConfigError(f"the {module} SDK is missing: pip install {module}") from error
        address = self.base_url if module == "openai" else self.anthropic_base_url
        self._sdks.append(kind(**{"base_url": address, "api_key": self.api_key, **options}))
        return self._sdks[-1]

    def _refuse(self, sdk: Any) -> None:
        """Makes a closed client say that the session has ended."""
        kind = next(kind for kind in type(sdk._client).__mro__ if kind.__name__ in ("Client", "AsyncClient"))
        http: Any = import_module(kind.__module__.partition(".")[0])  # each SDK has its own httpx
        text = f"session {self.id} has ended, and its clients are closed: open another session"
        error = {"type": "conflict", "code": "session_ended", "message": text}

        def answer(request: Any) -> Any:
            return http.Response(409, headers={"x-should-retry": "false"}, json={"type": "error", "error": error})

        sdk._client = getattr(http, kind.__name__)(transport=http.MockTransport(answer))


class ClientSession(_SessionAddress):
    def __init__(self, client: "Client", opened: JsonMapping) -> None:
        super().__init__(opened)
        self._client = client

    def openai(self, **options: Any) -> "OpenAI":
        return self._sdk("openai", "OpenAI", options)

    def anthropic(self, **options: Any) -> "Anthropic":
        return self._sdk("anthropic", "Anthropic", options)

    def reward(self, reward: float, *, leaf: str | None = None, metadata: JsonMapping | None = None) -> None:
        self._client.call(*_reward_request(self.id, reward=reward, leaf=leaf, metadata=metadata))

    def samples(self) -> list[Sample]:
        return self.result().samples

    def coverage(self) -> Coverage:
        return self.result().coverage

    def result(self) -> Assembly:
        return self._client.session_samples(self.id)

    def image(self, sha256: str) -> bytes:
        """The file of an image in the session's samples, by its hash."""
        return self._client.session_image(self.id, sha256)

    def state(self) -> JsonObject:
        return self._client.session_state(self.id)

    def end(self, *, purge: bool = False) -> None:
        """Admits no further turn; samples stay readable unless `purge`."""
        self.close()
        self._client.call(*_end_request(self.id, purge=purge))

    def close(self) -> None:
        """Closes the SDK clients and leaves the session open."""
        while self._sdks:
            sdk = self._sdks.pop()
            sdk.close()
            self._refuse(sdk)


class Client:
    """Administers a gateway. `admin_key` defaults to TOKENTRUE_ADMIN_KEY."""

    def __init__(self, url: str, admin_key: str | None = None, *, timeout_s: float = 600.0) -> None:
        self._http = httpx.Client(**_connection_options(url, admin_key, timeout_s))

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def open(self, **settings: Unpack[SessionSettings]) -> ClientSession:
        """A new session, which stays open until `end`."""
        return ClientSession(self, self.call(*_open_request(settings)))

    def session(self, **settings: Unpack[SessionSettings]) -> "SessionBlock":
        """`open` as a context manager that ends the session. After an exception it stays open, to be inspected or
        resumed."""
        return SessionBlock(self, settings)

    def sessions(
        self, *, limit: int = 100, offset: int = 0, group: str | None = None, after: JsonMapping | None = None
    ) -> list[JsonObject]:
        """Newest first. `after` is an item of an earlier list; unlike `offset`, it neither skips nor repeats
        sessions while others are opened and purged."""
        return self.call(*_list_request(limit, offset, group, after))["sessions"]

    def session_state(self, session_id: str) -> JsonObject:
        return self.call("GET", session_path(session_id))

    def session_samples(self, session_id: str) -> Assembly:
        return _samples_from(self.call("GET", f"{session_path(session_id)}/samples"))

    def session_image(self, session_id: str, sha256: str) -> bytes:
        return self.call("GET", _image_path(session_id, sha256))

    def reward_session(self, session_id: str, reward: float, *, group: str | None = None) -> None:
        """Rewards a session that another program opened. `group` sets its group if it has none."""
        self.call(*_reward_request(session_id, reward=reward, group=group))

    def end_session(self, session_id: str) -> None:
        self.call(*_end_request(session_id, purge=False))

    def delete_session(self, session_id: str) -> None:
        """Ends the session and deletes everything sampled in it."""
        self.call(*_end_request(session_id, purge=True))

    def wait_until_ready(self, *, timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while True:
            try:
                self.call("GET", "/ready")
                return
            except GatewayError as error:
                if time.monotonic() > end:
                    raise GatewayUnreachable(f"not ready after {timeout_s:g} s: {error}") from error
            time.sleep(0.2)

    def call(self, method: str, path: str, body: JsonMapping | None = None) -> JsonValue:
        """The JSON response of any administrative route."""
        try:
            return _decode_answer(method, path, self._http.request(method, path, **_encode_body(body)))
        except httpx.TransportError as error:
            _raise_unreachable(self._http.base_url, error)


class AsyncClientSession(_SessionAddress):
    def __init__(self, client: "AsyncClient", opened: JsonMapping) -> None:
        super().__init__(opened)
        self._client = client

    def openai(self, **options: Any) -> "AsyncOpenAI":
        return self._sdk("openai", "AsyncOpenAI", options)

    def anthropic(self, **options: Any) -> "AsyncAnthropic":
        return self._sdk("anthropic", "AsyncAnthropic", options)

    async def reward(self, reward: float, *, leaf: str | None = None, metadata: JsonMapping | None = None) -> None:
        await self._client.call(*_reward_request(self.id, reward=reward, leaf=leaf, metadata=metadata))

    async def samples(self) -> list[Sample]:
        return (await self.result()).samples

    async def coverage(self) -> Coverage:
        return (await self.result()).coverage

    async def result(self) -> Assembly:
        return await self._client.session_samples(self.id)

    async def image(self, sha256: str) -> bytes:
        return await self._client.session_image(self.id, sha256)

    async def state(self) -> JsonObject:
        return await self._client.session_state(self.id)

    async def end(self, *, purge: bool = False) -> None:
        await self.close()
        await self._client.call(*_end_request(self.id, purge=purge))

    async def close(self) -> None:
        while self._sdks:
            sdk = self._sdks.pop()
            await sdk.close()
            self._refuse(sdk)


class AsyncClient:
    """`Client` with `await`. `retries` is how often a call is repeated while the gateway is unreachable."""

    def __init__(self, url: str, admin_key: str | None = None, *, timeout_s: float = 600.0, retries: int = 0) -> None:
        options = _connection_options(url, admin_key, timeout_s)
        self._retries = retries
        self._http = httpx.AsyncClient(**options, limits=httpx.Limits(max_connections=None))

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def open(self, **settings: Unpack[SessionSettings]) -> AsyncClientSession:
        return AsyncClientSession(self, await self.call(*_open_request(settings)))

    def session(self, **settings: Unpack[SessionSettings]) -> "AsyncSessionBlock":
        return AsyncSessionBlock(self, settings)

    async def sessions(
        self, *, limit: int = 100, offset: int = 0, group: str | None = None, after: JsonMapping | None = None
    ) -> list[JsonObject]:
        return (await self.call(*_list_request(limit, offset, group, after)))["sessions"]

    async def session_state(self, session_id: str) -> JsonObject:
        return await self.call("GET", session_path(session_id))

    async def session_samples(self, session_id: str) -> Assembly:
        return _samples_from(await self.call("GET", f"{session_path(session_id)}/samples"))

    async def session_image(self, session_id: str, sha256: str) -> bytes:
        return await self.call("GET", _image_path(session_id, sha256))

    async def reward_session(self, session_id: str, reward: float, *, group: str | None = None) -> None:
        await self.call(*_reward_request(session_id, reward=reward, group=group))

    async def end_session(self, session_id: str) -> None:
        await self.call(*_end_request(session_id, purge=False))

    async def delete_session(self, session_id: str) -> None:
        await self.call(*_end_request(session_id, purge=True))

    async def wait_until_ready(self, *, timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while True:
            try:
                await self.call("GET", "/ready")
                return
            except GatewayError as error:
                if time.monotonic() > end:
                    raise GatewayUnreachable(f"not ready after {timeout_s:g} s: {error}") from error
            await asyncio.sleep(0.2)

    async def call(self, method: str, path: str, body: JsonMapping | None = None) -> JsonValue:
        for attempt in itertools.count():
            try:
                return _decode_answer(method, path, await self._http.request(method, path, **_encode_body(body)))
            except (httpx.TransportError, GatewayUnreachable) as error:
                if attempt == self._retries:
                    _raise_unreachable(self._http.base_url, error)
            await asyncio.sleep(min(4.0, 0.25 * 2**attempt))
        raise AssertionError("unreachable: the last attempt returns or raises")


class _Block:
    _keyword = "with"

    def __init__(self, client: Any, settings: SessionSettings) -> None:
        self._client, self._settings = client, settings

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # copy, inspect and notebooks look for these
            raise AttributeError(name)
        raise ConfigError(
            f"client.session(...) opens its session in a block: write `{self._keyword} client.session(...) as s:`; "
            "client.open(...) returns one that stays open until its end()"
        )


class SessionBlock(_Block):
    def __enter__(self) -> ClientSession:
        self._session: ClientSession = self._client.open(**self._settings)
        return self._session

    def __exit__(self, kind: object, *_: object) -> None:
        (self._session.end if kind is None else self._session.close)()


class AsyncSessionBlock(_Block):
    _keyword = "async with"

    async def __aenter__(self) -> AsyncClientSession:
        self._session: AsyncClientSession = await self._client.open(**self._settings)
        return self._session

    async def __aexit__(self, kind: object, *_: object) -> None:
        await (self._session.end if kind is None else self._session.close)()
