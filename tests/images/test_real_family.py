"""A real family (Qwen3-VL) behind the gateway: the ids that the engine gets are those of transformers' processor."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import tokentrue as tt
from tests.gateway.inside import ask, new_session
from tests.images.double import Eyes, ask_about, image_part, picture
from tests.vision_families import BY_NAME
from tokentrue.gateway import Gateway, GatewayConfig
from tokentrue.images import hash_image
from tokentrue.samples import audit, sample_from_json
from tokentrue.sessions.journal import Journal
from tokentrue.vision import families

SUBJECT = BY_NAME["own-qwen3-vl"]
ONE, TWO = picture(100, 70), picture(64, 200, "JPEG")


def turned() -> bytes:
    """Lies on its side, with the orientation in EXIF."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.new("RGB", (300, 100), (3, 4, 5)).save(file, "JPEG", exif=exif)
    return file.getvalue()


async def test_the_record_tells_processors_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One picture, one conversation, equal ids and equal grids: another resizing, resampling or library version."""

    async def record(folder: Path) -> Any:
        renderer: Any = tt.load_renderer(folder, template_kwargs=dict(SUBJECT.kwargs) or None)
        engine = Eyes()
        engine.ids = (*renderer.encode_sampled("A cat."), renderer.stop_token_ids[0])
        session = tt.Session(renderer=renderer, provider=engine, session_id="s")
        await session.chat([ask_about(image_part(ONE))])
        return session.samples()[0]

    def change(name: str, **settings: Any) -> Path:
        folder = tmp_path / name
        shutil.copytree(SUBJECT.folder(), folder)
        path = folder / "preprocessor_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
        return folder

    found, first = families._find_version, await record(change("first"))
    assert (await record(change("same"))).certificate.chain == first.certificate.chain
    others = [
        await record(change("resized", size={"shortest_edge": 65536, "longest_edge": 1048576})),
        await record(change("resampled", resample=2)),
    ]
    for library in ("transformers", "pillow"):
        with monkeypatch.context() as patched:
            patched.setattr(families, "_find_version", lambda name, of=library: "0" if name == of else found(name))
            others.append(await record(change(library)))
    known = {first.images[0].processor: first.certificate.chain}
    for other in others:
        assert list(other.token_ids) == list(first.token_ids) and other.images[0].grid == first.images[0].grid
        known[other.images[0].processor] = other.certificate.chain
    assert len(known) == len(set(known.values())) == 5


async def test_a_conversation_with_three_pictures() -> None:
    renderer: Any = tt.load_renderer(SUBJECT.folder(), template_kwargs=dict(SUBJECT.kwargs) or None)
    engine, side = Eyes(), turned()
    engine.ids = (*renderer.encode_sampled("A cat."), renderer.stop_token_ids[0])
    app = Gateway(
        config=GatewayConfig(model="m", admin_key="boss"),
        renderer_for=lambda _: renderer,
        provider=engine,  # type: ignore[arg-type]
        journal=Journal("memory"),
    )
    session = await new_session(app)

    async def chat(messages: list[Any]) -> Any:
        body = json.dumps({"model": "m", "messages": messages}).encode()
        status, answer = await ask(app, "POST", "/v1/chat/completions", body, key=session["api_key"])
        assert status == 200, answer
        return json.loads(answer)["choices"][0]["message"]

    messages: list[Any] = [ask_about(image_part(ONE), image_part(TWO, "image/jpeg"))]
    for part in (image_part(side, "image/jpeg"), None):
        messages.append({"role": "assistant", "content": (await chat(messages))["content"]})
        messages.append(ask_about(*([part] if part else []), text="<|image_pad|> and now?" if part is None else "and?"))
    await chat(messages)
    # transformers' processor on the first two turns, with upright pictures.
    processor = SUBJECT.processor()
    upright = Image.new("RGB", (100, 300), (3, 4, 5))
    shown = [Image.open(io.BytesIO(ONE)), Image.open(io.BytesIO(TWO)), upright]
    plain = [
        {**m, "content": [{"type": "image"} if p["type"] == "image_url" else p for p in m["content"]]}
        if isinstance(m["content"], list)
        else m
        for m in messages[:3]
    ]
    text = processor.apply_chat_template(plain, add_generation_prompt=True, tokenize=False, **SUBJECT.kwargs)
    made = processor(text=[text], images=shown)
    assert list(engine.seen[1][0]) == list(made["input_ids"][0])
    assert [list(image.run.grid) for image in engine.seen[1][1]] == [
        list(map(int, row)) for row in made["image_grid_thw"]
    ]
    assert [image.data for image in engine.seen[2][1]] == [ONE, TWO, side]
    pad = renderer.codec.literals[renderer.vision.repeated]
    ids = list(engine.seen[2][0])
    assert ids.count(pad) == sum(image.run.count for image in engine.seen[2][1])  # text that spells it stays text
    _, body = await ask(app, "GET", f"/sessions/{session['session_id']}/samples")
    answer = json.loads(body)
    (sample,) = [sample_from_json(row) for row in answer["samples"]]
    assert audit([sample]).ok and answer["coverage"]["ratio"] == 1.0
    assert [run.sha256 for run in sample.images] == [hash_image(data) for data in (ONE, TWO, side)]
    assert [list(sample.token_ids)[run.start : run.start + run.count] for run in sample.images] == [
        [pad] * run.count for run in sample.images
    ]
    assert "Qwen" in sample.images[0].processor
    await app.close()
