"""SGLang: its native /generate, ids in, ids and log-probabilities out, streamed.

SGLang reports log softmax(logits / temperature). Filters change the distribution further; recent versions return the
renormalised log-probabilities with `return_sampling_mask`, which is requested as soon as a filter is on. A server
started with SGLANG_RETURN_ORIGINAL_LOGPROB=1 reports temperature 1 whatever was sampled: do not set it for training.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from tokentrue.errors import EngineContractError, EngineError, EngineRejected
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.protocols import Streaming
from tokentrue.providers.transport.answers import (
    SGLangAnswer,
    SGLangFinish,
    SGLangInfo,
    SGLangMeta,
    SGLangUpdate,
    decode_answer,
    raise_fault,
    require_version,
    version_from,
)
from tokentrue.providers.transport.building import CompletionBuilder, answer_limit, refuse_unknown_extra
from tokentrue.providers.transport.constraints import CONSTRAINTS, dump_settings, for_sglang, plain
from tokentrue.providers.transport.http import EngineHttp, rejected
from tokentrue.providers.transport.publishing import DiskPublisher
from tokentrue.providers.transport.running import RunningRequests
from tokentrue.providers.transport.tokens import read_tokens
from tokentrue.providers.transport.weights import WrittenWeights
from tokentrue.types import TRUNCATIONS, Chunk, Completion, Finish, Ids, RoutedExperts, Sampling

EXTRA = CONSTRAINTS | frozenset(
    {"json_schema", "regex", "ebnf", "structural_tag", "min_new_tokens", "logit_bias", "ignore_eos"}
)


class SGLangProvider(Streaming):
    """`routed_experts=(layers, top_k)` asks a MoE server for its routing, for all positions but the last."""

    name = "sglang"

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 600.0,
        connect_s: float = 5.0,
        retries: int = 3,
        api_key: str | None = None,
        weights_dir: str | Path | None = None,
        sampling_mask: bool = False,
        routed_experts: tuple[int, int] | None = None,
    ) -> None:
        self._http = EngineHttp(url, timeout_s=timeout_s, connect_s=connect_s, retries=retries, api_key=api_key)
        self.url = self._http.url
        self._running = RunningRequests()
        self._publisher = DiskPublisher(self, weights_dir, place=self._http.place)
        self._sampling_mask = sampling_mask
        self._routed = routed_experts

    @property
    def truthful_filters(self) -> frozenset[str]:
        return frozenset(TRUNCATIONS) if self._sampling_mask else frozenset()

    async def stream(
        self, prompt_ids: Ids, sampling: Sampling, *, session: str | None = None, whole: bool = False
    ) -> AsyncIterator[Chunk]:
        ids = TokenIds(prompt_ids)
        builder = CompletionBuilder(self.name, ids)
        meta: SGLangMeta | None = None
        async with self._running.hold(self._abort) as rid:
            body = self._body(ids, sampling, session=session, rid=rid, stream=not whole)
            answers = self._http.answers("/generate", body, whole=whole, limit=answer_limit(ids, sampling))
            async with aclosing(answers) as events:
                async for data in events:
                    if meta is not None and meta.finish_reason is not None:
                        continue  # what follows the end is no part of this generation
                    meta = self._decode(data)
                    chunk = self._add(builder, meta, sampling)
                    if chunk.token_ids:
                        yield chunk
            if meta is None or meta.finish_reason is None:
                raise EngineContractError("sglang ended its answer without a finish reason")
        yield Chunk(final=self._complete(builder, meta))

    async def health(self) -> JsonMapping:
        """Facts of /model_info; a server without a weight version cannot stamp policies."""
        info = await self._info()
        if info.weight_version is None:
            raise EngineContractError("this SGLang does not report weight_version; 0.5.2 or newer is needed")
        version = version_from(info.weight_version)
        return {"engine": self.name, "url": self._http.url, "model": info.model_path, "version": version}

    async def weight_version(self) -> int:
        return version_from((await self._info()).weight_version)

    async def _info(self) -> SGLangInfo:
        """/model_info (older servers: /get_model_info)."""
        try:
            data = await self._http.read("GET", "/model_info")
        except EngineContractError:
            data = await self._http.read("GET", "/get_model_info")
        return decode_answer(data, SGLangInfo, where=f"{self._http.url}/model_info")

    async def tokenize(self, text: str) -> TokenIds | None:
        """/tokenize, which compares the server's tokenizer with ours; older servers do not have it."""
        return await read_tokens(self._http, "/tokenize", {"prompt": text, "add_special_tokens": False})

    async def publish(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        """Writes the weights below `weights_dir` (which the server must see) and has it load them; running requests are
        recomputed."""
        await self._publisher.publish(weights, version=version)

    async def rejoin(self) -> None:
        """Loads the weights that were written last: for a server that was away when they were published."""
        await self._publisher.rejoin()

    async def pause_for_weights(self) -> None:
        """Running requests are retracted: their keys and values belong to the old weights."""
        await self._http.read("POST", "/pause_generation", {"mode": "retract"}, retry=False)

    async def load_from_disk(self, written: WrittenWeights) -> None:
        update = {"model_path": str(written.directory), "weight_version": str(written.version), "flush_cache": True}
        data = await self._http.read("POST", "/update_weights_from_disk", update, retry=False)
        answer = decode_answer(data, SGLangUpdate, where=f"{self._http.url}/update_weights_from_disk")
        if not answer.success:
            raise EngineRejected(f"sglang did not take the weights: {answer.message}")
        require_version(self.name, await self.weight_version(), written.version)

    async def resume_with_weights(self) -> None:
        await self._http.read("POST", "/continue_generation", {}, retry=False)

    async def interrupt(self) -> int:
        """Aborts every generation of ours at the engine; each returns what it has."""

        async def abort(rids: Sequence[str]) -> None:
            await asyncio.gather(*map(self._abort, rids))

        return await self._running.abort_all(abort)

    async def close(self) -> None:
        await self._http.close()

    def _masked(self, sampling: Sampling) -> bool:
        return self._sampling_mask and bool(sampling.filters)

    def _body(self, ids: TokenIds, sampling: Sampling, *, session: str | None, rid: str, stream: bool) -> bytes:
        refuse_unknown_extra(self.name, sampling, EXTRA)
        fields: JsonObject = {
            "input_ids": np.frombuffer(ids.view, np.int32),
            "sampling_params": sampling_params(sampling),
            "return_logprob": True,
            "logprob_start_len": -1,
            "rid": rid,
            "stream": stream,
        }
        if sampling.top_logprobs:
            fields["top_logprobs_num"] = sampling.top_logprobs
        if self._masked(sampling):
            fields["return_sampling_mask"] = True
        if session is not None:
            fields["routing_key"] = session
        if self._routed is not None:
            fields |= {"return_routed_experts": True, "routed_experts_start_len": 0}
        return dump_settings(fields)

    def _decode(self, data: bytes) -> SGLangMeta:
        answer = decode_answer(data, SGLangAnswer, where=f"{self._http.url}/generate")
        raise_fault(self.name, answer.error)
        meta = answer.meta_info
        if meta is None:
            raise EngineContractError(f"sglang's answer lacks meta_info: {data[:200].decode('utf-8', 'replace')}")
        told = [row[1] for row in meta.output_token_logprobs]
        if answer.output_ids is not None and told[-len(answer.output_ids) :] != answer.output_ids[-len(told) :]:
            raise EngineContractError("sglang's output_ids and output_token_logprobs disagree")
        return meta

    def _add(self, builder: CompletionBuilder, meta: SGLangMeta, sampling: Sampling) -> Chunk:
        """Events are cumulative or incremental by the server's setting; the running count tells how many tokens are
        new."""
        rows = meta.output_token_logprobs
        new = meta.completion_tokens - len(builder.ids)
        if new < 0 or len(rows) < new:
            raise EngineContractError(
                f"sglang counts {meta.completion_tokens} sampled tokens after {len(builder.ids)}, and sent {len(rows)} log-probabilities"
            )
        if len(rows) == meta.completion_tokens and [row[1] for row in rows[: len(builder.ids)]] != builder.ids:
            raise EngineContractError("sglang changed token ids that it had already streamed")
        if not new:
            return Chunk()
        logprobs: list[float | None] = [row[0] for row in rows[-new:]]
        kept: list[list[int]] | None = None
        if self._masked(sampling):
            builder.raw += [value for value in logprobs if value is not None]
            logprobs = (meta.output_token_sampling_logprobs or [])[-new:]
            if sampling.truncates and meta.output_token_sampling_mask is not None:
                kept = meta.output_token_sampling_mask[-new:]
        if meta.output_top_logprobs:
            builder.top += [
                {row[1]: row[0] for row in top or () if row[0] is not None} for top in meta.output_top_logprobs[-new:]
            ]
        return builder.add(
            [row[1] for row in rows[-new:]], logprobs, version=version_from(meta.weight_version), kept=kept
        )

    def _complete(self, builder: CompletionBuilder, meta: SGLangMeta) -> Completion:
        reason = meta.finish_reason
        told = reason if isinstance(reason, SGLangFinish) else SGLangFinish(type=str(reason))
        if told.type not in set(Finish):
            raise EngineContractError(f"sglang ended with an unknown finish reason {told.type!r}")
        if told.type == "abort" and told.status_code:
            raise rejected(f"sglang aborted the request: {told.message}")
        return builder.complete(
            Finish(told.type),
            prompt_tokens=meta.prompt_tokens,
            stopped_by=told.matched,
            routed_experts=self._experts(meta, len(builder.prompt_ids) + len(builder.ids)),
        )

    def _experts(self, meta: SGLangMeta, tokens: int) -> RoutedExperts | None:
        if self._routed is None:
            return None
        layers, top_k = self._routed
        wide = array("i", base64.b64decode(meta.routed_experts or b""))
        if len(wide) != (tokens - 1) * layers * top_k:
            raise EngineContractError(
                f"sglang returned {len(wide)} routed experts for {tokens} tokens × {layers} layers × {top_k}"
            )
        return RoutedExperts(shape=(tokens - 1, layers, top_k), data=array("h", wide).tobytes())

    async def _abort(self, rid: str) -> None:
        try:
            await self._http.read("POST", "/abort_request", {"rid": rid}, retry=False)
        except EngineError:
            return  # the engine is gone: nothing is left to abort


def sampling_params(sampling: Sampling) -> JsonObject:
    params: JsonObject = {
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
