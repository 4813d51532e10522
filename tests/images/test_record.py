"""What the record, the store and the samples hold of images, and how tampering is found."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tokentrue as tt
from tests.gateway.inside import Parrot, ask, gateway, new_session
from tests.images.double import PAD, PROCESSOR, Eyes, Seer, ask_about, count_tokens, image_part, picture, seeing_gateway
from tokentrue.cli.main import run as run_command
from tokentrue.client import Client
from tokentrue.errors import (
    AuditError,
    FileFormatError,
    JournalError,
    MessageError,
    SessionNotFound,
    TokenContractError,
)
from tokentrue.images import ImageSettings, hash_image
from tokentrue.samples import audit, read_samples, sample_from_json, sample_to_json, write_samples
from tokentrue.samples.images import ImageFolder
from tokentrue.sessions.journal import Journal, open_journal
from tokentrue.sessions.journal.journal import load_tree
from tokentrue.turn import Session
from tokentrue.types import Sample

ONE, TWO, SAME_SIZE = picture(56, 28), picture(28, 84), picture(56, 28, color=(99, 9, 9))


def new(journal: Journal | None = None, engine: Any = None, **settings: Any) -> Session:
    return Session(renderer=Seer(), provider=engine or Eyes(), journal=journal, **settings)  # type: ignore[arg-type]


async def two_turns(session: Session, first: bytes = ONE, second: bytes = TWO) -> list[Any]:
    messages: list[Any] = [{"role": "system", "content": "s"}, ask_about(image_part(first))]
    messages.append((await session.chat(messages)).message)
    messages.append(ask_about(image_part(second), image_part(first), text="and now?"))
    messages.append((await session.chat(messages)).message)
    return messages


# The certificate, computed here from its description in docs/specification.md.
def independent_chain(sample: Sample) -> str:
    def named(text: str) -> bytes:
        return len(text.encode()).to_bytes(4, "little") + text.encode()

    link = hashlib.sha256(
        b"tokentrue certificate 1" + named(sample.certificate.template) + named(sample.certificate.tokenizer)
    ).digest()
    at = 0
    for node in sample.metadata["tokentrue"]["nodes"]:
        middle, end = at + node["given"], at + node["given"] + node["sampled"]
        parts = [link, node["given"].to_bytes(8, "little"), node["sampled"].to_bytes(8, "little")]
        parts += [int(token).to_bytes(4, "little") for token in sample.token_ids[at:end]]
        import struct

        parts += [struct.pack("<d", value) for value in sample.rollout_logprobs[middle:end]]
        parts += [b"%d,%d,%d;" % tuple(span) for span in node["versions"]]
        runs = [
            [run.sha256, run.start - at, run.count, list(run.grid), run.processor]
            for run in sample.images
            if at <= run.start < end
        ]
        if runs:
            parts.append(b"images" + json.dumps(runs, separators=(",", ":")).encode())
        link, at = hashlib.sha256(b"".join(parts)).digest(), end
    return f"sha256:{link.hex()}"


async def test_a_sample_has_its_images_where_they_are() -> None:
    session = new()
    await two_turns(session)
    (sample,) = session.samples()
    assert [run.sha256 for run in sample.images] == [hash_image(ONE), hash_image(TWO), hash_image(ONE)]
    at = 0
    for run, size in zip(sample.images, ((56, 28), (28, 84), (56, 28)), strict=True):
        start = list(sample.token_ids).index(PAD, at)
        assert (run.start, run.count, run.processor) == (start, count_tokens(*size), PROCESSOR)
        assert all(value is None for value in sample.rollout_logprobs[start : start + run.count])
        at = start + run.count
    assert audit([sample]).ok
    assert independent_chain(sample) == sample.certificate.chain
    assert sample_from_json(json.loads(json.dumps(sample_to_json(sample)))) == sample
    assert session.images.read(hash_image(TWO)) == (TWO, "image/png")


async def test_audit_finds_every_change_of_an_image() -> None:
    session = new()
    await two_turns(session)
    (sample,) = session.samples()
    one, two, three = sample.images
    changes = {
        "swapped": (replace(one, sha256=hash_image(SAME_SIZE)), two, three),
        "exchanged": (replace(one, sha256=two.sha256), replace(two, sha256=one.sha256), three),
        "moved": (replace(one, start=one.start - 1), two, three),
        "shorter": (replace(one, count=one.count - 1), two, three),
        "grid": (replace(one, grid=(1, 56, 28)), two, three),
        "processor": (one, two, replace(three, processor="double/2")),
        "missing": (one, three),
        "all missing": (),
        "one more": (one, two, three, replace(three, start=three.start + three.count)),
    }
    for name, images in changes.items():
        assert not audit([replace(sample, images=images)]).ok, name
    # Also if the seal is made again over the change: the chain alone finds it.
    from tokentrue.samples.recorded_turns import seal

    for name, images in changes.items():
        own = dict(sample.metadata["tokentrue"])
        forged = replace(sample, images=images, metadata={**sample.metadata, "tokentrue": own})
        own["seal"] = seal(forged)
        found = audit([forged]).findings
        assert any("chain breaks at node" in finding.what for finding in found), (name, found)


async def test_a_node_must_have_the_images_of_its_messages() -> None:
    class Blind(Seer):
        def render(self, *args: Any, **kwargs: Any) -> Any:
            return replace(super().render(*args, **kwargs), images=())

    session = Session(renderer=Blind(), provider=Eyes())  # type: ignore[arg-type]
    with pytest.raises(TokenContractError, match="not those of its messages"):
        await session.chat([ask_about(image_part(ONE))])
    assert not session.tree.nodes


async def test_the_same_image_in_another_encoding_is_an_edit() -> None:
    session = new()
    messages = await two_turns(session)
    replayed = [*messages, ask_about(text="again")]
    assert (await session.chat(replayed)).edge_reason is None  # the same bytes continue
    again = picture(56, 28, compress_level=1)
    assert again != ONE
    replayed[1] = ask_about(image_part(again))
    reply = await session.chat(replayed)
    assert reply.edge_reason == "edited"
    swapped = [*messages, ask_about(text="once more")]
    swapped[1] = ask_about(image_part(SAME_SIZE))  # the same ids, another picture
    engine: Any = session.provider
    assert (await session.chat(swapped)).edge_reason == "edited"
    assert [image.data for image in engine.seen[-1][1]] == [SAME_SIZE, TWO, ONE]
    coverage = session.coverage()
    assert coverage.ratio == 1.0 and len(session.samples()) == 3 and audit(session.samples()).ok


async def test_forks_share_an_image(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite")
    session = new(journal)
    messages = await two_turns(session)
    for text in ("a", "b"):
        await session.chat([*messages[:3], ask_about(image_part(ONE), text=text)])
    stored = journal.read(lambda db: db.execute("SELECT count(*), sum(length(data)) FROM images").fetchone())
    assert tuple(stored) == (2, len(ONE) + len(TWO))
    journal.close()


async def test_a_text_only_renderer_and_engine_refuse_by_name() -> None:
    app = gateway()
    key = (await new_session(app))["api_key"]
    body = json.dumps({"model": "m", "messages": [ask_about(image_part(ONE))]}).encode()
    status, answer = await ask(app, "POST", "/v1/chat/completions", body, key=key)
    assert status == 400 and b"messages[0].content[0]: images are refused: " in answer, answer
    await app.close()
    with pytest.raises(MessageError, match="the engine 'parrot' takes no images"):
        await new(engine=Parrot("ok")).chat([ask_about(image_part(ONE))])


async def store_images(store: str, session_id: str, *images: bytes) -> None:
    journal = open_journal(store, name="a", address="")
    session = new(journal, session_id=session_id)
    await session.chat([ask_about(*map(image_part, images))])
    await session.end()
    journal.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_one_image_in_many_sessions_is_stored_once_and_purged_with_the_last(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = f"sqlite:{tmp_path / 'j.sqlite'}" if kind == "sqlite" else request.getfixturevalue("database")
    journal = open_journal(store, name="a", address="")
    many = 500 if kind == "sqlite" else 40
    names = [f"s{number}" for number in range(many)]
    sessions = [new(journal, session_id=name) for name in names]
    for at in range(0, many, 50):
        await asyncio.gather(*(one.chat([ask_about(image_part(ONE))]) for one in sessions[at : at + 50]))

    def counts() -> tuple[int, ...]:
        sql = "SELECT (SELECT count(*) FROM images), (SELECT count(*) FROM session_images)"
        return tuple(journal.read(lambda db: db.execute(sql).fetchone()))

    assert counts() == (1, many)
    for name in names[:-1]:
        await journal.delete(name)
    assert counts() == (1, 1) and journal.read_image(names[-1], hash_image(ONE)) == (ONE, "image/png")
    await sessions[-1].end()
    assert await journal.purge(older_than_s=-10) == names[-1:]
    assert counts() == (0, 0)
    journal.close()


@pytest.mark.parametrize("paused", ["INSERT INTO session_images", "DELETE FROM images"])
async def test_one_gateway_purges_an_image_that_another_adds(
    paused: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either transaction is held at its most delicate statement while the other one runs."""
    from tokentrue.sessions.journal.postgres import Connection

    one, two = (open_journal(database, name=name, address="") for name in ("a", "b"))
    first, second = new(one, session_id="first"), new(two, session_id="second")
    await first.chat([ask_about(image_part(ONE))])
    await first.end()
    reached, released = threading.Event(), threading.Event()
    execute = Connection.execute

    def held(self: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith(paused):
            reached.set()
            released.wait(20)
        return execute(self, sql, *rest)

    monkeypatch.setattr(Connection, "execute", held)

    async def add() -> None:
        await second.chat([ask_about(image_part(ONE))])

    begun, other = (add, lambda: one.delete("first")) if "INSERT" in paused else (lambda: one.delete("first"), add)
    running = asyncio.ensure_future(begun())
    assert await asyncio.to_thread(reached.wait, 20)
    meanwhile = asyncio.ensure_future(other())
    await asyncio.wait([meanwhile], timeout=0.5)
    released.set()
    await asyncio.gather(running, meanwhile)
    assert two.read_image("second", hash_image(ONE)) == (ONE, "image/png")
    await second.end()
    await two.delete("second")
    assert two.read(lambda db: tuple(db.execute("SELECT count(*) FROM images").fetchone())) == (0,)
    for journal in (one, two):
        journal.close()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_reopened_session_continues(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    store = f"sqlite:{tmp_path / 'j.sqlite'}" if kind == "sqlite" else request.getfixturevalue("database")
    journal = open_journal(store, name="a", address="")
    messages = await two_turns(new(journal, session_id="s"))
    journal.close()
    journal, engine = open_journal(store, name="a", address=""), Eyes()
    session = await Session.open(journal, "s", renderer=Seer(), provider=engine)  # type: ignore[arg-type]
    # By reference, as a dialect continues an earlier reply: the bytes come from the journal.
    recorded = session.tree.messages(session.tree.in_order()[-1])
    reply = await session.chat([*recorded, ask_about(text="still there?")])
    assert reply.edge_reason is None
    assert [image.data for image in engine.seen[-1][1]] == [ONE, TWO, ONE]
    assert (await session.chat([*messages, ask_about(text="and by bytes?")])).edge_reason == "branch"
    assert audit(session.samples()).ok
    journal.close()


async def test_damaged_bytes_are_found(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    journal = Journal(path)
    await two_turns(new(journal, session_id="s"))
    with sqlite3.connect(path) as db:
        db.execute("UPDATE images SET data=? WHERE sha256=?", (SAME_SIZE, hash_image(ONE)))
    with pytest.raises(JournalError, match="does not fit its hash"):
        journal.read_image("s", hash_image(ONE))
    journal.close()


async def test_a_journal_of_the_last_release_opens(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    journal = Journal(path)
    session = new(journal, session_id="s")
    await session.chat([{"role": "user", "content": "hi"}])
    chain = session.samples()[0].certificate.chain
    journal.close()
    with sqlite3.connect(path) as db:
        db.executescript("DROP TABLE session_images; DROP TABLE images; PRAGMA user_version=4")
    journal = Journal(path)
    session = await Session.open(journal, "s", renderer=Seer(), provider=Eyes())  # type: ignore[arg-type]
    assert session.samples()[0].certificate.chain == chain
    await session.chat([ask_about(image_part(ONE))])
    assert journal.read_image("s", hash_image(ONE))[0] == ONE
    journal.close()


CHILD = """
import asyncio, os, sys
from tests.images.test_record import new, ask_about, image_part, picture
from tokentrue.sessions.journal import Journal
async def run():
    journal = Journal(sys.argv[1])
    number = 0
    while True:
        session = new(journal, session_id=f"{os.getpid()}-{number}")
        await session.chat([ask_about(image_part(picture(28, 28, color=(number % 256, os.getpid() % 256, 1))))])
        os.write(1, f"{session.id}\\n".encode())
        number += 1
while sys.stdin.readline():  # a process each: what they import takes seconds
    if os.fork() == 0:
        asyncio.run(run())
    os.wait()
    os.write(1, b"killed\\n")
"""


def test_a_killed_process_loses_no_image_of_an_answered_turn(tmp_path: Path) -> None:
    path, answered = tmp_path / "j.sqlite", list[str]()
    command = [sys.executable, "-c", CHILD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        for lines in (1, 7, 20):
            print(flush=True, file=parent.stdin)
            for _ in range(lines):
                answered.append(parent.stdout.readline().strip())
                assert "-" in answered[-1], "the process ended by itself"
            os.kill(int(answered[-1].partition("-")[0]), signal.SIGKILL)
            while (line := parent.stdout.readline().strip()) != "killed":
                answered.append(line)
        parent.stdin.close()
    journal = Journal(path)
    for name in answered:
        record, tree = load_tree(journal, name)
        (node,) = tree.nodes.values()
        assert hash_image(journal.read_image(record.id, node.images[0].sha256)[0]) == node.images[0].sha256
    journal.close()


async def test_limits_of_a_session() -> None:
    engine = Eyes()
    app = seeing_gateway(engine, images=ImageSettings(max_per_session=3, max_per_request=50))
    key = (await new_session(app))["api_key"]

    async def send(*images: bytes) -> tuple[int, Any]:
        body = {"model": "m", "messages": [ask_about(*map(image_part, images))]}
        status, answer = await ask(app, "POST", "/v1/chat/completions", json.dumps(body).encode(), key=key)
        return status, json.loads(answer)

    different = [picture(28, 28, color=(number, 0, 0)) for number in range(5)]
    assert (await send(*different[:2]))[0] == 200
    assert (await send(*different[:2] * 5))[0] == 200  # repeated
    status, answer = await send(*different[:4])
    assert status == 413 and "images.max_per_session=3" in answer["error"]["message"]
    asked = len(engine.seen)
    status, answer = await send(*[picture(1, 1)] * 10_000)
    assert status == 413 and "images.max_per_request=50" in answer["error"]["message"]
    assert answer["error"]["code"] == "limit_exceeded" and len(engine.seen) == asked
    assert (await send(different[0]))[0] == 200  # nothing of it stayed
    await app.close()


async def test_errors_name_the_place_in_each_dialect() -> None:
    app = seeing_gateway()
    key = (await new_session(app))["api_key"]
    bad = base64.b64encode(picture()[:-9]).decode()
    url = f"data:image/png;base64,{bad}"
    blob = {"mimeType": "image/png", "data": bad}
    source = {"type": "base64", "media_type": "image/png", "data": bad}
    cases: list[tuple[str, Any, str]] = [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]},
            "messages[0].content[0]",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
            "input[0].content[0].image_url",
        ),
        (
            "/v1/messages",
            {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]},
            "messages[0].content[0].source",
        ),
        (
            "/v1beta/models/m:generateContent",
            {"contents": [{"role": "user", "parts": [{"inlineData": blob}]}]},
            "contents[0].parts[0].inlineData",
        ),
    ]
    for path, body, field in cases:
        named = body if "models" in path else {"model": "m", **body}
        status, answer = await ask(app, "POST", path, json.dumps(named).encode(), key=key)
        assert status == 400 and f"{field}: the image cannot be read as image/png" in answer.decode(), answer
    for path, body, field in (
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]}, "source"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0]"),
        ("/v1beta/models/m:generateContent", {"contents": [{"parts": [{"fileData": {"fileUri": "https://x/y"}}]}]}, "fileData"),
        ("/v1/messages", {"max_tokens": 9, "system": [{"type": "image", "source": source}], "messages": [{"role": "user", "content": "x"}]}, "system[0]"),
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}, "messages[0].content"),
    ):  # fmt: skip
        named = body if "models" in path else {"model": "m", **body}
        status, answer = await ask(app, "POST", path, json.dumps(named).encode(), key=key)
        assert status == 400 and field in answer.decode(), (path, answer)
    await app.close()


async def test_text_that_looks_like_a_reference_is_text() -> None:
    session, engine = new(engine=(engine := Eyes())), engine
    part = {"type": "image", "sha256": hash_image(ONE), "media_type": "image/png", "width": 56, "height": 28}
    await session.chat([ask_about(image_part(ONE))])
    fake = "\0" + json.dumps(part, sort_keys=True)
    reply = await session.chat([{"role": "user", "content": fake + "what?"}])
    assert reply.edge_reason != "retry" and engine.seen[-1][1] == []


async def test_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "j.sqlite"
    journal = Journal(store)
    session = new(journal, session_id="s")
    await two_turns(session)
    samples = session.samples()
    journal.close()
    for format in ("jsonl", "parquet", "safetensors", "verl", "trl"):
        out = tmp_path / f"out.{format}"
        assert run_command("samples", [f"sqlite:{store}", "-o", str(out), "--format", format]) == 0
        assert list(read_samples(out)) == samples
        folder = ImageFolder(out)
        assert {path.name for path in folder.path.iterdir()} == {f"{hash_image(data)}.png" for data in (ONE, TWO)}
        assert [image.data for image in folder.load(samples[0])] == [ONE, TWO, ONE]
        assert run_command("audit", [str(out)]) == 0
        assert "2 images, with their files" in capsys.readouterr().out
        (folder.path / f"{hash_image(ONE)}.png").write_bytes(SAME_SIZE)
        assert run_command("audit", [str(out)]) == 1
        assert "does not fit its hash" in capsys.readouterr().out
        (folder.path / f"{hash_image(ONE)}.png").unlink()
        assert run_command("audit", [str(out)]) == 1
        assert f"image {hash_image(ONE)} is not in" in capsys.readouterr().out
    for name in ("../../etc/passwd", "/" + hash_image(ONE)[1:], hash_image(ONE).upper()):
        named = replace(samples[0], images=(replace(samples[0].images[0], sha256=name),))
        with pytest.raises(AuditError, match="is no SHA-256"):
            ImageFolder(tmp_path / "y").write(named, lambda _, __: ONE)
        with pytest.raises(AuditError, match="is no SHA-256"):
            ImageFolder(tmp_path / "y").load(named)
    with pytest.raises(AuditError, match="do not fit its hash"):
        ImageFolder(tmp_path / "y").write(samples[0], lambda _, __: SAME_SIZE)
    for format in ("slime", "prime-rl", "tinker"):
        with pytest.raises(FileFormatError, match=r"has 3 images, which rows for .* do not carry"):
            write_samples(samples, tmp_path / "x", format=format)


async def test_the_client_reads_images() -> None:
    import httpx

    app = seeing_gateway()
    session = await new_session(app)
    body = json.dumps({"model": "m", "messages": [ask_about(image_part(ONE))]}).encode()
    assert (await ask(app, "POST", "/v1/chat/completions", body, key=session["api_key"]))[0] == 200
    client = tt.AsyncClient("http://localhost", "boss")
    client._http = httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app),  # type: ignore[arg-type]
        base_url="http://localhost",
        headers={"authorization": "Bearer boss"},
    )
    assert await client.session_image(session["session_id"], hash_image(ONE)) == ONE
    with pytest.raises(SessionNotFound, match="no image"):
        await client.session_image(session["session_id"], hash_image(TWO))
    answer = await client._http.get(f"/sessions/{session['session_id']}/images/{hash_image(ONE)}")
    assert answer.headers["content-type"] == "image/png" and answer.headers["x-content-type-options"] == "nosniff"
    await client.close()
    await app.close()
    assert hasattr(Client, "session_image")
