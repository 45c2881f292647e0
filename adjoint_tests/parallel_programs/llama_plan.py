"""A Llama-like decoder of transformers in tensor parallel form, by a plan of torch. The head's
logits are cut by vocabulary and gathered; the norms stay whole."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

sys.modules.setdefault("torchvision", None)  # text only
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
CONFIG = LlamaConfig(
    vocab_size=12, hidden_size=8, intermediate_size=12, num_hidden_layers=2, head_dim=4,
    num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False, use_cache=False,
    attn_implementation="eager",
)  # fmt: skip


class Lm(nn.Module):
    """Logits of ids."""

    def __init__(self):
        super().__init__()
        self.net = LlamaForCausalLM(CONFIG).double()

    def forward(self, ids):
        return self.net(ids).logits


def twin():
    torch.manual_seed(921)
    return Lm()


class LocalColumns(nn.Module):
    """The rank's rows of a linear layer, as plain tensors."""

    def __init__(self, linear, rank):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.data.chunk(WORLD)[rank].clone())

    def forward(self, x):
        return F.linear(x if WRONG else Sum.apply(x), self.weight)


class Sum(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.view_as(x))

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone())
        return grad


def shard(name, value, rank, world):
    return value.chunk(world)[rank] if "gate_proj" in name else value


def model(twin):
    net = Lm()
    net.load_state_dict(twin.state_dict())
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    attention = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"}
    plan = attention | {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    plan["mlp.up_proj"] = ColwiseParallel()
    for layer in net.net.model.layers:
        parallelize_module(layer, mesh, plan)
        layer.mlp.gate_proj = LocalColumns(layer.mlp.gate_proj, dist.get_rank())
    head = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(net.net, mesh, {"lm_head": head})
    return net


def batch():
    g = torch.Generator().manual_seed(922)
    ids = torch.randint(0, 12, (2, 6), generator=g)
    return ids[:, :-1], ids[:, 1:]


def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


FAULT = {
    "parameter": ["net.model.layers.0.input_layernorm.weight",
                  "net.model.layers.0.post_attention_layernorm.weight",
                  "net.model.layers.0.self_attn.q_proj.weight",
                  "net.model.layers.0.self_attn.k_proj.weight",
                  "net.model.layers.0.self_attn.v_proj.weight",
                  "net.model.layers.0.self_attn.o_proj.weight",
                  "net.model.layers.1.input_layernorm.weight",
                  "net.model.layers.1.post_attention_layernorm.weight",
                  "net.model.layers.1.self_attn.q_proj.weight",
                  "net.model.layers.1.self_attn.k_proj.weight",
                  "net.model.layers.1.self_attn.v_proj.weight",
                  "net.model.layers.1.self_attn.o_proj.weight", "net.model.embed_tokens.weight",
                  "net.model.layers.0.mlp.gate_proj.weight",
                  "net.model.layers.0.mlp.up_proj.weight",
                  "net.model.layers.0.mlp.down_proj.weight"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "gate_proj was replaced by a layer of plain tensors that hands each rank its own part"
            " of the input gradient: everything before the last MLP lacks the other ranks' share",
    "place": ["gate_proj", "x if WRONG else Sum.apply(x)", "LocalColumns"],
    "report": "pytorch/torchtitan#1805",
}  # fmt: skip
