"""vLLM: ids in, ids out, streamed; over /inference/v1/generate if the server has it, else over /v1/completions.

Start the server with `--logprobs-mode processed_logprobs` (the default reports temperature 1 without filters) and,
for exact version spans, with `--enable-scale-out`. The first `health()` or generation detects what the server
reports; requests whose log-probabilities would be wrong are refused."""

import asyncio
import base64
import io
from collections.abc import Sequence
from typing import Unpack
from uuid import uuid4

import msgspec
import numpy as np
import orjson

from tokentrue.errors import EngineContractError, EngineRejected, SamplingError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.providers.building import CONSTRAINTS, CompletionBuilder, refuse_unknown_extra
from tokentrue.providers.remote import (
    EngineFault,
    EngineRequest,
    RemoteEngine,
    RemoteOptions,
    ServedModel,
    WeightInfo,
    WrittenWeights,
    common_params,
    decode_answer,
    dump_settings,
    raise_fault,
    read_tokens,
    version_from,
)
from tokentrue.types import FILTERS, UNVERSIONED, Completion, Finish, Ids, RoutedExperts, Sampling, VersionSpan

EXTRA = CONSTRAINTS | frozenset(
    {"structured_outputs", "min_tokens", "logit_bias", "ignore_eos", "allowed_token_ids", "bad_words", "adapter"}
)


class VLLMTop(msgspec.Struct):
    token_id: int
    logprob: float | None


class VLLMToken(msgspec.Struct):
    token_id: int
    logprob: float | None
    top_logprobs: list[VLLMTop] = []


class VLLMLogprobs(msgspec.Struct):
    """Rows on the token route (`content`); columns on /v1/completions, where a token is "token_id:N"."""

    content: list[VLLMToken] | None = None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class VLLMScored(msgspec.Struct):
    logprob: float | None = None


class VLLMVersions(msgspec.Struct):
    start: int
    end: int
    version: str | int


class VLLMChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: VLLMLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[VLLMVersions] | None = None
    routed_experts: str | None = None
    sampling_mask: list[list[int]] | None = None
    # By prompt token: ids with a log-probability there, including the prompt's; null for the first.
    prompt_logprobs: list[dict[str, VLLMScored] | None] | None = None


class VLLMUsage(msgspec.Struct):
    prompt_tokens: int | None = None


class VLLMEvent(msgspec.Struct):
    choices: list[VLLMChoice] = []
    usage: VLLMUsage | None = None
    prompt_token_ids: list[int] | None = None  # where they were requested, in the first event
    error: EngineFault | str | None = None


class VLLMProvider(RemoteEngine):
    """Publishing needs VLLM_SERVER_DEV_MODE=1, of an adapter --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1. With
    `cache_salt` requests share cached blocks with requests of the same publication alone: the cache is not reset, and
    generations in flight keep their keys and values."""

    name = "vllm"
    adapter_routes = "/v1"

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        version: int = UNVERSIONED,
        cache_salt: bool = False,
        **options: Unpack[RemoteOptions],
    ) -> None:
        super().__init__(url, **options)
        # Not the version alone: weights that replace a refused update have its version, and runs count from 0.
        self._salt = uuid4().hex if cache_salt else None
        self._loaded = version  # of the weights that the server loaded last
        self._model = model
        self._probing = asyncio.Lock()
        self._model_id = ""
        self._has_token_route = False
        self._is_processed: bool | None = None  # None until the server was probed
        self._takes_images: bool | None = None
        self.version = version

    @property
    def truthful_filters(self) -> frozenset[str] | None:
        return None if self._is_processed is None else FILTERS if self._is_processed else frozenset()

    async def health(self) -> JsonMapping:
        served = await self._served_model()
        await self._learn()
        return {
            "engine": self.name,
            "url": self.url,
            "model": self._model_id,
            "path": served.root,
            "max_model_len": served.max_model_len,
            "version": self.version,
            "token_route": self._has_token_route,
            "logprobs": "processed" if self._is_processed else "raw",
        }

    async def tokenize(self, text: str) -> TokenIds | None:
        body = {"model": (await self._served_model()).id, "prompt": text, "add_special_tokens": False}
        return await read_tokens(self._http, "/tokenize", body)

    async def score(self, token_ids: Ids) -> Sequence[float]:
        model, path = self._find_adapter(Sampling()) or (await self._served_model()).id, "/v1/completions"
        asked = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "add_special_tokens": False}
        body = {"model": model, "prompt": list(token_ids), **asked}
        choices = (await self._http.read_as(VLLMEvent, "POST", path, body)).choices
        rows = (choices[0].prompt_logprobs if choices else None) or []
        scored = [(row or {}).get(str(token)) for row, token in zip(rows[1:], token_ids[1:], strict=False)]
        found = [each.logprob for each in scored if each is not None and each.logprob is not None]
        if len(rows) != len(token_ids) or len(found) != len(token_ids) - 1:
            raise EngineContractError(
                f"{self.url}{path} returned no log-probability for some of the {len(token_ids)} tokens to score"
            )
        return found

    async def pause_for_weights(self) -> None:
        await self._post("/pause?mode=keep" + ("" if self._salt is None else "&clear_cache=false"))

    async def load_from_disk(self, written: WrittenWeights) -> None:
        """Cached keys and values are recomputed, or left to the requests of their salt."""
        where = {"weights_path": str(written.directory)}
        await self._post("/collective_rpc", {"method": "reload_weights", "kwargs": where})
        if self._salt is not None:
            self._salt = f"{written.version}.{uuid4().hex}"
        else:
            answer = orjson.loads(await self._post("/reset_prefix_cache?reset_running_requests=true") or b"{}")
            if not answer.get("success"):
                raise EngineRejected(
                    "vllm did not clear its prefix cache, which has keys and values of the old weights"
                )
        await self._reset_encoder_cache()
        await self._post("/update_weight_version", {"new_version": str(written.version)})
        await self._require_version(written.version)
        self._loaded = written.version

    async def _reset_encoder_cache(self) -> None:
        """It is keyed by an image's hash alone, and would outlive the weights that computed it."""
        try:
            await self._post("/reset_encoder_cache")
        except EngineContractError as error:  # the server has no such route: it matters only if images were sent
            if self._takes_images:
                raise EngineRejected(
                    f"vllm cannot clear its cache of images, which old weights computed: {error}"
                ) from error

    async def _info(self) -> WeightInfo:
        return await self._http.read_as(WeightInfo, "GET", "/weight_info")

    async def resume_with_weights(self) -> None:
        await self._post("/resume")
        self.version = self._loaded

    async def interrupt(self) -> int:
        """Without the token route, generations continue."""
        await self._learn()
        return await super().interrupt() if self._has_token_route else 0

    async def _abort(self, request_ids: Sequence[str]) -> None:
        # Closing the connection cancels, too; this makes it certain behind a router. The server prefixes the request id
        # with the route's name.
        if self._has_token_route:
            names = [name for each in request_ids for name in (each, f"generate-tokens-{each}")]
            await self._post("/inference/v1/abort_requests", {"request_ids": names})

    async def _prepare(self, sampling: Sampling) -> None:
        refuse_unknown_extra(self.name, sampling, EXTRA)
        await self._learn()
        if not self._is_processed and sampling.temperature not in (0.0, 1.0):
            raise SamplingError(
                f"this vLLM reports log-probabilities of temperature 1, not of {sampling.temperature:g}: "
                "start it with --logprobs-mode processed_logprobs, or sample at temperature 1"
            )

    async def check_images(self) -> None:
        """Only over the token route, as raw parts beside ids."""
        await self._learn()
        if self._takes_images is None:
            known = await self._http.read("GET", "/openapi.json")
            self._takes_images = self._has_token_route and b'"content_parts"' in known
        if not self._takes_images:
            cure = "vLLM 0.28 or newer, started with --enable-scale-out"
            raise EngineRejected(
                f"vllm at {self.url} takes images only as content_parts of /inference/v1/generate: {cure}"
            )

    def _new_answer(self, builder: CompletionBuilder, sampling: Sampling) -> "VLLMAnswer":
        return VLLMAnswer(self, builder, sampling)

    async def _learn(self) -> None:
        async with self._probing:
            if self._is_processed is None:
                self._model_id = (await self._served_model()).id
                self._has_token_route = await self._probe_token_route()
                self._is_processed = await self._probe_logprobs()

    async def _served_model(self) -> ServedModel:
        served = await self._list_models()
        if not served:
            raise EngineContractError(f"{self.url}/v1/models names no model")
        found = next((model for model in served if self._model in (None, model.id)), None)
        if found is None:
            names = ", ".join(model.id for model in served)
            raise EngineContractError(f"vllm at {self.url} serves {names}, not {self._model}")
        return found

    async def _probe_token_route(self) -> bool:
        try:
            await self._post("/inference/v1/generate")
        except EngineContractError:
            return False  # 403 or 404: the server was started without --enable-scale-out
        except EngineRejected:
            pass  # it rejects the empty request, so the route exists
        return True

    async def _probe_logprobs(self) -> bool:
        """One prompt at two temperatures: processed log-probabilities differ, raw ones do not."""
        ids, best = TokenIds([0]), list[float]()
        for temperature in (1.0, 0.5):
            sampling = Sampling(temperature=temperature, max_tokens=1, top_logprobs=2, seed=1)
            answer = self._new_answer(CompletionBuilder(self.name, ids), sampling)
            path, body = self._body(EngineRequest(ids, sampling, request_id=uuid4().hex))
            reply = await self._http.read("POST", path, body)
            try:
                answer.add(reply)
            except EngineContractError as error:  # logits, for one: --logprobs-mode raw_logits
                raise EngineContractError(f"{error}; start it with --logprobs-mode processed_logprobs") from error
            if not answer.builder.top or not answer.builder.top[0]:
                raise EngineContractError("vllm returned no top log-probabilities; is --max-logprobs 0?")
            best.append(max(answer.builder.top[0].values()))
        return best[0] != best[1]

    def _body(self, request: EngineRequest) -> tuple[str, bytes]:
        sampling = request.sampling
        prompt, params = np.frombuffer(request.ids.view, np.int32), sampling_params(sampling)
        model = sampling.extra.get("adapter", self._model_id)
        fields: JsonObject = {"model": model, "request_id": request.request_id, "stream": request.stream}
        if self._salt is not None:
            fields["cache_salt"] = self._salt
        if request.stream:
            fields["stream_options"] = {"include_usage": True}
        if self._has_token_route:
            params |= {"logprobs": sampling.top_logprobs, "detokenize": bool(sampling.stop)}
            fields |= {"token_ids": prompt, "sampling_params": params}
            if request.urls:  # the answer has the ids that vLLM expanded them to
                parts = [{"type": "image_url", "url": url} for url in request.urls]
                fields |= {"content_parts": parts, "return_token_ids": True}
            return "/inference/v1/generate", dump_settings(fields)
        fields |= {
            **params,
            "prompt": prompt,
            "max_tokens": sampling.max_tokens,  # omitted, it would mean 16
            "logprobs": sampling.top_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
        }
        return "/v1/completions", dump_settings(fields)


class VLLMAnswer:
    def __init__(self, engine: VLLMProvider, builder: CompletionBuilder, sampling: Sampling) -> None:
        self._engine, self.builder, self._sampling = engine, builder, sampling
        self._last: VLLMChoice | None = None  # with the finish reason
        self._prompt_tokens: int | None = None

    def add(self, event: bytes) -> None:
        answer = decode_answer(event, VLLMEvent, where=self._engine.url)
        raise_fault("vllm", answer.error)
        if answer.prompt_token_ids is not None:
            self.builder.check_prompt(answer.prompt_token_ids)
        if answer.usage is not None:
            self._prompt_tokens = answer.usage.prompt_tokens
        if self._last is None and answer.choices:  # what follows the end is not part of this generation
            choice = answer.choices[0]
            if choice.token_ids:
                self._append(choice, choice.token_ids)
            self._last = choice if choice.finish_reason else None

    def _append(self, choice: VLLMChoice, ids: list[int]) -> None:
        if choice.logprobs is None:
            raise EngineContractError("vllm returned no log-probabilities; is --max-logprobs 0?")
        rows = rows_from_columns(choice.logprobs) if choice.logprobs.content is None else choice.logprobs.content
        if [row.token_id for row in rows] != ids:
            raise EngineContractError(
                "vllm's token_ids and logprobs name different tokens; is this vLLM too old for return_token_ids?"
            )
        kept = choice.sampling_mask if self._sampling.truncates else None
        # Events do not carry the weight version.
        self.builder.append(ids, [row.logprob for row in rows], version=self._engine.version, kept=kept)
        if self._sampling.top_logprobs:
            self.builder.top += [
                {top.token_id: top.logprob for top in row.top_logprobs if top.logprob is not None} for row in rows
            ]

    def complete(self) -> Completion:
        choice, builder = self._last or VLLMChoice(), self.builder
        stopped_by, spans = choice.stop_reason, choice.weight_versions
        if choice.finish_reason == Finish.STOP and stopped_by is None and builder.ids:
            stopped_by = builder.ids[-1]  # vLLM gives no reason when its own EOS ended the turn
        versions = [VersionSpan(start=s.start, end=s.end, version=version_from(s.version)) for s in spans or ()]
        return builder.complete(
            choice.finish_reason,
            prompt_tokens=self._prompt_tokens,
            stopped_by=stopped_by,
            versions=versions or None,
            routed_experts=routed_experts(choice.routed_experts, len(builder.prompt_ids) + len(builder.ids)),
        )


def rows_from_columns(logprobs: VLLMLogprobs) -> list[VLLMToken]:
    columns = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs or [None] * len(logprobs.tokens))
    if len({len(column) for column in columns}) != 1:
        raise EngineContractError(f"vllm's logprobs columns differ in length: {[len(column) for column in columns]}")
    return [
        VLLMToken(
            token_id=_id_in(token),
            logprob=value,
            top_logprobs=[VLLMTop(token_id=_id_in(name), logprob=x) for name, x in (top or {}).items()],
        )
        for token, value, top in zip(*columns, strict=True)
    ]


def _id_in(token: str) -> int:
    number = token.removeprefix("token_id:")
    return int(number) if number != token and number.isdecimal() else -1


def routed_experts(encoded: str | None, tokens: int) -> RoutedExperts | None:
    """A .npy of all prompt and sampled positions but the last, without weights."""
    if not encoded:
        return None
    try:
        table = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise EngineContractError(f"vllm's routed_experts are not a .npy array: {error}") from error
    if table.ndim != 3 or table.shape[0] > tokens - 1:
        raise EngineContractError(f"vllm returned routed experts of shape {table.shape} for {tokens} tokens")
    positions, layers, top_k = (int(size) for size in table.shape)
    return RoutedExperts(
        shape=(positions, layers, top_k), data=table.astype("<i2").tobytes(), start=tokens - 1 - positions
    )


def sampling_params(sampling: Sampling) -> JsonObject:
    def constrain(**constraint: object) -> JsonObject:
        return {"structured_outputs": constraint}

    params = common_params(
        sampling,
        own=("structured_outputs",),
        tag=lambda tag: constrain(structural_tag=tag),
        schema=lambda schema: constrain(json_object=True) if schema is None else constrain(json=schema),
    )
    params |= {"top_k": sampling.top_k, "include_stop_str_in_output": True}
    if sampling.max_tokens is not None:
        params["max_tokens"] = sampling.max_tokens
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    return params
