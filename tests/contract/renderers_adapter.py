"""A pytest plugin: lets the tests of the PyPI package `renderers` examine our renderer instead of its own.

Loaded with `-p renderers_adapter` into a process of its own (see test_outside_renderers.py), where `tests` is that
package's folder. Tokenizers come from `PARTS`, a JSON file: model name to folder and template; models that are not in
it are skipped.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from outside_reasons import reason

from tokentrue.errors import TokenTrueError
from tokentrue.renderers.families.harmony import correct_template
from tokentrue.renderers.load import renderer_of
from tokentrue.renderers.messages import normalise_messages, normalise_tools
from tokentrue.types import Extension

PARTS: dict[str, dict[str, str]] = json.loads(Path(os.environ["PARTS"]).read_text())
_tokenizers: dict[str, Any] = {}


def load_tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    if model not in PARTS:
        pytest.skip(f"no tokenizer for {model}")
    if model not in _tokenizers:
        _tokenizers.clear()
        tokenizer = AutoTokenizer.from_pretrained(PARTS[model]["folder"])
        if PARTS[model].get("template"):
            tokenizer.chat_template = PARTS[model]["template"]
        tokenizer.name_or_path = model
        _tokenizers[model] = tokenizer
    return _tokenizers[model]


class Config(SimpleNamespace):
    def model_copy(self, *, update: dict[str, Any]) -> Config:
        return Config(**{**vars(self), **update})

    def __getattr__(self, name: str) -> Any:
        return None


class Adapter:
    """`thinking_retention="all"` is our history "keep"; anything else follows the template."""

    def __init__(self, tokenizer: Any, config: Any, kwargs: dict[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.last_bridge: tuple[list[int], list[Any], list[Any], Any] = ([], [], [], None)
        self.config = Config(**kwargs, thinking_retention=getattr(config, "thinking_retention", None))
        keep = self.config.thinking_retention == "all"
        self.variables = _defaults(tokenizer.name_or_path) | {
            name: value for name, value in kwargs.items() if value is not None
        }
        self._renderer = renderer_of(
            tokenizer,
            directory=Path(PARTS[tokenizer.name_or_path]["folder"]),
            chat_template=_template(tokenizer),
            template_kwargs=self.variables,
            history="keep" if keep else "template",
            injection="engine",
        )
        self._seen: dict[tuple[int, ...], list[Any]] = {}

    def render_ids(self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        global _examined
        _examined = self
        r = self._renderer
        if add_generation_prompt:
            ids = list(r.render(messages, tools).token_ids)
        else:  # our renders always open the next turn: take the same path without that
            plain, given = normalise_messages(messages, r.inputs), normalise_tools(tools, r.inputs)
            ids = r.codec.encode(r.template.render(plain, given, r.template_kwargs, generate=False, inputs=r.inputs))
        self._seen[tuple(ids)] = list(messages)
        return ids

    def get_stop_token_ids(self) -> list[int]:
        return list(self._renderer.stop_token_ids)

    def bridge_to_next_turn(
        self, previous_prompt_ids: Any, previous_completion_ids: Any, new_messages: Any, *, tools: Any = None
    ) -> Any:
        prefix = [*previous_prompt_ids, *previous_completion_ids]
        if not previous_prompt_ids:
            return None
        past = self._seen.get(tuple(previous_prompt_ids), [{"role": "user", "content": "Hi."}])
        turn = self._renderer.parse(previous_completion_ids, prompt_ids=previous_prompt_ids, tools=tools).message
        global _examined
        _examined = self
        result = self._renderer.extend(prefix, [*past, dict(turn)], list(new_messages), tools)
        self.last_bridge = (prefix, [*past, dict(turn)], list(new_messages), result)
        return result if isinstance(result, Extension) else None


def _template(tokenizer: Any) -> str:
    """The model's own; gpt-oss's as its own library writes it, which is what the suite compares with."""
    own = tokenizer.chat_template
    return correct_template(own) or own


def _defaults(model: str) -> dict[str, Any]:
    """Llama's template would write today's date; the suite's reference pins it."""
    return {"date_string": "26 Jul 2024"} if model.startswith("meta-llama/") else {}


def _set_fields(config: Any) -> dict[str, Any]:
    """The template variables that the suite's own configuration object sets."""
    names = getattr(type(config), "template_field_names", lambda: ())()
    return {name: getattr(config, name) for name in names if name in config.model_fields_set}


def create_renderer(
    tokenizer: Any, config: Any = None, *, chat_template_kwargs: dict[str, Any] | None = None, **_: Any
) -> Adapter:
    if tokenizer.name_or_path not in PARTS:
        pytest.skip(f"no tokenizer for {tokenizer.name_or_path}")
    try:
        return Adapter(tokenizer, config, {**_set_fields(config), **(chat_template_kwargs or {})})
    except TokenTrueError as error:
        raise AssertionError(f"our renderer: {error}") from error


def pytest_configure(config: Any) -> None:
    import renderers
    import renderers.base

    renderers.create_renderer = create_renderer
    renderers.base.load_tokenizer = load_tokenizer
    Extension.token_ids = property(lambda self: [*self.prefix_ids, *self.added_ids])  # type: ignore[method-assign,assignment]  # the suite compares lists


_examined: Adapter | None = None
_counts: Counter[str] = Counter()
_skips: Counter[str] = Counter()
_explained: dict[str, list[str]] = {}
_failures: list[str] = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = (yield).get_result()
    if not (report.when == "call" or (report.when == "setup" and report.outcome != "passed")):
        return
    _counts[report.outcome] += 1
    if report.outcome == "skipped":
        _skips[report.longrepr[2].removeprefix("Skipped: ")] += 1
    if report.outcome == "failed":
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if why := reason(item.originalname, parameters, _examined):
            _explained.setdefault(why, []).append(item.name)
        else:
            _failures.append(report.nodeid + " | " + str(report.longrepr).strip().splitlines()[-1][:300])


def pytest_sessionfinish(session: Any) -> None:
    found = {"counts": _counts, "explained": _explained, "skips": _skips, "failures": _failures}
    Path(os.environ["REPORT"]).write_text(json.dumps(found, indent=1))
