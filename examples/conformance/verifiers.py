"""verifiers: an interception server that renders prompts with `renderers` and records a message graph."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tokentrue.conformance import Row, Session, Target


class Verifiers(Target):
    name, requires = "verifiers", ("verifiers==0.4.0", "renderers==0.1.12", "transformers", "jinja2")
    engine, ready = "generate", "/rows"
    not_promised: ClassVar = {
        "1.4": "sampling is part of the rollout's configuration, not the agent's choice",
        "5.kill": "traces are in memory",
        "6": "no policy version per token",
        "8": "no export with a check",
        "9": "not tried with images",
    }

    def command(self, engine: str, port: int, folder: Path, model: Path) -> Sequence[str]:
        starter = Path(__file__).parent / "starters" / "verifiers_server.py"
        return [self.python, str(starter), engine, str(port), str(model)]

    def open(self) -> Session:
        made = self.post("/open")
        key = {"authorization": f"Bearer {made['key']}"}
        return Session(id=made["id"], urls={"chat": f"{made['url']}/v1/chat/completions"}, headers=key)

    def rows(self, session: Session) -> Sequence[Row]:
        return [Row(**row) for row in self.get(f"/rows?id={session.id}")]
