"""`tt.Client` and `tt.AsyncClient` against a real gateway process, with the real SDKs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

import tokentrue as tt
from tests.gateway.world import Server, sampled_by, scripted_server
from tokentrue.cli.sessions import session_ids
from tokentrue.client import AsyncClientSession, ClientSession
from tokentrue.errors import (
    ConfigError,
    GatewayError,
    GatewayUnreachable,
    MessageError,
    SessionConflict,
    SessionNotFound,
)

TEXTS = ["It is 4.", "It is 5."]


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = scripted_server(tmp_path_factory.mktemp("client"), TEXTS * 40, admin_key="a-long-admin-key")
    yield server
    server.stop()


@pytest.fixture
def server(one_server: Server) -> Iterator[Server]:
    """Without sessions, and with the first text as the next answer."""
    with tt.Client(one_server.url, "a-long-admin-key") as client:
        client.wait_until_ready()
        turns = re.findall(r"^tokentrue_turns_total\{.*\} (\S+)$", one_server.ask("GET", "/metrics")[1], re.MULTILINE)
        if sum(map(float, turns)) % 2:
            with client.session(session_id="even") as s:
                s.openai().chat.completions.create(model="policy", messages=[{"role": "user", "content": "2+2?"}])
        for session_id in list(session_ids(client)):
            client.delete_session(session_id)
    yield one_server


def ask(client: tt.Client) -> tuple[list[tt.Sample], str]:
    with client.session(group="task-7", metadata={"task": 7}) as s:
        history = [{"role": "user", "content": "2+2?"}]
        first = s.openai().chat.completions.create(model="policy", messages=history)  # pyright: ignore
        history += [
            {"role": "assistant", "content": first.choices[0].message.content or ""},
            {"role": "user", "content": "+1?"},
        ]
        second = s.anthropic().messages.create(model="policy", max_tokens=64, messages=history)  # pyright: ignore
        assert (first.choices[0].message.content, second.content[0].text) == tuple(TEXTS)  # pyright: ignore
        s.reward(0.5, metadata={"judge": "exact"})
        assert s.coverage().ratio == 1.0
        return s.samples(), s.id


def test_a_session_with_both_sdks_becomes_one_sample(server: Server) -> None:
    with tt.Client(server.url, "a-long-admin-key") as client:
        client.wait_until_ready()
        samples, session_id = ask(client)
        assert len(samples) == 1 and samples[0].reward == 0.5 and samples[0].group == "task-7"
        ids, logprobs = sampled_by(TEXTS)
        trained = [i for i, mask in zip(samples[0].token_ids, samples[0].loss_mask, strict=True) if mask]
        assert trained == ids and [x for x in samples[0].rollout_logprobs if x is not None] == logprobs
        assert session_id in {entry["session_id"] for entry in client.sessions()}


async def test_the_same_with_await(server: Server) -> None:
    async with tt.AsyncClient(server.url, "a-long-admin-key") as client, client.session(session_id="mine") as s:
        reply = await s.openai().chat.completions.create(model="policy", messages=[{"role": "user", "content": "2+2?"}])
        assert reply.choices[0].message.content == TEXTS[0]
        await s.reward(1.0)
        assert [sample.reward for sample in await s.samples()] == [1.0] and (await s.state())["session_id"] == "mine"


async def test_sessions_that_another_program_opened_with_await(server: Server) -> None:
    with tt.Client(server.url, "a-long-admin-key") as other:
        opened = other.open(session_id="theirs")
        opened.openai().chat.completions.create(model="policy", messages=[{"role": "user", "content": "2+2?"}])
        opened.close()
    async with tt.AsyncClient(server.url, "a-long-admin-key") as client:
        await client.wait_until_ready()
        await client.reward_session("theirs", 0.25, group="task-8")
        (sample,) = (await client.session_samples("theirs")).samples
        assert (sample.reward, sample.group) == (0.25, "task-8")
        await client.end_session("theirs")
        assert (await client.session_state("theirs"))["state"] == "ended"
        await client.delete_session("theirs")
        with pytest.raises(SessionNotFound):
            await client.session_state("theirs")
    async with tt.AsyncClient("http://127.0.0.1:9") as client:
        with pytest.raises(GatewayUnreachable, match="not ready after"):
            await client.wait_until_ready(timeout_s=0.1)


def test_a_session_that_is_not_for_training_admits_penalties(server: Server) -> None:
    with tt.Client(server.url, "a-long-admin-key") as client:
        asked: dict[str, Any] = {
            "model": "policy",
            "messages": [{"role": "user", "content": "2+2?"}],
            "presence_penalty": 0.5,
        }
        with client.session(training=False) as free:
            assert free.openai().chat.completions.create(**asked).choices[0].message.content in TEXTS
        with client.session() as trained, pytest.raises(openai.BadRequestError, match="training=False"):
            trained.openai(max_retries=0).chat.completions.create(**asked)


@pytest.mark.parametrize(("plain", "awaited"), [(tt.Client, tt.AsyncClient), (ClientSession, AsyncClientSession)])
def test_both_clients_have_the_same_methods(plain: type, awaited: type) -> None:
    public = [{name for name in dir(kind) if not name.startswith("_")} for kind in (plain, awaited)]
    assert public[0] == public[1]


async def test_a_session_without_its_block_says_what_to_write() -> None:
    def use(session: Any) -> None:
        for name in ("openai", "id", "reward"):
            getattr(session, name)

    with (
        tt.Client("http://127.0.0.1:9") as client,
        pytest.raises(ConfigError, match=r"`with client.session\(...\) as s:`"),
    ):
        use(client.session())
    async with tt.AsyncClient("http://127.0.0.1:9") as client:
        with pytest.raises(ConfigError, match=r"`async with client.session\(...\) as s:`"):
            use(client.session())
        assert not hasattr(client.session(), "__deepcopy__")


def test_a_client_of_an_ended_session_says_so(server: Server) -> None:
    history: list[Any] = [{"role": "user", "content": "2+2?"}]
    with tt.Client(server.url, "a-long-admin-key") as client:
        with client.session(session_id="over") as s:
            llm, claude = s.openai(), s.anthropic()
        with pytest.raises(openai.ConflictError, match="session over has ended, and its clients are closed"):
            llm.chat.completions.create(model="policy", messages=history)
        with pytest.raises(anthropic.ConflictError, match="session over has ended"):
            claude.messages.create(model="policy", max_tokens=64, messages=history)


async def test_an_asynchronous_client_of_an_ended_session_says_so(server: Server) -> None:
    async with tt.AsyncClient(server.url, "a-long-admin-key") as client:
        async with client.session(session_id="over") as s:
            llm = s.openai()
        with pytest.raises(openai.ConflictError, match="session over has ended, and its clients are closed"):
            await llm.chat.completions.create(model="policy", messages=[{"role": "user", "content": "2+2?"}])


def test_what_goes_wrong_is_typed(server: Server) -> None:
    with tt.Client(server.url, "another-key-of-some-length") as client, pytest.raises(ConfigError, match="admin_key"):
        client.open()
    with tt.Client(server.url, "a-long-admin-key") as client:
        session = client.open(session_id="one")
        with pytest.raises(SessionConflict, match="one"):
            client.open(session_id="one")
        session.end(purge=True)
        with pytest.raises(SessionNotFound):
            session.samples()
        with pytest.raises(RuntimeError), client.session(session_id="two"):
            raise RuntimeError("the agent failed")
        assert client.open(session_id="three").id == "three"  # and "two" stays open, to be looked at
    with tt.Client("http://127.0.0.1:9") as client, pytest.raises(GatewayUnreachable, match="tokentrue serve"):
        client.open()
    with pytest.raises(ConfigError, match="URL of a gateway"):
        tt.Client("127.0.0.1:8000")


def test_it_needs_neither_torch_nor_transformers() -> None:
    heavy = {"torch", "transformers", "tokenizers", "starlette"}
    code = f"import sys, tokentrue; tokentrue.Client; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_pinned_system_prompt_over_http(server: Server) -> None:
    with tt.Client(server.url, "a-long-admin-key") as client:
        client.wait_until_ready()
        for pin, samples in ((["system"], 1), (None, 2)):
            with client.session(pin=pin) as s:
                history: list[tt.types.Message] = [{"role": "user", "content": "2+2?"}]
                for turn in range(2):
                    asked = [{"role": "system", "content": f"It is 10:0{turn}."}, *history]
                    reply = s.openai().chat.completions.create(model="policy", messages=asked)  # pyright: ignore
                    history += [
                        {"role": "assistant", "content": reply.choices[0].message.content},
                        {"role": "user", "content": "+1?"},
                    ]
                assert len(s.samples()) == samples and s.coverage().pinned_turns == (1 if pin else 0)
                state = s.state()
                assert state["pin"] == (pin or [])
                sent = [{"role": "system", "content": "It is 10:01."}]
                assert [node.get("replaced") for node in state["nodes"]] == [None, sent if pin else None]


def test_a_session_named_by_a_header_is_opened_by_its_first_request(server: Server) -> None:
    """As evaluators and routers do it: one address, the admin key, a name for each rollout."""
    import openai

    asked = [{"role": "user", "content": "2+2?"}]
    with tt.Client(server.url, "a-long-admin-key") as client:
        client.wait_until_ready()
        sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="a-long-admin-key", max_retries=0)
        with sdk:
            for name in ("rollout-1", "rollout-2", "rollout-1"):
                headers = {"X-Session-ID": name}
                sdk.chat.completions.create(model="policy", messages=asked, extra_headers=headers)  # pyright: ignore
            with pytest.raises(openai.BadRequestError, match="X-Session-ID"):
                sdk.chat.completions.create(model="policy", messages=asked)  # pyright: ignore
            with pytest.raises(openai.BadRequestError, match="session_id"):
                bad = {"X-Session-ID": "../x"}
                sdk.chat.completions.create(model="policy", messages=asked, extra_headers=bad)  # pyright: ignore
        client.reward_session("rollout-1", 0.5, group="task-7")
        client.end_session("rollout-1")
        assert {(sample.group, sample.reward) for sample in client.session_samples("rollout-1").samples} == {
            ("task-7", 0.5)
        }
        assert len(client.session_samples("rollout-2").samples) == 1
        with pytest.raises(SessionConflict, match="is of group 'task-7'"):
            client.reward_session("rollout-1", 0.5, group="task-8")
        with client.session() as s:
            other = openai.OpenAI(
                base_url=f"{server.url}/v1", api_key=s.api_key, default_headers={"X-Session-ID": "rollout-2"}
            )
            with other:  # a session's own key opens that session alone
                other.chat.completions.create(model="policy", messages=asked)  # pyright: ignore
            assert len(s.samples()) == 1 and len(client.session_samples("rollout-2").samples) == 1


def test_a_list_that_is_read_page_by_page_gives_each_session_once_while_others_come_and_go(server: Server) -> None:
    with tt.Client(server.url, "a-long-admin-key") as client:
        opened = [client.open(session_id=f"s{i:03}").id for i in range(7)]
        listed = client.sessions(limit=3)
        client.open(session_id="later")
        client.delete_session(opened[6])  # the first of the page
        client.delete_session(opened[4])  # the last of it, where the next page begins
        while page := client.sessions(limit=3, after=listed[-1]):
            listed += page
        assert [item["session_id"] for item in listed] == opened[::-1]
        with pytest.raises(GatewayError, match="after: must be"):
            client.call("GET", "/sessions?after=x")


def test_an_export_leaves_out_what_is_purged_meanwhile_and_nothing_else(server: Server) -> None:
    with tt.Client(server.url, "a-long-admin-key") as client:
        opened = [client.open(session_id=f"s{i:03}").id for i in range(103)]
        names = session_ids(client)
        first = [next(names) for _ in range(50)]
        for session_id in opened[100:102]:
            client.delete_session(session_id)
        client.open(session_id="later")
        assert [*first, *names] == opened[::-1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"metadata": {"x": float("nan")}}, "metadata: must be finite: JSON has no number nan"),
        ({"metadata": {1: 2}}, "metadata: an object's keys must be strings"),
        ({"sampling": {"seed": {1}}}, "sampling: must be a JSON value; set"),
    ],
)
def test_what_json_cannot_hold_is_refused_before_it_is_sent(settings: dict[str, Any], words: str) -> None:
    with tt.Client("http://127.0.0.1:9") as client, pytest.raises(MessageError, match=words):
        client.open(**settings)


def test_ids_of_any_spelling_reach_the_gateway_as_they_are(server: Server) -> None:
    with tt.Client(server.url, "a-long-admin-key") as client:
        for odd in ("a\nb", "a/b?c#d", "ä", ".."):
            with pytest.raises(SessionNotFound):
                client.session_state(odd)
        with pytest.raises(MessageError, match="lone surrogates"):
            client.session_state("\ud800")
