"""ATIF, Harbor's trajectory format: a session with token ids and log-probabilities, and its comparison with the account
that the harness gives of the same run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any, NamedTuple, cast

from tokentrue.conversation.match_keys import text_of
from tokentrue.json_types import JsonMapping, JsonObject
from tokentrue.plain_json import digest, loads
from tokentrue.sessions.tree import Node, Tree

FOLLOWS = "ATIF-v1.7"
METRICS = ("prompt_tokens", "completion_tokens", "prompt_token_ids", "completion_token_ids", "logprobs")


def trajectory_from_tree(tree: Tree, session: str) -> JsonObject:
    """The longest branch; the others are embedded, with the turns that they share as copied context."""
    followed = {each for node in tree.in_order() for each in tree.predecessors(node)}
    leaves = [node for node in tree.in_order() if node.id not in followed]
    leaves.sort(key=lambda leaf: (-len(tree.path(leaf)), leaf.seq))
    seen: set[str] = set()
    agent: JsonObject = {"name": "tokentrue", "version": "1"}
    first, *others = [
        {
            "schema_version": FOLLOWS,
            "session_id": session,
            "trajectory_id": leaf.id,
            "agent": agent,
            "steps": [{"step_id": at, **step} for at, step in enumerate(_steps(tree, leaf, seen), 1)],
        }
        for leaf in leaves
    ]
    return {**first, "subagent_trajectories": others} if others else first


def _steps(tree: Tree, leaf: Node, seen: set[str]) -> list[JsonObject]:
    steps: list[JsonObject] = []
    for node in tree.path(leaf):
        for message in tree.given_messages(node):
            role, text = message["role"], text_of(message.get("content"))
            calls = [call["tool_call_id"] for call in steps[-1].get("tool_calls", ())] if steps else []
            if role == "tool" and steps:
                result: JsonObject = {"content": text}
                if message.get("tool_call_id") in calls:
                    result["source_call_id"] = message["tool_call_id"]
                steps[-1].setdefault("observation", {"results": []})["results"].append(result)
            elif role == "assistant":
                steps.append({**_agent_step(message), "is_copied_context": True})
            else:
                steps.append({"source": "user" if role == "user" else "system", "message": text})
        step = _agent_step(node.served)
        if node.id in seen:
            step["is_copied_context"] = True
        else:
            ids = list(tree.prompt_ids(node)), list(node.sampled_ids)
            step["metrics"] = dict(zip(METRICS, (len(ids[0]), len(ids[1]), *ids, list(node.logprobs)), strict=True))
            versions = [[span.start, span.end, span.version] for span in node.versions]
            step["metrics"]["extra"] = {"node": node.id, "policy_versions": versions}
        seen.add(node.id)
        steps.append({**step, **({"model_name": node.model} if node.model else {})})
    return steps


def _agent_step(message: JsonMapping) -> JsonObject:
    step: JsonObject = {"source": "agent", "message": text_of(message.get("content"))}
    if message.get("reasoning_content"):
        step["reasoning_content"] = text_of(message["reasoning_content"])
    if message.get("tool_calls"):
        step["tool_calls"] = [
            {"tool_call_id": call["id"], "function_name": call["function"]["name"], "arguments": _arguments(call)}
            for call in message["tool_calls"]
        ]
    return step


def _arguments(call: JsonMapping) -> JsonObject:
    try:
        found: Any = loads(call["function"]["arguments"].encode())
    except ValueError:
        found = None
    return cast("JsonObject", found) if isinstance(found, dict) else {}


def compare_trajectories(recorded: JsonMapping, told: JsonMapping) -> list[str]:
    """What the gateway recorded of the longest branch against what the harness says that it sent and got."""
    ours, theirs = list(_events(recorded)), list(_events(told))
    if not any(event.who == "system" for event in theirs):  # some harnesses leave it out
        ours = [event for event in ours if event.who != "system"]
    while theirs and theirs[-1].who != "agent":  # what no turn followed was never sent
        theirs.pop()
    keys = [[(event.who, digest(event.what)) for event in events] for events in (ours, theirs)]
    found: list[str] = []
    for tag, a, b, c, d in SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        for mine, other in zip_longest(ours[a:b], theirs[c:d]):
            if other is None:
                found.append(f"recorded step {mine.step}: the harness tells of no such {mine}")
            elif mine is None:
                found.append(f"told step {other.step}: the gateway recorded no such {other}")
            elif tag == "replace":
                found.append(f"recorded step {mine.step}: recorded {mine}, told {other}")
            else:
                found += [f"recorded step {mine.step}: {what}" for what in _differences(mine.metrics, other.metrics)]
    return found


class Event(NamedTuple):
    """A message that was sent (`system`, `given`) or sampled (`agent`)."""

    who: str
    what: Sequence[Any]
    step: int
    metrics: JsonMapping

    def __str__(self) -> str:
        return f"{self.who} message {self.what!r:.160}"


def _events(trajectory: JsonMapping) -> Iterator[Event]:
    for step in trajectory["steps"]:
        number, calls = step["step_id"], step.get("tool_calls") or ()
        if not step.get("is_copied_context") and step.get("llm_call_count") != 0:
            who = step["source"] if step["source"] != "user" else "given"
            made = [[call["function_name"], call["arguments"]] for call in calls]
            yield Event(who, [text_of(step["message"]).strip(), *made], number, step.get("metrics") or {})
        for result in (step.get("observation") or {}).get("results", ()):
            # Harbor's converters tell later user messages as results, too.
            yield Event("given", [text_of(result.get("content")).strip()], number, {})


def _differences(mine: JsonMapping, other: JsonMapping) -> Iterator[str]:
    for name in METRICS:
        if other.get(name) and other[name] != mine.get(name):
            yield f"{name}: recorded {mine.get(name)!r:.60}, told {other[name]!r:.60}"
