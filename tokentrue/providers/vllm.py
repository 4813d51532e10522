"""vLLM: token-in, token-out, streamed; over /inference/v1/generate where the server has it, over /v1/completions where
not.

Start the server with `--logprobs-mode processed_logprobs` (vLLM's own default reports temperature 1 and no filters,
whatever was sampled) and, for exact version spans, with `--enable-scale-out`. The first `health()` or generation asks
the server which of the two it reports; what it would report untruthfully is refused, not recorded.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import orjson

from tokentrue.errors import EngineContractError, EngineError, EngineRejected, SamplingError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.protocols import Streaming
from tokentrue.providers.transport.answers import (
    VLLMAnswer,
    VLLMChoice,
    VLLMLogprobs,
    VLLMModel,
    VLLMModels,
    VLLMToken,
    VLLMTop,
    VLLMUsage,
    VLLMVersions,
    VLLMWeights,
    decode_answer,
    raise_fault,
    require_version,
    version_from,
)
from tokentrue.providers.transport.building import CompletionBuilder, answer_limit, refuse_unknown_extra
from tokentrue.providers.transport.constraints import CONSTRAINTS, dump_settings, for_vllm, plain
from tokentrue.providers.transport.http import EngineHttp
from tokentrue.providers.transport.publishing import DiskPublisher
from tokentrue.providers.transport.running import RunningRequests
from tokentrue.providers.transport.scoring import score_prompt
from tokentrue.providers.transport.tokens import read_tokens
from tokentrue.providers.transport.weights import WrittenWeights
from tokentrue.types import FILTERS, UNVERSIONED, Chunk, Completion, Finish, Ids, RoutedExperts, Sampling, VersionSpan

EXTRA = CONSTRAINTS | frozenset(
    {"structured_outputs", "min_tokens", "logit_bias", "ignore_eos", "allowed_token_ids", "bad_words"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What one server can do, as it showed: its token route, and whether log-probabilities are of the sampled
    distribution."""

    model: str
    token_route: bool
    processed: bool


class VLLMProvider(Streaming):
    name = "vllm"

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        timeout_s: float = 600.0,
        connect_s: float = 5.0,
        retries: int = 3,
        api_key: str | None = None,
        weights_dir: str | Path | None = None,
        version: int = UNVERSIONED,
    ) -> None:
        self._http = EngineHttp(url, timeout_s=timeout_s, connect_s=connect_s, retries=retries, api_key=api_key)
        self.url = self._http.url
        self._running = RunningRequests()
        self._publisher = DiskPublisher(self, weights_dir, place=self._http.place)
        self._loaded = version  # of the weights that the server loaded last
        self._model = model
        self._abilities: Abilities | None = None
        self._probing = asyncio.Lock()
        self.version = version

    @property
    def truthful_filters(self) -> frozenset[str] | None:
        if self._abilities is None:
            return None
        return FILTERS if self._abilities.processed else frozenset()

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False
    ) -> AsyncIterator[Chunk]:
        abilities, ids = await self._ready(sampling), TokenIds(prompt_ids)
        builder = CompletionBuilder(self.name, ids)
        last: VLLMChoice | None = None
        usage: VLLMUsage | None = None
        async with self._running.hold(self._abort) as request_id:
            path, body = self._body(abilities, ids, sampling, request_id=request_id, stream=not whole)
            answers = self._http.answers(path, body, whole=whole, limit=answer_limit(ids, sampling))
            async with aclosing(answers) as events:
                async for data in events:
                    answer = self._decode(data)
                    usage = answer.usage or usage
                    if last is not None:
                        continue  # what follows the end is no part of this generation
                    for choice in answer.choices[:1]:
                        chunk = self._add(builder, choice, sampling)
                        if chunk.token_ids:
                            yield chunk
                        last = choice if choice.finish_reason else None
            if last is None:
                raise EngineContractError("vllm ended its answer without a finish reason")
        yield Chunk(final=self._complete(builder, last, usage))

    async def health(self) -> JsonMapping:
        """Always asks the server; learns its abilities the first time."""
        served = await self._served_model()
        abilities = await self._learn()
        return {
            "engine": self.name,
            "url": self._http.url,
            "model": abilities.model,
            "path": served.root,
            "max_model_len": served.max_model_len,
            "version": self.version,
            "token_route": abilities.token_route,
            "logprobs": "processed" if abilities.processed else "raw",
        }

    async def tokenize(self, text: str) -> TokenIds | None:
        """/tokenize, which compares the server's tokenizer with ours."""
        body = {"model": (await self._served_model()).id, "prompt": text, "add_special_tokens": False}
        return await read_tokens(self._http, "/tokenize", body)

    async def score(self, token_ids: Ids) -> Sequence[float]:
        return await score_prompt(self._http, (await self._served_model()).id, TokenIds(token_ids))

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        """Writes the weights below `weights_dir` and has the server load them (VLLM_SERVER_DEV_MODE=1), also in
        mid-generation."""
        await self._publisher.publish(weights, version=version)

    async def rejoin(self) -> None:
        """Loads the weights that were written last: for a server that was away when they were published."""
        await self._publisher.rejoin()

    async def pause_for_weights(self) -> None:
        await self._post("/pause?mode=keep")

    async def load_from_disk(self, written: WrittenWeights) -> None:
        """Reload, recompute every cached key and value, stamp the version and ask for it. Each answer is required."""
        await self._post(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(written.directory)}}
        )
        answer = orjson.loads(
            await self._http.read("POST", "/reset_prefix_cache?reset_running_requests=true", {}, retry=False) or b"{}"
        )
        if not answer.get("success", False):
            raise EngineRejected("vllm did not clear its prefix cache, which holds keys and values of the old weights")
        await self._post("/update_weight_version", {"new_version": str(written.version)})
        require_version(self.name, await self.weight_version(), written.version)
        self._loaded = written.version

    async def weight_version(self) -> int:
        data = await self._http.read("GET", "/weight_info")
        return version_from(decode_answer(data, VLLMWeights, where=f"{self.url}/weight_info").weight_version)

    async def resume_with_weights(self) -> None:
        await self._post("/resume")
        self.version = self._loaded

    async def interrupt(self) -> int:
        """Aborts every generation of ours at the engine; each returns what it has. Without the token route they go
        on."""
        if not (await self._learn()).token_route:
            return 0

        async def abort(request_ids: Sequence[str]) -> None:
            await self._post("/inference/v1/abort_requests", {"request_ids": names_of(request_ids)})

        return await self._running.abort_all(abort)

    async def close(self) -> None:
        await self._http.close()

    async def _ready(self, sampling: Sampling) -> Abilities:
        refuse_unknown_extra(self.name, sampling, EXTRA)
        abilities = await self._learn()
        if not abilities.processed and sampling.temperature not in (0.0, 1.0):
            raise SamplingError(
                f"this vLLM reports log-probabilities of temperature 1, not of {sampling.temperature:g}: "
                "start it with --logprobs-mode processed_logprobs, or sample at temperature 1"
            )
        return abilities

    async def _learn(self) -> Abilities:
        async with self._probing:
            if self._abilities is None:
                model = (await self._served_model()).id
                shown = Abilities(model=model, token_route=await self._has_token_route(), processed=False)
                self._abilities = replace(shown, processed=await self._reports_processed(shown))
            return self._abilities

    async def _served_model(self) -> VLLMModel:
        where = f"{self._http.url}/v1/models"
        served = decode_answer(await self._http.read("GET", "/v1/models"), VLLMModels, where=where).data
        if not served:
            raise EngineContractError(f"{where} names no model")
        found = next((model for model in served if self._model in (None, model.id)), None)
        if found is None:
            raise EngineContractError(
                f"vllm at {self._http.url} serves {', '.join(model.id for model in served)}, not {self._model}"
            )
        return found

    async def _has_token_route(self) -> bool:
        try:
            await self._http.read("POST", "/inference/v1/generate", {}, retry=False)
        except EngineContractError:
            return False  # 403 or 404: the server was started without --enable-scale-out
        except EngineRejected:
            return True  # it complains about the empty request, so it is there
        return True

    async def _reports_processed(self, abilities: Abilities) -> bool:
        """The same prompt at two temperatures: processed log-probabilities differ, raw ones do not."""
        tops: list[Mapping[int, float]] = []
        for temperature in (1.0, 0.5):
            sampling = Sampling(temperature=temperature, max_tokens=1, top_logprobs=2, seed=1)
            builder = CompletionBuilder(self.name, TokenIds([0]))
            path, body = self._body(abilities, builder.prompt_ids, sampling, request_id=uuid4().hex, stream=False)
            answer = self._decode(await self._http.read("POST", path, body))
            for choice in answer.choices:
                self._add(builder, choice, sampling)
            if not builder.top:
                raise EngineContractError("vllm returned no top log-probabilities; is --max-logprobs 0?")
            tops.append(builder.top[0])
        first, second = (sorted(top.values(), reverse=True)[0] for top in tops)
        return first != second

    def _body(
        self, abilities: Abilities, ids: TokenIds, sampling: Sampling, *, request_id: str, stream: bool
    ) -> tuple[str, bytes]:
        """The route and the request."""
        prompt = np.frombuffer(ids.view, np.int32)
        fields: JsonObject = {"model": abilities.model, "request_id": request_id, "stream": stream}
        if stream:
            fields["stream_options"] = {"include_usage": True}
        if abilities.token_route:
            params = {**sampling_params(sampling), "logprobs": sampling.top_logprobs, "detokenize": bool(sampling.stop)}
            fields |= {"token_ids": prompt, "sampling_params": params}
            return "/inference/v1/generate", dump_settings(fields)
        fields |= {
            **sampling_params(sampling),
            "prompt": prompt,
            "max_tokens": sampling.max_tokens,  # left out it would mean 16
            "logprobs": sampling.top_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
        }
        return "/v1/completions", dump_settings(fields)

    def _decode(self, data: bytes) -> VLLMAnswer:
        answer = decode_answer(data, VLLMAnswer, where=self._http.url)
        raise_fault(self.name, answer.error)
        return answer

    def _add(self, builder: CompletionBuilder, choice: VLLMChoice, sampling: Sampling) -> Chunk:
        ids = choice.token_ids or []
        if not ids:
            return Chunk()
        if choice.logprobs is None:
            raise EngineContractError("vllm returned no log-probabilities; is --max-logprobs 0?")
        rows = rows_from_columns(choice.logprobs) if choice.logprobs.content is None else choice.logprobs.content
        if [row.token_id for row in rows] != ids:
            raise EngineContractError(
                "vllm's token_ids and logprobs name different tokens; is this vLLM too old for return_token_ids?"
            )
        if sampling.top_logprobs:
            builder.top += [
                {top.token_id: top.logprob for top in row.top_logprobs if top.logprob is not None} for row in rows
            ]
        kept = choice.sampling_mask if sampling.truncates else None
        return builder.add(ids, [row.logprob for row in rows], version=self.version, kept=kept)

    def _complete(self, builder: CompletionBuilder, choice: VLLMChoice, usage: VLLMUsage | None) -> Completion:
        if choice.finish_reason not in set(Finish):
            raise EngineContractError(f"vllm ended with an unknown finish reason {choice.finish_reason!r}")
        finish, stopped_by = Finish(choice.finish_reason), choice.stop_reason
        if finish is Finish.STOP and stopped_by is None and builder.ids:
            stopped_by = builder.ids[-1]  # vLLM names no reason when its own EOS ended the turn
        return builder.complete(
            finish,
            prompt_tokens=usage.prompt_tokens if usage else None,
            stopped_by=stopped_by,
            versions=version_spans(choice.weight_versions),
            routed_experts=routed_experts(choice.routed_experts, len(builder.prompt_ids) + len(builder.ids)),
        )

    async def _post(self, path: str, body: JsonMapping | None = None) -> None:
        await self._http.read("POST", path, body or {}, retry=False)

    async def _abort(self, request_id: str) -> None:
        """Closing the connection cancels too; this makes it certain behind a router."""
        if self._abilities is not None and self._abilities.token_route:
            try:
                await self._post("/inference/v1/abort_requests", {"request_ids": names_of([request_id])})
            except EngineError:
                return  # the engine is gone: nothing is left to abort


def names_of(request_ids: Sequence[str]) -> list[str]:
    """What the server may call our requests: it puts the route's name before the id that it was given."""
    return [name for request_id in request_ids for name in (request_id, f"generate-tokens-{request_id}")]


def rows_from_columns(logprobs: VLLMLogprobs) -> list[VLLMToken]:
    """The columns of /v1/completions as rows."""
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
    """The id in "token_id:N"; -1, which is no id, for any other spelling."""
    number = token.removeprefix("token_id:")
    return int(number) if number != token and number.isdecimal() else -1


def version_spans(spans: Sequence[VLLMVersions] | None) -> list[VersionSpan] | None:
    if not spans:
        return None
    return [VersionSpan(start=span.start, end=span.end, version=version_from(span.version)) for span in spans]


def routed_experts(encoded: str | None, tokens: int) -> RoutedExperts | None:
    """vLLM sends a .npy of the prompt's and the sampled tokens' positions but the last, and no weights."""
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
    params: JsonObject = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        **plain(sampling.extra),
        **for_vllm(sampling.extra),
    }
    if sampling.max_tokens is not None:
        params["max_tokens"] = sampling.max_tokens
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    return params
