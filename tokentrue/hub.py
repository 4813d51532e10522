"""Locates and loads a model: a directory, the name of the one that ships with the package, or a hub id."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokentrue.errors import ConfigError, did_you_mean

ANSWER_S = 5.0
SMALL_MODEL = Path(__file__).parent / "assets" / "calculator"  # ships with the package; `calculator` names it, too
SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")  # everything but weights
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)


def check_model(model: str | Path) -> None:
    """Raises if `model` is neither a hub id nor a directory with a tokenizer. Loads nothing."""
    if folder := find_directory(model):
        require_tokenizer(model, folder)


def require_tokenizer(model: str | Path, folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"model: directory {str(model)!r} has no tokenizer ({', '.join(TOKENIZER_FILES[:-2])}): is it a model's?"
        )


def load_causal_model(model: str | Path, *, dtype: str, **options: Any) -> Any:
    """To host memory, with the vision tower where transformers has no decoder without it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = type(load_config(model))
    sees = kind not in AutoModelForCausalLM._model_mapping and kind in AutoModelForImageTextToText._model_mapping
    return _load(AutoModelForImageTextToText if sees else AutoModelForCausalLM, model, dtype=dtype, **options)


def load_config(model: str | Path) -> Any:
    from transformers import AutoConfig

    return _load(AutoConfig, model)


def _load(kind: Any, model: str | Path, **options: Any) -> Any:
    located = locate_model(model)
    try:
        with _without_progress_bar(is_local=Path(located).is_dir()):
            return kind.from_pretrained(located, **options)
    except Exception as error:  # transformers raises many kinds of error; users see one
        raise ConfigError(f"model: cannot load {str(model)!r}: {one_line(error)}") from error


@contextmanager
def _without_progress_bar(*, is_local: bool) -> Generator[None]:
    from transformers.utils import logging

    hidden = is_local and logging.is_progress_bar_enabled()
    if hidden:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hidden:
            logging.enable_progress_bar()


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def locate_model(model: str | Path) -> str:
    """`model` itself, or the cached directory of a hub id while the hub is unreachable."""
    if folder := find_directory(model):
        return str(folder)
    reason = why_unreachable()
    return str(model) if reason is None else _download(str(model), reason)


def locate_small_files(model: str | Path) -> Path:
    if folder := find_directory(model):
        return folder
    return Path(_download(str(model), why_unreachable(), allow_patterns=list(SMALL_FILES)))


def find_directory(model: str | Path) -> Path | None:
    """None for a hub id. Raises if a `Path`, or a text that is not a hub id, is not a directory."""
    if Path(model).is_dir():
        return Path(model)
    if model == SMALL_MODEL.name:
        return SMALL_MODEL
    meant = did_you_mean(str(model), [SMALL_MODEL.name])
    if isinstance(model, Path) or meant or not is_hub_id(model):
        cure = meant or "; give a Hugging Face directory or a hub id such as Qwen/Qwen3-0.6B"
        raise ConfigError(f"model: there is no directory {str(model)!r}{cure}")
    return None


def _download(model: str, reason: str | None, **options: Any) -> str:
    """`reason`: why the hub is unreachable; None if it is reachable."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return str(snapshot_download(model, local_files_only=reason is not None, **options))
    except Exception as error:  # the library raises many kinds of error; users see one
        if reason is not None and isinstance(error, LocalEntryNotFoundError):
            where = f"neither a directory here nor in the hub's cache, and the hub cannot be reached ({reason})"
            cure = f"give a model's directory, or connect to {constants.ENDPOINT}"
            raise ConfigError(f"model: {model!r} is {where}; {cure}") from None
        raise ConfigError(f"model: cannot download {model!r}: {one_line(error)}") from error


def is_hub_id(model: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


def why_unreachable() -> str | None:
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    session: Any = get_session()
    try:
        session.head(constants.ENDPOINT, timeout=ANSWER_S)
    except (httpx.HTTPError, OSError) as error:  # OSError: versions of the library that use requests
        return str(error) or type(error).__name__
    return None
