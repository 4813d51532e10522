"""Engines that are servers. A request is retried only until its response begins; a generation that is not streamed and
breaks off is sampled again, since none of its tokens arrived. A body, and a line of an event stream, has at most
`limit` bytes. Unknown fields of a response are ignored, because engines add them with every release."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
from abc import abstractmethod
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypedDict, TypeVar, cast
from urllib.parse import urlsplit
from uuid import uuid4

import aiohttp
import msgspec
import orjson

from tokentrue.errors import (
    ConfigError,
    EngineContractError,
    EngineError,
    EngineRejected,
    EngineTimeout,
    EngineUnreachable,
    PromptTooLong,
    SamplingError,
    TrainingError,
)
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.protocols import NamedWeights, PretrainedAdapter, Streaming
from tokentrue.providers.building import CONSTRAINTS, CompletionBuilder, collapse_images
from tokentrue.records import record
from tokentrue.types import MAX_INT64, UNVERSIONED, Chunk, Completion, Ids, PromptImage, Sampling

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
RETRIED_STATUS = frozenset({502, 503})
FIRST_BACKOFF_S = 0.2
QUOTED_CHARS = 300
TOO_LONG = re.compile(r"(context|model|allowed) length", re.IGNORECASE)
END_S = 0.05
ABORT_S = 30.0
ABORT_RETRY_S = 0.1  # a request may reach the engine after the abort that was meant for it
BODY_BYTES = 16 << 20  # of a response, without its tokens
ANSWER_BYTES = 64 << 20
POSITION_BYTES = 4096  # per token: log-probabilities, sampling mask and routing, in JSON
UNBOUNDED_TOKENS = 16_384  # assumed for a request without max_tokens
MOST_TOKENS = 65_536
IMAGE_BYTES = 128 << 20  # encoded images that an engine's adapter keeps: each turn sends those of all turns before
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
NO_ADAPTERS = "LoRA is not enabled"  # how both engines refuse an adapter if they were started without LoRA


class EngineHttp:
    """`timeout_s` bounds the silence between two reads, `connect_s` the connection."""

    def __init__(
        self, url: str, *, timeout_s: float, connect_s: float, retries: int, api_key: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is not the URL of an engine; give one such as http://127.0.0.1:30000")
        self.place = f"{parts.hostname}-{parts.port or parts.scheme}"  # names this engine's files
        self._timeout_s, self._retries = timeout_s, retries
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=timeout_s)
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def read(
        self,
        method: str,
        path: str,
        body: JsonMapping | bytes | None = None,
        *,
        retry: bool = True,
        limit: int = BODY_BYTES,
    ) -> bytes:
        """Any response but a 2xx raises a typed error that quotes the engine."""
        parts: list[bytes] = []
        size = 0
        async with await self._respond(method, path, body, self._retries if retry else 0) as response:
            while part := await self._read_part(path, response):
                parts.append(part)
                size += len(part)
                self._check_size(path, size, limit)
        return b"".join(parts)

    async def read_as(
        self, kind: type[T], method: str, path: str, body: JsonMapping | None = None, *, retry: bool = True
    ) -> T:
        return decode_answer(await self.read(method, path, body, retry=retry), kind, where=self.url + path)

    async def answers(
        self, path: str, body: bytes, *, whole: bool = False, limit: int = BODY_BYTES
    ) -> AsyncGenerator[list[bytes]]:
        """The data of the server-sent events up to [DONE], in one list per read. With `whole`, the single body."""
        if whole:
            yield [await self.read("POST", path, body, limit=limit)]
            return
        begun: list[bytes] = []  # parts of a line, joined once: an event may span many reads
        size = 0
        async with await self._respond("POST", path, body, self._retries) as response:
            while True:
                part = await self._read_part(path, response)
                first, *others = part.split(b"\n")
                begun.append(first)
                size += len(first)
                self._check_size(path, size, limit)
                if part and not others:
                    continue
                lines = [b"".join(begun), *others[:-1]]  # the last line may have no line break
                events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
                is_over = b"[DONE]" in events
                if is_over:
                    del events[events.index(b"[DONE]") :]
                if events:
                    yield events
                if is_over:
                    # A connection that has read the end of the body can be reused.
                    with suppress(TimeoutError, aiohttp.ClientError):
                        async with asyncio.timeout(END_S):
                            await response.content.read(1)
                if is_over or not part:
                    return
                begun, size = [others[-1]], len(others[-1])

    async def _read_part(self, path: str, response: aiohttp.ClientResponse) -> bytes:
        """Empty at the end of the body."""
        try:
            return await response.content.readany()
        except TimeoutError as error:
            raise EngineTimeout(f"{self.url}{path} sent nothing for {self._timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnreachable(f"{self.url}{path} broke off: {error or type(error).__name__}") from error

    def _check_size(self, path: str, size: int, limit: int) -> None:
        if size > limit:
            raise EngineContractError(
                f"{self.url}{path} answers with more than {limit >> 20} MiB, which no answer to this request takes"
            )

    async def _respond(
        self, method: str, path: str, body: JsonMapping | bytes | None, retries: int
    ) -> aiohttp.ClientResponse:
        """Leaving a response's block early closes the connection, which cancels the request."""
        data, where = body if isinstance(body, bytes | None) else orjson.dumps(body), self.url + path
        if self._session is None:  # created on first use, because aiohttp binds it to the running event loop
            connector, jar = aiohttp.TCPConnector(limit=0), aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=self._timeout, headers=self._headers, cookie_jar=jar
            )
        for attempt in count():
            try:
                response = await self._session.request(method, where, data=data, allow_redirects=False)
                if response.status < 300:
                    return response
                if response.status not in RETRIED_STATUS or attempt >= retries:
                    async with response:
                        words = (await response.content.read(QUOTED_CHARS)).decode("utf-8", "replace")
                    raise _refusal(where, response.status, words.replace("\n", " "))
                response.release()
            except aiohttp.SocketTimeoutError as error:
                raise EngineTimeout(f"{where} did not answer in {self._timeout_s:g} s") from error
            except aiohttp.ClientConnectionError as error:
                # A server may close an idle connection just as a request is sent: that does not count as an attempt.
                free = isinstance(error, aiohttp.ServerDisconnectedError) and attempt == 0
                if attempt >= retries and not free:
                    why = getattr(error, "os_error", error)  # aiohttp's own text has "ssl:default" for any address
                    why = getattr(why, "strerror", None) or str(why) or type(error).__name__
                    raise EngineUnreachable(f"no engine is reachable at {self.url}: {why}") from error
            except aiohttp.ClientError as error:
                raise EngineContractError(f"{where} does not answer in HTTP: {error}") from error
            await asyncio.sleep(FIRST_BACKOFF_S * 2**attempt)
        raise AssertionError


def rejected(message: str) -> EngineRejected:
    """vLLM and SGLang report a prompt that is too long only in the text."""
    return PromptTooLong(f"prompt is too long: {message}") if TOO_LONG.search(message) else EngineRejected(message)


def _refusal(where: str, status: int, words: str) -> EngineError:
    said = f"{where} answered {status}: {words}"
    if status in {408, 504}:
        return EngineTimeout(said)
    if status in {401, 403, 404, 405}:
        return EngineContractError(f"{said}; docs/engines.md says how to start the engine")
    return EngineUnreachable(said) if status in RETRIED_STATUS else rejected(said)


class EngineFault(msgspec.Struct):
    message: str | None = None


class Tokenized(msgspec.Struct):
    tokens: list[int]


class ServedModel(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class ServedModels(msgspec.Struct):
    data: list[ServedModel]


class WeightInfo(msgspec.Struct):
    model_path: str | None = None
    weight_version: str | int | None = None
    has_image_understanding: bool | None = None


def decode_answer(data: bytes, kind: type[T], *, where: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:  # a ValidationError is one, too
        words = data[:QUOTED_CHARS].decode("utf-8", "replace")
        raise EngineContractError(f"{where} answered something unexpected ({error}): {words}") from error


def raise_fault(engine: str, fault: EngineFault | str | None) -> None:
    """For an error inside a 200 response or a stream."""
    if fault is not None:
        raise rejected(f"{engine}: {fault if isinstance(fault, str) else fault.message or 'error without a message'}")


def version_from(text: str | int | None) -> int:
    """The integer at the end ("7", "step-7"); engines start with a word such as "default"."""
    words = "" if text is None else str(text).rstrip()
    digits = words[len(words.rstrip("0123456789")) :]
    version = int(digits) if digits else UNVERSIONED
    if version > MAX_INT64:  # what the journal's integer column holds
        raise EngineContractError(f"weight version {text!r} does not fit 64 bits; publish versions that count steps")
    return version


async def read_tokens(http: EngineHttp, path: str, body: JsonMapping) -> TokenIds | None:
    """None if the server has no such route."""
    try:
        return TokenIds((await http.read_as(Tokenized, "POST", path, body, retry=False)).tokens)
    except (EngineContractError, EngineRejected):
        return None


# Published weights, in a directory that the server sees.
#     ROOT/version-000007/model.safetensors      every name, no index; tied heads written out
# There is no index because an engine would load the shards of the first checkpoint that it names. A tied head is
# written as a separate tensor: an engine that holds it apart from the embedding would keep the old one.
#     ROOT/policy@7.3f9a1c/adapter_model.safetensors, adapter_config.json      a LoRA adapter, as peft saves it
@record
class WrittenWeights:
    directory: Path
    version: int


def write_weights(weights: NamedWeights, root: Path, *, version: int, keep: Sequence[Path] = ()) -> WrittenWeights:
    """Writes a version completely, then removes all others but those in `keep`. Blocks."""
    kept = copy_finite(weights, version)
    embedding = next((tensor for name, tensor in kept.items() if name.endswith(EMBEDDING)), None)
    if HEAD not in kept and embedding is not None:
        kept[HEAD] = embedding.clone()
    target = (root / f"version-{version:06d}").absolute()
    partial = root / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    save_tensors(kept, partial / "model.safetensors")
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    spared = {target, *keep}
    for old in root.glob("version-*"):
        if old.absolute() not in spared:
            shutil.rmtree(old, ignore_errors=True)
    return WrittenWeights(directory=target, version=version)


def write_adapter(weights: NamedWeights, config: PretrainedAdapter, directory: Path, *, version: int) -> None:
    """Blocks."""
    save_tensors(copy_finite(weights, version), directory / "adapter_model.safetensors")
    config.save_pretrained(directory)


def copy_finite(weights: NamedWeights, version: int) -> dict[str, Tensor]:
    kept = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights}
    for name, tensor in kept.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise TrainingError(f"weights of version {version}: {name} is not finite; they are not published")
    return kept


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

    path.parent.mkdir(parents=True)
    save_file(tensors, path, metadata={"format": "pt"})


class Answer(Protocol):
    builder: CompletionBuilder

    def add(self, event: bytes) -> None: ...

    def complete(self) -> Completion: ...


def adapter_version(name: str) -> int:
    """The 7 of "policy@7.3f9a1c"."""
    return version_from(name.partition("@")[2].partition(".")[0])


class RemoteOptions(TypedDict, total=False):
    """`RemoteEngine` has their defaults."""

    timeout_s: float
    connect_s: float
    retries: int
    api_key: str | None
    weights_dir: str | Path | None
    adapter: str | None


class EngineRequest(NamedTuple):
    """`urls`: the images, each one placeholder in `ids`."""

    ids: TokenIds
    sampling: Sampling
    session: str | None = None
    request_id: str = ""
    stream: bool = False
    urls: Sequence[orjson.Fragment] = ()


class RemoteEngine(Streaming):
    """`weights_dir` is shared with the server. `adapter` names the LoRA adapter of requests that name none."""

    name: str
    adapter_routes = ""  # before /load_lora_adapter

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 600.0,
        connect_s: float = 5.0,
        retries: int = 3,
        api_key: str | None = None,
        weights_dir: str | Path | None = None,
        adapter: str | None = None,
    ) -> None:
        self._http = EngineHttp(url, timeout_s=timeout_s, connect_s=connect_s, retries=retries, api_key=api_key)
        self.url = self._http.url
        self._running: dict[str, str | None] = {}  # the adapter, by request id
        self._own: dict[str, str] = {}  # adapters published here: the server's name by the one in requests
        self._listed: set[str] = set()  # adapters of the server
        self._adapter = adapter
        self._images: dict[str, bytes] = {}  # as JSON, by SHA-256, the one used last at the end
        self._weights_dir = None if weights_dir is None else Path(weights_dir) / self._http.place
        self._loading = asyncio.Lock()
        self._written: WrittenWeights | None = None
        self._published: WrittenWeights | None = None

    @property
    def bans_tokens(self) -> bool:
        return True

    async def close(self) -> None:
        await self._http.close()

    # What an adapter writes.
    @abstractmethod
    async def _prepare(self, sampling: Sampling) -> None:
        """Raises if the engine cannot sample so, or not truthfully."""

    @abstractmethod
    def _new_answer(self, builder: CompletionBuilder, sampling: Sampling) -> Answer: ...

    def _check_image(self, image: PromptImage) -> None:
        """Raises if the engine would show the model something else."""

    @abstractmethod
    def _body(self, request: EngineRequest) -> tuple[str, bytes]:
        """Its route and body."""

    @abstractmethod
    async def check_images(self) -> None: ...

    @abstractmethod
    async def _abort(self, request_ids: Sequence[str]) -> None: ...

    @abstractmethod
    async def pause_for_weights(self) -> None: ...

    @abstractmethod
    async def load_from_disk(self, written: WrittenWeights) -> None:
        """Loads the weights, drops caches of older ones, and stamps the version."""

    @abstractmethod
    async def resume_with_weights(self) -> None: ...

    @abstractmethod
    async def _info(self) -> WeightInfo: ...

    async def stream(
        self,
        prompt_ids: Ids,
        sampling: Sampling,
        *,
        session: str | None = None,
        whole: bool = False,
        images: Sequence[PromptImage] = (),
    ) -> AsyncIterator[Chunk]:
        await self._prepare(sampling)
        if images:
            await self.check_images()
        ids, adapter, version = TokenIds(prompt_ids), self._find_adapter(sampling), None
        if adapter is not None:
            sampling = replace(sampling, extra={**sampling.extra, "adapter": adapter})
            version = adapter_version(adapter)
        builder = CompletionBuilder(self.name, ids, version=version, must_count=bool(images))
        answer = self._new_answer(builder, sampling)
        tokens = min(sampling.max_tokens or UNBOUNDED_TOKENS, MOST_TOKENS)
        limit = ANSWER_BYTES + POSITION_BYTES * (len(ids) + tokens)
        request_id = uuid4().hex
        self._running[request_id] = adapter
        try:
            sent = collapse_images(self.name, ids, images) if images else ids
            urls = [await self._encode_image(image) for image in images]
            path, body = self._body(EngineRequest(sent, sampling, session, request_id, not whole, urls))
            async with aclosing(self._http.answers(path, body, whole=whole, limit=limit)) as reads:
                async for events in reads:
                    for chunk in answer.builder.take_read(events, answer.add):
                        yield chunk
            completion = answer.complete()
        except BaseException:
            self._running.pop(request_id, None)
            with suppress(EngineError):  # the engine is unreachable: nothing is left to abort
                await self._abort([request_id])
            raise
        finally:
            self._running.pop(request_id, None)
        yield Chunk(final=completion)

    async def _encode_image(self, image: PromptImage) -> orjson.Fragment:
        """Its data URL. Encoding takes milliseconds per megabyte, so it is done once, and in a thread."""
        found = self._images.pop(image.run.sha256, None)
        if found is None:
            self._check_image(image)
            encoded = await asyncio.to_thread(b64encode, image.data)
            found = b'"data:%s;base64,%s"' % (image.media_type.encode(), encoded)
        self._images[image.run.sha256] = found
        while sum(map(len, self._images.values())) > IMAGE_BYTES and len(self._images) > 1:
            del self._images[next(iter(self._images))]
        return orjson.Fragment(found)

    async def interrupt(self) -> int:
        """Aborts our generations and waits until each has returned its tokens; returns their number."""
        running, end = len(self._running), time.monotonic() + ABORT_S
        while self._running:
            if time.monotonic() > end:
                raise EngineTimeout(
                    f"the engine did not end {len(self._running)} aborted generations within {ABORT_S:g} s"
                )
            await self._abort(sorted(self._running))
            await asyncio.sleep(ABORT_RETRY_S if self._running else 0)
        return running

    async def publish(self, weights: NamedWeights, *, version: int) -> None:
        """Works during generations, too."""
        root, keep = self._publishing_root(), () if self._published is None else (self._published.directory,)
        async with self._loading:
            self._written = await asyncio.to_thread(write_weights, weights, root, version=version, keep=keep)
            self._adapter = None  # the policy is the model itself
            await self._load(self._written)

    async def publish_adapter(
        self, weights: NamedWeights, config: PretrainedAdapter, *, version: int, name: str
    ) -> bool:
        """Each publication has a new name at the server: generations in flight keep their adapter, and share no cached
        block with later ones."""
        served, root = f"{name}@{version}.{uuid4().hex[:6]}", self._publishing_root()
        async with self._loading:
            await asyncio.to_thread(write_adapter, weights, config, root / served, version=version)
            if not await self._load_adapter(served):
                shutil.rmtree(root / served)
                return False
            self._own[name], self._adapter = served, name
            used = {served, *self._running.values()}
            for old in [path for path in root.glob(f"{name}@*") if path.name not in used]:
                with suppress(EngineRejected, EngineContractError):  # a restarted server does not have it
                    await self._post(f"{self.adapter_routes}/unload_lora_adapter", {"lora_name": old.name})
                shutil.rmtree(old)
            return True

    async def _load_adapter(self, served: str) -> bool:
        """False if the server was started without LoRA."""
        body = {"lora_name": served, "lora_path": str((self._publishing_root() / served).absolute())}
        try:
            await self._post(f"{self.adapter_routes}/load_lora_adapter", body)
        except EngineContractError:  # no such route
            return False
        except EngineRejected as error:
            if NO_ADAPTERS not in str(error):
                raise
            return False
        return True

    @property
    def adapters(self) -> Sequence[str]:
        return sorted({*self._own, *self._listed})

    def _find_adapter(self, sampling: Sampling) -> str | None:
        """The server's name of the adapter that samples."""
        name = sampling.extra.get("adapter", self._adapter)
        return None if name is None else self._own.get(name, name)

    async def _list_models(self) -> list[ServedModel]:
        models = (await self._http.read_as(ServedModels, "GET", "/v1/models")).data
        self._listed = {model.id for model in models if model.parent}
        return models

    def _publishing_root(self) -> Path:
        if self._weights_dir is None:
            raise ConfigError(f"publishing to {self.name} needs weights_dir=, a directory that the server sees")
        return self._weights_dir

    async def rejoin(self) -> None:
        async with self._loading:
            if self._written is not None:
                await self._load(self._written)
            for served in self._own.values():
                await self._list_models()
                if served not in self._listed and not await self._load_adapter(served):
                    raise EngineRejected(f"{self.name} at {self.url} was restarted without LoRA")

    async def _load(self, written: WrittenWeights) -> None:
        """If the server refuses, it gets the previous version again. Without one it stays paused: it may hold half of
        the new weights."""
        before, said = self._published, f"{self.name} did not take version {written.version} and"
        await self.pause_for_weights()
        try:
            await self.load_from_disk(written)
        except EngineError as error:
            if before is None:
                raise EngineRejected(f"{said} is left paused; restart it: {error}") from error
            await self.load_from_disk(before)
            await self.resume_with_weights()
            raise EngineRejected(f"{said} keeps version {before.version}: {error}") from error
        await self.resume_with_weights()
        self._published = written

    async def weight_version(self) -> int:
        if own := self._own.get(self._adapter or ""):
            await self._list_models()
            return adapter_version(own) if own in self._listed else UNVERSIONED
        return version_from((await self._info()).weight_version)

    async def _require_version(self, version: int) -> None:
        reported = await self.weight_version()
        if reported != version:
            raise EngineRejected(f"{self.name} reports weight version {reported} after loading version {version}")

    async def _post(self, path: str, body: JsonMapping | None = None) -> bytes:
        return await self._http.read("POST", path, body or {}, retry=False)


def common_params(
    sampling: Sampling,
    *,
    own: tuple[str, ...],
    tag: Callable[[str], JsonObject],
    schema: Callable[[JsonMapping | None], JsonObject],
) -> JsonObject:
    """The settings that both engines name alike. `own`: the engine's own constraints; `tag` and `schema` write a
    structural tag and a JSON schema (None: any object) as the engine wants them. Log-probabilities are those under a
    constraint's mask."""
    extra = sampling.extra
    params: JsonObject = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "skip_special_tokens": False,
        **{name: value for name, value in extra.items() if name not in CONSTRAINTS and name != "adapter"},
    }
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    given = [name for name in (*sorted(CONSTRAINTS), *own) if extra.get(name) is not None]
    if len(given) > 1:
        raise SamplingError(f"{' and '.join(given)} cannot be enforced together; send one of them")
    if given == ["tool_choice"]:
        wanted = _object(extra["tool_choice"])
        if wanted.get("type") != "structural_tag":
            raise SamplingError("tool_choice: must be a structural tag, as the renderer's call_tag gives it")
        params |= tag(dump_settings(wanted).decode())
    elif given == ["response_format"]:
        wanted = _object(extra["response_format"])
        declared = _object(wanted.get("json_schema")).get("schema")
        if wanted.get("type") == "json_object":
            params |= schema(None)
        elif wanted.get("type") == "json_schema" and isinstance(declared, Mapping):
            params |= schema(_object(cast("object", declared)))
        else:
            rule = "must be of type json_object, or json_schema with a json_schema.schema"
            raise SamplingError(f"response_format: {rule}")
    return params


def _object(value: object) -> JsonMapping:
    return cast("JsonMapping", value) if isinstance(value, Mapping) else {}


def dump_settings(value: object) -> bytes:
    """Values that JSON cannot hold come from the client: they are its error."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise SamplingError(f"the sampling settings cannot be sent to an engine: {error}") from error
