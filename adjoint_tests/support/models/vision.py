"""Models of `torchvision` and `timm`."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import torch
from torch import nn

from support.models.model import Batch, Configuration, Cut, Family, Plan
from support.models.packages import torchvision

torchvision()

import timm.models as timm  # noqa: E402
from torchvision import models  # noqa: E402
from torchvision.models.convnext import CNBlockConfig  # noqa: E402
from torchvision.models.efficientnet import MBConvConfig  # noqa: E402
from torchvision.models.mobilenetv3 import InvertedResidualConfig  # noqa: E402

USUAL = {"width": 8, "heads": 4, "classes": 6, "size": 32, "dropout": 0.0, "path": 0.0}


def drawn(random: Random) -> Configuration:
    heads = random.choice([1, 2, 3])
    return {
        "width": random.choice([6, 8, 10]),
        "heads": heads,
        "classes": random.choice([3, 5, 7]),
        "size": 32,
        "dropout": random.choice([0.0, 0.0, 0.2]),
        "path": random.choice([0.0, 0.0, 0.2]),
    }


def images(c: Configuration, rows: int, draw: Any) -> Batch:
    pixels = torch.randn(rows, 3, c["size"], c["size"], generator=draw, dtype=torch.float64)
    return Batch((pixels,), {}, torch.randint(c["classes"], (rows,), generator=draw))


def small_images(c: Configuration, rows: int, draw: Any) -> Batch:
    return images(c | {"size": 8}, rows, draw)


def torchvision_resnet(c: Configuration) -> Any:
    return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=c["classes"])


def torchvision_mobilenet(c: Configuration) -> Any:
    w = c["width"]
    blocks = [
        InvertedResidualConfig(w, 3, 2 * w, w, True, "RE", 2, 1, 1),
        InvertedResidualConfig(w, 3, 2 * w, 2 * w, True, "HS", 2, 1, 1),
        InvertedResidualConfig(2 * w, 5, 2 * w, 2 * w, False, "HS", 1, 1, 1),
    ]
    return models.MobileNetV3(blocks, 2 * w, c["classes"], dropout=c["dropout"])


def torchvision_efficientnet(c: Configuration) -> Any:
    w = c["width"]
    blocks = [MBConvConfig(1, 3, 2, w, w, 1), MBConvConfig(2, 3, 2, w, 2 * w, 2)]
    return models.EfficientNet(
        blocks, c["dropout"], c["path"], num_classes=c["classes"], last_channel=3 * w
    )


def torchvision_convnext(c: Configuration) -> Any:
    w = c["width"]
    blocks = [CNBlockConfig(w, 2 * w, 2), CNBlockConfig(2 * w, None, 1)]
    return models.ConvNeXt(blocks, c["path"], 0.5, c["classes"])


def torchvision_vit(c: Configuration) -> Any:
    wide = c["heads"] * c["width"]
    return models.VisionTransformer(
        8, 4, 2, c["heads"], wide, 2 * wide, c["dropout"], c["dropout"], c["classes"]
    )


def timm_resnet(c: Configuration) -> Any:
    w = c["width"]
    return timm.resnet.ResNet(
        timm.resnet.BasicBlock,
        (2, 1, 1, 1),
        c["classes"],
        channels=(w, w + 1, 2 * w, 2 * w),
        drop_rate=c["dropout"],
        drop_path_rate=c["path"],
    )


def _timm(kind: Any, c: Configuration, blocks: list[list[str]]) -> Any:
    from timm.models._efficientnet_builder import decode_arch_def

    return kind(
        decode_arch_def(blocks),
        c["classes"],
        num_features=3 * c["width"],
        stem_size=c["width"],
        round_chs_fn=partial(timm._efficientnet_builder.round_channels, divisor=1),
        act_layer=nn.Hardswish,
        drop_rate=c["dropout"],
        drop_path_rate=c["path"],
    )


def timm_mobilenet(c: Configuration) -> Any:
    w = c["width"]
    blocks = [
        [f"ds_r1_k3_s2_e1_c{w}_se0.25"],
        [f"ir_r2_k5_s2_e2_c{w + 2}_se0.25"],
        ["cn_r1_k1_s1_c12"],
    ]
    return _timm(timm.mobilenetv3.MobileNetV3, c, blocks)


def timm_efficientnet(c: Configuration) -> Any:
    w = c["width"]
    blocks = [[f"ds_r1_k3_s1_e1_c{w}_se0.25"], [f"ir_r2_k3_s2_e2_c{w + 2}_se0.25"]]
    return _timm(timm.efficientnet.EfficientNet, c, blocks)


def timm_convnext(c: Configuration) -> Any:
    w = c["width"]
    return timm.convnext.ConvNeXt(
        num_classes=c["classes"],
        depths=(2, 1, 1, 1),
        dims=(w, w + 2, w + 4, w + 6),
        ls_init_value=0.5,
        drop_rate=c["dropout"],
        drop_path_rate=c["path"],
    )


def timm_vit(c: Configuration) -> Any:
    return timm.vision_transformer.VisionTransformer(
        8,
        4,
        num_classes=c["classes"],
        embed_dim=c["heads"] * c["width"],
        depth=2,
        num_heads=c["heads"],
        init_values=0.5,
        pos_drop_rate=c["dropout"],
        proj_drop_rate=c["dropout"],
        attn_drop_rate=c["dropout"],
        drop_path_rate=c["path"],
    )


def _last(name: str, c: Configuration, one: bool) -> Plan | None:
    """A classifier that is cut by classes; convolutions are not."""
    return None if one else {name: Cut("column", outputs="whole")}


def _two(first: str, second: str, c: Configuration, one: bool) -> Plan | None:
    return None if one else {first: Cut("column"), second: Cut("row")}


def torchvision_vit_plan(c: Configuration, one: bool) -> Plan | None:
    at = "encoder.layers.*"
    return (
        None
        if one
        else {
            f"{at}.self_attention": Cut("attention"),
            f"{at}.mlp.0": Cut("column"),
            f"{at}.mlp.3": Cut("row"),
        }
    )


def timm_vit_plan(c: Configuration, one: bool) -> Plan | None:
    at = "blocks.*"
    return (
        None
        if one
        else {
            f"{at}.attn.qkv": Cut("column", heads=c["heads"], packed=3),
            f"{at}.attn.proj": Cut("row", heads=c["heads"]),
            f"{at}.attn": Cut("numbers", heads=c["heads"], named="attn_dim"),
            f"{at}.mlp.fc1": Cut("column"),
            f"{at}.mlp.fc2": Cut("row"),
        }
    )


def _family(
    package: str, name: str, build: Any, plan: Any, cut: str, chains: str, inputs: Any = images
) -> Family:
    names = tuple(chains.split())
    return Family(package, name, USUAL, drawn, build, inputs, plan, (cut,), names, names)


STAGES = "layer1 layer2 layer3 layer4"
MODELS = [
    _family("torchvision", "ResNet", torchvision_resnet, partial(_last, "fc"), "layer3", STAGES),
    _family(
        "torchvision",
        "MobileNet",
        torchvision_mobilenet,
        partial(_two, "classifier.0", "classifier.3"),
        "features.2",
        "features",
    ),
    _family(
        "torchvision",
        "EfficientNet",
        torchvision_efficientnet,
        partial(_last, "classifier.1"),
        "features.2",
        "features",
    ),
    _family(
        "torchvision",
        "ConvNeXt",
        torchvision_convnext,
        partial(_two, "features.*.*.block.3", "features.*.*.block.5"),
        "features.2",
        "features",
    ),
    _family(
        "torchvision",
        "ViT",
        torchvision_vit,
        torchvision_vit_plan,
        "encoder.layers.encoder_layer_1",
        "encoder.layers",
        small_images,
    ),
    _family("timm", "ResNet", timm_resnet, partial(_last, "fc"), "layer3", STAGES),
    _family(
        "timm", "MobileNet", timm_mobilenet, partial(_last, "classifier"), "blocks.1", "blocks"
    ),
    _family(
        "timm",
        "EfficientNet",
        timm_efficientnet,
        partial(_last, "classifier"),
        "blocks.1",
        "blocks",
    ),
    _family(
        "timm",
        "ConvNeXt",
        timm_convnext,
        partial(_two, "stages.*.blocks.*.mlp.fc1", "stages.*.blocks.*.mlp.fc2"),
        "stages.2",
        "stages",
    ),
    _family("timm", "ViT", timm_vit, timm_vit_plan, "blocks.1", "blocks", small_images),
]
