"""The data API: one JSON shape per view, the same for every source, for the live page and for the export."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import pairwise
from typing import Any, cast
from urllib.parse import urlencode

from tokentrue.client import Client
from tokentrue.errors import ConfigError, GatewayError, InputError, SessionNotFound
from tokentrue.images import find_media_type
from tokentrue.json_types import JsonObject
from tokentrue.samples.recorded_turns import read_record
from tokentrue.samples.shape import encode_bytes
from tokentrue.samples.trainer_logprobs import TrainerLogprobs
from tokentrue.samples.trainer_rows import find_ranges
from tokentrue.types import Ids
from tokentrue.viewer.blocks import cut_blocks, messages_from_tokens
from tokentrue.viewer.breaks import breaks_to_json
from tokentrue.viewer.plots import compute_advantages, plots_to_json
from tokentrue.viewer.records import Branch, RecordSource, SessionSummary, SessionView, ViewRenderer, check_names

PAGE = 500
NUMBERS = ("offset", "limit")
VIEWS: Mapping[str, tuple[str, ...]] = {  # the arguments of each
    "index": NUMBERS,
    "search": ("text", "offset"),
    "session": ("session",),
    "branch": ("session", "sample"),
    "breaks": ("session", "sample"),
    "image": ("session", "sha256"),
    "group": ("group",),
    "mismatch": (),
}
STRIP = 1000  # points of a rollout's strip in the group view
SEARCH_S, MATCHES, AROUND = 1.5, 50, 60  # of one search request; messages, and characters beside the text
TIMEOUT_S = 60.0  # of one call to a gateway
FRESH_S = 2.0  # seconds for which a live source's advantages are cached
TEXT = 2000  # characters of a message in the group view
NO_MODEL = "this needs the model's tokenizer and chat template: start the viewer with --model DIR"
NO_TRAINER = "no trainer log-probabilities: view a store or a samples file with --trainer-logprobs FILE"


class ViewerData:
    def __init__(
        self,
        source: RecordSource,
        *,
        renderer: ViewRenderer | None = None,
        trainer: Mapping[str, TrainerLogprobs] | None = None,
    ) -> None:
        self.source, self._renderer, self._trainer = source, renderer, dict(trainer or {})
        self._groups: dict[str, tuple[float, dict[str, float]]] = {}  # when they were computed, advantages by sample id

    def ask(self, view: str, /, **query: str) -> JsonObject:
        if view not in VIEWS:
            raise SessionNotFound(f"no such view; one of {', '.join(VIEWS)}")
        given: JsonObject = {}
        for name in VIEWS[view]:
            if name in NUMBERS:
                given |= {name: _whole(name, query[name])} if name in query else {}
            elif name not in query:
                raise InputError(f"{name}: missing")
            else:
                given[name] = query[name]
        return getattr(self, view)(**given)

    def index(self, *, offset: int = 0, limit: int = PAGE) -> JsonObject:
        rows, total = self.source.list_sessions(offset=offset, limit=min(limit, PAGE))
        return {
            "source": {
                "kind": self.source.kind,
                "name": self.source.name,
                "live": self.source.live,
                "active": self.source.is_active(),
            },
            "has_text": self._renderer is not None,
            "has_trainer": bool(self._trainer),
            "has_report": False,
            "sessions": [_row(row) for row in rows],
            "total": total,
        }

    def search(self, text: str, *, offset: int = 0) -> JsonObject:
        """From `offset` on, as far as one request may take; `next` is where the following one starts."""
        wanted, deadline = text.casefold(), time.monotonic() + SEARCH_S
        rows, total = self.source.list_sessions(offset=offset, limit=PAGE)
        found: list[JsonObject] = []
        done = 0
        for row in rows:
            if time.monotonic() > deadline or len(found) >= MATCHES:
                break
            done += 1
            with suppress(SessionNotFound):  # purged since it was listed
                branches = self.source.load_session(row.session_id).branches if wanted else ()
                found += filter(None, (self._match(branch, wanted) for branch in branches[:1]))
        at = offset + done
        return {"matches": found, "searched": at, "total": total, "next": at if at < total and done else None}

    def session(self, session: str) -> JsonObject:
        view = self.source.load_session(session)
        advantages = self._advantages(view)
        heads = [_head(branch, advantages.get(branch.sample.sample_id)) for branch in view.branches]
        return {"session": _row(view.summary), "metadata": view.metadata, "nodes": list(view.nodes), "branches": heads}

    def branch(self, session: str, sample: str) -> JsonObject:
        view, branch = self._find(session, sample)
        shown, entropy = branch.sample, branch.entropy
        trainer = self._trainer.get(sample)
        if trainer is not None:
            trainer.check(shown)
            entropy = entropy if trainer.entropy is None else trainer.entropy
        return {
            **_head(branch, self._advantages(view).get(sample)),
            "session_id": shown.session_id,
            "group": shown.group,
            "token_ids": list(shown.token_ids),
            "rollout_logprobs": list(shown.rollout_logprobs),
            "trainer_logprobs": None if trainer is None else list(trainer.logprobs),
            "entropy": None if entropy is None else list(entropy),
            "untrained": find_ranges([not mask for mask in shown.loss_mask]),
            "spans": [
                [s.start, s.end, s.kind, s.role, s.turn, s.policy_version, int(s.trainable), s.why] for s in shown.spans
            ],
            "images": [[run.start, run.count, run.sha256, list(run.grid)] for run in shown.images],
            "inserted": self._inserted(branch),
            "blocks": self._blocks(branch),
            "malformed_calls": [
                {"turn": call.turn, "status": call.status} for call in read_record(shown).malformed_calls
            ],
            "pieces": self._pieces(shown.token_ids),
            "certificate": {name: getattr(shown.certificate, name) for name in ("chain", "template", "tokenizer")},
        }

    def breaks(self, session: str, sample: str) -> JsonObject:
        if self._renderer is None:
            raise ConfigError(NO_MODEL)
        _, branch = self._find(session, sample)
        found, ids = breaks_to_json(branch, self._renderer), list(branch.sample.token_ids)
        return {
            **found,
            "sample_id": sample,
            "token_ids": ids,
            "rollout_logprobs": list(branch.sample.rollout_logprobs),
            "pieces": self._pieces([*ids, *found["other_ids"]]),
        }

    def image(self, session: str, sha256: str) -> JsonObject:
        data = self.source.load_image(session, sha256)
        return {"url": f"data:{find_media_type(data)};base64,{encode_bytes(data)}"}

    def group(self, group: str) -> JsonObject:
        views = self.source.load_group(group)
        if not views:
            raise SessionNotFound(f"no session of group {group!r}")
        branches = [branch for view in views for branch in view.branches if branch.abandoned is None]
        advantages = compute_advantages([branch.sample for branch in branches])
        totals = {name: sum(getattr(view.summary, name) for view in views) for name in ("sampled", "trained")}
        return {"group": group, **totals, "rollouts": [self._rollout(branch, advantages) for branch in branches]}

    def mismatch(self) -> JsonObject:
        if not self._trainer:
            raise ConfigError(NO_TRAINER)
        summaries: list[SessionSummary] = []
        while more := self.source.list_sessions(offset=len(summaries), limit=PAGE)[0]:
            summaries += more
        rows: list[Any] = []
        for summary in summaries:
            view = self.source.load_session(summary.session_id)
            advantages = self._advantages(view)
            for sample in (branch.sample for branch in view.branches):
                trainer = self._trainer.get(sample.sample_id)
                if trainer is not None:
                    trainer.check(sample)
                    advantage = advantages.get(sample.sample_id)
                    rows.append((sample.rollout_logprobs, trainer.logprobs, sample.loss_mask, advantage))
        return {"samples": len(rows), **plots_to_json(rows)}

    def _match(self, branch: Branch, wanted: str) -> JsonObject | None:
        for block in self._blocks(branch):
            message = cast("JsonObject", block.get("message") or {})
            calls: list[JsonObject] = message.get("calls") or []
            texts = [message.get("reasoning"), message.get("content")]
            text = " ".join(filter(None, [*texts, *(f"{call['name']}({call['arguments']})" for call in calls)]))
            at = text.casefold().find(wanted)
            if at >= 0:
                shown = " ".join(text[max(0, at - AROUND) : at + len(wanted) + AROUND].split())
                names = {"session_id": branch.sample.session_id, "sample_id": branch.sample.sample_id}
                return {**names, "turn": block["turn"], "role": block["role"], "text": shown}
        return None

    def _find(self, session_id: str, sample_id: str) -> tuple[SessionView, Branch]:
        view = self.source.load_session(session_id)
        for branch in view.branches:
            if branch.sample.sample_id == sample_id:
                return view, branch
        raise SessionNotFound(f"session {session_id!r} has no sample {sample_id!r}")

    def _advantages(self, view: SessionView) -> dict[str, float]:
        group = view.summary.group
        if group is None:
            return _advantages([view])
        known = self._groups.get(group)
        if known is None or (self.source.live and time.monotonic() - known[0] > FRESH_S):
            known = self._groups[group] = (time.monotonic(), _advantages(self.source.load_group(group)))
        return known[1]

    def _pieces(self, ids: Ids) -> dict[str, list[str]]:
        if self._renderer is None:
            return {}
        spelling: Mapping[int, bytes] = self._renderer.codec.spelling
        raw = {str(token): spelling[token] for token in sorted(set(ids))}
        return {token: [text.decode("utf-8", "replace"), text.hex()] for token, text in raw.items()}

    def _blocks(self, branch: Branch) -> list[JsonObject]:
        turns = branch.turns
        if turns is None and self._renderer is not None:
            turns = messages_from_tokens(branch, self._renderer)
        return cut_blocks(branch, turns)

    def _inserted(self, branch: Branch) -> list[tuple[int, int]]:
        """As the store recorded them, else generation prompts and special tokens."""
        if branch.inserted is not None:
            return list(branch.inserted)
        ids = branch.sample.token_ids
        marks = [0] * len(ids)
        special: frozenset[int] = frozenset() if self._renderer is None else self._renderer.structure.special
        for span in branch.sample.spans:
            if span.kind == "given":
                own = span.role in {"assistant", "structure"}
                marks[span.start : span.end] = [int(own or token in special) for token in ids[span.start : span.end]]
        return find_ranges(marks)

    def _rollout(self, branch: Branch, advantages: Mapping[str, float]) -> JsonObject:
        sample = branch.sample
        messages = [block["message"] for block in self._blocks(branch) if "message" in block]
        known = [value for value in sample.rollout_logprobs if value is not None]
        edges = [len(known) * n // STRIP for n in range(STRIP + 1)]
        return {
            **_head(branch, advantages.get(sample.sample_id)),
            "session_id": sample.session_id,
            "mean_logprob": sum(known) / len(known) if known else None,
            # each point shows the least likely of its tokens
            "strip": known if len(known) <= STRIP else [min(known[a:b]) for a, b in pairwise(edges)],
            "messages": [{**message, "content": message["content"][:TEXT]} for message in messages],
        }


class GatewayData:
    def __init__(self, url: str, *, key: str | None) -> None:
        address = url.rstrip("/").removesuffix("/v1").removesuffix("/view")
        self.name, self._client = address.partition("://")[2], Client(address, key, timeout_s=TIMEOUT_S)
        self.close = self._client.close
        try:
            self.ask("index", limit="1")
        except (ConfigError, GatewayError) as error:  # a wrong address or key is a start-up error
            self.close()
            raise ConfigError(str(error)) from error

    def ask(self, view: str, /, **query: str) -> JsonObject:
        if view == "mismatch":
            raise ConfigError(NO_TRAINER)
        return self._client.call("GET", f"/view/data/{view}?{urlencode(query)}")


def _whole(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise InputError(f"{name}: must be a whole number from 0 up")
    return int(text)


def _advantages(views: Sequence[SessionView]) -> dict[str, float]:
    return compute_advantages([branch.sample for view in views for branch in view.branches if branch.abandoned is None])


def _row(summary: SessionSummary) -> JsonObject:
    check_names(summary)
    return {each.name: getattr(summary, each.name) for each in fields(summary)}


def _head(branch: Branch, advantage: float | None) -> JsonObject:
    sample = branch.sample
    check_names(sample)
    return {
        "sample_id": sample.sample_id,
        "leaf": branch.leaf,
        "tokens": len(sample.token_ids),
        "sampled": sum(value is not None for value in sample.rollout_logprobs),
        "trained": sum(sample.loss_mask),
        "turns": 1 + max((span.turn for span in sample.spans), default=-1),
        "reward": sample.reward,
        "advantage": advantage,
        "finish_reason": sample.finish_reason,
        "abandoned": branch.abandoned,
        "versions": sorted({span.policy_version for span in sample.spans if span.policy_version is not None}),
    }
