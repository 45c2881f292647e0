"""Language models, and a vision transformer, of `transformers`."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import torch
import transformers

from support.models.model import IGNORED, Batch, Configuration, Cut, Family, Plan

LENGTH, PACKAGE = 6, "transformers"
LANGUAGE = {
    "heads": 4,
    "groups": 2,
    "head": 4,
    "hidden": 16,
    "layers": 2,
    "words": 14,
    "dropout": 0.0,
    "tied": False,
    "mask": False,
    "ignored": 0.0,
    "unused": False,
}


def drawn(random: Random) -> Configuration:
    """Any number of heads and groups, sizes that need not divide."""
    groups = random.choice([1, 2, 3])
    return {
        "heads": groups * random.choice([1, 2]),
        "groups": groups,
        "head": random.choice([2, 4]),
        "hidden": random.choice([6, 7, 10, 13]),
        "layers": 2,
        "words": random.choice([7, 10, 13]),
        "dropout": random.choice([0.0, 0.0, 0.1, 0.3]),
        "tied": random.random() < 0.4,
        "mask": random.random() < 0.4,
        "ignored": random.choice([0.0, 0.0, 0.5]),
        "unused": random.random() < 0.25,
    }


def _width(c: Configuration) -> int:
    return int(c["heads"] * c["head"])


def _common(c: Configuration) -> dict[str, Any]:
    return {"use_cache": False, "attn_implementation": "eager", "vocab_size": c["words"]}


def _modern(c: Configuration) -> dict[str, Any]:
    """Arguments of the configurations of Llama and those after it."""
    return _common(c) | {
        "hidden_size": _width(c),
        "intermediate_size": c["hidden"],
        "num_hidden_layers": c["layers"],
        "num_attention_heads": c["heads"],
        "num_key_value_heads": c["groups"],
        "max_position_embeddings": 2 * LENGTH,
        "tie_word_embeddings": c["tied"],
        "attention_dropout": c["dropout"],
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def gpt2(c: Configuration) -> Any:
    config = transformers.GPT2Config(
        **_common(c),
        n_positions=2 * LENGTH,
        n_embd=_width(c),
        n_layer=c["layers"],
        n_head=c["heads"],
        n_inner=c["hidden"],
        resid_pdrop=c["dropout"],
        embd_pdrop=c["dropout"],
        attn_pdrop=c["dropout"],
        tie_word_embeddings=c["tied"],
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def llama(c: Configuration) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_modern(c)))


def mixtral(c: Configuration) -> Any:
    # The fast experts of torch are not there in float64.
    config = transformers.MixtralConfig(
        **_modern(c),
        num_local_experts=3,
        num_experts_per_tok=2,
        experts_implementation="eager",
    )
    return transformers.MixtralForCausalLM(config)


def phi3(c: Configuration) -> Any:
    return transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**_modern(c), resid_pdrop=c["dropout"], embd_pdrop=c["dropout"])
    )


def qwen3(c: Configuration) -> Any:
    config = transformers.Qwen3Config(**_modern(c), head_dim=c["head"])
    return transformers.Qwen3ForCausalLM(config)


def bert(c: Configuration) -> Any:
    config = transformers.BertConfig(
        **_common(c),
        hidden_size=_width(c),
        num_hidden_layers=c["layers"],
        num_attention_heads=c["heads"],
        intermediate_size=c["hidden"],
        hidden_dropout_prob=c["dropout"],
        attention_probs_dropout_prob=c["dropout"],
        max_position_embeddings=2 * LENGTH,
        tie_word_embeddings=c["tied"],
    )
    # Of the two outputs of the first the second, and the pooler before it, are not in the loss.
    kind = transformers.BertForPreTraining if c["unused"] else transformers.BertForMaskedLM
    return kind(config)


def t5(c: Configuration) -> Any:
    config = transformers.T5Config(
        vocab_size=c["words"],
        use_cache=False,
        d_model=_width(c),
        d_kv=c["head"],
        d_ff=c["hidden"],
        num_layers=c["layers"],
        num_heads=c["heads"],
        dropout_rate=c["dropout"],
        relative_attention_num_buckets=4,
        tie_word_embeddings=c["tied"],
        attn_implementation="eager",
    )
    return transformers.T5ForConditionalGeneration(config)


def vit(c: Configuration) -> Any:
    config = transformers.ViTConfig(
        hidden_size=_width(c),
        num_hidden_layers=c["layers"],
        num_attention_heads=c["heads"],
        intermediate_size=c["hidden"],
        hidden_dropout_prob=c["dropout"],
        attention_probs_dropout_prob=c["dropout"],
        image_size=8,
        patch_size=4,
        num_labels=c["words"],
        attn_implementation="eager",
    )
    kind = transformers.ViTModel if c["unused"] else transformers.ViTForImageClassification
    return kind(config)


def text(c: Configuration, rows: int, draw: Any) -> Batch:
    """Words, perhaps a mask of padding, and targets of which some are ignored."""
    words = torch.randint(3, c["words"], (rows, LENGTH), generator=draw)
    target = torch.randint(c["words"], (rows, LENGTH), generator=draw)
    target[torch.rand(rows, LENGTH, generator=draw) < c["ignored"]] = IGNORED
    options = {}
    if c["mask"]:
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (rows, 1), generator=draw)
        options["attention_mask"] = (torch.arange(LENGTH) < lengths).long()
    return Batch((words,), options, target)


def two_texts(c: Configuration, rows: int, draw: Any) -> Batch:
    """Words of the encoder, and of the decoder."""
    first, second = (text(c, rows, draw) for _ in range(2))
    return Batch(
        first.arguments, {**first.options, "decoder_input_ids": second.arguments[0]}, second.target
    )


def images(c: Configuration, rows: int, draw: Any) -> Batch:
    pixels = torch.randn(rows, 3, 8, 8, generator=draw, dtype=torch.float64)
    if c["unused"]:  # one target for each patch, and for the class token
        return Batch((pixels,), {}, torch.randint(_width(c), (rows, 5), generator=draw))
    return Batch((pixels,), {}, torch.randint(c["words"], (rows,), generator=draw))


def _attention(at: str, names: tuple[str, str, str, str], c: Configuration, one: bool) -> Plan:
    """Cuts of an attention with a projection each for queries, keys, values and the output.

    Args:
        one: the output is split along the sequence.
    """
    q, k, v, o = (f"{at}.{name}" for name in names)
    inputs, outputs = (1, 1) if one else (None, None)
    heads, groups = c["heads"], c["groups"]
    if groups < c.get("workers", 2):  # which share the groups' weights
        whole, queries = heads, heads
    else:
        whole, queries = groups, None
    of = Cut("column", heads=groups, queries=queries, inputs=inputs)
    query = Cut("column", heads=whole, inputs=inputs)
    return {q: query, k: of, v: of, o: Cut("row", heads=whole, outputs=outputs)}


def _gathered(at: str, names: tuple[str, str, str, str], c: Configuration) -> Plan:
    """Cuts of an attention whose input is gathered once, before it looks at the sequence's
    length."""
    found = _attention(at, names, c, True)
    gathers = {name: replace(cut, inputs="copies") for name, cut in found.items()}
    return gathers | {f"{at}.{names[3]}": found[f"{at}.{names[3]}"]}


def _mlp(up: tuple[str, ...], down: str, one: bool) -> Plan:
    column = Cut("column", inputs=1) if one else Cut("column")
    return dict.fromkeys(up, column) | {down: Cut("row", outputs=1) if one else Cut("row")}


def _words(c: Configuration, embedding: str, head: str | None, one: bool) -> Plan:
    found = {embedding: Cut("row", outputs=1) if one else Cut("row")}
    if head:
        found[head] = Cut("column", inputs=1 if one else None, outputs="whole")
    return found


def llama_plan(c: Configuration, one: bool) -> Plan:
    at = "model.layers.*"
    found = _attention(f"{at}.self_attn", ("q_proj", "k_proj", "v_proj", "o_proj"), c, one)
    up = f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"
    found |= _mlp(up, f"{at}.mlp.down_proj", one)
    found |= _words(c, "model.embed_tokens", "lm_head", one)
    if not one:
        return found
    # The rotary embedding is of the whole sequence, which is split after it.
    found |= _gathered(f"{at}.self_attn", ("q_proj", "k_proj", "v_proj", "o_proj"), c)
    norms = f"{at}.input_layernorm", f"{at}.post_attention_layernorm"
    found |= dict.fromkeys(norms, Cut("norm"))
    return found | {
        "model.embed_tokens": Cut("row"),
        "model.layers.0": Cut("input", inputs="whole", outputs=1),
        f"{at}.self_attn": Cut("input", inputs=1, named="hidden_states"),
        "model.norm": Cut("norm"),
        "lm_head": Cut("column", inputs=1, outputs="whole"),
    }


def qwen3_plan(c: Configuration, one: bool) -> Plan:
    norms = {f"model.layers.*.self_attn.{name}_norm": Cut("heads' norm") for name in "qk"}
    return llama_plan(c, one) | norms


def mixtral_plan(c: Configuration, one: bool) -> Plan | None:
    found = llama_plan(c, one)
    return None if one else {name: cut for name, cut in found.items() if ".mlp." not in name}


def phi3_plan(c: Configuration, one: bool) -> Plan | None:
    at, groups = "model.layers.*", c["groups"]
    parts = c["heads"], groups, groups
    found = {
        f"{at}.self_attn.qkv_proj": Cut("column", heads=groups, packed=parts),
        f"{at}.self_attn.o_proj": Cut("row", heads=groups),
        f"{at}.mlp.gate_up_proj": Cut("column", packed=2),
        f"{at}.mlp.down_proj": Cut("row"),
    }
    return None if one else found


def gpt2_plan(c: Configuration, one: bool) -> Plan | None:
    at = "transformer.h.*"
    found = {
        f"{at}.attn.c_attn": Cut("column", heads=c["heads"], packed=3),
        f"{at}.attn.c_proj": Cut("row", heads=c["heads"]),
    }
    return None if one else found | _mlp((f"{at}.mlp.c_fc",), f"{at}.mlp.c_proj", False)


def bert_plan(c: Configuration, one: bool) -> Plan:
    c = c | {"groups": c["heads"]}
    at = "bert.encoder.layer.*"
    names = "self.query", "self.key", "self.value", "output.dense"
    found = _attention(f"{at}.attention", names, c, one)
    found |= _mlp((f"{at}.intermediate.dense",), f"{at}.output.dense", one)
    if not one:
        return found
    found |= _gathered(f"{at}.attention", names, c) | {
        f"{at}.attention.self": Cut("input", inputs=1)
    }
    norms = f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"
    ends = {"bert.embeddings": Cut("output", outputs=1)}
    ends |= {f"bert.encoder.layer.{c['layers'] - 1}": Cut("output", inputs=1, outputs="whole")}
    return found | dict.fromkeys(norms, Cut("norm")) | ends


def t5_plan(c: Configuration, one: bool) -> Plan | None:
    found, crossed = {}, "decoder.block.*.layer.1.EncDecAttention"
    found |= {f"{crossed}.{name}": Cut("column", heads=c["heads"]) for name in "qkv"}
    found |= {f"{crossed}.o": Cut("row", heads=c["heads"])}
    found |= {crossed: Cut("numbers", named="n_heads")}
    for part, feed in ("encoder", 1), ("decoder", 2):
        at = f"{part}.block.*.layer.*"
        heads, bias = c["heads"], "SelfAttention.relative_attention_bias"
        found |= {f"{at}.SelfAttention.{name}": Cut("column", heads=heads) for name in "qkv"}
        found |= {f"{at}.SelfAttention.o": Cut("row", heads=heads)}
        found |= {f"{part}.block.0.layer.0.{bias}": Cut("column", heads=heads)}
        found |= _mlp(
            (f"{part}.block.*.layer.{feed}.DenseReluDense.wi",),
            f"{part}.block.*.layer.{feed}.DenseReluDense.wo",
            False,
        )
    return None if one else found


def vit_plan(c: Configuration, one: bool) -> Plan:
    c = c | {"groups": c["heads"]}
    model = "" if c["unused"] else "vit."
    at = f"{model}layers.*"
    names = "q_proj", "k_proj", "v_proj", "o_proj"
    found = _attention(f"{at}.attention", names, c, one)
    found |= _mlp((f"{at}.mlp.fc1",), f"{at}.mlp.fc2", one)
    if not one:
        return found
    found |= _gathered(f"{at}.attention", names, c) | {f"{at}.attention": Cut("input", inputs=1)}
    norms = f"{at}.layernorm_before", f"{at}.layernorm_after"
    ends = {f"{model}embeddings": Cut("output", outputs=1)}
    ends |= {f"{model}layernorm": Cut("norm", outputs="whole")}  # of which one is classified
    return found | dict.fromkeys(norms, Cut("norm")) | ends


def _language(
    name: str, build: Any, plan: Any, cuts: str, layers: str, inputs: Any = text
) -> Family:
    return Family(
        PACKAGE,
        name,
        LANGUAGE,
        drawn,
        build,
        inputs,
        plan,
        tuple(cuts.split()),
        tuple(layers.split()),
        normalizes=True,
    )


ENDS = "model.layers.1 lm_head"
MODELS = [
    _language("GPT-2", gpt2, gpt2_plan, "transformer.h.1 lm_head", "transformer.h"),
    _language("Llama", llama, llama_plan, ENDS, "model.layers"),
    _language("BERT", bert, bert_plan, "bert.encoder.layer.1 cls", "bert.encoder.layer"),
    _language("T5", t5, t5_plan, "decoder lm_head", "encoder.block decoder.block", two_texts),
    _language("ViT", vit, vit_plan, "vit.layers.1 classifier", "vit.layers layers", images),
    _language("Mixtral", mixtral, mixtral_plan, ENDS, "model.layers"),
    _language("Phi-3", phi3, phi3_plan, ENDS, "model.layers"),
    _language("Qwen3", qwen3, qwen3_plan, ENDS, "model.layers"),
]
