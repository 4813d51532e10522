"""vLLM: token-in, token-out, streamed; over /inference/v1/generate where the server has it, over /v1/completions where not.

Start the server with `--logprobs-mode processed_logprobs` (vLLM's own default reports temperature 1 and no filters, whatever was
sampled) and, for exact version spans, with `--enable-scale-out`. The first `health()` or generation asks the server which of the
two it reports; what it would report untruthfully is refused, not recorded.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tokentrue.errors import EngineContractError, EngineError, EngineRejected, SamplingError
from tokentrue.providers.constraints import CONSTRAINTS, for_vllm, plain
from tokentrue.providers.evidence import Gathering, refuse_unknown_extra, together
from tokentrue.providers.running import Running
from tokentrue.providers.wire import Body, IdsJson, Wire, version_of
from tokentrue.types import UNVERSIONED, Chunk, Completion, Finish, Ids, RoutedExperts, Sampling, VersionSpan

EXTRA = CONSTRAINTS | frozenset({"structured_outputs", "min_tokens", "logit_bias", "ignore_eos", "allowed_token_ids", "bad_words"})
ALL_FILTERS = frozenset({"top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What one server can do, as it showed: its token route, and whether log-probabilities are of the sampled distribution."""

    model: str
    token_route: bool
    processed: bool


class VLLMProvider:
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
        version: int = UNVERSIONED,
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else None
        self._wire = Wire(url, timeout_s=timeout_s, connect_s=connect_s, retries=retries, headers=headers)
        self._ids = IdsJson()
        self._running = Running()
        self._model = model
        self._abilities: Abilities | None = None
        self._probing = asyncio.Lock()
        self.version = version

    @property
    def truthful_filters(self) -> frozenset[str]:
        return ALL_FILTERS if self._abilities is not None and self._abilities.processed else frozenset()

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        abilities = await self._ready(sampling)
        gathering = Gathering(self.name, len(prompt_ids))
        path, body, request_id = self._body(abilities, prompt_ids, sampling, session=session, stream=False)
        async with self._running.holding(request_id, lambda: self._abort(abilities, request_id)):
            answer = await self._wire.json("POST", path, body)
        choice = answer["choices"][0]
        self._take(gathering, choice, sampling)
        return self._complete(gathering, choice, answer.get("usage"))

    async def stream(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> AsyncIterator[Chunk]:
        abilities = await self._ready(sampling)
        gathering = Gathering(self.name, len(prompt_ids))
        path, body, request_id = self._body(abilities, prompt_ids, sampling, session=session, stream=True)
        last: Mapping[str, Any] | None = None
        usage: Mapping[str, Any] | None = None
        async with self._running.holding(request_id, lambda: self._abort(abilities, request_id)):
            async with aclosing(self._wire.events(path, body)) as blocks:
                async for events in blocks:
                    chunks, wrong = together(_choices(events), lambda choice: self._take(gathering, choice, sampling))
                    for chunk in chunks:
                        yield chunk
                    if wrong is not None:
                        raise wrong
                    for event in events:
                        usage = event.get("usage") or usage
                        last = next((choice for choice in event["choices"] if choice.get("finish_reason")), last)
            if last is None:
                raise EngineContractError("vllm closed the stream without a finish reason")
        yield Chunk(final=self._complete(gathering, last, usage))

    async def health(self) -> Mapping[str, Any]:
        """Always asks the server; learns its abilities the first time."""
        await self._served_model()
        abilities = await self._learn()
        return {
            "engine": self.name,
            "url": self._wire.url,
            "model": abilities.model,
            "version": self.version,
            "token_route": abilities.token_route,
            "logprobs": "processed" if abilities.processed else "raw",
        }

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int, directory: Path) -> None:
        """Writes safetensors into the directory that the server was started from and has it reload them (VLLM_SERVER_DEV_MODE=1)."""
        from tokentrue.providers.weights import write_weights

        write_weights(weights, directory)
        await self._post("/pause?mode=keep")
        try:
            await self._post("/collective_rpc", {"method": "reload_weights"})
            await self._post("/reset_prefix_cache")
            await self._post("/update_weight_version", {"new_version": str(version)})
        finally:
            await self._post("/resume")
        self.version = version

    def foresee(self, ids: Ids, session: str) -> None:
        self._ids.foresee(ids, session)

    def forget(self, session: str) -> None:
        """A session that is no longer in memory needs no grown prompt either; where it comes back, it is made anew."""
        self._ids.forget(session)

    async def interrupt(self, *, within_s: float = 30.0) -> int:
        """Ends every generation of ours at the engine; each returns what it has, as aborted. Without the token route they run on."""
        if not (await self._learn()).token_route:
            return 0

        async def abort(request_ids: Sequence[str]) -> None:
            await self._post("/inference/v1/abort_requests", {"request_ids": names_of(request_ids)})

        return await self._running.break_off(abort, within_s=within_s)

    async def close(self) -> None:
        await self._wire.close()

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
                model = await self._served_model()
                token_route = await self._has_token_route()
                self._abilities = Abilities(model=model, token_route=token_route, processed=False)
                try:
                    processed = await self._reports_processed()
                except BaseException:
                    self._abilities = None
                    raise
                self._abilities = Abilities(model=model, token_route=token_route, processed=processed)
            return self._abilities

    async def _served_model(self) -> str:
        models = [entry["id"] for entry in (await self._wire.json("GET", "/v1/models"))["data"]]
        if self._model is not None and self._model not in models:
            raise EngineContractError(f"vllm at {self._wire.url} serves {', '.join(models)}, not {self._model}")
        return self._model or models[0]

    async def _has_token_route(self) -> bool:
        try:
            await self._wire.json("POST", "/inference/v1/generate", b"{}", retry=False)
        except EngineContractError:
            return False  # 403 or 404: the server was started without --enable-scale-out
        except EngineRejected:
            return True  # it complains about the empty request, so it is there
        return True

    async def _reports_processed(self) -> bool:
        """The same prompt at two temperatures: processed log-probabilities differ, raw ones do not."""
        assert self._abilities is not None
        tops: list[Mapping[int, float]] = []
        for temperature in (1.0, 0.5):
            sampling = Sampling(temperature=temperature, max_tokens=1, top_logprobs=2, seed=1)
            gathering = Gathering(self.name, 1)
            path, body, _ = self._body(self._abilities, [0], sampling, session=None, stream=False)
            answer = await self._wire.json("POST", path, body)
            self._take(gathering, answer["choices"][0], sampling)
            tops.append(gathering.top[0])
        first, second = (sorted(top.values(), reverse=True)[0] for top in tops)
        return first != second

    def _body(
        self, abilities: Abilities, prompt_ids: Ids, sampling: Sampling, *, session: str | None, stream: bool
    ) -> tuple[str, Body, str]:
        request_id = self._running.new_id()
        ids = self._ids.dump(prompt_ids, session)
        rest: dict[str, Any] = {"model": abilities.model, "request_id": request_id, "stream": stream}
        if stream:
            rest["stream_options"] = {"include_usage": True}
        if abilities.token_route:
            rest["sampling_params"] = {**sampling_params(sampling), "logprobs": sampling.top_logprobs, "detokenize": bool(sampling.stop)}
            return "/inference/v1/generate", (b'{"token_ids":[', *ids, b"],", orjson.dumps(rest)[1:]), request_id
        rest |= {
            **sampling_params(sampling),
            "max_tokens": sampling.max_tokens,  # left out it would mean 16
            "logprobs": sampling.top_logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
        }
        return "/v1/completions", (b'{"prompt":[', *ids, b"],", orjson.dumps(rest)[1:]), request_id

    def _take(self, gathering: Gathering, choice: Mapping[str, Any], sampling: Sampling) -> Chunk:
        ids = choice.get("token_ids") or []
        if not ids:
            return Chunk()
        found = choice.get("logprobs")
        if found is None:
            raise EngineContractError("vllm returned no log-probabilities; is --max-logprobs 0?")
        rows = found["content"] if "content" in found else completion_rows(found, ids)
        if [row["token_id"] for row in rows] != list(ids):
            raise EngineContractError("vllm's token_ids and logprobs name different tokens; is this vLLM too old for return_token_ids?")
        if sampling.top_logprobs:
            gathering.top += [{top["token_id"]: top["logprob"] for top in row["top_logprobs"]} for row in rows]
        return gathering.add(tuple(ids), tuple(row["logprob"] for row in rows), version=self.version)

    def _complete(self, gathering: Gathering, choice: Mapping[str, Any], usage: Mapping[str, Any] | None) -> Completion:
        finish = choice.get("finish_reason")
        if finish not in {"stop", "length", "abort"}:
            raise EngineContractError(f"vllm ended with an unknown finish reason {finish!r}")
        stopped_by = choice.get("stop_reason")
        if finish == "stop" and stopped_by is None and gathering.count:
            stopped_by = gathering.token_ids[-1]  # vLLM names no reason when its own EOS ended the turn
        return gathering.completion(
            Finish(finish),
            prompt_tokens=usage.get("prompt_tokens") if usage else None,
            stopped_by=stopped_by,
            versions=version_spans(choice.get("weight_versions")),
            routed_experts=routed_experts(choice.get("routed_experts"), gathering.count),
        )

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        await self._wire.read("POST", path, orjson.dumps(body or {}), retry=False)

    async def _abort(self, abilities: Abilities, request_id: str) -> None:
        """Closing the connection cancels too; this makes it certain behind a router."""
        if abilities.token_route:
            try:
                await self._post("/inference/v1/abort_requests", {"request_ids": names_of([request_id])})
            except EngineError:
                return  # the engine is gone: nothing is left to abort


def _choices(events: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for event in events:
        if "error" in event:
            raise EngineRejected(f"vllm: {event['error'].get('message', event['error'])}")
        yield from event["choices"]


def names_of(request_ids: Sequence[str]) -> list[str]:
    """What the server may call our requests: it puts the route's name before the id that it was given."""
    return [name for request_id in request_ids for name in (request_id, f"generate-tokens-{request_id}")]


def completion_rows(logprobs: Mapping[str, Any], ids: Sequence[int]) -> list[dict[str, Any]]:
    """The columns of /v1/completions as rows; tokens are spelled "token_id:N"."""

    def number(token: str) -> int:
        return int(token.removeprefix("token_id:")) if token.startswith("token_id:") else -1

    tops = logprobs.get("top_logprobs") or [None] * len(ids)
    return [
        {
            "token_id": number(token),
            "logprob": value,
            "top_logprobs": [{"token_id": number(name), "logprob": x} for name, x in (top or {}).items()],
        }
        for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
    ]


def version_spans(spans: Sequence[Mapping[str, Any]] | None) -> list[VersionSpan] | None:
    if not spans:
        return None
    return [VersionSpan(start=span["start"], end=span["end"], version=version_of(span["version"])) for span in spans]


def routed_experts(encoded: str | None, sampled: int) -> RoutedExperts | None:
    """vLLM sends a .npy of all positions but the last; the rows that predicted the sampled tokens are its end."""
    if not encoded:
        return None
    import numpy as np

    table = np.load(io.BytesIO(base64.b64decode(encoded)))
    if table.ndim != 3 or table.shape[0] < sampled:
        raise EngineContractError(f"vllm returned routed experts of shape {table.shape} for {sampled} sampled tokens")
    rows = table[-sampled:].astype("<i2")
    return RoutedExperts(shape=(int(rows.shape[0]), int(rows.shape[1]), int(rows.shape[2])), data=rows.tobytes())


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    params: dict[str, Any] = {
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
