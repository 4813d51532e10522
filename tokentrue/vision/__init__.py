"""What an image is in a model's prompt: vision families, counts, identities of image processors."""

from tokentrue.vision.families import (
    FAMILIES,
    GemmaVision,
    QwenVision,
    Vision,
    identify_processor,
    list_placeholder_ids,
    load_vision,
    read_config,
    resolve_settings,
)

__all__ = [
    "FAMILIES",
    "GemmaVision",
    "QwenVision",
    "Vision",
    "identify_processor",
    "list_placeholder_ids",
    "load_vision",
    "read_config",
    "resolve_settings",
]
