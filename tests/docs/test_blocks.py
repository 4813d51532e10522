"""Every code block of README.md and docs/ is run or, where its program cannot run here, parsed: fences.py says which is
which, commands.py and dry.py how, and reader.py what stands in for what. `make test` runs README's Python in its own
process, `make test-slow` that of every page in a new one."""

from __future__ import annotations

import html
import json
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tests.docs import dry
from tests.docs.commands import Shell, run_python
from tests.docs.fences import CONSOLE, KNOWN, PAGES, ROOT, Block, blocks_of, name_of, pages_with
from tests.docs.reader import KEY, Record, environment, furnish, recorded
from tokentrue.app.background import BackgroundGateway

FIRST = "README.md"  # in `make test`
# The first answers of the shipped model are right, by arithmetic.
SAID = {
    "README.md": (
        "The answer is 17. 1.0 46 of 98 tokens sampled and trained",
        "reward 1.0 for 46 sampled tokens, coverage 1.0",
    ),
    "docs/start.md": ("The answer is 17. reward 1.0 coverage 1.0",),
    "docs/client.md": ('{"expression": "12 + 5"} reward 1.0 coverage 1.0',),
    "docs/walk.md": ("8 samples, rewards [0.0, ", ", 1.0]"),
}
PARSED = ("console slow", "console gpu", "console vllm", "console harness", "console cluster")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Record]:
    with recorded(tmp_path_factory.mktemp("record")) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path, record: Record) -> Path:
    furnish(tmp_path, record)
    return tmp_path


def write_titled(page: Path, folder: Path, record: Record) -> None:
    for block in blocks_of(page):
        if block.title is not None and not block.title.startswith("~"):
            (folder / block.title).write_text(record.at_real_addresses(block.body))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_fences_are_of_a_known_kind(page: Path) -> None:
    for block in blocks_of(page):
        assert block.kind in KNOWN, f"{page.name}: fence {block.kind!r}; one of {KNOWN}"
        assert bool(block.commands) == (block.kind in CONSOLE), f"{page.name}: a console block without a `$ ` command"
        assert not (block.kind == "text" and block.body.startswith("$ ")), (
            f"{page.name}: commands belong into a console block"
        )


@pytest.mark.parametrize("page", pages_with("toml", "json"), ids=name_of)
def test_data_blocks_are_whole(page: Path) -> None:
    for block in blocks_of(page):
        if block.kind in ("toml", "json"):
            (tomllib if block.kind == "toml" else json).loads(block.body)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with("python"), ids=name_of)
def test_python_blocks_run(page: Path, folder: Path, record: Record) -> None:
    """README's gateway has the shipped model, those of other pages a script."""
    with shipped_model(record) if name_of(page) == FIRST else nullcontext(record) as reached:
        check_python_blocks(page, run_python(python_of(page), folder, reached))


def test_the_readmes_python_blocks_run_in_this_process(
    folder: Path, record: Record, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that imports nothing again takes a tenth of the time."""
    page = ROOT / FIRST
    with shipped_model(record) as reached:
        for name, value in environment(folder, reached).items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(folder)
        exec(compile(python_of(page), FIRST, "exec"), {"__name__": "__main__"})
    check_python_blocks(page, capsys.readouterr().out)


@contextmanager
def shipped_model(record: Record) -> Iterator[Record]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENTRUE_ADMIN_KEY", KEY)
        with BackgroundGateway() as gateway:
            yield replace(record, url=gateway.url)


def python_of(page: Path) -> str:
    return "\n".join(block.body for block in blocks_of(page) if block.kind == "python")


def check_python_blocks(page: Path, said: str) -> None:
    for expected in SAID.get(name_of(page), ()):
        assert expected in said, said
    rewards = re.search(r"rewards \[(.*)\]", said)
    assert rewards is None or len(set(rewards[1].split(", "))) > 1, "no advantage: all rewards are equal"


def run_console_blocks(page: Path, folder: Path, record: Record) -> None:
    write_titled(page, folder, record)
    for block in [block for block in blocks_of(page) if block.kind == "console"]:
        with Shell(folder, record) as shell:
            for command in block.commands:
                shell.run(command)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", pages_with("console"), ids=name_of)
def test_console_blocks_run(page: Path, folder: Path, record: Record) -> None:
    run_console_blocks(page, folder, record)


@pytest.mark.parametrize("page", pages_with(*PARSED), ids=name_of)
def test_other_command_lines_are_read_by_their_programs(page: Path, folder: Path, record: Record) -> None:
    write_titled(page, folder, record)
    for block in blocks_of(page):
        if block.kind in PARSED:
            with Shell(folder, record) as shell:
                for command in block.commands:
                    shell.check(command)


WRONG = [
    "python -m experiments show --nope",
    "tokentrue rollout --config",
    "torchrun --nproc-per-node=2 -m tokentrue train --stepss 2",
    "python -m experiments.run_all --device cuda --outt x",
    "python -m experiments run tim-grpo --steps many",
    "python -m tests.gpu.job --fast",
    "python -m vllm.entrypoints.openai.api_server --logprob-mode raw",
    "pip install 'tokentrue[gatewy]'",
    "pip install -e '.[gatewy]'",
    "docker compose up exact",
    "docker compose up nothing",
    "claude --print 'the task'",
    "CODEX_KEY=<its api_key> codex exec 'the task'",
    "sglang serve",
    "python -m pytest tests/nowhere",
    "python -m pytest tests/contract -m slowest",
    "python -m pytest tests/contract -k own-nothing",
]


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_line_is_found(command: str) -> None:
    with pytest.raises(AssertionError):
        dry.check(command, cwd=ROOT, env={"TOKENTRUE_ADMIN_KEY": "x"})


def slow_blocks() -> list[tuple[Path, int, Block]]:
    return [
        (page, index, block)
        for page in PAGES
        for index, block in enumerate(blocks_of(page))
        if block.kind == "console slow"
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("page", "index", "block"), slow_blocks(), ids=lambda each: name_of(each) if isinstance(each, Path) else ""
)
def test_slow_console_blocks_run(page: Path, index: int, block: Block, folder: Path, record: Record) -> None:
    write_titled(page, folder, record)
    with Shell(folder, record, timeout_s=1200.0) as shell:
        for command in block.commands:
            shell.run(command)
    for rollouts in folder.glob("out/*/rollouts.jsonl"):
        assert all(json.loads(line)["samples"] for line in rollouts.read_text().splitlines()), (
            f"{rollouts}: the model was not asked"
        )


def test_the_recorded_terminal_shows_commands_that_are_there() -> None:
    """scripts/record_terminal.py made it; its commands are still read by their programs, and no font is fetched."""
    svg = (ROOT / "docs" / "figures" / "terminal.svg").read_text(encoding="utf-8")
    lines = [html.unescape(text).replace("\xa0", " ") for text in re.findall(r">([^<]+)</text>", svg)]
    lines = "".join(line if line.startswith("$") else f"{line}\n" for line in lines).splitlines()
    commands = [line.removeprefix("$ ").removesuffix(" &") for line in lines if line.startswith("$ ")]
    assert [command.split()[:2] for command in commands] == [
        ["tokentrue", "serve"],
        ["python", "examples/openai_sdk.py"],
        ["tokentrue", "samples"],
        ["tokentrue", "audit"],
        ["tokentrue", "view"],
    ]
    for command in commands:
        dry.check(command, cwd=ROOT, env={})
    assert "The answer is 17." in "\n".join(lines) and "font-face" not in svg and "url(" not in svg.replace("url(#", "")


def test_the_first_screen_of_the_readme_is_short() -> None:
    """What it is, ten lines of use and their output, the picture, who does not need it: before the second heading."""
    first = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[0]
    assert len(first.splitlines()) <= 55
    for part in (
        "pip install",
        "tokentrue serve",
        "base_url",
        "s.reward(",
        "s.samples()",
        "viewer-breaks.png",
        "Who does not need it",
    ):
        assert part in first, part
