"""Probes of the interface: ids, templates, what log-probabilities mean, and whether they are the same again.

Those of meaning and stability compare the engine with itself, so that they hold whatever weights it has.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from tokentrue.doctor.exam import QUESTIONS, Examination, probe
from tokentrue.doctor.findings import Finding, Verdict, cannot_tell, fault, ok
from tokentrue.doctor.formats import NARROW
from tokentrue.doctor.naming import Evidence
from tokentrue.doctor.reference import Observation
from tokentrue.errors import (
    EngineContractError,
    EngineError,
    EngineUnreachable,
    InputError,
    RenderError,
    SamplingError,
    TokenContractError,
)
from tokentrue.protocols import Tokenizing
from tokentrue.providers.closeness import compare_completions
from tokentrue.types import Completion, Sampling

TEXTS = (
    "The quick brown fox jumps over 1234567 lazy dogs.",
    "  two spaces, a tab\tand a line\n\nbreak; naïve café, 你好, Привет 🙂",
    "def f(x):\n    return {'a': x ** 2, \"b\": [1, 2.5e-3]}",
)
NO_TOKENIZER = "the engine has no route that tokenises text"
CHATS: Mapping[str, Sequence[str]] = {
    "user": (QUESTIONS[0],),
    "system, user": ("Answer briefly.", QUESTIONS[1]),
    "user, assistant, user": ("Hi.", "Hello!", QUESTIONS[2]),
}
CLEAR_GAP = 0.3  # nats between the two likeliest tokens: at temperature 0.02 the second is e^-15 times as likely
DIGITS = range(1, 6)
ENOUGH = 20
BATCH = 6
OTHER_REPORTS = "such draws are those of the reports neither at this temperature nor at 1"


# Identity.


async def probe_identity(exam: Examination) -> list[Finding]:
    return [await ask(exam) for ask in (_tokenizer, _special_tokens, _template)]


@probe("identity: ids of a text")
async def _tokenizer(exam: Examination) -> Finding:
    if not isinstance(exam.provider, Tokenizing):
        return cannot_tell(NO_TOKENIZER)
    for text in TEXTS:
        theirs, ours = await exam.provider.tokenize(text), exam.renderer.encode_sampled(text)
        if theirs is None:
            return cannot_tell(NO_TOKENIZER)
        if theirs != list(ours):
            return _other_ids("tokenizer", ours, theirs, exam)
    return ok(f"{len(TEXTS)} texts equal")


@probe("identity: stop tokens")
async def _special_tokens(exam: Examination) -> Finding:
    """By their text: an engine encodes them as special tokens."""
    if not isinstance(exam.provider, Tokenizing):
        return cannot_tell(NO_TOKENIZER)
    for stop in exam.renderer.stop_token_ids:
        text = exam.renderer.decode([stop])
        theirs = await exam.provider.tokenize(text)
        if theirs is None:
            return cannot_tell(NO_TOKENIZER)
        if theirs != [stop]:
            return fault("special_tokens", f"{text!r} is {theirs.tolist()}, expected [{stop}]")
    return ok(f"{len(exam.renderer.stop_token_ids)} stop tokens equal")


@probe("identity: chat template")
async def _template(exam: Examination) -> Finding:
    compared = 0
    for roles, texts in CHATS.items():
        messages = [{"role": role, "content": text} for role, text in zip(roles.split(", "), texts, strict=True)]
        try:
            ours = list(exam.renderer.render(messages).token_ids)
        except RenderError:
            continue  # a role that this template refuses
        theirs = await exam.routes.tokenize_chat(messages)
        if theirs is None:
            return cannot_tell("the engine has no route that renders a conversation")
        if theirs != ours:
            return _other_ids("template", ours, theirs, exam, where=f"conversation {roles}: ")
        compared += 1
    return ok(f"{compared} conversations equal")


def _other_ids(name: str, ours: Sequence[int], theirs: Sequence[int], exam: Examination, where: str = "") -> Finding:
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))

    def text(ids: Sequence[int]) -> str:
        known = [i for i in ids if 0 <= i < exam.reference.vocab_size]
        return f"{list(ids)} ({exam.renderer.decode(known)!r})" if known else f"{list(ids)} (nothing)"

    detail = f"{where}from token {at} on: {text(theirs[at : at + 6])}, expected {text(ours[at : at + 6])}"
    return fault(name, f"{len(theirs)} ids, expected {len(ours)}", detail=detail)


# Meaning.


async def gather_observations(exam: Examination) -> Finding:
    try:
        found = await _observe(exam)
    except EngineUnreachable:
        raise  # nothing can be probed
    except (EngineContractError, TokenContractError) as error:
        found = fault("bad_logprobs", "refused", detail=str(error))
        if counted := re.search(r"counted (\d+) prompt tokens where (\d+) were sent", str(error)):
            theirs, sent = map(int, counted.groups())
            known = "bos_added" if theirs == sent + 1 else "context_truncated" if theirs < sent else "prompt_changed"
            others = () if known == "prompt_changed" else ("prompt_changed",)  # a count does not say where
            found = fault(known, f"{theirs} prompt tokens of {sent}", detail=str(error), alternatives=others)
    except (EngineError, InputError) as error:
        found = fault("engine_refused", "no answer", detail=str(error))
    return replace(found, probe="contract: ids and log-probabilities")


async def _observe(exam: Examination) -> Finding:
    long = exam.long_prompt()
    # Cut in the middle of a sentence: many tokens are likely there, and those tell more than certain ones.
    prompts = [*exam.prompts(), *(long[:cut] for cut in (48, 96) if cut < len(long) // 2), long]
    sampling = Sampling(temperature=1.0, max_tokens=exam.max_tokens, seed=exam.seed, top_logprobs=4)
    completions = await exam.generate(prompts, sampling)
    exam.uncertain = _uncertain(prompts, completions)
    pairs = zip(prompts, completions, strict=True)
    exam.observations += [Observation.from_completion(*pair) for pair in pairs if pair[1].token_ids]
    exam.observations += await exam.observe(exam.unusual_prompts(), sampling)
    size, sampled = exam.reference.vocab_size, [token for one in completions for token in one.token_ids]
    if max(sampled, default=0) >= size:
        return fault("other_model", f"sampled id {max(sampled)} of {size}")
    return ok(f"{len(sampled)} sampled tokens") if sampled else cannot_tell("the engine sampled nothing")


def _uncertain(prompts: Sequence[Sequence[int]], completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    """Prefixes of what was sampled where the likeliest token is clear and yet least likely."""
    found: list[tuple[float, tuple[int, ...]]] = []
    for prompt, completion in zip(prompts, completions, strict=True):
        for index, top in enumerate(completion.top_logprobs or ()):
            values = sorted(top.values(), reverse=True)
            if len(values) > 1 and values[0] - values[1] > CLEAR_GAP:
                found.append((values[0], (*prompt, *completion.token_ids[:index])))
    return [prefix for _, prefix in sorted(found)[:4]]


async def probe_meaning(exam: Examination) -> list[Finding]:
    tops = await _read_tops(exam)
    if tops.verdict != "ok":
        return [tops, await _wire(exam)]
    found = [await _temperature(exam), await _low_temperature(exam)]
    exam.follows_temperature = all(one.verdict is Verdict.OK for one in found)
    if found[-1].detail == OTHER_REPORTS:  # no reading of the reports is tried on draws of another distribution
        if found[0].fault != "raw_logprobs":  # which the reports alone show
            found[0] = cannot_tell(found[0].figure, probe=found[0].probe)
        return [tops, *found, await _wire(exam)]
    return [*found, *[await ask(exam) for ask in (_filters, _wire)]]


@probe("meaning")
async def _read_tops(exam: Examination) -> Finding:
    prompts = exam.open_prompts()
    plain = await exam.generate(prompts, Sampling(temperature=1.0, max_tokens=1, seed=exam.seed, top_logprobs=4))
    exam.tops = [completion.top_logprobs[0] for completion in plain if completion.top_logprobs]
    if len(exam.tops) != len(prompts):
        return cannot_tell("the engine gives no top log-probabilities")
    return ok(f"top log-probabilities of {len(prompts)} prompts")


@probe("meaning: temperature")
async def _temperature(exam: Examination) -> Finding:
    """Gaps between two tokens' log-probabilities double at temperature 0.5."""
    sampling = Sampling(temperature=0.5, max_tokens=1, seed=exam.seed, top_logprobs=4)
    try:
        found = await exam.generate(exam.open_prompts(), sampling)
    except SamplingError as error:
        return fault("raw_logprobs", "refused by the adapter", detail=str(error))
    ratios: list[tuple[float, float]] = []  # and how far rounding may move each
    for warm, completion in zip(exam.tops, found, strict=True):
        cold, first = (completion.top_logprobs or ({},))[0], _likeliest(warm)
        for token, value in warm.items():
            gap = warm[first] - value
            if first in cold and token in cold and gap > CLEAR_GAP:
                ratios.append(((cold[first] - cold[token]) / gap, 0.03 + 3 * exam.mean_limit / gap))
    if not ratios:
        return cannot_tell("no prompt has two tokens that are told apart")
    middle = median(ratio for ratio, _ in ratios)
    figure = f"gaps grow {middle:.3f}-fold at T = 0.5, expected 2"
    if any(abs(ratio - middle) > doubt * max(1.0, middle) for ratio, doubt in ratios):
        return cannot_tell("gaps between log-probabilities do not grow together", figure=figure)
    if abs(middle - 2.0) < 0.1:
        return ok(figure)
    return fault("raw_logprobs" if abs(middle - 1.0) < 0.1 else "temperature_ignored", figure, confidence="medium")


@probe("meaning: sampling follows the temperature")
async def _low_temperature(exam: Examination) -> Finding:
    """At temperature 0.02 a clearly likelier token is sampled; if the temperature is ignored, as often as at 1."""
    hits, chances = list[bool](), list[float]()
    for n in range(8):
        found = await exam.generate(exam.open_prompts(), Sampling(temperature=0.02, max_tokens=1, seed=exam.seed + n))
        for top, completion in zip(exam.tops, found, strict=True):
            first, second = sorted(top.values(), reverse=True)[:2]
            if completion.token_ids and first - second > CLEAR_GAP:
                hits.append(completion.token_ids[0] == _likeliest(top))
                chances.append(math.exp(first))
    if not hits:
        return cannot_tell("no prompt has a clearly likeliest first token")
    figure = f"{sum(hits)} of {len(hits)} samples are the likeliest token at T = 0.02"
    if all(hits):
        return ok(figure)
    deviation = math.sqrt(sum(chance * (1 - chance) for chance in chances))
    if sum(hits) == 0 or abs(sum(hits) - sum(chances)) > 3 * deviation:
        return cannot_tell(OTHER_REPORTS, figure=figure)
    return fault("temperature_ignored", figure)


def _likeliest(top: Mapping[int, float]) -> int:
    return max(top, key=lambda token: top[token])


@probe("meaning: filters")
async def _filters(exam: Examination) -> Finding:
    if "top_k" not in (exam.provider.truthful_filters or ()):
        return cannot_tell("the engine reports no renormalised log-probabilities; training sessions refuse filters")
    found = await exam.generate(exam.open_prompts(), Sampling(top_k=2, max_tokens=1, seed=exam.seed))
    inside, outside, limit = list[float](), list[float](), exam.visible
    for top, completion in zip(exam.tops, found, strict=True):
        kept, values = sorted(top, key=lambda token: -top[token])[:2], sorted(top.values(), reverse=True)
        if len(values) > 2 and values[1] - values[2] < CLEAR_GAP:
            continue  # which tokens are the two likeliest may depend on rounding
        token = completion.token_ids[0]
        if token not in kept:
            return fault("filters_ignored", f"top_k = 2 sampled token {token}, which is not among the two likeliest")
        mass = math.log(sum(math.exp(top[t]) for t in kept))
        if abs(mass) > 3 * limit:  # else what the filter drops weighs too little to be seen
            inside.append(abs(completion.logprobs[0] - (top[token] - mass)))
            outside.append(abs(completion.logprobs[0] - top[token]))
    if not inside:
        return cannot_tell("no prompt has two tokens that are clearly the likeliest and leave some mass to the rest")
    right, wrong = median(inside), median(outside)
    if right <= limit:
        return ok(f"renormalised within {right:.2g}")
    if wrong <= limit:
        return fault("filters_ignored", f"equal to the unfiltered within {wrong:.2g}")
    return cannot_tell(f"neither renormalised ({right:.2g} off) nor unfiltered ({wrong:.2g} off)")


@probe("meaning: precision on the wire")
async def _wire(exam: Examination) -> Finding:
    """Full float32 values, and their probabilities, have more digits than any rounding leaves."""
    values = [value for seen in exam.observations for value in seen.logprobs if abs(value) > 1e-3]
    if len(values) < ENOUGH:
        return cannot_tell(f"only {len(values)} log-probabilities differ from 0")
    grids: dict[str, Callable[[float], float]] = {f"{n} decimals": partial(round, ndigits=n) for n in DIGITS}
    grids |= {f"{n} digits": lambda value, n=n: float(f"{value:.{n}g}") for n in DIGITS}
    grids |= {name: lambda value, to=to: float(to(torch.tensor(value))) for name, to in NARROW.items()}
    chances = [math.exp(value) for value in values]
    for words, numbers, near in (("", values, 0.0), ("probabilities of ", chances, 1e-6)):
        for name, to in grids.items():
            if all(abs(to(one) - one) <= near * abs(one) for one in numbers):
                return fault("wire_precision", f"{words}{name}")
    return ok(f"{len(values)} values in full precision")


# Stability.


async def probe_stability(exam: Examination) -> list[Finding]:
    return [await ask(exam) for ask in (_repeat, _batch, _prefix_cache, _prefill)]


async def _compare(
    exam: Examination, known: str, prompt: Sequence[int], others: Sequence[Sequence[int]] = ()
) -> Finding:
    """The same greedy request twice, the second time beside others; where the answers differ, once more: what differs
    in one situation is unstable."""
    sampling = Sampling(temperature=0.0, max_tokens=12)
    first = await exam.provider.generate(prompt, sampling)
    second, *_ = await exam.generate([prompt, *others], sampling)
    found = compare_runs(exam, known, first, second)
    if found.verdict is Verdict.FAULT:
        third = await exam.provider.generate(prompt, sampling)
        steady = compare_runs(exam, "unstable", first if others else second, third)
        return steady if steady.verdict is Verdict.FAULT else found
    return found


def _first_fault(found: Sequence[Finding]) -> Finding:
    return next((one for one in found if one.verdict is Verdict.FAULT), found[0])


@probe("stability: same request twice")
async def _repeat(exam: Examination) -> Finding:
    """Five requests that were sent before, and all again: a fault of every n-th request, or of what the request before
    left, meets others of them."""
    sampling = Sampling(temperature=1.0, max_tokens=12, seed=exam.seed)
    prompts = [seen.token_ids[: seen.prompt_tokens] for seen in exam.observations[:5]] or exam.prompts()[:1]
    rounds = [[await exam.provider.generate(prompt, sampling) for prompt in prompts] for _ in range(2)]
    return _first_fault([compare_runs(exam, "unstable", *pair) for pair in zip(*rounds, strict=True)])


@probe("stability: alone and in a batch")
async def _batch(exam: Examination) -> Finding:
    """Greedy requests that were sent before, beside others of other lengths."""
    prompts = exam.prompts()
    others = [prompt[: len(prompt) - shorter] for shorter, prompt in enumerate(prompts * 2)][: BATCH - 1]
    tried = (prompts[1], *exam.open_prompts()[:2])
    return _first_fault([await _compare(exam, "batch_variant", prompt, others) for prompt in tried])


@probe("stability: prefix cache cold and warm")
async def _prefix_cache(exam: Examination) -> Finding:
    """A prompt that was never sent, then again, maybe from a cache. Then prompts that go on after answers of this
    engine: a difference from the reference that no other prompt has is the cache's."""
    found = await _compare(exam, "prefix_cache", exam.fresh_prompt(160, 0))
    if found.verdict is not Verdict.OK or exam.evidence is None or exam.evidence.departs:
        return found
    prompts = [(*seen.token_ids, *exam.prompts()[-1]) for seen in exam.observations[:3]]
    seen = await exam.observe(prompts, Sampling(max_tokens=12, seed=exam.seed, top_logprobs=4))
    if not seen:
        return found
    later = Evidence(exam.reference, seen, exam.dtype)
    if later.size(later.e) < 2 * later.limit:
        return found
    figure = f"mean |δ| {float(later.e.abs().mean()):.2g} after answers of the engine, and none after other prompts"
    return fault("prefix_cache", figure)


@probe("stability: prefill and decode")
async def _prefill(exam: Examination) -> Finding:
    """The k-th token by decoding, and as the first one after a longer prompt."""
    prompt, sampling = exam.fresh_prompt(60, 1), Sampling(temperature=0.0, max_tokens=12)
    decoded = await exam.provider.generate(prompt, sampling)
    ids, cut = decoded.token_ids, len(decoded.token_ids) // 2
    if not cut:
        return cannot_tell("the model ended its turn at once")
    rest = Completion(token_ids=ids[cut:], logprobs=decoded.logprobs[cut:], finish=decoded.finish)
    filled = await exam.provider.generate((*prompt, *ids[:cut]), replace(sampling, max_tokens=len(ids) - cut))
    return compare_runs(exam, "prefill_decode", rest, filled)


def compare_runs(exam: Examination, known: str, first: Completion, second: Completion) -> Finding:
    """Up to a near tie, log-probabilities must agree: within rounding or, for the exact engine, in bits."""
    limit = 0.0 if exam.provider.name == "exact" else exam.largest_limit
    found = compare_completions(first, second, tolerance=limit)
    if found.compared == 0:
        if abs(first.logprobs[0] - second.logprobs[0]) <= limit:
            return cannot_tell("the first tokens differ at a near tie")
        return fault(known, "other tokens from the first on", confidence="medium")
    worst = found.max_difference
    if not found.close:
        return fault(known, f"max |δ| {worst:.3g} over {found.compared} tokens, expected at most {limit:.2g}")
    grade = "equal in bits" if worst == 0 else f"max |δ| {worst:.2g}, expected at most {limit:.2g}"
    return ok(f"{grade} over {found.compared} tokens")
