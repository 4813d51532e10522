"""How many cache blocks fit: measured from the memory that is free, not asked of the user."""

from __future__ import annotations

import os

import torch

from tokentrue.engine.model.decoder import Decoder
from tokentrue.engine.scheduling.schedule import ScheduleLimits
from tokentrue.numerics import Ops
from tokentrue.numerics.delta import GatedDelta

CPU_SHARE, GPU_SHARE = 0.25, 0.85
CPU_MOST_BYTES = 4 << 30


def blocks_for(
    decoder: Decoder,
    ops: Ops,
    *,
    limits: ScheduleLimits,
    kv_tokens: int | None,
    device: torch.device,
    share: float = 1.0,
) -> int:
    """Enough for every request at full length if memory allows, else `share` of what memory allows; one more for the
    null block."""
    _, heads, head_dim = decoder.heads
    attentions = sum(not isinstance(layer.mixer, GatedDelta) for layer in decoder.layers)
    token_bytes = 2 * attentions * heads * head_dim * decoder.dtype.itemsize
    wanted = kv_tokens
    if wanted is None:
        wanted = min(
            limits.max_requests * decoder.max_positions,
            int(share * free_bytes(decoder, limits, device)) // max(token_bytes, 1),
        )
    return max(2, -(-wanted // ops.block_size)) + 1


def free_bytes(decoder: Decoder, limits: ScheduleLimits, device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        heads, key_heads, size = decoder.heads
        width = max(decoder.width, (heads + 2 * key_heads) * size)
        activations = (
            limits.step_tokens * width * decoder.dtype.itemsize * 16 + limits.max_requests * decoder.vocabulary * 40
        )
        return max(int(free * GPU_SHARE) - activations, 0)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(free * CPU_SHARE), CPU_MOST_BYTES)
