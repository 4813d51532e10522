"""A run: one engine stand-in, one target, the cases of the chosen levels, and the report."""

import importlib.metadata
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import aiohttp

from tokentrue.conformance.agents.dialects import CHAT, PATHS
from tokentrue.conformance.levels import CASES, FEWEST_ROWS, LEVELS, ONE_DIALECT
from tokentrue.conformance.oracle import Severity
from tokentrue.conformance.play import Bench, Play, Score, Stop
from tokentrue.conformance.standin.engine import Engine
from tokentrue.conformance.standin.generation import Writer
from tokentrue.conformance.standin.vocabulary import Vocabulary, write_vision_model
from tokentrue.conformance.target import Target, TargetProcess
from tokentrue.errors import ConfigError
from tokentrue.json_types import JsonObject
from tokentrue.records import record

SPECIFICATION = "1.1"
IMAGES = 9  # the level that needs a model with images
DIALECTS = tuple(PATHS)


@record
class ConformanceSettings:
    """`case` replays one case, LEVEL.NAME.DIALECT.TURNS, or several with commas, in order."""

    levels: Sequence[int] = tuple(LEVELS)
    dialects: Sequence[str] = DIALECTS
    turns: int = 8
    seed: int = 1
    case: str | None = None


@record
class Finding:
    """The smallest conversation that breaks a rule; `before`: the case that was played before it."""

    level: int
    rule: str
    severity: Severity
    detail: str
    case: str
    tokens: int
    conversation: Sequence[str]
    replay: str
    before: str = ""


@dataclass(kw_only=True)
class ConformanceReport:
    target: str
    version: str
    engine: str
    settings: ConformanceSettings
    not_promised: dict[str, str]
    command: str = ""
    findings: list[Finding] = field(default_factory=list[Finding])
    habits: list[JsonObject] = field(default_factory=list[JsonObject])  # of level 3: habit, dialect and `Score`
    ran: Counter[int] = field(default_factory=Counter[int])
    seconds: float = 0.0

    def why_not(self, level: int) -> str:
        """The gateway promises none of the level, or none of its cases."""
        cases = [self.not_promised.get(f"{level}.{name}", "") for name in CASES[level]]
        return self.not_promised.get(str(level), "") or (cases[0] if cases and all(cases) else "")

    def verdict(self, level: int) -> str:
        found = {finding.severity for finding in self.findings if finding.level == level}
        if "fatal" in found:
            return "fail"
        if self.why_not(level):
            return "not applicable"
        if not self.ran[level]:
            return "not run"
        return "warn" if "warning" in found else "pass"

    @property
    def exit_code(self) -> int:
        return 1 if any(finding.severity == "fatal" for finding in self.findings) else 0

    @property
    def summary(self) -> str:
        verdicts = [self.verdict(level) for level in LEVELS]
        told = [f"{verdicts.count(name)} {name}" for name in ("pass", "warn", "fail", "not applicable", "not run")]
        return f"{self.target} {self.version}: levels " + ", ".join(one for one in told if not one.startswith("0 "))

    def to_json(self) -> JsonObject:
        levels = [
            {
                "level": level,
                "name": name,
                "verdict": self.verdict(level),
                "cases": self.ran[level],
                "why": self.why_not(level),
                "not_promised": {name: why for name, why in self.not_promised.items() if name.startswith(f"{level}.")},
            }
            for level, name in LEVELS.items()
        ]
        return {
            "specification": SPECIFICATION,
            **{name: getattr(self, name) for name in ("target", "version", "engine", "command", "not_promised")},
            **{name: getattr(self.settings, name) for name in ("seed", "turns")},
            "seconds": round(self.seconds, 1),
            "summary": self.summary,
            "levels": levels,
            "habits": self.habits,
            "findings": [asdict(one) for one in self.findings],
        }


Process = Callable[[Target, str, Path, Path], TargetProcess]


async def run(
    target: Target,
    settings: ConformanceSettings,
    *,
    model: Path,
    process: Process = TargetProcess,
    on_case: Callable[[str], None] = lambda name: None,
) -> ConformanceReport:
    began = time.monotonic()
    runner = Runner(target, settings, model, process, on_case)
    await runner.run_all()
    runner.report.seconds = time.monotonic() - began
    return runner.report


def show_command(command: Sequence[str], names: Mapping[str, str]) -> str:
    """Without what differs from run to run and from machine to machine."""
    text = " ".join(command)
    for value, name in names.items():
        text = text.replace(value, name)
    return re.sub(r"\S*/(\w+\.py)\b", r"\1", re.sub(r"\b\d{4,5}\b", "PORT", text))


def version_of(target: Target) -> str:
    if target.requires:
        return re.split("==|@", target.requires[0])[-1]
    try:
        return importlib.metadata.version(target.name)
    except importlib.metadata.PackageNotFoundError:
        return ""


PlayedCase = tuple[int, str, str, int]  # level, name, dialect and turns
PROBE: PlayedCase = (0, "answer", "", 1)  # only opens a session, to see the dialects


class Runner:
    def __init__(
        self,
        target: Target,
        settings: ConformanceSettings,
        model: Path,
        process: Process,
        on_case: Callable[[str], None],
    ) -> None:
        self._target, self._settings, self._model, self._process = target, settings, model, process
        self._on_case = on_case
        self.report = ConformanceReport(
            target=target.name,
            version=version_of(target),
            engine=target.engine,
            settings=settings,
            not_promised=dict(target.not_promised),
        )
        self._shown: set[tuple[str, str]] = set()
        self._before = ""

    @asynccontextmanager
    async def _open_bench(self, *, images: bool) -> AsyncIterator[Bench]:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as vision:
            if images:
                write_vision_model(self._model, Path(vision))
            model = Path(vision) if images else self._model
            vocabulary = Vocabulary(model)
            engine = Engine(vocabulary, self._settings.seed)
            engine.fallback = Writer(vocabulary, random.Random(0)).structured("", "ok", ())
            url = await engine.start()
            started = self._process(self._target, url, Path(folder), model)
            names = {self._target.python: "python", folder: "DIR", str(model): "MODEL", url: "ENGINE"}
            self.report.command = self.report.command or show_command(started.command, names)
            timeout, connector = aiohttp.ClientTimeout(total=60), aiohttp.TCPConnector(limit=0, force_close=True)
            try:
                await started.start()
                async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
                    yield Bench(target=self._target, process=started, engine=engine, vocabulary=vocabulary, http=http)
            finally:
                await started.stop()
                await engine.stop()

    def cases(self, offered: Sequence[str], *, images: bool) -> Iterator[PlayedCase]:
        settings, skipped = self._settings, self._target.not_promised
        if settings.case is not None:
            yield from (case for case in map(parse_case, settings.case.split(",")) if (case[0] == IMAGES) == images)
            return
        for level, cases in CASES.items():
            if level not in settings.levels or str(level) in skipped or (level == IMAGES) != images:
                continue
            for name in cases:
                if f"{level}.{name}" in skipped or (name == "several" and offered[0] != CHAT):
                    continue
                for dialect in offered[:1] if name in ONE_DIALECT else offered:
                    if f"{level}.{name}.{dialect}" not in skipped:
                        yield level, name, dialect, settings.turns

    async def run_all(self) -> None:
        for images in (False, True):
            if any(self.cases(DIALECTS, images=images)):
                async with self._open_bench(images=images) as bench:
                    await self._run_cases(bench, images=images)
        if self._settings.case is None:
            found = self.report.findings
            first = {one.rule: one for one in reversed(found) if one.conversation and one.severity == "fatal"}
            for finding in first.values():
                found[found.index(finding)] = await self._check_replay(finding)

    async def _run_cases(self, bench: Bench, *, images: bool) -> None:
        probe = await self._play(bench, PROBE, run=False)
        if probe.faults:
            self._add(probe, probe.faults[0].rule, f"0.answer.{DIALECTS[0]}.1", ())
            return
        offered = [name for name in self._settings.dialects if name in probe.session.urls]
        if not offered:
            raise ConfigError(f"{self._target.name} serves {', '.join(probe.session.urls)}: choose one of these")
        broken: set[str] = set()
        for case in self.cases(offered, images=images):
            level, name, dialect, turns = case
            if dialect in broken:
                continue  # a dialect that does not answer at all has one finding, not thirty
            self._on_case(f"{level}.{name}.{dialect}")
            play = await self._play(bench, case)
            self.report.ran[level] += 1
            if level == 0 and any(fault.rule.startswith("0.") for fault in play.faults):
                broken.add(dialect)
            if level == 3 and play.score is not None:
                self._score(name, dialect, turns, play, play.score)
            await self._report(bench, case, play)
            self._before = write_case(case)

    async def _check_replay(self, finding: Finding) -> Finding:
        """A case that breaks its rule only after another one is replayed with it, or with the whole run."""
        for several in ([finding.case], [finding.before, finding.case]):
            cases = [parse_case(text) for text in several if text]
            async with self._open_bench(images=cases[-1][0] == IMAGES) as bench:
                await self._play(bench, PROBE, run=False)
                plays = [await self._play(bench, case) for case in cases]
            if any(fault.rule == finding.rule for fault in plays[-1].faults):
                return replace(
                    finding, replay=f"--case {','.join(map(write_case, cases))} --seed {self._settings.seed}"
                )
        asked = self._settings
        run = f"--levels 0-{finding.level} --dialects {','.join(asked.dialects)} --turns {asked.turns}"
        return replace(finding, replay=f"{run} --seed {asked.seed}")

    def _score(self, name: str, dialect: str, turns: int, play: Play, score: Score) -> None:
        fewest = FEWEST_ROWS.get(name, 1)
        known = min(fewest, turns) if fewest < 1 << 30 else None
        self.report.habits.append({"habit": name, "dialect": dialect, **asdict(score), "fewest_rows": known})
        if known is not None and score.rows > known:
            enough = f"{known} {'row is' if known == 1 else 'rows are'} enough"
            play.fault("3.1", f"{score.rows} rows, {score.tokens} tokens to forward, where {enough}", "warning")

    async def _report(self, bench: Bench, case: PlayedCase, play: Play) -> None:
        """Each broken rule once; the first time in a dialect, with the fewest turns that break it."""
        level, name, dialect, turns = case
        for rule in dict.fromkeys(fault.rule for fault in play.faults):
            smallest, fewer = play, turns
            is_first = (rule, dialect) not in self._shown
            self._shown.add((rule, dialect))
            for count in range(1, turns) if is_first and self._settings.case is None and rule != "3.1" else ():
                tried = await self._play(bench, (level, name, dialect, count))
                if any(other.rule == rule for other in tried.faults):
                    smallest, fewer = tried, count
                    break
            text = write_case((level, name, dialect, fewer))
            self._add(smallest, rule, text, smallest.transcript if is_first else ())

    def _add(self, play: Play, rule: str, case: str, conversation: Sequence[str]) -> None:
        faults = [fault for fault in play.faults if fault.rule == rule]
        self.report.findings.append(
            Finding(
                level=int(rule.partition(".")[0]), rule=rule, severity=faults[0].severity, detail=faults[0].detail,
                case=case, tokens=sum(fault.tokens for fault in faults), conversation=tuple(conversation),
                replay=f"--case {case} --seed {self._settings.seed}", before=self._before,
            )
        )  # fmt: skip

    async def _play(self, bench: Bench, case: PlayedCase, *, run: bool = True) -> Play:
        level, name, dialect, turns = case
        bench.engine.plans[""].clear()
        bench.engine.version = "1"
        play = Play(bench, dialect, turns, f"{self._settings.seed}/{level}.{name}.{dialect}")
        try:
            await play.open()
            if run:
                await CASES[level][name](play)
        except Stop:
            pass  # the play has the fault
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            play.fault("0.1", f"the connection failed: {error!r}")
        return play


def write_case(case: PlayedCase) -> str:
    return ".".join(map(str, case))


def parse_case(text: str) -> PlayedCase:
    parts = text.split(".")
    if len(parts) != 4 or not parts[0].isdecimal() or not parts[3].isdecimal():
        raise ConfigError(f"--case {text!r}: LEVEL.NAME.DIALECT.TURNS is needed, such as 3.retry.chat.2")
    level, name, dialect, turns = int(parts[0]), parts[1], parts[2], int(parts[3])
    if name not in CASES.get(level, {}) or dialect not in DIALECTS:
        known = ", ".join(CASES.get(level, {})) or "none"
        raise ConfigError(f"--case {text!r}: level {level} has the cases {known}; dialects are {', '.join(DIALECTS)}")
    return level, name, dialect, turns


def parse_levels(text: str) -> Sequence[int]:
    """`text` is such as `0-3,5`."""
    levels: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            levels |= set(range(int(first), int(last or first) + 1))
    except ValueError:
        levels = {-1}
    if not levels or not levels <= set(LEVELS):
        raise ConfigError(f"--levels {text!r}: numbers from 0 to 9 are needed, such as 0-3,5")
    return sorted(levels)
