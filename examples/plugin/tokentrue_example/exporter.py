"""A trainer's rows: the sampled tokens as pairs of id and log-probability, the context as ids.

`trainer_format` adds a column `tokentrue` with the rest of the sample, so that the file can be read back and audited.
"""

from typing import Any

from tokentrue.samples.formats import trainer_format
from tokentrue.types import Sample


def row(sample: Sample) -> dict[str, Any]:
    triples = zip(sample.token_ids, sample.loss_mask, sample.rollout_logprobs, strict=True)
    return {"pairs": [[token, trained, logprob] for token, trained, logprob in triples], "return": sample.reward}


def columns(found: Any) -> tuple[list[int], list[int], list[float | None]]:
    """The three columns of a sample from its row."""
    ids, mask, logprobs = map(list, zip(*found["pairs"], strict=True))
    return ids, mask, logprobs


PAIRS = trainer_format("pairs", follows="nobody: an example", mark="pairs", row=row, columns=columns)
