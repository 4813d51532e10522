"""SGLang's native /generate: ids in, ids and log-probabilities out, streamed.

SGLang reports log softmax(logits / temperature). Under filters, recent versions return the renormalised
log-probabilities with `return_sampling_mask`. A server started with SGLANG_RETURN_ORIGINAL_LOGPROB=1 always reports
temperature 1: do not set it for training."""

import asyncio
import base64
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Unpack

import msgspec
import numpy as np

from tokentrue.errors import EngineContractError, EngineError, EngineRejected
from tokentrue.ids import TokenIds
from tokentrue.images import is_turned
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.providers.building import CONSTRAINTS, CompletionBuilder, refuse_unknown_extra
from tokentrue.providers.remote import (
    EngineFault,
    EngineRequest,
    RemoteEngine,
    RemoteOptions,
    WeightInfo,
    WrittenWeights,
    common_params,
    decode_answer,
    dump_settings,
    raise_fault,
    read_tokens,
    rejected,
    version_from,
)
from tokentrue.types import TRUNCATIONS, UNVERSIONED, Completion, PromptImage, RoutedExperts, Sampling

EXTRA = CONSTRAINTS | frozenset(
    {"json_schema", "regex", "ebnf", "structural_tag", "min_new_tokens", "logit_bias", "ignore_eos", "adapter"}
)


class SGLangFinish(msgspec.Struct):
    type: str | None
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


class SGLangMeta(msgspec.Struct):
    """`output_token_logprobs` rows are (log-probability, id, text)."""

    completion_tokens: int
    output_token_logprobs: list[tuple[float | None, int, str | None]]
    prompt_tokens: int | None = None
    finish_reason: SGLangFinish | str | None = None
    weight_version: str | int | None = None
    output_token_sampling_logprobs: list[float | None] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_top_logprobs: list[list[tuple[float | None, int, str | None]] | None] | None = None
    routed_experts: str | None = None


class SGLangEvent(msgspec.Struct):
    meta_info: SGLangMeta | None = None
    output_ids: list[int] | None = None
    error: EngineFault | str | None = None


class SGLangUpdate(msgspec.Struct):
    success: bool = False
    message: str | None = None


class SGLangProvider(RemoteEngine):
    """`routed_experts=(layers, top_k)` requests a MoE server's routing."""

    name = "sglang"

    def __init__(
        self,
        url: str,
        *,
        sampling_mask: bool = False,
        routed_experts: tuple[int, int] | None = None,
        **options: Unpack[RemoteOptions],
    ) -> None:
        super().__init__(url, **options)
        self._sampling_mask, self._routed = sampling_mask, routed_experts
        self._takes_images: bool | None = None  # as the server said last; every health check asks it

    @property
    def truthful_filters(self) -> frozenset[str]:
        return frozenset(TRUNCATIONS) if self._sampling_mask else frozenset()

    async def health(self) -> JsonMapping:
        info = await self._info()
        self._takes_images = info.has_image_understanding is not False
        if info.weight_version is None:
            raise EngineContractError("this SGLang does not report weight_version; 0.5.2 or newer is needed")
        version = version_from(info.weight_version)
        with suppress(EngineContractError, EngineRejected):  # an older server
            await self._list_models()
        return {"engine": self.name, "url": self.url, "model": info.model_path, "version": version}

    async def _info(self) -> WeightInfo:
        try:
            return await self._http.read_as(WeightInfo, "GET", "/model_info")
        except EngineContractError:  # an older server
            return await self._http.read_as(WeightInfo, "GET", "/get_model_info")

    async def tokenize(self, text: str) -> TokenIds | None:
        return await read_tokens(self._http, "/tokenize", {"prompt": text, "add_special_tokens": False})

    async def pause_for_weights(self) -> None:
        # Running requests are retracted: their keys and values belong to the old weights.
        await self._post("/pause_generation", {"mode": "retract"})

    async def load_from_disk(self, written: WrittenWeights) -> None:
        update = {"model_path": str(written.directory), "weight_version": str(written.version), "flush_cache": True}
        answer = await self._http.read_as(SGLangUpdate, "POST", "/update_weights_from_disk", update, retry=False)
        if not answer.success:
            raise EngineRejected(f"sglang did not take the weights: {answer.message}")
        await self._require_version(written.version)

    async def resume_with_weights(self) -> None:
        await self._post("/continue_generation")

    async def _abort(self, request_ids: Sequence[str]) -> None:
        async def abort(request_id: str) -> None:
            with suppress(EngineError):
                await self._post("/abort_request", {"rid": request_id})

        await asyncio.gather(*map(abort, request_ids))

    async def check_images(self) -> None:
        """Servers that do not say are asked by the request itself."""
        if self._takes_images is None:
            self._takes_images = (await self._info()).has_image_understanding is not False
        if not self._takes_images:
            raise EngineRejected(f"sglang at {self.url} serves a model that takes no images")

    def _check_image(self, image: PromptImage) -> None:
        # SGLang ignores EXIF, and the count of a turned picture is the same: nothing would fail.
        if is_turned(image.data):
            raise EngineRejected("sglang shows the model pictures that EXIF turns as they lie: save the image upright")

    async def _prepare(self, sampling: Sampling) -> None:
        refuse_unknown_extra(self.name, sampling, EXTRA)

    def _body(self, request: EngineRequest) -> tuple[str, bytes]:
        sampling = request.sampling
        fields: JsonObject = {
            "input_ids": np.frombuffer(request.ids.view, np.int32),
            "sampling_params": sampling_params(sampling),
            "return_logprob": True,
            "logprob_start_len": -1,
            "rid": request.request_id,
            "stream": request.stream,
        }
        if request.urls:  # SGLang expands them; where it falls back to encoding text again, its count differs
            fields["image_data"] = request.urls
        if sampling.top_logprobs:
            fields["top_logprobs_num"] = sampling.top_logprobs
        if self._sampling_mask and sampling.filters:
            fields["return_sampling_mask"] = True
        if request.session is not None:
            fields["routing_key"] = request.session
        if "adapter" in sampling.extra:
            fields["lora_path"] = sampling.extra["adapter"]  # a name, in spite of the field's
        if self._routed is not None:
            fields |= {"return_routed_experts": True, "routed_experts_start_len": 0}
        return "/generate", dump_settings(fields)

    def _new_answer(self, builder: CompletionBuilder, sampling: Sampling) -> "SGLangAnswer":
        return SGLangAnswer(f"{self.url}/generate", builder, sampling, self._sampling_mask, self._routed)


class SGLangAnswer:
    """Events are cumulative or incremental; the running count shows how many tokens are new."""

    def __init__(
        self, where: str, builder: CompletionBuilder, sampling: Sampling, masks: bool, routed: tuple[int, int] | None
    ) -> None:
        self._where, self.builder, self._sampling, self._routed = where, builder, sampling, routed
        self._is_masked = masks and bool(sampling.filters)  # log-probabilities after filters are reported apart
        self._last: SGLangMeta | None = None
        self._weight_version: str | int | None = None
        self._version = UNVERSIONED

    def add(self, event: bytes) -> None:
        if self._last is not None and self._last.finish_reason is not None:
            return  # what follows the end is not part of this generation
        answer = decode_answer(event, SGLangEvent, where=self._where)
        raise_fault("sglang", answer.error)
        meta = answer.meta_info
        if meta is None:
            raise EngineContractError(f"sglang's answer lacks meta_info: {event[:200].decode('utf-8', 'replace')}")
        rows, known = meta.output_token_logprobs, self.builder.ids
        told = [row[1] for row in rows]
        if answer.output_ids is not None and told[-len(answer.output_ids) :] != answer.output_ids[-len(told) :]:
            raise EngineContractError("sglang's output_ids and output_token_logprobs disagree")
        new = meta.completion_tokens - len(known)
        if new < 0 or len(rows) < new:
            raise EngineContractError(
                f"sglang counts {meta.completion_tokens} sampled tokens after {len(known)}, and sent {len(rows)} "
                "log-probabilities"
            )
        if len(rows) == meta.completion_tokens and told[: len(known)] != known:
            raise EngineContractError("sglang changed token ids that it had already streamed")
        if new:
            self._append(meta, told[-new:], new)
        self._last = meta

    def _append(self, meta: SGLangMeta, ids: list[int], new: int) -> None:
        logprobs: list[float | None] = [row[0] for row in meta.output_token_logprobs[-new:]]
        raw, kept = logprobs, None
        if self._is_masked:
            logprobs = (meta.output_token_sampling_logprobs or [])[-new:]
            if self._sampling.truncates and meta.output_token_sampling_mask is not None:
                kept = meta.output_token_sampling_mask[-new:]
        if meta.weight_version != self._weight_version:  # else as in the event before
            self._weight_version, self._version = meta.weight_version, version_from(meta.weight_version)
        self.builder.append(ids, logprobs, version=self._version, kept=kept)
        if self._is_masked:
            self.builder.raw += [value for value in raw if value is not None]
        if meta.output_top_logprobs:
            self.builder.top += [
                {row[1]: row[0] for row in top or () if row[0] is not None} for top in meta.output_top_logprobs[-new:]
            ]

    def complete(self) -> Completion:
        meta, builder = self._last, self.builder
        reason = None if meta is None else meta.finish_reason
        finish = reason if isinstance(reason, SGLangFinish) else SGLangFinish(type=reason)
        if finish.type == "abort" and finish.status_code:
            raise rejected(f"sglang aborted the request: {finish.message}")
        return builder.complete(
            finish.type,
            prompt_tokens=None if meta is None else meta.prompt_tokens,
            stopped_by=finish.matched,
            routed_experts=self._experts(meta, len(builder.prompt_ids) + len(builder.ids)),
        )

    def _experts(self, meta: SGLangMeta | None, tokens: int) -> RoutedExperts | None:
        if self._routed is None or meta is None or meta.finish_reason is None:
            return None
        layers, top_k = self._routed
        wide = array("i", base64.b64decode(meta.routed_experts or b""))
        if len(wide) != (tokens - 1) * layers * top_k:
            raise EngineContractError(
                f"sglang returned {len(wide)} routed experts for {tokens} tokens × {layers} layers × {top_k}"
            )
        return RoutedExperts(shape=(tokens - 1, layers, top_k), data=array("h", wide).tobytes())


def sampling_params(sampling: Sampling) -> JsonObject:
    params = common_params(
        sampling,
        own=("json_schema", "regex", "ebnf", "structural_tag"),
        tag=lambda tag: {"structural_tag": tag},
        schema=lambda schema: {"json_schema": dump_settings({"type": "object"} if schema is None else schema).decode()},
    )
    # Omitted, max_new_tokens would mean 128; null means "up to the context".
    params |= {"max_new_tokens": sampling.max_tokens, "no_stop_trim": True}
    if sampling.top_k:
        params["top_k"] = sampling.top_k
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return params
