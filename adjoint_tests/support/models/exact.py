"""Models of `transformers` in float64 throughout: norms and softmax, which they compute in float32
whatever the model's dtype, would hide differences below 1e-7."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

from support.models.packages import torchvision

if find_spec("torchvision") is not None:
    torchvision()  # which transformers imports

import transformers

CONFIGURATION: dict[str, Any] = {
    "vocab_size": 14,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "attn_implementation": "eager",
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "Mistral": ("Mistral", {"sliding_window": 4}),
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {"head_dim": 4}),
    "OLMo-2": ("Olmo2", {}),
    "Gemma": ("Gemma", {"head_dim": 4, "tie_word_embeddings": True}),
    "Gemma 2": ("Gemma2", {"head_dim": 4}),
    "Cohere": ("Cohere", {}),
    "Phi-3": ("Phi3", {}),
    "Mixtral": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    ),
    "Qwen3-MoE": (
        "Qwen3Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "head_dim": 4,
            "experts_implementation": "eager",
        },
    ),
    "OLMoE": (
        "Olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    ),
}
"""Decoders with such a configuration: their class, and what they have beside it."""
_MADE: dict[str, Any] = {}
_LOCK = threading.RLock()
_PATCHED = [0]


def model(name: str) -> Any:
    """A model of float64, the same at every call; copy it before it is changed."""
    with _LOCK:
        if name not in _MADE:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                made = _built(name).double()
                with torch.no_grad():
                    for p in made.parameters():
                        p.add_(torch.randn_like(p) * 0.05)
            _MADE[name] = made.train()
        return _MADE[name]


def _built(name: str) -> Any:
    if name == "GPT-2":
        return _gpt2()
    if name == "T5":
        return _t5()
    kind, more = NAMES[name]
    configuration = getattr(transformers, f"{kind}Config")(**CONFIGURATION | more)
    return getattr(transformers, f"{kind}ForCausalLM")(configuration)


def _gpt2() -> Any:
    common = {k: v for k, v in CONFIGURATION.items() if k in _OF_ALL}
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 20}
    configuration = transformers.GPT2Config(**common, **none, **sizes)
    return transformers.GPT2LMHeadModel(configuration)


def _t5() -> Any:
    common = {k: v for k, v in CONFIGURATION.items() if k in _OF_ALL}
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 4}
    configuration = transformers.T5Config(
        **common,
        **sizes,
        dropout_rate=0.0,
        relative_attention_num_buckets=4,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(configuration)


_OF_ALL = "vocab_size", "attn_implementation", "use_cache", "bos_token_id", "eos_token_id"


def inputs(name: str) -> dict[str, Any]:
    """A batch, by name."""
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(3, 14, (2, 6), generator=draw)
    if name != "T5":
        return {"input_ids": words}
    mask = torch.ones(2, 6).long()
    mask[0, 4:] = 0
    other = torch.randint(3, 14, (2, 5), generator=draw)
    return {"input_ids": words, "attention_mask": mask, "decoder_input_ids": other}


class _Torch:
    """torch, whose float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextmanager
def in_double(net: Any) -> Iterator[None]:
    """Context in which modules of transformers compute in float64. Threads may be in it
    together."""
    wide, narrow = _Torch(), torch.Tensor.float
    modules = {type(one).__module__ for one in net.modules()}
    modules = {name for name in modules if name.startswith("transformers")}
    with _LOCK:
        _PATCHED[0] += 1
        if _PATCHED[0] == 1:
            _PATCHED[1:] = [narrow]
            torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
        for name in modules:
            if getattr(sys.modules[name], "torch", None) is torch:
                sys.modules[name].torch = wide  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with _LOCK:
            _PATCHED[0] -= 1
            if not _PATCHED[0]:
                torch.Tensor.float = _PATCHED[1]  # type: ignore[method-assign,assignment]
                for module in list(sys.modules.values()):
                    if isinstance(module.__dict__.get("torch"), _Torch):
                        module.torch = torch  # type: ignore[attr-defined]
