"""OpenEnv's capture server: a proxy that asks the engine for ids and links calls to a graph by their prefixes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from tokentrue.conformance import Row, Session, Target


class OpenEnv(Target):
    name, requires = "openenv", ("openenv==0.10.0",)
    not_promised: ClassVar = {
        "5.kill": "sessions are in memory",
        "6": "no policy version in its contract",
        "7": "the engine renders the prompt",
        "8": "its validation runs inside of the server",
        "9": "no images in rows",
    }

    def command(self, engine: str, port: int, folder: Path, model: Path) -> Sequence[str]:
        module = "openenv.core.harness.capture.server"
        return [self.python, "-m", module, "--llm-url", f"{engine}/v1", "--model", "standin", "--port", str(port)]

    def open(self) -> Session:
        made = self.post("/sessions")
        paths = {
            "chat": "v1/chat/completions",
            "responses": "v1/responses",
            "anthropic": "v1/messages",
            "google": "v1beta",
        }
        key = {"authorization": f"Bearer {made['session_id']}", "x-api-key": made["session_id"]}
        return Session(id=made["session_id"], urls={k: f"{self.url}/{v}" for k, v in paths.items()}, headers=key)

    def rows(self, session: Session) -> Sequence[Row]:
        found = self.get(f"/sessions/{session.id}/rollout")["sequences"]
        return [Row(ids=r["input_ids"], mask=r["loss_mask"], logprobs=r["logprobs"]) for r in found if r["trainable"]]

    def reasons(self, session: Session) -> Mapping[str, int]:
        told = self.get(f"/sessions/{session.id}/rollout?include_discarded=true")
        return Counter({"abandoned": sum(t["n_sampled"] for t in told["turns"] if t["discarded"])})
