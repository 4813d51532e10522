"""tokentrue's own gateway as a target."""

import base64
import json
import subprocess
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from tokentrue.conformance.agents.dialects import PATHS
from tokentrue.conformance.oracle import Row
from tokentrue.conformance.target import Session, Target
from tokentrue.json_types import JsonObject

KEY = {"authorization": "Bearer conformance-admin-key"}


class TokenTrue(Target):
    name, engine, ready = "tokentrue", "sglang", "/ready"

    def command(self, engine: str, port: int, folder: Path, model: Path) -> Sequence[str]:
        serve = [self.python, "-m", "tokentrue", "serve", "--model", str(model), "--engine", "sglang", "--url", engine]
        store = ["--store", f"sqlite:{folder / 'journal.sqlite'}", "--port", str(port)]
        return [*serve, *store, "--set", "engine.options.sampling_mask=true"]

    def environment(self) -> Mapping[str, str]:
        return {"TOKENTRUE_ADMIN_KEY": "conformance-admin-key"}

    def open(self) -> Session:
        made = self.post("/sessions", {}, KEY)
        url = f"{self.url}/sessions/{made['session_id']}"
        urls = {name: f"{url}/{path}" for name, path in PATHS.items()}
        return Session(id=made["session_id"], urls=urls, headers={"authorization": f"Bearer {made['api_key']}"})

    def rows(self, session: Session) -> Sequence[Row]:
        return [row_from(sample) for sample in self.get(f"/sessions/{session.id}/samples", KEY)["samples"]]

    def reasons(self, session: Session) -> Mapping[str, int]:
        reasons = Counter[str]()
        for item in self.get(f"/sessions/{session.id}/samples", KEY)["coverage"]["untrained"]:
            reasons[item["why"]] += item["tokens"]
        return reasons

    def export(self, session: Session, folder: Path) -> Path:
        path = folder / f"{session.id}.jsonl"
        samples = self.get(f"/sessions/{session.id}/samples", KEY)["samples"]
        path.write_text("".join(json.dumps(sample) + "\n" for sample in samples), encoding="utf-8")
        return path

    def audit(self, path: Path) -> bool:
        command = [self.python, "-m", "tokentrue", "audit", str(path)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def row_from(sample: JsonObject) -> Row:
    ids: list[int] = sample["token_ids"]
    versions: list[int | None] = [None] * len(ids)
    for span in sample["spans"]:
        versions[span["start"] : span["end"]] = [span["policy_version"]] * (span["end"] - span["start"])
    kept, mask = None, sample.get("sampling_mask")
    if mask is not None:
        every, ends = (array("i", base64.b64decode(mask[name])) for name in ("token_ids", "offsets"))
        kept = [list(every[first:last]) for first, last in pairwise(ends)]
    images = [(image["sha256"], image["start"], image["count"]) for image in sample.get("images", ())]
    columns = {"mask": sample["loss_mask"], "logprobs": sample["rollout_logprobs"], "versions": versions, "kept": kept}
    return Row(ids=ids, images=images, **columns)
