"""The pixels of images, checked against the record, and what a model's forward takes for them."""

from tokentrue.pixels.inputs import ReadImage, check_runs, find_images, plain_inputs
from tokentrue.pixels.reader import PixelReader, load_processor, processor_identity

__all__ = [
    "PixelReader",
    "ReadImage",
    "check_runs",
    "find_images",
    "load_processor",
    "plain_inputs",
    "processor_identity",
]
