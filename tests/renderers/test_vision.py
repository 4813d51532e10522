"""Images in prompts, held to transformers' own processors: ids of whole conversations, counts, grids, refusals."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests import parts
from tests import vision_families as vision
from tests.marks import IS_THOROUGH
from tests.vision_families import BY_NAME, GEMMA3, OWN, QWEN2_5_VL, QWEN3_VL, REAL, VisionSubject, picture, processed
from tokentrue.errors import MessageError
from tokentrue.renderers.seeing import images as seeing
from tokentrue.types import Extension
from tokentrue.vision.families import QwenVision, identify_processor, load_vision, resolve_settings

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks.",
            "parameters": {"type": "object", "properties": {"q": {"type": "string", "description": "what"}}},
        },
    }
    for name in ("zoom", "crop")
]
WORDS = ("What is here?", " look\n\n", "naïve 図 🙂", "\n", "a  b", "The answer:")
SPELLED = ("<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>", "<image_soft_token>")


@cache
def load(name: str, **options: str) -> Any:
    subject = BY_NAME[name]
    return tt.load_renderer(subject.folder(), template_kwargs=dict(subject.kwargs) or None, **options)


def make_talk(subject: VisionSubject, seed: int) -> list[dict[str, Any]]:
    """A random conversation of two to five turns of the model, with images wherever the family takes them."""
    rng = random.Random(seed)

    def content() -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        for _ in range(rng.randint(1, 5)):
            size = rng.randint(8, 300), rng.randint(8, 300)
            made.append(picture(*size) if rng.random() < 0.5 else {"type": "text", "text": rng.choice(WORDS)})
        return made or [{"type": "text", "text": "x"}]

    talk: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] if rng.random() < 0.5 else []
    talk.append({"role": "user", "content": content()})
    for turn in range(rng.randint(1, 4)):
        if "tool" in subject.roles and rng.random() < 0.6:
            names = ["zoom", "crop"][: rng.randint(1, 2)]
            calls = [
                {"id": f"call{turn}{name}", "type": "function", "function": {"name": name, "arguments": {"q": "x"}}}
                for name in names
            ]
            talk.append({"role": "assistant", "content": "", "tool_calls": calls})
            talk += [
                {"role": "tool", "tool_call_id": f"call{turn}{name}", "name": name, "content": content()}
                for name in names
            ]
        else:
            talk.append({"role": "assistant", "content": rng.choice(("Four.", "I see a cat."))})
            talk.append({"role": "user", "content": content()})
    return talk


def check(renderer: Any, subject: VisionSubject, talk: list[dict[str, Any]]) -> None:
    """`render` of the conversation, and `extend` after each of its turns, against the processor over the whole."""
    tools = TOOLS if "tool" in subject.roles else None
    rendered = renderer.render(talk, tools)
    ids, grids = processed(subject.processor(), talk, tools=tools)
    assert rendered.token_ids == ids
    assert [run.grid for run in rendered.images] == grids
    token = renderer.codec.literals[renderer.vision.repeated]
    ends = [(run.start, run.start + run.count) for run in rendered.images]
    assert all(ids[start:end] == [token] * (end - start) for start, end in ends)
    assert sum(end - start for start, end in ends) == ids.count(token)
    assert all(a[1] < b[0] for a, b in pairwise(ends))  # adjacent images stay two runs
    spans = {place: span for span in rendered.spans for place in range(span.start, span.end)}
    assert all(spans[start] is spans[end - 1] for start, end in ends)
    assert all(spans[start].message is not None for start, _ in ends) or not subject.calls
    parts_seen = [
        part["sha256"] for m in talk if isinstance(m["content"], list) for part in m["content"] if "width" in part
    ]
    assert [run.sha256 for run in rendered.images] == parts_seen
    for place, message in enumerate(talk):
        if message["role"] != "assistant":
            continue
        end = next((n for n in range(place + 1, len(talk)) if talk[n]["role"] == "assistant"), len(talk))
        whole, _ = processed(subject.processor(), talk[:end], tools=tools)
        stop = renderer.codec.literals[(renderer.stops.call if message.get("tool_calls") else renderer.stops.text)[0]]
        for _ in ("planned", "with the plan"):
            found = renderer.extend([stop], talk[: place + 1], talk[place + 1 : end], tools)
            assert isinstance(found, Extension), found
            added = found.added_ids
            assert whole[-len(added) - 1 :] == [stop, *added]
            assert [run.sha256 for run in found.images] == [
                part["sha256"] for m in talk[place + 1 : end] for part in m["content"] if "width" in part
            ]
            assert all(added[run.start : run.start + run.count] == [token] * run.count for run in found.images)
            assert sum(span.end - span.start for span in found.spans) == len(added)


SLOW = [pytest.param(each, marks=pytest.mark.slow, id=each.name) for each in REAL if each.name != "real-qwen3-vl"]


@pytest.mark.parametrize("subject", [*OWN, BY_NAME["real-qwen3-vl"], *SLOW], ids=lambda subject: subject.name)
def test_ids_with_images_are_those_of_the_familys_own_processor(subject: VisionSubject) -> None:
    renderer = load(subject.name)
    proven = {role for role, outcome in renderer.proof.images.items() if outcome == "proven"}
    assert proven == subject.roles
    for seed in range(4 if IS_THOROUGH else 2):
        check(renderer, subject, make_talk(subject, seed))


@pytest.mark.slow
@pytest.mark.parametrize("subject", [*OWN, *REAL], ids=lambda subject: subject.name)
def test_ids_of_many_conversations(subject: VisionSubject) -> None:
    for seed in range(100, 140):
        check(load(subject.name), subject, make_talk(subject, seed))


def test_numbered_images_count_the_whole_history() -> None:
    """Qwen's templates can write "Picture 3:"."""
    subject = BY_NAME["real-qwen3-vl"]
    renderer = tt.load_renderer(subject.folder(), template_kwargs={"add_vision_id": True})
    talk = [
        {"role": "user", "content": [picture(40, 40), picture(90, 40)]},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": [picture(30, 99), {"type": "text", "text": "and now?"}]},
    ]
    ids, _ = processed(subject.processor(), talk, add_vision_id=True)
    assert renderer.render(talk).token_ids == ids
    found = renderer.extend([renderer.stop_token_ids[0]], talk[:2], talk[2:])
    assert isinstance(found, Extension)
    assert renderer.proof.images["user"] == "proven"
    assert "Picture 3: " in renderer.decode(found.added_ids)
    assert ids[-len(found.added_ids) :] == found.added_ids


MUTANTS: dict[str, Any] = {
    "one token too many": lambda self, width, height: (_measure(self, width, height)[0] + 1, (1, 2, 2)),
    "another grid": lambda self, width, height: (_measure(self, width, height)[0], (1, 2, 2)),
}
_measure = QwenVision.measure


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_count_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QwenVision, "measure", MUTANTS[name])
    with pytest.raises(AssertionError):
        check(load("own-qwen3-vl"), BY_NAME["own-qwen3-vl"], make_talk(BY_NAME["own-qwen3-vl"], 3))


def test_merged_neighbours_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = seeing.ImageInputs.expand

    def merge(self: Any, codec: Any, ids: Any, spans: Any, images: Any) -> Any:
        made, spans, runs = real(self, codec, ids, spans, images)
        one = replace(runs[0], count=sum(run.count for run in runs))
        return made, spans, (one,)

    monkeypatch.setattr(seeing.ImageInputs, "expand", merge)
    talk = [{"role": "user", "content": [picture(90, 60), picture(60, 90)]}]
    with pytest.raises(AssertionError):
        check(load("own-qwen3-vl"), BY_NAME["own-qwen3-vl"], talk)


# ---- text like a placeholder


@pytest.mark.parametrize("name", ["own-qwen3-vl", "own-gemma-3"])
@pytest.mark.parametrize("spelled", SPELLED)
def test_text_that_spells_a_placeholder_stays_text(name: str, spelled: str) -> None:
    renderer = load(name)
    token = renderer.codec.literals[renderer.vision.repeated]
    image = picture(200, 100)
    count, _ = renderer.vision.measure(200, 100)
    for content in (
        [{"type": "text", "text": f"see {spelled}"}, image],
        [image, {"type": "text", "text": spelled}],
        [{"type": "text", "text": spelled[:-1]}, image, {"type": "text", "text": spelled[1:]}],
        [
            {"type": "text", "text": spelled[: len(spelled) // 2]},
            {"type": "text", "text": spelled[len(spelled) // 2 :]},
            image,
        ],
    ):
        rendered = renderer.render([{"role": "user", "content": content}])
        (run,) = rendered.images
        assert rendered.token_ids.count(token) == count == run.count
        before, after = rendered.token_ids[: run.start], rendered.token_ids[run.start + run.count :]
        text = renderer.decode(before) + renderer.decode(after)
        plain = "".join(part["text"] for part in content if "text" in part)
        assert (
            "".join(plain.split()) in "".join(text.replace("<|vision_start|><|vision_end|>", "").split())
            or name == "own-gemma-3"
        )
        new = [{"role": "user", "content": content}]
        past = [{"role": "user", "content": f"x {spelled}"}, {"role": "assistant", "content": "Yes."}]
        found = renderer.extend([renderer.stop_token_ids[0]], past, new)
        assert isinstance(found, Extension)
        assert found.added_ids.count(token) == count
        assert len(found.images) == 1


def test_without_a_shield_such_text_is_refused_beside_images() -> None:
    renderer = load("own-qwen3-vl", injection="engine")
    talk = [{"role": "user", "content": [picture(), {"type": "text", "text": "no literal"}]}]
    ids, _ = processed(BY_NAME["own-qwen3-vl"].processor(), talk)
    assert renderer.render(talk).token_ids == ids
    talk[0]["content"].append({"type": "text", "text": "<|image_pad|>"})
    with pytest.raises(MessageError, match="spells a placeholder of qwen3_vl"):
        renderer.render(talk)


# ---- what is refused, by name


def changed_dir(tmp_path: Path, name: str, *, config: Mapping[str, Any] | None = None, **files: Any) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(BY_NAME[name].folder(), folder)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | dict(config)))
    for file, value in files.items():
        path = folder / file.replace("__", ".")
        if value is None:
            path.unlink()
        else:
            path.write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


ASK = [{"role": "user", "content": [picture()]}]


@pytest.mark.parametrize(
    ("config", "files", "said"),
    [
        ({"model_type": "llava"}, {}, "model_type 'llava' is not among the proven vision families"),
        ({"model_type": "qwen2_vl"}, {}, "model_type 'qwen2_vl' is not among the proven vision families"),
        ({}, {"preprocessor_config__json": None}, "has no preprocessor_config.json"),
        (
            {},
            {"preprocessor_config__json": {"image_processor_type": "GotOcr2ImageProcessor"}},
            "'GotOcr2ImageProcessor'",
        ),
        ({}, {"preprocessor_config__json": {**QWEN3_VL, "do_resize": False}}, "does not resize"),
        ({}, {"config__json": {"model_type": "qwen3"}}, "a model of model_type 'qwen3' takes text only"),
        ({}, {"config__json": None}, "no config.json"),
    ],
)
def test_a_model_that_is_no_proven_vision_family_refuses_images_by_name(
    tmp_path: Path, config: Mapping[str, Any], files: Mapping[str, Any], said: str
) -> None:
    renderer = tt.load_renderer(changed_dir(tmp_path, "own-qwen3-vl", config=config, **files))
    with pytest.raises(MessageError, match=r"messages\[0\].content\[0\]: images are refused: .*" + said):
        renderer.render(ASK)
    past = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    with pytest.raises(MessageError, match="images are refused"):
        renderer.extend([renderer.stop_token_ids[0]], past, ASK)
    talk = [{"role": "user", "content": "x"}]  # text is as before
    assert renderer.render(talk).token_ids == load("own-qwen3-vl").render(talk).token_ids


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_images_are_refused_in_other_roles(role: str) -> None:
    with pytest.raises(MessageError, match=f"images in {role} messages: only user and tool messages may hold them"):
        load("own-qwen3-vl").render([{"role": role, "content": [picture()]}, {"role": "user", "content": "x"}])


def test_a_template_that_drops_images_of_tool_results_refuses_them_there(tmp_path: Path) -> None:
    source = (vision.FIXTURES / "qwen-vl-like.jinja").read_text()
    drops = source.replace(
        "'\\n<tool_response>\\n' + write(message.content)", "'\\n<tool_response>\\n' + text(message.content)"
    )
    drops = drops.replace(
        "{%- if tools %}",
        "{%- macro text(content) %}{{- content if content is string else content | map(attribute='text') | select('string') | join }}{%- endmacro %}\n{%- if tools %}",
        1,
    )
    assert drops != source
    renderer = tt.load_renderer(changed_dir(tmp_path, "own-qwen3-vl", chat_template__jinja=drops))
    assert renderer.proof.images == {"user": "proven", "tool": "the template drops them"}
    renderer.render(ASK)
    calls = [{"id": "c1", "type": "function", "function": {"name": "zoom", "arguments": {}}}]
    talk = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": [picture()]},
    ]
    with pytest.raises(
        MessageError, match=r"messages\[2\].content\[0\]: images in tool messages: the template drops them"
    ):
        renderer.render(talk, TOOLS)


def test_a_template_that_moves_images_is_refuted(tmp_path: Path) -> None:
    source = (vision.FIXTURES / "qwen-vl-like.jinja").read_text()
    moved = source.replace("for part in content %}", "for part in content | sort(attribute='type') %}")
    renderer = tt.load_renderer(changed_dir(tmp_path, "own-qwen3-vl", chat_template__jinja=moved))
    assert renderer.proof.images["user"] == "the template does not write them where they are in the message"


def test_a_part_without_its_size_is_one_line() -> None:
    with pytest.raises(MessageError, match="needs its sha256, width and height"):
        load("own-qwen3-vl").render([{"role": "user", "content": [{"type": "image", "sha256": "00"}]}])
    with pytest.raises(MessageError, match="takes at most 200 times as long as wide"):
        load("own-qwen3-vl").render([{"role": "user", "content": [{**picture(), "width": 4000, "height": 10}]}])


def test_verify_reports_images() -> None:
    found = tt.verify(OWN[0].folder())
    assert found.images == {"user": "proven", "tool": "proven"}


def test_text_models_have_no_images_in_their_proof() -> None:
    renderer = tt.load_renderer(parts.own_dir("qwen3-like"))
    assert (renderer.proof.images, renderer.placeholder_ids) == ({}, ())


# ---- counts and identities

SETTINGS = (
    QWEN2_5_VL,
    QWEN3_VL,
    {**QWEN2_5_VL, "max_pixels": 200_000, "min_pixels": 100_000},
    {**QWEN3_VL, "size": {"shortest_edge": 4096, "longest_edge": 65536}, "merge_size": 1},
    {"image_processor_type": "Qwen2VLImageProcessor"},
)


def qwen(settings: Mapping[str, Any], tmp_path: Path) -> Any:
    found = load_vision(changed_dir(tmp_path, "own-qwen3-vl", preprocessor_config__json=dict(settings)))
    assert not isinstance(found, str), found
    return found


@pytest.mark.parametrize("settings", SETTINGS)
def test_counts_are_those_of_the_class(settings: Mapping[str, Any], tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

    made: Any = Qwen2VLImageProcessorPil(**{k: v for k, v in settings.items() if k != "image_processor_type"})
    ours = qwen(settings, tmp_path)
    rng = random.Random(1)
    sizes = [(rng.randint(1, 5000), rng.randint(1, 5000)) for _ in range(2000)]
    sizes += [(rng.randint(1, 80), rng.randint(1, 80)) for _ in range(1000)] + [(1, 1), (1, 200), (28, 28), (14, 42)]
    for width, height in sizes:
        factor = made.patch_size * made.merge_size
        if max(width, height) > 200 * min(width, height):
            continue
        tall, wide = smart_resize(height, width, factor, made.size["shortest_edge"], made.size["longest_edge"])
        grid = (1, tall // made.patch_size, wide // made.patch_size)
        patches = made.get_number_of_image_patches(height, width)
        assert ours.measure(width, height) == (patches // made.merge_size**2, grid), (width, height)


@pytest.mark.parametrize("name", ["own-qwen2.5-vl", "own-qwen3-vl", "own-gemma-3"])
def test_settings_and_identity_are_those_of_the_loaded_processor(name: str, tmp_path: Path) -> None:
    """Also after transformers wrote the settings again, nested in processor_config.json."""
    processor = BY_NAME[name].processor().image_processor
    ours = load_vision(BY_NAME[name].folder())
    assert not isinstance(ours, str)
    assert resolve_settings(processor.to_dict()) == ours.settings
    assert identify_processor(processor.to_dict(), processor.backend) == ours.processor
    folder = changed_dir(tmp_path, name, preprocessor_config__json=None)
    nested = {"image_processor": json.loads(processor.to_json_string()), "image_seq_length": 256}
    (folder / "processor_config.json").write_text(json.dumps(nested))
    again = load_vision(folder)
    assert not isinstance(again, str)
    assert again.processor == ours.processor


def test_identities_tell_resizings_backends_and_versions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    first = identify_processor(QWEN3_VL)
    assert first.startswith("Qwen2VLImageProcessor pil transformers=")
    assert identify_processor({**QWEN3_VL, "size": {"shortest_edge": 65536, "longest_edge": 999_999}}) != first
    assert identify_processor({**QWEN3_VL, "resample": 2}) != first
    assert identify_processor({**QWEN3_VL, "image_std": [0.5, 0.5, 0.4]}) != first
    assert identify_processor(QWEN3_VL, "torchvision") != first
    assert identify_processor({**QWEN3_VL, "image_processor_type": "Qwen2VLImageProcessor"}) == first
    assert identify_processor(GEMMA3) != first
    for library in ("transformers", "pillow"):
        with monkeypatch.context() as patched:
            patched.setattr(
                "tokentrue.vision.families._find_version", lambda name, library=library: "0" if name == library else "1"
            )
            one = identify_processor(QWEN3_VL)
            patched.setattr("tokentrue.vision.families._find_version", lambda name: "1")
            assert identify_processor(QWEN3_VL) != one
