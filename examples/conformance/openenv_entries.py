"""OpenEnv's capture server, by its other contract: one training entry per model call that it keeps."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from tokentrue.conformance import Row, Session, Target, merge_calls


class OpenEnvEntries(Target):
    name, requires = "openenv (entries)", ("openenv==0.10.0",)
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
        key = {"authorization": f"Bearer {made['session_id']}"}
        return Session(id=made["session_id"], urls={"chat": f"{self.url}/v1/chat/completions"}, headers=key)

    def rows(self, session: Session) -> Sequence[Row]:
        rows = []
        for one in self.get(f"/sessions/{session.id}/trace_entries")["entries"]:
            given, sampled = one["prompt_token_ids"], one["completion_token_ids"]
            logprobs = [None] * len(given) + one["per_token_logps"]
            rows.append(Row(ids=given + sampled, mask=one["loss_mask"], logprobs=logprobs))
        return merge_calls(rows)

    def reasons(self, session: Session) -> Mapping[str, int]:
        told = self.get(f"/sessions/{session.id}/rollout?include_discarded=true")
        return Counter({"abandoned": sum(t["n_sampled"] for t in told["turns"] if t["discarded"])})
