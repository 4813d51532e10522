"""Where real chat templates come from: packages of the public registries, by name, and folders where a machine has
them.

* PyPI wheels: `trl`, `xinference`, `axolotl`; npm: `@huggingface/ollama-utils`, whose table holds the templates of the
  GGUF files that it knows. Each is downloaded once, without its dependencies, under `.cache/parts`.
* llama.cpp's own collection: `../shared/templates` where that folder is, else the PyPI sdist `llama-cpp-python`, which
  vendors it.
* any other collection: `.cache/parts/templates/CARRIER/*.jinja`, for what only a source repository has (vllm, sglang,
  miles).

`ours/Kimi-K2.6` is the one text that no package has: K2.5's with the switch that K2.6 adds.
What cannot be downloaded is left out; nothing here talks to a model hub.
"""

from __future__ import annotations

import json
import re
import tarfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests import parts

WHEELS = {"trl": "1.16.0", "xinference": "4.1.0", "axolotl": "0.19.0"}
LLAMA_CPP = ("llama-cpp-python", "0.3.36")
OLLAMA_UTILS = ("@huggingface/ollama-utils", "0.0.18")
Named = Iterator[tuple[str, str]]


@cache
def all_templates() -> dict[str, str]:
    """Every template by `carrier/file`; one text may have several names."""
    found: dict[str, str] = {}
    for source in (_llama_cpp(), _wheels(), _ollama(), _folders()):
        for name, text in source:
            found.setdefault(name, text)
    if kimi := found.get("xinference/Kimi-K2.5"):
        found["ours/Kimi-K2.6"] = _kimi_2_6(kimi)
    return found


@cache
def distinct_templates() -> dict[str, str]:
    """The same with each text once, under its first name."""
    first: dict[str, str] = {}
    for name, text in all_templates().items():
        first.setdefault(text, name)
    return {name: text for text, name in first.items()}


def _kimi_2_6(template: str) -> str:
    """Kimi-K2.6 has K2.5's tokenizer and template, with one switch more: `preserve_thinking`, which makes all of the
    history recent."""
    search = template.index("{%- for idx in range(messages|length-1, -1, -1) -%}")
    end = template.index("{%- endfor -%}", search) + len("{%- endfor -%}")
    return f"{template[:search]}{{%- if not preserve_thinking -%}}{template[search:end]}{{%- endif -%}}{template[end:]}"


def _llama_cpp() -> Named:
    folder = parts.shared()
    if folder is not None and (folder / "templates").is_dir():
        for path in sorted((folder / "templates").glob("*.jinja")):
            yield f"llama.cpp/{path.name}", path.read_text(encoding="utf-8")
        return
    archive = parts.downloaded(*LLAMA_CPP, kind="sdist")
    if archive is None:
        return
    with tarfile.open(archive) as opened:
        for member in sorted(opened.getmembers(), key=lambda member: member.name):
            if member.isfile() and re.search(r"/models/templates/[^/]+\.jinja$", member.name):
                source = opened.extractfile(member)
                assert source is not None
                yield f"llama.cpp/{Path(member.name).name}", source.read().decode()


def _wheels() -> Named:
    for package, version in WHEELS.items():
        archive = parts.downloaded(package, version, kind="wheel")
        if archive is None:
            continue
        with zipfile.ZipFile(archive) as opened:
            yield from _xinference(opened) if package == "xinference" else _jinja_files(opened, package)


def _jinja_files(archive: zipfile.ZipFile, package: str) -> Named:
    for name in sorted(archive.namelist()):
        if name.endswith(".jinja"):
            yield f"{package}/{Path(name).name}", archive.read(name).decode()


def _xinference(archive: zipfile.ZipFile) -> Named:
    """Model specifications as JSON: one template per family."""
    for name in sorted(archive.namelist()):
        if not (name.endswith(".json") and "llm" in name):
            continue
        specs = json.loads(archive.read(name))
        for spec in specs if isinstance(specs, list) else [specs]:
            template = spec.get("chat_template") if isinstance(spec, dict) else None
            if isinstance(template, str) and "{" in template:
                yield f"xinference/{spec['model_name']}", template


def _ollama() -> Named:
    archive = parts.downloaded(*OLLAMA_UTILS, kind="npm")
    if archive is None:
        return
    with tarfile.open(archive) as opened:
        source = opened.extractfile("package/dist/index.js")
        assert source is not None
        script = source.read().decode()
    entry = re.compile(r'model: "([^"]+)",\s*gguf: ("(?:[^"\\]|\\.)*"|`(?:[^`\\]|\\.)*`)', re.DOTALL)
    for model, literal in entry.findall(script):
        yield f"ollama-utils/{model.removeprefix('library/')}", _js_string(literal)


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}


def _js_string(literal: str) -> str:
    """The value of a JavaScript string that the package's own build wrote."""

    def value(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPES.get(code, code)

    return re.sub(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", value, literal[1:-1], flags=re.DOTALL)


def _folders() -> Named:
    for path in sorted((parts.CACHE / "templates").glob("*/*.jinja")):
        text = path.read_text(encoding="utf-8")
        if text.strip():
            yield f"{path.parent.name}/{path.name}", text
