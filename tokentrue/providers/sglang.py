"""SGLang: its native /generate, ids in, ids and log-probabilities out, streamed.

SGLang reports log softmax(logits / temperature). Filters change the distribution further; recent versions return the renormalised
log-probabilities with `return_sampling_mask`, which is asked for as soon as a filter is on. A server started with
SGLANG_RETURN_ORIGINAL_LOGPROB=1 reports temperature 1 whatever was sampled: do not set it for training.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import orjson

from tokentrue.errors import EngineContractError, EngineError, EngineRejected
from tokentrue.providers.constraints import CONSTRAINTS, for_sglang, plain
from tokentrue.providers.evidence import Gathering, refuse_unknown_extra, together
from tokentrue.providers.running import Running
from tokentrue.providers.wire import Body, IdsJson, OncePerSampling, Wire, version_of
from tokentrue.types import Chunk, Completion, Finish, Ids, RoutedExperts, Sampling

EXTRA = CONSTRAINTS | frozenset({"json_schema", "regex", "ebnf", "structural_tag", "min_new_tokens", "logit_bias", "ignore_eos"})
MASKABLE = frozenset({"top_k", "top_p", "min_p"})
FINISHES = {finish.value: finish for finish in Finish}


class SGLangProvider:
    """`routed_experts=(layers, top_k)` asks a MoE server for its routing, one row per sampled token."""

    name = "sglang"

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 600.0,
        connect_s: float = 5.0,
        retries: int = 3,
        api_key: str | None = None,
        sampling_mask: bool = False,
        routed_experts: tuple[int, int] | None = None,
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else None
        self._wire = Wire(url, timeout_s=timeout_s, connect_s=connect_s, retries=retries, headers=headers)
        self._ids = IdsJson()
        self._running = Running()
        self._asks = OncePerSampling(self._asked)
        self._sampling_mask = sampling_mask
        self._routed = routed_experts

    @property
    def truthful_filters(self) -> frozenset[str]:
        return MASKABLE if self._sampling_mask else frozenset()

    async def generate(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> Completion:
        rid = self._running.new_id()
        body = self._body(prompt_ids, sampling, session=session, rid=rid, stream=False)
        async with self._running.holding(rid, lambda: self._abort(rid)):
            answer = await self._wire.json("POST", "/generate", body)
        gathering = Gathering(self.name, len(prompt_ids))
        self._take(gathering, answer, masked=self._masked(sampling))
        return self._complete(gathering, answer["meta_info"])

    async def stream(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None) -> AsyncIterator[Chunk]:
        rid = self._running.new_id()
        gathering = Gathering(self.name, len(prompt_ids))
        body = self._body(prompt_ids, sampling, session=session, rid=rid, stream=True)
        masked, last = self._masked(sampling), dict[str, Any]()
        async with self._running.holding(rid, lambda: self._abort(rid)):
            async with aclosing(self._wire.events("/generate", body)) as blocks:
                async for events in blocks:
                    chunks, wrong = together(events, lambda event: self._take(gathering, event, masked=masked))
                    for chunk in chunks:
                        yield chunk
                    if wrong is not None:
                        raise wrong
                    last = events[-1]
            if not last or last["meta_info"].get("finish_reason") is None:
                raise EngineContractError("sglang closed the stream without a finish reason")
        yield Chunk(final=self._complete(gathering, last["meta_info"]))

    async def health(self) -> Mapping[str, Any]:
        """Facts of /model_info (older servers: /get_model_info); one without a weight version cannot stamp policies."""
        try:
            info = await self._wire.json("GET", "/model_info")
        except EngineContractError:
            info = await self._wire.json("GET", "/get_model_info")
        if "weight_version" not in info:
            raise EngineContractError("this SGLang does not report weight_version; 0.5.2 or newer is needed")
        return {"engine": self.name, "url": self._wire.url, "model": info.get("model_path"), "version": version_of(info["weight_version"])}

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int, directory: Path) -> None:
        """Writes safetensors into `directory` (which the server must see) and has it load them; the KV cache is flushed."""
        from tokentrue.providers.weights import write_weights

        write_weights(weights, directory)
        await self._post("/pause_generation", {"mode": "in_place"})
        try:
            answer = await self._post(
                "/update_weights_from_disk", {"model_path": str(directory), "weight_version": str(version), "flush_cache": True}
            )
        finally:
            await self._post("/continue_generation", {})
        if not answer.get("success", False):
            raise EngineRejected(f"sglang did not take the weights: {answer.get('message')}")

    def foresee(self, ids: Ids, session: str) -> None:
        self._ids.foresee(ids, session)

    def forget(self, session: str) -> None:
        """A session that is no longer in memory needs no grown prompt either; where it comes back, it is made anew."""
        self._ids.forget(session)

    async def interrupt(self, *, within_s: float = 30.0) -> int:
        """Ends every generation of ours at the engine; each returns what it has, as aborted."""

        async def abort(rids: Sequence[str]) -> None:
            await asyncio.gather(*map(self._abort, rids))

        return await self._running.break_off(abort, within_s=within_s)

    async def close(self) -> None:
        await self._wire.close()

    def _masked(self, sampling: Sampling) -> bool:
        return self._sampling_mask and bool(sampling.filters)

    def _body(self, prompt_ids: Ids, sampling: Sampling, *, session: str | None, rid: str, stream: bool) -> Body:
        own: dict[str, Any] = {"rid": rid, "stream": stream}
        if session is not None:
            own["routing_key"] = session
        if self._routed is not None:
            own |= {"return_routed_experts": True, "routed_experts_start_len": max(0, len(prompt_ids) - 1)}
        asked = self._asks(sampling)
        return (b'{"input_ids":[', *self._ids.dump(prompt_ids, session), b"],", asked, orjson.dumps(own)[1:])

    def _asked(self, sampling: Sampling) -> bytes:
        """The fields that depend on nothing else, with a comma behind them."""
        refuse_unknown_extra(self.name, sampling, EXTRA)
        fields: dict[str, Any] = {"sampling_params": sampling_params(sampling), "return_logprob": True, "logprob_start_len": -1}
        if sampling.top_logprobs:
            fields["top_logprobs_num"] = sampling.top_logprobs
        if self._masked(sampling):
            fields["return_sampling_mask"] = True
        return orjson.dumps(fields)[1:-1] + b","

    def _take(self, gathering: Gathering, event: Mapping[str, Any], *, masked: bool) -> Chunk:
        """Events are cumulative or incremental by the server's setting; the running count tells how many tokens are new."""
        if "error" in event:
            raise EngineRejected(f"sglang: {event['error'].get('message', event['error'])}")
        meta = event.get("meta_info")
        if meta is None or "output_token_logprobs" not in meta or "completion_tokens" not in meta:
            raise EngineContractError("sglang's answer lacks meta_info.output_token_logprobs; was return_logprob dropped by a router?")
        new = meta["completion_tokens"] - gathering.count
        if new <= 0:
            return Chunk()
        rows, said = meta["output_token_logprobs"][-new:], event.get("output_ids")
        columns = tuple(zip(*rows, strict=False))  # log-probabilities, ids, texts
        if len(rows) != new or len(columns) < 2 or (said is not None and tuple(said[-new:]) != columns[1]):
            raise EngineContractError("sglang's output_ids and output_token_logprobs disagree")
        logprobs, ids = columns[:2]
        if masked:
            gathering.raw += logprobs
            logprobs = tuple((meta.get("output_token_sampling_logprobs") or [])[-new:])
        if tops := meta.get("output_top_logprobs"):
            gathering.top += [{row[1]: row[0] for row in top} for top in tops[-new:]]
        return gathering.add(ids, logprobs, version=version_of(meta.get("weight_version")))

    def _complete(self, gathering: Gathering, meta: Mapping[str, Any]) -> Completion:
        reason = meta["finish_reason"]
        told: dict[str, Any] = reason if isinstance(reason, dict) else {"type": str(reason)}
        kind = told["type"]
        finish = FINISHES.get(kind)
        if finish is None:
            raise EngineContractError(f"sglang ended with an unknown finish reason {kind!r}")
        if kind == "abort" and told.get("status_code"):
            raise EngineRejected(f"sglang aborted the request: {told.get('message')}")
        return gathering.completion(
            finish,
            prompt_tokens=meta.get("prompt_tokens"),
            stopped_by=told.get("matched"),
            routed_experts=self._experts(meta, gathering.count),
        )

    def _experts(self, meta: Mapping[str, Any], sampled: int) -> RoutedExperts | None:
        if self._routed is None:
            return None
        layers, top_k = self._routed
        wide = array("i", base64.b64decode(meta.get("routed_experts") or b""))
        if len(wide) != sampled * layers * top_k:
            raise EngineContractError(f"sglang returned {len(wide)} routed experts for {sampled} tokens × {layers} layers × {top_k}")
        return RoutedExperts(shape=(sampled, layers, top_k), data=array("h", wide).tobytes())

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        return await self._wire.json("POST", path, orjson.dumps(body), retry=False)

    async def _abort(self, rid: str) -> None:
        try:
            await self._wire.read("POST", "/abort_request", orjson.dumps({"rid": rid}), retry=False)
        except EngineError:
            return  # the engine is gone: nothing is left to abort


def sampling_params(sampling: Sampling) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,  # left out it would mean 128; null means "up to the context"
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        **plain(sampling.extra),
        **for_sglang(sampling.extra),
    }
    if sampling.top_k:
        params["top_k"] = sampling.top_k
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    return params
