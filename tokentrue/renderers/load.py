"""`load_renderer`: a model directory or hub id -> a proven Renderer."""

from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, Unpack, cast, get_args

import msgspec

from tokentrue.errors import ConfigError, TemplateError, TokenizerError
from tokentrue.hub import TOKENIZER_FILES, locate_small_files, one_line, require_tokenizer
from tokentrue.json_types import JsonMapping, JsonObject, is_object
from tokentrue.renderers import proof_cache as cache
from tokentrue.renderers.codec import LIMIT_BYTES, Codec
from tokentrue.renderers.confined import run_confined
from tokentrue.renderers.extending.extender import MAX_PLANS, History
from tokentrue.renderers.extending.stops import Stops, derive_stops, read_declared_stops
from tokentrue.renderers.families import family_for
from tokentrue.renderers.prove import prove
from tokentrue.renderers.renderer import UNPROVEN, Injection, Proof, Renderer
from tokentrue.renderers.seeing.proof import prove_images
from tokentrue.renderers.template import Template, find_input_format
from tokentrue.vision.families import Vision, list_placeholder_ids, load_vision, read_config

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ChatTokenizer(Protocol):
    backend_tokenizer: "Tokenizer"
    chat_template: str | JsonMapping | None
    eos_token: str | None
    special_tokens_map: JsonMapping


class RendererOptions(TypedDict, total=False):
    """Bytes of cached encodings, number of cached plans, and a context that every rendering runs in."""

    encode_cache_bytes: int
    extend_plans: int
    render_deadline: AbstractContextManager[object] | None


def load_renderer(
    model: str | Path,
    chat_template: str | None = None,
    template_kwargs: JsonMapping | None = None,
    history: History = "keep",
    injection: Injection = "safe",
    **options: Unpack[RendererOptions],
) -> Renderer:
    """`model`: a local directory or a hub id; `chat_template`: a template's text or the path of its file."""
    for name, value, choices in (
        ("history", history, get_args(History)),
        ("injection", injection, get_args(Injection)),
    ):
        if value not in choices:
            raise ConfigError(f"{name}: must be one of {', '.join(choices)}, got {value!r}")
    try:
        directory = locate_small_files(model)
        require_tokenizer(model, directory)
    except ConfigError as error:
        raise TokenizerError(str(error)) from error
    tokenizer = _load_tokenizer(model, directory)
    return renderer_of(tokenizer, directory, chat_template, template_kwargs, history, injection, **options)


def renderer_of(
    tokenizer: ChatTokenizer,
    directory: Path | None = None,
    chat_template: str | None = None,
    template_kwargs: JsonMapping | None = None,
    history: History = "keep",
    injection: Injection = "safe",
    **options: Unpack[RendererOptions],
) -> Renderer:
    """Builds a renderer for a loaded transformers tokenizer; `directory` holds its files."""
    source = _find_source(tokenizer, chat_template)
    codec = Codec(tokenizer.backend_tokenizer, options.get("encode_cache_bytes", LIMIT_BYTES), template=source)
    family = family_for(source, tokenizer, codec.literals)
    if chat_template is None and family.chat_template is not None and (history, injection) == ("keep", "safe"):
        source = family.chat_template
    kwargs = {**(family.template_kwargs if history == "keep" else {}), **(template_kwargs or {})}
    names = tokenizer.special_tokens_map
    template = Template(source, variables=names, deadline=options.get("render_deadline"))
    declared = read_declared_stops(directory, codec, tokenizer.eos_token)
    tokenizer_hash = _hash_tokenizer(directory, tokenizer)
    vision = load_vision(directory)
    facts = {
        "template": template.hash,
        "tokenizer": tokenizer_hash,
        "tokens": names,
        "kwargs": kwargs,
        "stops": declared,
        "vision": vision.processor if isinstance(vision, Vision) else "",
    }
    key = cache.make_key({**facts, "code": cache.hash_code()})

    make_renderer = partial(
        Renderer,
        template=template,
        codec=codec,
        tokenizer_hash=tokenizer_hash,
        template_kwargs=kwargs,
        family=family,
        vision=vision,
        placeholder_ids=list_placeholder_ids(read_config(directory)),
        max_plans=options.get("extend_plans", MAX_PLANS),
    )

    def prove_template() -> JsonObject:
        inputs = find_input_format(template, kwargs)
        stops = derive_stops(template, codec, inputs, kwargs, declared)
        if not stops.all:
            raise TokenizerError(
                "eos_token: neither the tokenizer nor the template has a token that ends a turn; "
                "set eos_token in tokenizer_config.json"
            )
        trial = make_renderer(inputs=inputs, stops=stops, history="keep", injection="safe", proof=UNPROVEN)
        proof = prove(trial)
        if isinstance(vision, Vision):
            proof = replace(proof, images=prove_images(trial, vision))
        return {"stops": msgspec.to_builtins(stops), "proof": proof.to_json()}

    found = cache.read(key)
    if found is None:
        found = run_confined(prove_template)
        cache.write(key, found)
    proof, stops = msgspec.convert(found["proof"], Proof), msgspec.convert(found["stops"], Stops)
    return make_renderer(inputs=proof.inputs, stops=stops, history=history, injection=injection, proof=proof)


def _find_source(tokenizer: ChatTokenizer, chat_template: str | None) -> str:
    if chat_template is not None:
        if "{" not in chat_template and len(chat_template) < 4096 and Path(chat_template).is_file():
            return Path(chat_template).read_text(encoding="utf-8")
        if not chat_template.strip():
            raise TemplateError("chat_template: is empty")
        return chat_template
    own = tokenizer.chat_template
    if is_object(own):
        own = own.get("tool_use") or own.get("default")
    if not isinstance(own, str) or not own:
        raise TemplateError(
            "chat_template: the tokenizer has none; pass one as chat_template=… (or --template F.jinja)"
        )
    return own


def _load_tokenizer(model: str | Path, directory: Path) -> ChatTokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = cast("Any", AutoTokenizer).from_pretrained(str(directory), trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds; to the user they are one
        raise TokenizerError(f"model: no tokenizer could be loaded from {str(model)!r}: {one_line(error)}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise TokenizerError(f"model: {str(model)!r} has no fast tokenizer; convert it to a tokenizer.json first")
    return tokenizer


def _hash_tokenizer(directory: Path | None, tokenizer: ChatTokenizer) -> str:
    paths = [] if directory is None else [directory / name for name in TOKENIZER_FILES]
    files = [path for path in paths if path.is_file()]
    hashes = [sha256(path.read_bytes()).hexdigest() for path in files]
    if len(files) == 1:
        return f"sha256:{hashes[0]}"
    listed = "\n".join(f"{path.name} {digest}" for path, digest in zip(files, hashes, strict=True))
    return "sha256:" + sha256((listed or tokenizer.backend_tokenizer.to_str()).encode()).hexdigest()
