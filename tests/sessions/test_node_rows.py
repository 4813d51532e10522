"""Every field of a node is in its row: one that the row forgets would be gone after a restart."""

from __future__ import annotations

from array import array
from dataclasses import MISSING, fields

from tokentrue.ids import TokenIds
from tokentrue.routing_replay import RoutedExperts, SamplingMask
from tokentrue.sessions.journal.rows import node_from_row, row_from_node
from tokentrue.sessions.tree import Node, ServedRef
from tokentrue.types import Attempt, Finish, ImageRun, PromptSpan, Sampling, Status, VersionSpan

NODE = Node(
    id="b",
    seq=4,
    started=3,
    parent="a",
    given=({"role": "user", "content": "hi"}, ServedRef("c")),
    given_ids=TokenIds([1, 2, 3]),
    given_spans=(PromptSpan(start=0, end=2, role="user", message=0), PromptSpan(start=2, end=3, role="assistant")),
    sampled_ids=TokenIds([7, 8]),
    logprobs=array("d", [-0.25, -1e-300]),
    versions=(VersionSpan(start=0, end=1, version=2), VersionSpan(start=1, end=2, version=3)),
    finish=Finish.LENGTH,
    served={"role": "assistant", "content": "7"},
    chain=b"\1" * 32,
    prompt_length=11,
    prompt_digest=b"\2" * 32,
    stopped_by="###",
    attempts=(Attempt(status=Status.INVALID_JSON, raw="{", start=0, end=1, name="f", arguments={"x": 1}, detail="d"),),
    dialect="google",
    model="gemini-flash",
    projection="arguments",
    edge_reason="retry",
    detail="of node a",
    replaced=({"role": "system", "content": "be brief"},),
    origin="c",
    outcome="disconnected",
    tools=[{"type": "function", "function": {"name": "f"}}],
    template_kwargs={"enable_thinking": False},
    sampling=Sampling(temperature=0.5, stop=("###",), stop_token_ids=(5,), max_tokens=9, seed=1),
    request_key="k",
    joined_keys=("l", "m"),
    request_digest="sha256:1",
    choice=1,
    created=12.5,
    routed_experts=RoutedExperts(shape=(2, 1, 2), data=b"\0\1" * 4, start=10, weights=b"\0\0\0\1" * 4),
    sampling_mask=SamplingMask.from_rows([[7, 9], [8]]),
    top_logprobs=({7: -0.25, 9: -2.0}, {8: -1e-300}),
    fingerprint="fp",
    images=(ImageRun(sha256="ab" * 32, start=1, count=2, grid=(1, 2, 4), processor="P pil"),),
)


def test_every_field_of_a_node_comes_back_from_its_row() -> None:
    for field in fields(Node):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        assert getattr(NODE, field.name) != default, f"give NODE a value of {field.name} that is not its default"
    reread = node_from_row(row_from_node(NODE, None), None)
    for field in fields(Node):
        assert getattr(reread, field.name) == getattr(NODE, field.name), field.name
