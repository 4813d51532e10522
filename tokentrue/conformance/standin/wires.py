"""How gateways ask engines: SGLang's `/generate`, and vLLM's `/v1/chat/completions` with `return_token_ids`,
`/v1/completions` and `/inference/v1/generate`.
"""

import base64
import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from tokentrue.conformance.standin.generation import EngineRequest, Finished, Generation
from tokentrue.conformance.standin.vocabulary import Vocabulary

Json = dict[str, Any]
MODEL = "standin"


class EngineWire:
    """What vLLM's three routes share."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @abstractmethod
    def read(self, body: Json) -> EngineRequest: ...

    @abstractmethod
    def answer(self, generation: Generation, count: int, finish: Finished | None, *, new: int) -> Json:
        """The event after `count` tokens, `new` of them in no event before; a whole answer has them all."""

    def join(self, answers: list[Json]) -> Any:
        """One body for all answers to one request."""
        return {**answers[0], "choices": [{**one["choices"][0], "index": at} for at, one in enumerate(answers)]}

    def rows(self, generation: Generation, first: int, count: int) -> list[Json]:
        def row(token: int, value: float) -> Json:
            text = list(self.vocabulary.text([token]).encode())
            return {
                "token": f"token_id:{token}",
                "token_id": token,
                "logprob": value,
                "bytes": text,
                "top_logprobs": [],
            }

        return list(map(row, generation.sampled[first:count], generation.logprobs[first:count]))

    def envelope(self, generation: Generation, kind: str, choice: Json, finish: Finished | None) -> Json:
        if finish is not None:
            choice["stop_reason"] = None if finish.matched == self.vocabulary.stop else finish.matched
        usage = {"prompt_tokens": len(generation.prompt), "completion_tokens": len(generation.sampled)}
        usage["total_tokens"] = sum(usage.values())
        made = {"id": f"{kind}-{generation.number}", "object": kind, "created": 1, "model": MODEL}
        return {**made, "choices": [{"index": 0, **choice}], "usage": usage if finish is not None else None}


def read_request(
    body: Json, prompt: Sequence[int], params: Json, *, images: Sequence[str] = (), limit: str = "max_tokens"
) -> EngineRequest:
    """`images` are data URLs; `limit` is the name of the limit of tokens."""
    stops = params.get("stop") or ()
    top_p, top_k, min_p = (params.get(name) for name in ("top_p", "top_k", "min_p"))
    return EngineRequest(
        body=body,
        prompt=tuple(prompt),
        stream=bool(body.get("stream")),
        temperature=1.0 if params.get("temperature") is None else params["temperature"],
        limit=params.get("max_completion_tokens") or params.get(limit),
        stops=(stops,) if isinstance(stops, str) else tuple(stops),
        seed=params.get("sampling_seed", params.get("seed")),
        is_filtered=(top_p or 1.0) < 1.0 or (top_k or 0) > 0 or (min_p or 0.0) > 0.0,
        several=params.get("n") or 1,
        images=tuple(base64.b64decode(url.partition(",")[2]) for url in images),
    )


class SGLang(EngineWire):
    def read(self, body: Json) -> EngineRequest:
        params, images = body.get("sampling_params") or {}, body.get("image_data") or ()
        return read_request(body, body["input_ids"], params, images=images, limit="max_new_tokens")

    def join(self, answers: list[Json]) -> Any:
        return answers if len(answers) > 1 else answers[0]

    def answer(self, generation: Generation, count: int, finish: Finished | None, *, new: int) -> Json:
        asked = generation.asked
        first = 0 if generation.plan.cumulative or not asked.stream else count - new
        ids, logprobs = generation.sampled[first:count], generation.logprobs[first:count]
        told: Json | None = None
        if finish is not None:
            told = {"type": finish.reason, "matched": finish.matched}
            told = told if finish.reason == "stop" else {"type": "length", "length": len(generation.sampled)}
        meta = {
            "id": "x",
            "prompt_tokens": len(generation.prompt),
            "completion_tokens": count,
            "cached_tokens": 0,
            "e2e_latency": 0.0,
            "weight_version": generation.version_at(count),
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, ids, strict=True)],
            "finish_reason": told,
        }
        if generation.kept and asked.body.get("return_sampling_mask"):  # log-probabilities before the filter, and after
            meta["output_token_logprobs"] = [[v - 1.0, token, None] for v, token in zip(logprobs, ids, strict=True)]
            meta["output_token_sampling_logprobs"] = logprobs
            meta["output_token_sampling_mask"] = generation.kept[first:count]
        text = "" if asked.stream else self.vocabulary.text(ids).removesuffix("<|im_end|>")
        return {"text": text, "output_ids": ids, "meta_info": meta}


class VLLMGenerate(EngineWire):
    """A stream sends new tokens only, its last event the spans of weight versions."""

    def read(self, body: Json) -> EngineRequest:
        images = [part["url"] for part in body.get("content_parts") or () if part["type"] == "image_url"]
        return read_request(body, body["token_ids"], body.get("sampling_params") or {}, images=images)

    def answer(self, generation: Generation, count: int, finish: Finished | None, *, new: int) -> Json:
        choice: Json = {
            "token_ids": generation.sampled[count - new : count],
            "logprobs": {"content": self.rows(generation, count - new, count)},
            "finish_reason": finish.reason if finish is not None else None,
        }
        if generation.kept:
            choice["sampling_mask"] = generation.kept[count - new : count]
        if finish is not None:
            choice["weight_versions"] = generation.version_spans()
        made = self.envelope(generation, "generate", choice, finish)
        if generation.asked.body.get("return_token_ids") and count == new:
            made["prompt_token_ids"] = list(generation.prompt)
        return made


class VLLMCompletions(EngineWire):
    def read(self, body: Json) -> EngineRequest:
        prompt = body["prompt"]
        return read_request(body, self.vocabulary.encode(prompt) if isinstance(prompt, str) else prompt, body)

    def answer(self, generation: Generation, count: int, finish: Finished | None, *, new: int) -> Json:
        rows = self.rows(generation, count - new, count)
        logprobs = {
            "tokens": [row["token"] for row in rows],
            "token_logprobs": [row["logprob"] for row in rows],
            "top_logprobs": [{row["token"]: row["logprob"]} for row in rows],
            "text_offset": [0] * len(rows),
        }
        ids = generation.sampled[count - new : count]
        choice: Json = {"text": self.vocabulary.text(ids), "token_ids": ids, "logprobs": logprobs}
        choice["finish_reason"] = finish.reason if finish is not None else None
        if count == new:
            choice["prompt_token_ids"] = list(generation.prompt)
        return self.envelope(generation, "text_completion", choice, finish)


class VLLMChat(EngineWire):
    """Renders the messages with the chat template and parses what it sampled, as vLLM does with `--reasoning-parser`
    and `--tool-call-parser hermes`. SGLang's chat route also takes `input_ids`, and answers `return_meta_info`."""

    def read(self, body: Json) -> EngineRequest:
        messages = [chat_message(message) for message in body["messages"]]
        parts = [part for one in body["messages"] if isinstance(one.get("content"), list) for part in one["content"]]
        images = [part["image_url"]["url"] for part in parts if part.get("type") == "image_url"]
        prompt = body.get("input_ids") or self.vocabulary.render(messages, body.get("tools"))
        return read_request(body, prompt, body, images=images)

    def answer(self, generation: Generation, count: int, finish: Finished | None, *, new: int) -> Json:
        body, stream, first = generation.asked.body, generation.asked.stream, count - new
        now = parse_output(self.vocabulary.text(generation.sampled[:count]), ended=finish is not None)
        was = parse_output(self.vocabulary.text(generation.sampled[:first]), ended=False)
        said: Json = {"role": "assistant"} if first == 0 or not stream else {}
        said |= {"reasoning_content": now[0][len(was[0]) :], "content": now[1][len(was[1]) :]}
        if finish is not None:
            said["tool_calls"] = [
                {"index": at, "id": f"call_{generation.number}_{at}", "type": "function", "function": call}
                for at, call in enumerate(now[2])
            ]
        said = {name: value for name, value in said.items() if value or name == "content"}
        reason = None if finish is None else "tool_calls" if now[2] and finish.reason == "stop" else finish.reason
        choice: Json = {"delta" if stream else "message": said, "finish_reason": reason}
        choice["logprobs"] = {"content": self.rows(generation, first, count)} if body.get("logprobs") else None
        if body.get("return_meta_info"):
            choice["meta_info"] = SGLang(self.vocabulary).answer(generation, count, finish, new=new)["meta_info"]
        if body.get("return_token_ids"):
            choice["token_ids"] = generation.sampled[first:count]
        made = self.envelope(generation, f"chat.completion{'.chunk' if stream else ''}", choice, finish)
        if body.get("return_token_ids") and first == 0:
            made["prompt_token_ids"] = list(generation.prompt)
        return made


def chat_message(message: Json) -> Json:
    """As vLLM gives them to a template: texts as one string where there is no image, arguments as objects."""
    out = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list) and any(part.get("type") == "image_url" for part in content):
        content = [{"type": "image"} if part.get("type") == "image_url" else part for part in content]
    elif isinstance(content, list):
        content = "\n".join(part.get("text", "") for part in content)
    out["content"] = content or ""
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        out["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        out["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": loaded(call["function"].get("arguments") or "{}")}}
            for call in message["tool_calls"]
        ]
    return out


def loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def parse_output(text: str, *, ended: bool) -> tuple[str, str, list[Json]]:
    """Reasoning, text and calls; of an output that goes on, only what cannot change."""
    text = text.removesuffix("<|im_end|>")
    text = text if ended else text.rstrip("\ufffd")
    reasoning = ""
    if text.startswith("<think>"):
        reasoning, closed, text = text.removeprefix("<think>").removeprefix("\n").partition("</think>")
        reasoning = reasoning.rstrip("\n")
        text = text.lstrip("\n") if closed else ""
    text, _, rest = text.partition("<tool_call>")
    calls = [json.loads(found) for found in re.findall(r"\n(.*?)\n</tool_call>", rest, re.DOTALL)]
    made = [{"name": c["name"], "arguments": json.dumps(c["arguments"], ensure_ascii=False)} for c in calls]
    return reasoning, text.rstrip("\n"), made


ROUTES: dict[str, type[EngineWire]] = {
    "/generate": SGLang,
    "/v1/chat/completions": VLLMChat,
    "/v1/completions": VLLMCompletions,
    "/inference/v1/generate": VLLMGenerate,
}
