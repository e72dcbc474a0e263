"""Generator of the model files from the published architectures: `python -m cgx_ray.planner.models.generate`.

Names, shapes and their order are those of torchvision (images of 224 x 224) and of the authors' or Hugging Face's
PyTorch code (`tokens` per sequence). Forward multiply-adds are those of one sample: the elements of a matrix, bias or
scale times the positions that it is applied to. The products of activations in attention have no parameters; they count
with the projection before them (qkv, or key if it is separate).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

Row = tuple[str, tuple[int, ...], int]


def linear(name: str, out: int, into: int, positions: int = 1, *, bias: bool = True, extra: int = 0) -> list[Row]:
    """Return the rows of a linear layer. `extra`: multiply-adds without a parameter that count with its weight."""
    weight: Row = (f"{name}.weight", (out, into), out * into * positions + extra)
    return [weight, (f"{name}.bias", (out,), out * positions)] if bias else [weight]


def norm(name: str, width: int, positions: int) -> list[Row]:
    return [(f"{name}.{kind}", (width,), width * positions) for kind in ("weight", "bias")]


def conv(name: str, out: int, into: int, kernel: int, size: int, *, bias: bool = False) -> list[Row]:
    """Return the rows of a convolution. `size`: height and width of the output."""
    weight: Row = (f"{name}.weight", (out, into, kernel, kernel), out * into * kernel**2 * size**2)
    return [weight, (f"{name}.bias", (out,), out * size**2)] if bias else [weight]


def resnet(blocks: Sequence[int], *, bottleneck: bool) -> list[Row]:
    """He et al. 2016; the stride of a bottleneck is in its 3 x 3 convolution, as in torchvision."""
    rows = conv("conv1", 64, 3, 7, 112) + norm("bn1", 64, 112**2)
    into = 64
    for stage, num_blocks in enumerate(blocks):
        width, size = 64 << stage, 56 >> stage
        out = 4 * width if bottleneck else width
        for block in range(num_blocks):
            name, size_in = f"layer{stage + 1}.{block}", size * 2 if block == 0 and stage > 0 else size
            shapes = (
                [(width, into, 1, size_in), (width, width, 3, size), (out, width, 1, size)]
                if bottleneck
                else [(width, into, 3, size), (width, width, 3, size)]
            )
            for index, (channels, channels_in, kernel, side) in enumerate(shapes, start=1):
                rows += conv(f"{name}.conv{index}", channels, channels_in, kernel, side)
                rows += norm(f"{name}.bn{index}", channels, side**2)
            if into != out:
                rows += conv(f"{name}.downsample.0", out, into, 1, size) + norm(f"{name}.downsample.1", out, size**2)
            into = out
    return rows + linear("fc", 1000, into)


def vgg16() -> list[Row]:
    """Simonyan and Zisserman 2015, configuration D."""
    rows: list[Row] = []
    index, into = 0, 3
    for stage, (channels, num_convs) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        for _ in range(num_convs):
            rows += conv(f"features.{index}", channels, into, 3, 224 >> stage, bias=True)
            index, into = index + 2, channels
        index += 1
    sizes = ((0, 4096, 512 * 49), (3, 4096, 4096), (6, 1000, 4096))
    return rows + [row for index, out, into in sizes for row in linear(f"classifier.{index}", out, into)]


def alexnet() -> list[Row]:
    """Krizhevsky 2014, one tower."""
    convs = ((0, 64, 3, 11, 55), (3, 192, 64, 5, 27), (6, 384, 192, 3, 13), (8, 256, 384, 3, 13), (10, 256, 256, 3, 13))
    sizes = ((1, 4096, 256 * 36), (4, 4096, 4096), (6, 1000, 4096))
    rows = [row for index, *shape in convs for row in conv(f"features.{index}", *shape, bias=True)]
    return rows + [row for index, out, into in sizes for row in linear(f"classifier.{index}", out, into)]


def vit_b_16() -> list[Row]:
    """Dosovitskiy et al. 2021, ViT-B/16: 196 patches and a class token."""
    width, tokens = 768, 197
    rows: list[Row] = [("class_token", (1, 1, width), width)]
    rows += conv("conv_proj", width, 3, 16, 14, bias=True)
    rows += [("encoder.pos_embedding", (1, tokens, width), tokens * width)]
    for layer in range(12):
        name = f"encoder.layers.encoder_layer_{layer}"
        rows += norm(f"{name}.ln_1", width, tokens)
        rows += [
            (
                f"{name}.self_attention.in_proj_weight",
                (3 * width, width),
                3 * width**2 * tokens + 2 * width * tokens**2,
            ),
            (f"{name}.self_attention.in_proj_bias", (3 * width,), 3 * width * tokens),
        ]
        rows += linear(f"{name}.self_attention.out_proj", width, width, tokens)
        rows += norm(f"{name}.ln_2", width, tokens)
        rows += linear(f"{name}.mlp.0", 4 * width, width, tokens) + linear(f"{name}.mlp.3", width, 4 * width, tokens)
    return rows + norm("encoder.ln", width, tokens) + linear("heads.head", 1000, width)


def bert_base(tokens: int = 128) -> list[Row]:
    """Devlin et al. 2019, BertForPreTraining. It has 207 tensors, since the decoder's weight is not tied."""
    width, vocabulary = 768, 30522
    embeddings = (("word", vocabulary), ("position", 512), ("token_type", 2))
    rows: list[Row] = [
        (f"bert.embeddings.{kind}_embeddings.weight", (num_rows, width), width * tokens)
        for kind, num_rows in embeddings
    ]
    rows += norm("bert.embeddings.LayerNorm", width, tokens)
    for layer in range(12):
        name = f"bert.encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            extra = 2 * width * tokens**2 if part == "key" else 0
            rows += linear(f"{name}.attention.self.{part}", width, width, tokens, extra=extra)
        rows += linear(f"{name}.attention.output.dense", width, width, tokens)
        rows += norm(f"{name}.attention.output.LayerNorm", width, tokens)
        rows += linear(f"{name}.intermediate.dense", 4 * width, width, tokens)
        rows += linear(f"{name}.output.dense", width, 4 * width, tokens)
        rows += norm(f"{name}.output.LayerNorm", width, tokens)
    rows += linear("bert.pooler.dense", width, width)
    rows += [("cls.predictions.bias", (vocabulary,), vocabulary * tokens)]
    rows += linear("cls.predictions.transform.dense", width, width, tokens)
    rows += norm("cls.predictions.transform.LayerNorm", width, tokens)
    rows += linear("cls.predictions.decoder", vocabulary, width, tokens, bias=False)
    return rows + linear("cls.seq_relationship", 2, width)


def _with_output(rows: list[Row], macs: int) -> list[Row]:
    """Add the multiply-adds of an output layer that is tied to the embedding to the last row.

    Backward computes them next to that row, while the gradient of the embedding is complete only at the end of
    backward.
    """
    name, shape, own = rows[-1]
    return [*rows[:-1], (name, shape, own + macs)]


def gpt2(tokens: int = 1024) -> list[Row]:
    """Radford et al. 2019, the smallest model; its output layer is the token embedding."""
    width, vocabulary = 768, 50257
    rows: list[Row] = [
        ("transformer.wte.weight", (vocabulary, width), width * tokens),
        ("transformer.wpe.weight", (1024, width), width * tokens),
    ]
    for layer in range(12):
        name = f"transformer.h.{layer}"
        rows += norm(f"{name}.ln_1", width, tokens)
        rows += linear(f"{name}.attn.c_attn", 3 * width, width, tokens, extra=2 * width * tokens**2)
        rows += linear(f"{name}.attn.c_proj", width, width, tokens)
        rows += norm(f"{name}.ln_2", width, tokens)
        rows += linear(f"{name}.mlp.c_fc", 4 * width, width, tokens)
        rows += linear(f"{name}.mlp.c_proj", width, 4 * width, tokens)
    return _with_output(rows + norm("transformer.ln_f", width, tokens), vocabulary * width * tokens)


def transformer_xl_base(tokens: int = 150) -> list[Row]:
    """Dai et al. 2019, base for WikiText-103: memory as long as the sequence, adaptive softmax over tied embeddings.

    Clusters outside the short list of the softmax are computed only for their own tokens and are not counted.
    """
    width, vocabulary, num_heads, head, inner = 410, 267_735, 10, 41, 2100
    hidden, seen, short_list = num_heads * head, 2 * tokens, 20_000
    rows: list[Row] = [("word_emb.emb_layers.0.weight", (vocabulary, width), width * tokens)]
    rows += [(name, (num_heads, head), hidden * tokens) for name in ("r_w_bias", "r_r_bias")]
    for layer in range(16):
        name, attention = f"layers.{layer}.dec_attn", 3 * hidden * tokens * seen
        rows += linear(f"{name}.qkv_net", 3 * hidden, width, seen, bias=False, extra=attention)
        rows += linear(f"{name}.o_net", width, hidden, tokens, bias=False)
        rows += norm(f"{name}.layer_norm", width, tokens)
        rows += linear(f"{name}.r_net", hidden, width, seen, bias=False)
        rows += linear(f"layers.{layer}.pos_ff.CoreNet.0", inner, width, tokens)
        rows += linear(f"layers.{layer}.pos_ff.CoreNet.3", width, inner, tokens)
        rows += norm(f"layers.{layer}.pos_ff.layer_norm", width, tokens)
    rows += [("crit.cluster_weight", (3, width), 3 * width * tokens), ("crit.cluster_bias", (3,), 3 * tokens)]
    rows += [("crit.out_layers.0.bias", (vocabulary,), short_list * tokens)]
    return _with_output(rows, short_list * width * tokens)


MODELS = {
    "alexnet": alexnet,
    "bert_base": bert_base,
    "gpt2": gpt2,
    "resnet18": lambda: resnet((2, 2, 2, 2), bottleneck=False),
    "resnet50": lambda: resnet((3, 4, 6, 3), bottleneck=True),
    "resnet101": lambda: resnet((3, 4, 23, 3), bottleneck=True),
    "transformer_xl_base": transformer_xl_base,
    "vgg16": vgg16,
    "vit_b_16": vit_b_16,
}


def write(folder: Path) -> None:
    """Write one CSV file per model."""
    for model, rows_of in MODELS.items():
        with (folder / f"{model}.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("name", "shape", "forward_macs"))
            for name, shape, macs in rows_of():
                writer.writerow((name, "x".join(map(str, shape)), macs))


if __name__ == "__main__":
    write(Path(__file__).parent)
