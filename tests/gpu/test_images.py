"""Exact Qwen3-VL on the GPU, vision tower included."""

from __future__ import annotations

import tempfile
from pathlib import Path


def test_images_have_the_trainers_bits() -> None:
    """Prompts with images in one batch; the tower's weights change in the middle of the run."""
    from benchmarks import images

    with tempfile.TemporaryDirectory() as folder:
        images.save_model(Path(folder), quick=True)
        report = images.bits(folder, quick=True)
    found = dict(zip(report.columns, report.rows[0], strict=True))
    assert (found["sampled"], found["differing bits"]) == (6 * 12, 0)


def test_an_images_bits_do_not_depend_on_the_rows_beside_it() -> None:
    import torch

    from benchmarks import images
    from tokentrue.numerics import exact, score, see_rows
    from tokentrue.pixels import PixelReader

    with tempfile.TemporaryDirectory() as folder:
        images.save_model(Path(folder), quick=True)
        reader, model = PixelReader(folder), images.load(folder).eval()
        rows = [
            images.prompt(reader, [images.picture(seed, *size), *range(20, 60)])
            for seed, size in enumerate(((512, 512), (640, 427), (256, 1024)))
        ]

        def scores(*shown: int) -> torch.Tensor:
            chosen = [(torch.tensor(rows[i][0]), rows[i][1]) for i in shown]
            borders = torch.tensor([0, *(len(ids) for ids, _ in chosen)]).cumsum(0).to(model.device, torch.int32)
            ids = torch.cat([ids for ids, _ in chosen]).to(model.device)
            return score(model, ids, cu_seqlens=borders, images=see_rows(model, chosen, reader)).view(torch.int32)

        first = len(rows[0][0]) - 1
        with torch.no_grad(), exact(model):
            alone = scores(0)
            assert torch.equal(alone[:first], scores(0, 1, 2)[:first])
            assert torch.equal(alone[:first], scores(2, 0)[-first:])
            assert not torch.equal(alone[:first], scores(1)[:first])
