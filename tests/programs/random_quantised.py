"""Random quantised checkpoints of random options, each against the numbers that were written.

    python -m tests.programs.random_quantised [FORMAT ...] [--count N] [--seed N]

Options: the kind of model, sizes, biases, layers, bits, ragged groups, zero points, orders of columns, products that
stay floats or have other bits. Checked: every weight bit for bit, but for formats whose own formula rounds twice; the
logits of onnxruntime and of an engine of `f32` within 1e-4 of the range of those of the float weights; the logits of an
engine of `--precision auto` no further off than noise makes them that is as large as the errors that its manifest
states.
"""

import argparse
import dataclasses
import json
import random
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.dtypes import DType
from ingot.engine import read_manifest
from tests import gguf_files
from tests import quantised as write
from tests.builder.engines import engine_logits
from tests.convert.gguf.test_blocks import VOCAB as GGUF_VOCAB
from tests.convert.gguf.test_blocks import write_llama
from tests.convert.quantised.test_formats import compressed, fp8, product_weights
from tests.graph_logits import logits_of_graph

CLOSE = 1e-4  # of the range of logits
TWICE = 2.0**-22  # relative, of weights whose formula rounds twice
TIMES = 3  # logits may be off by so much more than those of weights with noise, whose errors happen to cancel or not


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """settings: quantization_config. others: of products that are not packed as the rest."""

    settings: Mapping[str, object]
    packer: write.Packer
    others: Mapping[str, write.Packer] = dataclasses.field(default_factory=dict)
    twice: bool = False


Sizes = Mapping[str, tuple[int, int]]
Draw = Callable[[random.Random, Sizes], Drawn]
GROUPS = (-1, 16, 32, 48, 64, 128)


def _dividing(draw: random.Random, sizes: Sizes, choices: tuple[int, ...] = GROUPS) -> int:
    """A group that divides the columns of all products; -1: whole rows."""
    return draw.choice([each for each in choices if each < 0 or all(k % each == 0 for _, k in sizes.values())])


def _gptq(draw: random.Random, sizes: Sizes) -> Drawn:
    bits, group = draw.choice((2, 3, 4, 8)), draw.choice((*GROUPS, 24, 40))
    symmetric, version = draw.random() < 0.5, draw.choice((1, 2))
    shuffled, dtype = draw.random() < 0.4, draw.choice((DType.F16, DType.BF16))
    settings: dict[str, object] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": shuffled,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }

    def packer(bits: int, group: int) -> write.Packer:
        return write.gptq(
            bits, group, symmetric=symmetric, less=2 - version, shuffled=shuffled, same_order=True, dtype=dtype
        )

    others: dict[str, write.Packer] = {}
    dynamic: dict[str, dict[str, int]] = {}
    if draw.random() < 0.5:
        module, other = draw.choice(list(sizes)), draw.choice((2, 4, 8))
        dynamic[f"+:.*{module.rpartition('.')[2]}"] = {"bits": other, "group_size": 32}
        others[module] = packer(other, 32)
    if draw.random() < 0.5:
        module = draw.choice([each for each in sizes if each not in others])
        dynamic[f"-:.*{module.rpartition('.')[2]}"] = {}
        others[module] = write.as_floats
    if dynamic:
        settings["dynamic"] = dynamic
    return Drawn(settings=settings, packer=packer(bits, group), others=others)


def _without(draw: random.Random, sizes: Sizes, key: str, drawn: Drawn) -> Drawn:
    """Perhaps with a product that stays floats, which the configuration lists under a key."""
    if draw.random() < 0.5:
        return drawn
    module = draw.choice(list(sizes))
    listed = [module] if key != "ignore" else [f"re:.*{module.rpartition('.')[2]}$"]
    others = {**drawn.others, module: write.as_floats}
    return dataclasses.replace(drawn, settings={**drawn.settings, key: listed}, others=others)


def _awq(draw: random.Random, sizes: Sizes) -> Drawn:
    group, zeros = _dividing(draw, sizes), draw.random() < 0.7
    settings = {"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": group, "zero_point": zeros}
    drawn = Drawn(settings=settings, packer=write.awq(group, zeros=zeros))
    return _without(draw, sizes, "modules_to_not_convert", drawn)


def _auto_round(draw: random.Random, sizes: Sizes) -> Drawn:
    packing, group = draw.choice(("auto_round:auto_gptq", "auto_round", "auto_round:auto_awq")), _dividing(draw, sizes)
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": group, "sym": False, "packing_format": packing}
    if packing.endswith("awq"):
        return Drawn(settings=settings, packer=write.awq(group))
    less, module, other = int(packing.endswith("gptq")), draw.choice(list(sizes)), draw.choice((2, 8))
    if draw.random() < 0.5:
        return Drawn(settings=settings, packer=write.gptq(4, group, less=less))
    extra = {f".*{module.rpartition('.')[2]}": {"bits": other, "group_size": 32}}
    others = {module: write.gptq(other, 32, less=less)}
    return Drawn(settings={**settings, "extra_config": extra}, packer=write.gptq(4, group, less=less), others=others)


def _packed(draw: random.Random, sizes: Sizes) -> Drawn:
    bits, group = draw.randrange(1, 9), draw.choice((*GROUPS, 24, 40))
    symmetric, shuffled, dense = draw.random() < 0.5, draw.random() < 0.4 and group > 0, draw.random() < 0.7
    strategy = {"strategy": "channel"} if group < 0 else {"strategy": "group", "group_size": group}
    order = {"actorder": "group"} if shuffled else {}
    settings = compressed("pack-quantized", num_bits=bits, symmetric=symmetric, **strategy, **order)
    packer = write.packed(bits, group, symmetric=symmetric, shuffled=shuffled, dense=dense or 32 % bits == 0)
    return Drawn(settings=settings, packer=packer)


def _bytes(draw: random.Random, sizes: Sizes) -> Drawn:
    if draw.random() < 0.3:
        drawn = Drawn(
            settings=compressed("int-quantized", num_bits=8, strategy="channel"),
            packer=write.bytes_with_scale(DType.I8, "weight_scale", (1, 0), dtype=draw.choice((DType.F32, DType.BF16))),
        )
        return _without(draw, sizes, "ignore", drawn)
    grain = draw.choice(("tensor", "channel", "block"))
    block = {"tensor": None, "channel": (1, 0), "block": (draw.choice((16, 40, 128)), draw.choice((16, 24, 32, 128)))}
    settings = fp8(
        "float-quantized", grain, **({"block_structure": list(block[grain] or ())} if grain == "block" else {})
    )
    dtype = draw.choice((DType.F32, DType.BF16))
    packer = write.bytes_with_scale(DType.F8, "weight_scale", block[grain], dtype=dtype, flat=grain == "tensor")
    return _without(draw, sizes, "ignore", Drawn(settings=settings, packer=packer))


def _fp4(draw: random.Random, sizes: Sizes) -> Drawn:
    """NVFP4 of both conventions, MXFP4."""
    kind = draw.choice(("mxfp4", "nvfp4", "modelopt"))
    if kind == "mxfp4":
        settings = compressed("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32)
        return Drawn(settings=settings, packer=write.fp4("weight_packed", 32))
    if kind == "nvfp4":
        settings = compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16)
        return Drawn(
            settings=settings, packer=write.fp4("weight_packed", 16, factor="weight_global_scale", divides=True)
        )
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    packer, columns = write.fp4("weight", 16, factor="weight_scale_2"), draw.random() < 0.5
    return Drawn(settings=settings, packer=write.with_columns(packer) if columns else packer, twice=columns)


def _fp8(draw: random.Random, sizes: Sizes) -> Drawn:
    block = (draw.choice((16, 24, 40, 128)), draw.choice((16, 32, 40, 64, 128)))
    settings = {"quant_method": "fp8", "weight_block_size": list(block)}
    drawn = Drawn(settings=settings, packer=write.bytes_with_scale(DType.F8, "weight_scale_inv", block))
    return _without(draw, sizes, "modules_to_not_convert", drawn)


def _modelopt(draw: random.Random, sizes: Sizes) -> Drawn:
    group = _dividing(draw, sizes, (16, 32, 64, 128))
    settings = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": group}
    return Drawn(settings=settings, packer=write.modelopt_int4(group), twice=True)


def _bnb(draw: random.Random, sizes: Sizes) -> Drawn:
    if draw.random() < 0.25:
        return Drawn(settings={"quant_method": "bitsandbytes", "load_in_8bit": True}, packer=write.bnb8, twice=True)
    packer = write.bnb4(draw.choice((20, 32, 64, 100)), nested=draw.random() < 0.5, kind=draw.choice(("nf4", "fp4")))
    return Drawn(settings={"quant_method": "bitsandbytes", "load_in_4bit": True}, packer=packer)


def _hqq(draw: random.Random, sizes: Sizes) -> Drawn:
    bits, axis = draw.choice((1, 2, 3, 4, 8)), draw.choice((0, 1))
    group = _dividing(draw, sizes, (16, 32, 64))
    return Drawn(settings={"quant_method": "hqq"}, packer=write.hqq(bits, group, axis), twice=True)


def _torchao(draw: random.Random, sizes: Sizes) -> Drawn:
    group = _dividing(draw, sizes, (16, 32, 64))
    return Drawn(settings={"quant_method": "torchao"}, packer=write.torchao(group))


FORMATS: dict[str, Draw] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "compressed-tensors packed": _packed,
    "compressed-tensors bytes": _bytes,
    "fp4": _fp4,
    "fp8": _fp8,
    "modelopt int4": _modelopt,
    "bitsandbytes": _bnb,
    "hqq": _hqq,
    "torchao": _torchao,
}
GGUF = "gguf"


def _model(draw: random.Random) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """(config, products)"""
    family = draw.choice(("llama", "llama", "qwen2", "qwen3", "mistral", "phi3"))
    heads, dim = draw.choice(((2, 32), (4, 16), (4, 32), (6, 16), (8, 16)))
    hidden = heads * dim if family in ("qwen2", "phi3") else draw.choice((64, 96, 128, 192))
    kv, inner = draw.choice([each for each in (1, 2, heads) if heads % each == 0]), draw.choice((64, 96, 160, 224, 256))
    kv = max(kv, 32 // dim)  # rows of all products are whole words of every format
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "num_hidden_layers": draw.choice((1, 2)),
        "attention_bias": family == "qwen2" or (family in ("llama", "qwen3") and draw.random() < 0.5),
        "mlp_bias": family == "llama" and draw.random() < 0.5,
        "tie_word_embeddings": draw.random() < 0.4,
    }
    if family == "phi3":
        config |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        fused = {"self_attn.qkv_proj": ((heads + 2 * kv) * dim, hidden), "mlp.gate_up_proj": (2 * inner, hidden)}
        rest = {"self_attn.o_proj": (hidden, heads * dim), "mlp.down_proj": (hidden, inner)}
        return config, fused | rest
    rows = {"q": heads * dim, "k": kv * dim, "v": kv * dim}
    products = {f"self_attn.{name}_proj": (n, hidden) for name, n in rows.items()}
    products |= {"self_attn.o_proj": (hidden, heads * dim), "mlp.down_proj": (hidden, inner)}
    return config, products | {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}


def check(name: str, seed: int, folder: Path) -> str:
    """What was drawn. Raises AssertionError or an IngotError where something is wrong."""
    draw = random.Random(f"{name} {seed}")
    if name == GGUF:
        return _check_gguf(draw, seed, folder)
    config, products = _model(draw)
    drawn = FORMATS[name](draw, products)
    for model, settings in (("model", drawn.settings), ("float", None)):
        write.write_model(
            folder / model, settings, drawn.packer, seed=seed, config=config, products=products, others=drawn.others
        )
    ids = np.random.default_rng(seed).integers(0, write.VOCAB, (2, 19))
    _compare(folder, folder / "model", ids, twice=drawn.twice)
    return f"{config}, {drawn.settings}, others {sorted(drawn.others)}"


def _check_gguf(draw: random.Random, seed: int, folder: Path) -> str:
    kind = draw.choice(list(gguf_files.BLOCKS))
    alike = [each for each, (_, size, *_) in gguf_files.BLOCKS.items() if gguf_files.BLOCKS[kind][1] % size == 0]
    names = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "ffn_down")
    kinds = {each: draw.choice(alike) for each in names if draw.random() < 0.6}
    (folder / "model").mkdir()
    values = write_llama(folder / "model", kind, kinds=kinds)
    hidden, inner = values["model.embed_tokens.weight"].shape[1], values["model.layers.0.mlp.up_proj.weight"].shape[0]
    config = {
        **write.CONFIG,
        **{"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20, "hidden_size": hidden},
        **{"intermediate_size": inner, "vocab_size": GGUF_VOCAB, "attention_bias": False, "tie_word_embeddings": True},
    }
    write.save(folder / "float", config, {key: (DType.F32, each) for key, each in values.items()})
    ids = np.random.default_rng(seed).integers(0, GGUF_VOCAB, (2, 19))
    _compare(folder, folder / "model" / "model.gguf", ids, twice=False)
    return f"{gguf_files.BLOCKS[kind][0]}, others { {key: gguf_files.BLOCKS[each][0] for key, each in kinds.items()} }"


def _compare(folder: Path, model: Path, ids: "np.ndarray[Any, np.dtype[np.int64]]", *, twice: bool) -> None:
    convert(ConvertOptions(model_dir=model, output_dir=folder / "checkpoint"))
    convert(ConvertOptions(model_dir=folder / "float", output_dir=folder / "expected"))
    made, wanted = (product_weights(folder / each) for each in ("checkpoint", "expected"))
    for got, expected in zip(made, wanted, strict=True):
        if twice:
            np.testing.assert_allclose(got, expected, rtol=TWICE, atol=0)
        else:
            np.testing.assert_array_equal(got, expected)
    exact = logits_of_graph(folder / "expected", ids)
    within = CLOSE * np.ptp(exact)
    np.testing.assert_allclose(logits_of_graph(folder / "checkpoint", ids), exact, rtol=0, atol=within)
    build(BuildConfig(target="ref", precision="f32"), folder / "checkpoint", folder / "f32")
    np.testing.assert_allclose(engine_logits(folder / "f32", ids), exact, rtol=0, atol=within)
    config = BuildConfig(target="ref", activations="bf16", kv_cache_dtype="f32")
    build(config, folder / "checkpoint", folder / "auto")
    shake(folder, read_manifest(folder / "auto").weight_errors)
    got, noisy = engine_logits(folder / "auto", ids), logits_of_graph(folder / "noisy", ids)
    error, noise = (float(np.sqrt(np.square(each - exact).mean()) / exact.std()) for each in (got, noisy))
    assert error <= TIMES * noise, f"auto is off by {error:.2e}, noise of the stated errors by {noise:.2e}"


def shake(folder: Path, errors: Mapping[str, float]) -> None:
    """A Checkpoint `noisy` of the float weights and noise: as large as the largest error that is stated of a product in
    the layers, and of a weight outside of them."""
    layers = max((error for name, error in errors.items() if name.startswith("layers.")), default=0.0)
    outside = max((error for name, error in errors.items() if not name.startswith("layers.")), default=0.0)
    rng, file = np.random.default_rng([1, 2]), folder / "float" / "model.safetensors"
    tensors: write.Tensors = {}
    for name, values in load_file(file).items():
        size = 0.0 if values.ndim < 2 else layers if ".layers." in name else outside
        noise = size * np.sqrt(np.square(values).mean()) * rng.standard_normal(values.shape)
        tensors[name] = (DType.F32, (values + noise).astype(np.float32))
    write.save(folder / "shaken", json.loads((folder / "float" / "config.json").read_text()), tensors)
    convert(ConvertOptions(model_dir=folder / "shaken", output_dir=folder / "noisy"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"of {', '.join([*FORMATS, GGUF])}; default: all")
    parser.add_argument("--count", type=int, default=4, help="checkpoints of each format")
    parser.add_argument("--seed", type=int, default=0, help="number of the first one")
    options = parser.parse_args()
    failed = False
    for name in options.formats or [*FORMATS, GGUF]:
        wrong = 0
        for seed in range(options.seed, options.seed + options.count):
            with tempfile.TemporaryDirectory() as made:
                try:
                    check(name, seed, Path(made))
                except Exception as error:  # whatever it is, the next seed is tried
                    last = traceback.extract_tb(error.__traceback__)[-1]
                    where = f"{Path(last.filename).name}:{last.lineno}"
                    print(f"  {name} {seed}: {type(error).__name__} at {where}: {error}"[:900], flush=True)
                    wrong += 1
        print(f"{name}: {options.count - wrong} of {options.count} equal", flush=True)
        failed |= wrong > 0
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
