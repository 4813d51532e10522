"""Image files of requests: their settings, checks and bytes. Needs the extra `images` (Pillow) only when used."""

from tokentrue.images.files import (
    EXTENSIONS,
    ImageFile,
    ImageSettings,
    check_image,
    find_media_type,
    hash_image,
    is_turned,
    open_image,
)
from tokentrue.images.urls import read_url

__all__ = [
    "EXTENSIONS",
    "ImageFile",
    "ImageSettings",
    "check_image",
    "find_media_type",
    "hash_image",
    "is_turned",
    "open_image",
    "read_url",
]
