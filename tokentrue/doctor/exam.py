"""What every probe is given."""

import asyncio
import functools
import random
import re
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import ParamSpec

from msgspec import Struct

from tokentrue.doctor.findings import Finding, cannot_tell
from tokentrue.doctor.naming import Evidence
from tokentrue.doctor.reference import Observation, Reference
from tokentrue.errors import ConfigError, EngineError, InputError, RenderError, TokenContractError
from tokentrue.ids import TokenIds
from tokentrue.json_types import JsonMapping
from tokentrue.protocols import Provider
from tokentrue.providers.remote import EngineHttp, read_tokens
from tokentrue.renderers import Renderer
from tokentrue.types import Completion, Sampling

P = ParamSpec("P")
MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z]+\]")
QUESTIONS = (
    "What is 12 + 7?",
    "Name three rivers and say where they flow.",
    "Write one sentence about the sea in winter.",
    "Is 91 a prime number? Explain in a few words.",
)
STORY = (
    "The lamp on the pier had burned all night, and when the boats came in at six the harbour was still grey. Anna "
    "counted the crates, wrote 14 into the book, then 9, then 31, and asked twice whether the ice would last until "
    "noon. "
)


class EngineRoutes:
    """Those of vLLM and of SGLang. An engine in this process, without a URL, has none: None says so."""

    _http: EngineHttp | None = None
    _provider: Provider | None = None

    def __init__(self, provider: Provider | None = None, url: str | None = None, *, api_key: str | None = None) -> None:
        if url is not None:
            self._http = EngineHttp(url, timeout_s=120.0, connect_s=5.0, retries=1, api_key=api_key)
            self._provider = provider

    async def tokenize_chat(self, messages: Sequence[JsonMapping]) -> TokenIds | None:
        if self._http is None or self._provider is None:
            return None
        model = (await self._provider.health())["model"]
        body = {"model": model, "messages": list(messages), "add_generation_prompt": True}
        return await read_tokens(self._http, "/tokenize", body)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


class Examination(Struct, kw_only=True):
    """The first probes add what they observe, which later ones use."""

    provider: Provider
    routes: EngineRoutes
    renderer: Renderer
    reference: Reference
    dtype: str  # what the engine is expected to compute in
    mean_limit: float = 5e-5  # of |δ|, beyond which it is not that dtype's rounding
    largest_limit: float = 1e-3  # of a single |δ|
    previous: str | Path | None = None
    max_tokens: int = 40
    seed: int = 7
    observations: list[Observation] = []
    uncertain: list[tuple[int, ...]] = []  # prompts with an uncertain next id
    evidence: Evidence | None = None  # of `observations`
    follows_temperature: bool = False  # log-probabilities are of the temperature that is asked for
    prompt_evidence: Evidence | None = None
    tops: list[Mapping[int, float]] = []  # at `open_prompts`, T = 1

    @property
    def visible(self) -> float:
        """A difference above this is seen through the wire and the dtype."""
        return max(self.mean_limit, 1e-3)

    def special_ids(self) -> list[int]:
        """Ids that an engine may put before a prompt: the configuration's, and those that look like markers."""
        config, size = self.reference.config, self.reference.vocab_size
        named = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "decoder_start")]
        flat = [one for name in named for one in (name if isinstance(name, list) else [name]) if isinstance(one, int)]
        edges = [*range(min(64, size)), *range(max(64, size - 256), size)]
        markers = [one for one in edges if MARKER.fullmatch(self.renderer.decode([one]))]
        return list(dict.fromkeys([*flat, *self.renderer.stop_token_ids, 0, 1, 2, *markers]))[:24]

    def prefixes(self) -> list[tuple[int, ...]]:
        """Runs of ids that may be put into a prompt: markers, white space, system messages of templates."""
        plain = self.render(QUESTIONS[0])
        found = [(one,) for one in self.special_ids()]
        texts = (" ", "\n", "\n\n", "<think>\n", "<think>\n\n</think>\n\n")
        found += [tuple(self.renderer.encode_sampled(text)) for text in texts]
        for text in ("You are a helpful assistant.", "You are a helpful assistant", ""):
            messages = [{"role": "system", "content": text}, {"role": "user", "content": QUESTIONS[0]}]
            try:
                ids = self.renderer.render(messages)
            except RenderError:
                continue
            if tuple(ids.token_ids[-len(plain) + 1 :]) == plain[1:]:
                found.append(tuple(ids.token_ids[: len(ids.token_ids) - len(plain)]))
        return [one for one in dict.fromkeys(found) if one]

    def rewrites(self) -> dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]]:
        """What an engine that works on text may make of ids."""
        decode = self.renderer.decode
        markers = {one for one in self.special_ids() if MARKER.fullmatch(decode([one]))}

        def encode_again(ids: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(self.renderer.encode_sampled(decode(ids)))

        def without_markers(ids: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(one for one in ids if one not in markers)

        def render_again(ids: tuple[int, ...]) -> tuple[int, ...]:
            try:
                return self.render(decode(ids))
            except RenderError:
                return ids

        return {
            "prompts decoded and encoded again": encode_again,
            "prompts without special tokens": without_markers,
            "prompts without special tokens, decoded and encoded again": lambda ids: encode_again(without_markers(ids)),
            "prompts as texts of a user's message": render_again,
        }

    def unusual_prompts(self) -> list[tuple[int, ...]]:
        """Ids that encoding would not give, and a conversation that no engine has answered in part."""
        first, second, *_, last = self.prompts()
        encode, decode = self.renderer.encode_sampled, self.renderer.decode

        def split(one: int) -> tuple[int, ...]:
            text = decode([one])
            found = tuple(chain.from_iterable(map(encode, text)))
            return found if decode(found) == text and not MARKER.fullmatch(text) else (one,)

        return [tuple(chain.from_iterable(map(split, first))), (*first, *second[-12:], *last)]

    def render(self, text: str) -> tuple[int, ...]:
        return tuple(self.renderer.render([{"role": "user", "content": text}]).token_ids)

    def prompts(self) -> list[tuple[int, ...]]:
        return [self.render(text) for text in QUESTIONS]

    def open_prompts(self) -> list[tuple[int, ...]]:
        """Prompts after which several tokens are likely; where none is known, the plain ones."""
        return self.uncertain or self.prompts()

    def long_prompt(self, tokens: int = 400) -> tuple[int, ...]:
        """About `tokens` ids that no probe has sent, well inside the context."""
        tokens = min(tokens, self.reference.max_positions // 2)
        words = STORY.split() * (1 + tokens // len(STORY.split()))
        too_many = bisect_right(range(len(words)), tokens, key=lambda count: len(self.render(" ".join(words[:count]))))
        return self.render(" ".join(words[: max(1, too_many - 1)]))

    def fresh_prompt(self, tokens: int, seed: int) -> list[int]:
        """Ids that no cache knows; without the end of the message, after which a model may say little."""
        start, *middle = self.long_prompt(tokens)[:-8]
        random.Random(self.seed + seed).shuffle(middle)
        return [start, *middle]

    async def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """All at once; where one fails the others end before its error is raised."""
        found = await asyncio.gather(
            *(self.provider.generate(prompt, sampling) for prompt in prompts), return_exceptions=True
        )
        for one in found:
            if isinstance(one, BaseException):
                raise one
        return [one for one in found if isinstance(one, Completion)]

    async def observe(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Observation]:
        """Answers that hold a token."""
        pairs = zip(prompts, await self.generate(prompts, sampling), strict=True)
        return [Observation.from_completion(*pair) for pair in pairs if pair[1].token_ids]


def probe(name: str) -> Callable[[Callable[P, Awaitable[Finding]]], Callable[P, Awaitable[Finding]]]:
    """A probe of this name. Where the engine refuses what it asks, it cannot tell."""

    def wrap(ask: Callable[P, Awaitable[Finding]]) -> Callable[P, Awaitable[Finding]]:
        @functools.wraps(ask)
        async def run(*args: P.args, **kwargs: P.kwargs) -> Finding:
            try:
                found = await ask(*args, **kwargs)
            except ConfigError:  # the user's own, such as weights that cannot be loaded: not the engine's refusal
                raise
            except (EngineError, InputError, TokenContractError) as error:
                found = cannot_tell(str(error))
            return replace(found, probe=name)

        return run

    return wrap
