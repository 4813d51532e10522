"""Samples as OpenEnv's training contract (schema 1): `python openenv_trace.py SAMPLES SESSION -o trace.json`.

Every sampled turn is one engine call: the ids before it, its own ids and log-probabilities, and the mask of both.
OpenEnv reads it with `openenv.core.harness.training.TrainingTrace.model_validate_json`. The reward is not part of the
contract: environments give it by `verify()`.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from tokentrue.samples import read_samples
from tokentrue.types import Sample


def training_trace(samples: Iterable[Sample]) -> dict:
    return {"schema_version": 1, "turns": [turn for sample in samples for turn in turns_from(sample)]}


def turns_from(sample: Sample) -> Iterator[dict]:
    sampled = [span for span in sample.spans if span.kind == "sampled"]
    for number, spans in groupby(sampled, key=lambda span: span.turn):  # one span per policy version
        parts = list(spans)
        start, end = parts[0].start, parts[-1].end
        yield {
            "node_id": f"{sample.sample_id}:{number}",
            "prompt_token_ids": list(sample.token_ids[:start]),
            "completion_token_ids": list(sample.token_ids[start:end]),
            "per_token_logps": list(sample.rollout_logprobs[start:end]),
            "loss_mask": [*[0] * start, *map(int, sample.loss_mask[start:end])],
            "metadata": {
                "session_id": sample.session_id,
                "policy_versions": [[span.start - start, span.end - start, span.policy_version] for span in parts],
            },
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("samples", type=Path)
    parser.add_argument("session")
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    trace = training_trace(sample for sample in read_samples(given.samples) if sample.session_id == given.session)
    given.out.write_text(json.dumps(trace))
    print(f"{len(trace['turns'])} turns in {given.out}")


if __name__ == "__main__":
    main()
