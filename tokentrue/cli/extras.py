"""Which optional extra of the package brings a library that a command needs."""

from __future__ import annotations

EXTRAS: dict[str, frozenset[str]] = {
    "gateway": frozenset(
        {
            "aiohttp",
            "httptools",
            "jinja2",
            "prometheus_client",
            "regex",
            "starlette",
            "tokenizers",
            "transformers",
            "uvicorn",
            "uvloop",
        }
    ),
    "engine": frozenset({"torch"}),
    "train": frozenset({"matplotlib", "openai", "tensorboard"}),
    "ray": frozenset({"ray"}),
    "postgres": frozenset({"psycopg"}),
    "otel": frozenset({"opentelemetry"}),
}


def extra_with(module: str | None) -> str | None:
    """The extra that installs `module`, which could not be imported; None where it is no library of ours to name."""
    top = (module or "").split(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if top in modules), None)
