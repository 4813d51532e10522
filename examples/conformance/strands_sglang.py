"""strands-sglang: a model class that keeps the ids of one conversation, behind a chat route of the suite."""

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tokentrue.conformance import Row, Session, Target

LINEAR = "a model object holds one conversation that only grows; reset() begins another"
OTHER = ("2.once", *(f"3.{name}" for name in ("retry", "fork", "compaction", "sub_agents", "tools_a_b", "clock")))


class StrandsSglang(Target):
    name, engine, ready = "strands-sglang", "sglang", "/x/rows"
    requires = ("strands-sglang==0.4.3", "aiohttp", "jinja2")
    not_promised: ClassVar = {
        **dict.fromkeys((*OTHER, "5.duplicate", "5.out_of_order"), LINEAR),
        "2.several": "one answer to a request",
        "4": "generates whole; no stream to an agent",
        "5.engine_error": "it does not stream",
        "5.disconnect": "it does not stream",
        "5.kill": "a rollout is in memory",
        "6": "a rollout has no policy version",
        "8": "no export with a check",
        "9": "a rollout has ids, mask and log-probabilities, no images",
    }

    def command(self, engine: str, port: int, folder: Path, model: Path) -> Sequence[str]:
        return [self.python, str(Path(__file__).parent / "starters/strands_server.py"), engine, str(port), str(model)]

    def open(self) -> Session:
        name = uuid.uuid4().hex
        return Session(id=name, urls={"chat": f"{self.url}/{name}/chat"})

    def rows(self, session: Session) -> Sequence[Row]:
        return [Row(**row) for row in self.get(f"/{session.id}/rows")]
