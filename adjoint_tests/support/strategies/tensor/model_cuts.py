"""Plans of tensor and sequence parallelism for models of `transformers` as they are, and what each
has to hold: outputs, gradients, a step of an optimizer and the state are those of one process."""

from __future__ import annotations

import copy
import tempfile
from functools import partial
from typing import Any

import torch

from linop import COPIES, REPLICATED, layers
from linop.backends.engine.base import Backend
from linop.strategies import (
    ColwiseParallel,
    LocalAttributes,
    Mesh,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    check,
    full_state_dict,
    fully_shard,
    parallelize_module,
    tp_plan,
)
from support.models.exact import in_double, inputs, model

AT = "model.layers.*"
Plan = dict[str, Any]


def llama(heads: int = 2) -> Plan:
    """Of Llama, and those after it."""
    return {
        f"{AT}.self_attn.[qkv]_proj": ColwiseParallel(heads=heads),
        f"{AT}.self_attn.o_proj": RowwiseParallel(heads=heads),
        f"{AT}.mlp.gate_proj": ColwiseParallel(),
        f"{AT}.mlp.up_proj": ColwiseParallel(),
        f"{AT}.mlp.down_proj": RowwiseParallel(),
        "model.embed_tokens": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=REPLICATED),
    }


def llama_sequence(heads: int = 2) -> Plan:
    """Between attention and MLP the sequence is split; the attention has its input by name."""
    hidden: Any = {"hidden_states": 1}, {"hidden_states": COPIES}
    return {
        "model.embed_tokens": RowwiseParallel(),
        "model.layers.0": PrepareModuleInput(REPLICATED, 1),
        f"{AT}.*layernorm": SequenceParallel(),
        f"{AT}.self_attn": PrepareModuleInput((), (), *hidden),
        f"{AT}.self_attn.[qkv]_proj": ColwiseParallel(COPIES, heads=heads),
        f"{AT}.self_attn.o_proj": RowwiseParallel(output_layouts=1, heads=heads),
        f"{AT}.mlp": PrepareModuleInput(1, COPIES),
        f"{AT}.mlp.gate_proj": ColwiseParallel(COPIES),
        f"{AT}.mlp.up_proj": ColwiseParallel(COPIES),
        f"{AT}.mlp.down_proj": RowwiseParallel(output_layouts=1),
        "model.norm": SequenceParallel(output_layouts=REPLICATED),
        "lm_head": ColwiseParallel(output_layouts=REPLICATED),
    }


def phi3() -> Plan:
    fused = {
        f"{AT}.self_attn.qkv_proj": ColwiseParallel(heads=2, packed=(4, 2, 2)),
        f"{AT}.mlp.gate_up_proj": ColwiseParallel(packed=2),
    }
    parts = ("qkv", "[qkv]_proj", "gate_proj", "up_proj")
    return fused | {n: s for n, s in llama().items() if not n.endswith(parts)}


def gpt2() -> Plan:
    at = "transformer.h.*"
    return {
        f"{at}.attn.c_attn": ColwiseParallel(heads=4, packed=3),
        f"{at}.attn.c_proj": RowwiseParallel(heads=4),
        f"{at}.mlp.c_fc": ColwiseParallel(),
        f"{at}.mlp.c_proj": RowwiseParallel(),
        "transformer.wte": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=REPLICATED),
    }


def gpt2_sequence() -> Plan:
    at = "transformer.h.*"
    return gpt2() | {
        f"{at}.ln_*": SequenceParallel(),
        "transformer.h.0": PrepareModuleInput(REPLICATED, 1),
        f"{at}.attn": PrepareModuleInput(1, COPIES),
        f"{at}.attn.c_attn": ColwiseParallel(COPIES, heads=4, packed=3),
        f"{at}.attn.c_proj": RowwiseParallel(heads=4, output_layouts=1),
        f"{at}.mlp.c_fc": ColwiseParallel(1),
        f"{at}.mlp.c_proj": RowwiseParallel(output_layouts=1),
        "transformer.ln_f": SequenceParallel(output_layouts=REPLICATED),
    }


def t5() -> Plan:
    crossed = "decoder.block.*.layer.1.EncDecAttention"
    found: Plan = {
        crossed: LocalAttributes("n_heads"),
        f"{crossed}.[qkv]": ColwiseParallel(heads=4),
        f"{crossed}.o": RowwiseParallel(heads=4),
    }
    for part in "encoder", "decoder":
        at = f"{part}.block.*.layer.*"
        found |= {
            f"{at}.SelfAttention.[qkv]": ColwiseParallel(heads=4),
            f"{at}.SelfAttention.o": RowwiseParallel(heads=4),
            f"{at}.SelfAttention.relative_attention_bias": ColwiseParallel(heads=4),
            f"{at}.DenseReluDense.wi": ColwiseParallel(),
            f"{at}.DenseReluDense.wo": RowwiseParallel(),
        }
    return found


def olmo2() -> Plan:
    """Its norms are over all heads: of whole queries and keys, which are cut afterwards."""
    return llama() | {
        f"{AT}.self_attn.[qk]_proj": ColwiseParallel(heads=2, output_layouts=REPLICATED),
        f"{AT}.self_attn.[qk]_norm": PrepareModuleOutput(REPLICATED, -1, heads=2),
    }


NORMS = {f"{AT}.self_attn.[qk]_norm": SequenceParallel(None)}
PLANS: dict[str, dict[str, Plan]] = {
    "Llama": {"tensor": llama(), "sequence": llama_sequence()},
    "Llama, tied": {"tensor": llama(), "sequence": llama_sequence()},
    "Mistral": {"tensor": llama(), "sequence": llama_sequence()},
    "Qwen2": {"tensor": llama(), "sequence": llama_sequence()},
    "Qwen3": {"tensor": llama() | NORMS, "sequence": llama_sequence() | NORMS},
    "Gemma": {"tensor": llama(), "sequence": llama_sequence()},
    "OLMo-2": {"tensor": olmo2()},
    "Phi-3": {"tensor": phi3()},
    "GPT-2": {"tensor": gpt2(), "sequence": gpt2_sequence()},
    "T5": {"tensor": t5()},
    "Mixtral": {"tensor": {n: s for n, s in llama().items() if ".mlp." not in n}},
    "Gemma 2": {},
    "Cohere": {},
}
"""Of tensor and of sequence parallelism; all but GPT-2 and T5 have a plan of their own, too."""


def plan_of(name: str, kind: str, axis: Any) -> Plan:
    """The plan "tensor" or "sequence" of a model; or "own", that of transformers."""
    return tp_plan(model(name), axis) if kind == "own" else PLANS[name][kind]


def logits(output: Any) -> Any:
    return output.logits


def loss(output: Any) -> Any:
    return output.logits.square().sum()


def steps_as_one_process(backend: Backend, name: str, kind: str) -> None:
    """A step of an optimizer, and the call after it, that is not followed."""
    axis, twin, given = Mesh(backend, tp=-1)["tp"], copy.deepcopy(model(name)), inputs(name)
    with in_double(twin):
        net = parallelize_module(copy.deepcopy(twin), axis, plan_of(name, kind, axis))
        both = [(one, torch.optim.SGD(one.parameters(), lr=0.01)) for one in (twin, net)]
        for _ in range(2):
            outputs = []
            for one, sgd in both:
                sgd.zero_grad()
                output = one(**given)
                outputs.append(logits(output).detach())
                loss(output).backward()
                sgd.step()
            assert (outputs[0] - outputs[1]).abs().max() < 1e-10
        state = layers.gather_state(net)
        assert state is not None
        assert [*state] == [*twin.state_dict()]
        for key, p in twin.state_dict().items():
            assert (state[key] - p).abs().max() < 1e-10, key


def compiles_at_the_first_call(backend: Backend, name: str, kind: str) -> None:
    axis, twin, given = Mesh(backend, tp=-1)["tp"], copy.deepcopy(model(name)), inputs(name)
    with in_double(twin):
        wanted = logits(twin(**given))
        net = parallelize_module(copy.deepcopy(twin), axis, plan_of(name, kind, axis))
        compiled = torch.compile(net, backend="eager")
        for _ in range(2):
            output = compiled(**given)
            assert (logits(output) - wanted).abs().max() < 1e-10
        loss(output).backward()
        loss(twin(**given)).backward()
        grads = {n: p.grad for n, p in twin.named_parameters()}
        norm = "model.norm.weight" if "model.norm.weight" in grads else "transformer.ln_f.weight"
        mine = dict(net.named_parameters())[norm].grad
        assert mine is not None and (mine - grads[norm]).abs().max() < 1e-10


def computes_again(backend: Backend, name: str, kind: str) -> None:
    """The model's own checkpoints, in which parts of fused projections are taken again."""
    axis, twin, given = Mesh(backend, tp=-1)["tp"], copy.deepcopy(model(name)), inputs(name)
    with in_double(twin):
        net = parallelize_module(copy.deepcopy(twin), axis, plan_of(name, kind, axis))
        options = {"use_reentrant": False, "preserve_rng_state": False}
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        for _ in range(2):
            twin.zero_grad()
            net.zero_grad()
            loss(twin(**given)).backward()
            loss(net(**given)).backward()
        for key, p in net.named_parameters():
            whole = dict(twin.named_parameters())[key]
            if p.shape == whole.shape:
                assert (p.grad - whole.grad).abs().max() < 1e-9, key  # type: ignore[operator]


def agrees_by_check(backend: Backend, name: str, kind: str) -> None:
    axis, twin, given = Mesh(backend, tp=-1)["tp"], copy.deepcopy(model(name)), inputs(name)
    with in_double(twin):
        net = parallelize_module(copy.deepcopy(twin), axis, plan_of(name, kind, axis))

        def step(one: Any, batch: Any) -> Any:
            value = loss(one(**{**given, "input_ids": batch[0]}))
            value.backward()
            return value

        words = given["input_ids"]
        assert check(net, twin, words, step=step, mine=words) < 1e-10


def goes_on_elsewhere(backend: Backend, name: str, folder: str, saves: bool) -> None:
    """Blocks of fused projections in a folder, which other numbers of workers read; shards of
    blocks, too."""
    mesh = Mesh(backend, dp=1, tp=-1) if saves else Mesh(backend, dp=2, tp=-1)
    twin, given = copy.deepcopy(model(name)), inputs(name)
    with in_double(twin):
        net = parallelize_module(
            copy.deepcopy(twin), mesh["tp"], plan_of(name, "tensor", mesh["tp"])
        )
        if not saves:
            with torch.no_grad():
                for p in net.parameters():
                    p.fill_(7)
            fully_shard(net, mesh["dp"])
        both = [(one, torch.optim.Adam(one.parameters(), lr=0.01)) for one in (twin, net)]
        for one, adam in both[: 2 if saves else 1]:
            loss(one(**given)).backward()
            adam.step()
        if saves:
            layers.save(net, folder, both[1][1], sharded=True)
        else:
            layers.load(net, folder, both[1][1])
            for one, adam in both:
                adam.zero_grad()
                (loss(one(**given)) / (1 if one is twin else 2)).backward()
                adam.step()
        state = full_state_dict(net)
        for key, p in twin.state_dict().items():
            assert (state[key] - p).abs().max() < 1e-8, key  # Adam divides by small numbers


def folder() -> Any:
    return partial(tempfile.TemporaryDirectory)()
