"""The tests bite: each mutation breaks the code on purpose, in a way that would cost tokens, and a test must fail."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from _pytest.outcomes import Failed

from tests.samples import test_audit
from tests.sessions import test_bit_rot
from tests.turn import test_matching, test_promise, test_turn
from tokentrue.conversation import reading
from tokentrue.errors import TokenTrueError
from tokentrue.ids import TokenIds
from tokentrue.sessions import matching, singleflight
from tokentrue.sessions import tree as trees
from tokentrue.sessions.journal import Journal, rows
from tokentrue.sessions.journal import journal as claims
from tokentrue.sessions.stages import commits, generation, prompts

assembling, auditing = (
    import_module(f"tokentrue.samples.{name}") for name in ("assemble", "audit")
)  # functions hide the modules
Patch = Callable[[pytest.MonkeyPatch], None]


def any_replay_fits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(matching, "find_changes", lambda served, replayed: ())


def results_without_their_call(patch: pytest.MonkeyPatch) -> None:
    real = reading.chain_key
    for module in (reading, matching):
        patch.setattr(module, "chain_key", lambda previous, key, reference: real(previous, key, None))
    patch.setattr(matching, "_restore", lambda *known: {**known[-2], "tool_call_id": "x"})


def oldest_sibling_first(patch: pytest.MonkeyPatch) -> None:
    real = matching._Search._choose
    patch.setattr(
        matching._Search,
        "_choose",
        lambda self, fits, **how: real(self, sorted(fits, key=lambda fit: fit[0].seq)[:1], **how),
    )


def nothing_is_given_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(assembling, "find_left_out", lambda tree, rewarded: {})


def hash_without_logprobs(patch: pytest.MonkeyPatch) -> None:
    real = trees.next_link
    for module in (trees, auditing):
        patch.setattr(
            module, "next_link", lambda previous, **parts: real(previous, **{**parts, "logprobs": array("d")})
        )


def seal_of_nothing(patch: pytest.MonkeyPatch) -> None:
    for module in (assembling, auditing):
        patch.setattr(module, "seal", lambda sample: "sha256:0")


def served_before_written(patch: pytest.MonkeyPatch) -> None:
    async def later(self: Any, *arguments: Any) -> None:
        return None

    patch.setattr(Journal, "append_nodes", later)


def prefix_decoded_and_encoded(patch: pytest.MonkeyPatch) -> None:
    """The recorded split is healed, as re-rendering would: the classic loss."""
    real = prompts._extend

    async def healed(resolution: Any, node: Any, chars: int, renderer: Any, *rest: Any) -> Any:
        made = await real(resolution, node, chars, renderer, *rest)
        text = renderer.decode(made.ids)
        ids = TokenIds(test_matching.encode(text, "own"))
        return prompts.Prompt(**{name: getattr(made, name) for name in made.__slots__} | {"ids": ids})

    patch.setattr(prompts, "_extend", healed)


def ids_not_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(matching, "_restore", lambda *known: known[-2])


def joins_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(singleflight.SingleFlight, "find", lambda self, identity: None)


def sources_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reading, "count_equal", lambda one, other: min(len(one), len(other)))


def what_was_sent_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        commits,
        "_sent_digest",
        lambda completion, prompt, tree: tree.hash_prompt(prompt.resolution.parent, prompt.given_ids).digest(),
    )


def a_failed_turn_leaves_nothing(patch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Any, outcome: str) -> None:
        return None

    patch.setattr(generation.Choice, "parse_partial", nothing)


def requests_are_named_loosely(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(matching.Conversation, "digest", property(lambda self: self.keys[-1]))


def an_old_object_may_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(claims.SessionClaim, "check", lambda self: None)


def any_version_is_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(generation, "_check_version", lambda version: None)


def given_messages_are_compared_loosely(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reading.ConversationMessage, "repeats", lambda self, recorded: True)


def tools_are_compared_loosely(patch: pytest.MonkeyPatch) -> None:
    async def has_same_tools(self: Any, node: Any) -> bool:
        return matching.tools_key(node.tools) == matching.tools_key(self._conversation.tools)

    patch.setattr(matching._Search, "_has_same_tools", has_same_tools)


def joining_a_cancelled_turn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(singleflight.SingleFlight, "remove", lambda self, turn: None)


def rows_are_not_compared_with_their_digest(patch: pytest.MonkeyPatch) -> None:
    for module in (claims, rows):
        patch.setattr(module, "row_digest", lambda values: b"")


MUTATIONS: list[tuple[Patch, Callable[[Path], Any]]] = [
    (any_replay_fits, lambda _: test_matching.test_an_edit_of_one_character_never_matches(1)),
    (results_without_their_call, lambda _: test_matching.test_swapped_tool_results_fork()),
    (
        oldest_sibling_first,
        lambda _: test_matching.test_siblings_that_differ_only_in_what_was_dropped_are_ambiguous_and_the_newest_wins(),
    ),
    (nothing_is_given_up, lambda _: test_matching.test_going_back_before_a_new_root_gives_up_what_followed_it()),
    (served_before_written, lambda path: test_turn.test_the_journal_has_a_turn_before_anyone_hears_of_it(path)),
    (prefix_decoded_and_encoded, lambda _: test_turn.test_prompts_are_the_recorded_ids_and_nothing_else()),
    (ids_not_restored, lambda _: test_matching.test_the_model_sees_the_ids_that_were_served()),
    (
        sources_are_not_compared,
        lambda _: test_promise.test_what_a_caller_does_to_its_objects_changes_nothing_recorded(),
    ),
    (what_was_sent_is_not_compared, lambda _: test_promise.test_a_provider_that_sent_other_ids_is_found_out(False)),
    (
        a_failed_turn_leaves_nothing,
        lambda path: test_promise.test_tokens_streamed_before_the_engine_failed_are_recorded_with_the_reason(
            test_promise.TROUBLES[0], path
        ),
    ),
    (
        a_failed_turn_leaves_nothing,
        lambda path: test_promise.test_deleting_a_session_records_what_its_streams_had_sampled(path),
    ),
    (
        requests_are_named_loosely,
        lambda _: test_promise.test_requests_that_differ_in_a_given_assistant_message_are_two_turns(
            {**test_promise.GIVEN, "content": "I will. "}
        ),
    ),
    (an_old_object_may_write, lambda path: test_promise.test_a_session_has_one_writer(path)),
    (any_version_is_taken, lambda path: test_promise.test_a_version_beyond_64_bits_is_the_engines_fault(path)),
    (
        given_messages_are_compared_loosely,
        lambda _: test_promise.test_given_parts_that_render_otherwise_are_an_edit(True),
    ),
    (
        tools_are_compared_loosely,
        lambda _: test_promise.test_tools_that_render_otherwise_are_other_tools(
            [test_promise.tool("b"), test_promise.tool(True)]
        ),
    ),
    (
        joining_a_cancelled_turn,
        lambda _: test_promise.test_the_same_request_after_hanging_up_starts_anew_while_the_engine_still_aborts(),
    ),
    (rows_are_not_compared_with_their_digest, lambda path: asyncio.to_thread(test_bit_rot.flip_bits, path, 150)),
    (joins_nobody, lambda _: test_turn.test_the_same_request_in_flight_is_one_turn_even_if_the_first_caller_leaves()),
]


@pytest.mark.parametrize(("mutate", "check"), MUTATIONS, ids=[mutate.__name__ for mutate, _ in MUTATIONS])
async def test_a_broken_turn_is_noticed(mutate: Patch, check: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "healthy").mkdir()
    await check(tmp_path / "healthy")
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        with pytest.raises((AssertionError, TokenTrueError, IndexError, ValueError, asyncio.CancelledError, Failed)):
            await check(tmp_path)


BLINDING = [(hash_without_logprobs, test_audit.flip_logprob), (seal_of_nothing, test_audit.other_reward)]


@pytest.mark.parametrize(("mutate", "change"), BLINDING, ids=[mutate.__name__ for mutate, _ in BLINDING])
async def test_a_broken_certificate_is_noticed(mutate: Patch, change: Callable[[Any], Any]) -> None:
    async def found() -> list[Any]:
        rows = [test_audit.sample_to_json(sample) for sample in (await test_audit.forest()).samples()]
        change(rows)
        return test_audit.findings(rows)

    assert await found()
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        assert not await found(), "the mutation should blind the audit: if it does not, this test shows nothing"
