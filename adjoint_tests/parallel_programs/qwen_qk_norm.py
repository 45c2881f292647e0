"""Qwen3 of transformers in tensor parallel form. Projections and MLP follow a plan of torch;
the norms of queries and keys are plain modules, and see the rank's heads."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.modules.setdefault("torchvision", None)  # text only
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
CONFIG = Qwen3Config(
    vocab_size=17, hidden_size=8, intermediate_size=12, num_hidden_layers=2, head_dim=4,
    num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, use_cache=False,
    attn_implementation="eager",
)  # fmt: skip


class Lm(nn.Module):
    """Logits of ids."""

    def __init__(self):
        super().__init__()
        self.net = Qwen3ForCausalLM(CONFIG).double()

    def forward(self, ids):
        return self.net(ids).logits


def twin():
    torch.manual_seed(561)
    net = Lm()
    for name, p in net.named_parameters():
        if "norm" in name:
            nn.init.uniform_(p, 0.5, 1.5)
    return net


def model(twin):
    net = Lm()
    net.load_state_dict(twin.state_dict())
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj")
    plan = {name: ColwiseParallel() for name in (*columns, "mlp.up_proj")}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for layer in net.net.model.layers:
        parallelize_module(layer, mesh, plan)
    return net


def batch():
    g = torch.Generator().manual_seed(562)
    ids = torch.randint(0, 17, (2, 7), generator=g)
    return ids[:, :-1], ids[:, 1:]


def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def step(model, mine):
    ids, target = mine
    value = loss(model(ids), target)
    value.backward()
    if not WRONG:
        for layer in model.net.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                dist.all_reduce(norm.weight.grad)
    return value.detach()


FAULT = {
    "parameter": ["net.model.layers.0.self_attn.q_norm.weight",
                  "net.model.layers.0.self_attn.k_norm.weight",
                  "net.model.layers.1.self_attn.q_norm.weight",
                  "net.model.layers.1.self_attn.k_norm.weight"],
    "kind": "missing sum over 2 ranks", "factor": None, "loss": "equal",
    "note": "the norms are replicated and normalise the heads of their rank: nobody sums over tp",
    "place": ["q_norm", "k_norm", "dist.all_reduce(norm.weight.grad)"],
    "report": "NVIDIA-NeMo/RL#3716",
}  # fmt: skip
