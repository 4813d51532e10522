"""How far are the rollout's log-probabilities from the trainer's, and what would a correction do? From samples, in
Python.

Needs: the extra `train`, and a gateway (`tokentrue serve`).
Run: TOKENTRUE_URL=http://127.0.0.1:8000 TOKENTRUE_ADMIN_KEY=… python examples/diagnose_samples.py
"""

import os

import torch
from transformers import AutoModelForCausalLM

import tokentrue as tt
from tokentrue.environments import SMALL_MODEL
from tokentrue.mismatch import PRESETS, correct, diagnose
from tokentrue.numerics import exact, score

with tt.Client(os.environ["TOKENTRUE_URL"]) as client, client.session(sampling={"seed": 1}) as session:
    session.openai().chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": "Tom has 12 pens. Tom gets 5 more. How many now?"}],
        max_tokens=64,
    )
    (sample,) = session.samples()

ids = torch.tensor([sample.token_ids])
mask = torch.tensor([sample.loss_mask[1:]], dtype=torch.bool)
rollout = torch.tensor([[value or 0.0 for value in sample.rollout_logprobs[1:]]])
model = AutoModelForCausalLM.from_pretrained(SMALL_MODEL, dtype=torch.float32)
with torch.no_grad(), exact(model):
    trainer = score(model, ids)
noisy = trainer + 0.05 * torch.randn(
    trainer.shape, generator=torch.Generator().manual_seed(0)
)  # a trainer with other kernels

for name, side in (("exact", trainer), ("noisy", noisy)):
    found, corrected = diagnose(side, rollout, mask), correct(side, rollout, mask, PRESETS["decoupled_token_is"])
    print(
        f"{name}: K3 {found['corr/k3']:.6f}, largest δ {found['delta/max']:.4f}, weights up to {corrected.weights.max():.3f}"
    )
assert torch.equal(trainer[mask], rollout[mask])  # equal in every bit
