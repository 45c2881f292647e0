"""Losses of routers, as this worker's terms: their sum over the workers is that of all tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RouterLosses(NamedTuple):
    """This worker's terms of the losses of a router, of dtype and device of its logits.

    Attributes:
        balance: of experts · Σₑ fₑ pₑ, where fₑ is how often expert e is chosen, and pₑ the sum of
            its probabilities, both divided by the number of tokens (Fedus et al. 2021, "Switch
            transformers", equation 4; with several choices as in Mixtral). fₑ has no derivative.
        z: of the mean over tokens of the squared logarithm of the sum of exponentials of the logits
            (Zoph et al. 2022, "ST-MoE", equation 5).
    """

    balance: Tensor
    z: Tensor


def router_losses(logits: Tensor, counts: Tensor, tokens: int) -> RouterLosses:
    """The terms of this worker's tokens.

    Args:
        logits: of its tokens, of shape (own tokens, experts).
        counts: choices of each expert by the tokens of all workers, of shape (experts,).
        tokens: of all workers.
    """
    every, dtype = max(1, tokens), logits.dtype
    # Float16 ends at 65504, and bfloat16 has 8 bits: too few for sums over tokens.
    wide = logits.float() if dtype in (torch.float16, torch.bfloat16) else logits
    sums = wide.softmax(-1).sum(0) / every
    share = (counts.double() / every).to(sums.dtype)
    balance = (sums * share).sum() * logits.shape[-1]
    z = wide.logsumexp(-1).square().sum() / every
    return RouterLosses(balance.to(dtype), z.to(dtype))


def routed(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Experts of each token, and their gates: the largest probabilities.

    Args:
        logits: of shape (tokens, experts).
        normalize: True if a token's gates are to sum to one.

    Returns:
        Indices, int64, and gates, of shape (tokens, top_k).
    """
    gates, indices = torch.topk(logits.softmax(-1), top_k, -1)
    return indices, gates / gates.sum(-1, keepdim=True) if normalize else gates
