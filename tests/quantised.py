"""Writes tiny llamas whose products are quantised, in every format, and the float32 weights that they stand for.

Codes and scales are random: no weight is rounded, so that what is stored is known exactly. Packers are written after
the formats' descriptions, not after the code that reads them.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ingot.dtypes import DType, from_float32, to_float32
from ingot.tensor_file import TensorFileWriter, TensorSpec, read_header

Array = npt.NDArray[Any]
Tensors = dict[str, tuple[DType, Array]]
Packer = Callable[[np.random.Generator, int, int], tuple[Tensors, Array]]
"""(draws, N, K) → tensors of a module by name, the weight in float64"""

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 37, 4, 2, 16
PRODUCTS = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def stream(codes: Array, bits: int) -> npt.NDArray[np.int32]:
    """Fields [..., n] → int32 words, one dense stream, low bits first; filled up with zeros."""
    spread = (codes[..., None] >> np.arange(bits) & 1).reshape(*codes.shape[:-1], -1).astype(np.uint8)
    spread = np.concatenate([spread, np.zeros((*spread.shape[:-1], -spread.shape[-1] % 32), np.uint8)], axis=-1)
    return np.packbits(spread, axis=-1, bitorder="little").view(np.int32)


def floats(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType, size: float = 0.02) -> tuple[Array, Array]:
    """(stored bits, values) of random scales."""
    bits = from_float32((size * rng.uniform(0.5, 1.5, shape)).astype(np.float32), dtype)
    return bits, to_float32(bits, dtype).astype(np.float64)


def f8(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Bytes of E4M3, subnormals among them, and their values."""
    byte = rng.integers(0, 0x68, shape).astype(np.uint8) | rng.integers(0, 2, shape).astype(np.uint8) << 7
    exponent, fraction = byte >> 3 & 15, (byte & 7) / 8
    value = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent.astype(int) - 7), fraction * 2.0**-6)
    return byte, np.where(byte >> 7, -value, value)


def gptq(
    bits: int,
    group: int,
    *,
    symmetric: bool = False,
    less: int = 1,
    shuffled: bool = False,
    same_order: bool = False,
    dtype: DType = DType.F16,
) -> Packer:
    """same_order: shuffled weights with as many columns have one order, as where they have the same input."""

    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        size = group if group > 0 else k
        groups, top = -(-k // size), 1 << bits
        codes = rng.integers(0, top, (k, n))
        zeros = np.full((groups, n), top // 2) if symmetric else rng.integers(0, top, (groups, n))
        stored, scales = floats(rng, (groups, n), dtype)
        owner = np.arange(k) // size
        order = np.random.default_rng(k) if same_order else rng
        owner = order.permutation(owner) if shuffled else owner
        weight = ((codes - zeros[owner]) * scales[owner]).T
        tensors = {
            "qweight": (DType.I32, np.ascontiguousarray(stream(codes.T, bits).T)),
            "qzeros": (DType.I32, stream(zeros - less & top - 1, bits)),
            "scales": (dtype, stored),
        }
        return tensors | ({"g_idx": (DType.I32, owner.astype(np.int32))} if shuffled else {}), weight

    return pack


def awq(group: int, *, zeros: bool = True) -> Packer:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def words(codes: Array) -> Array:
        return stream(codes.reshape(len(codes), -1, 8)[..., order].reshape(codes.shape), 4)

    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        size = group if group > 0 else k
        codes = rng.integers(0, 16, (k, n))
        zero = rng.integers(0, 16, (k // size, n)) if zeros else np.full((k // size, n), 8)
        stored, scales = floats(rng, (k // size, n), DType.F16)
        tensors: Tensors = {"qweight": (DType.I32, words(codes)), "scales": (DType.F16, stored)}
        if zeros:
            tensors["qzeros"] = (DType.I32, words(zero))
        return tensors, ((codes - zero.repeat(size, 0)) * scales.repeat(size, 0)).T

    return pack


def packed(bits: int, group: int, *, symmetric: bool = True, shuffled: bool = False, dense: bool = True) -> Packer:
    """pack-quantized of compressed-tensors."""

    def words(codes: Array) -> Array:
        if dense:
            return stream(codes, bits)
        per = 32 // bits
        filled = np.concatenate([codes, np.zeros((len(codes), -codes.shape[1] % per), codes.dtype)], axis=1)
        shifts = np.arange(per, dtype=np.int64) * bits
        found: Array = (filled.reshape(len(codes), -1, per) << shifts).sum(-1).astype(np.uint32).view(np.int32)
        return found

    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        size = group if group > 0 else k
        groups, middle = -(-k // size), 1 << bits - 1
        codes = rng.integers(-middle, middle, (n, k))
        zeros = np.zeros((n, groups), int) if symmetric else rng.integers(-middle, middle, (n, groups))
        stored, scales = floats(rng, (n, groups), DType.BF16)
        owner = rng.permutation(np.arange(k) // size) if shuffled else np.arange(k) // size
        tensors: Tensors = {
            "weight_packed": (DType.I32, words(codes + middle)),
            "weight_scale": (DType.BF16, stored),
            "weight_shape": (DType.I64, np.array([n, k], np.int64)),
        }
        if not symmetric:
            tensors["weight_zero_point"] = (DType.I32, np.ascontiguousarray(words((zeros + middle).T).T))
        if shuffled:
            tensors["weight_g_idx"] = (DType.I32, owner.astype(np.int32))
        return tensors, (codes - zeros[:, owner]) * scales[:, owner]

    return pack


def bytes_with_scale(
    code: DType,
    scale: str,
    block: tuple[int, int] | None,
    *,
    dtype: DType = DType.F32,
    flat: bool = False,
    name: str = "weight",
) -> Packer:
    """int8 or FP8 codes with a scale per block; block None: one scale."""

    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        high, wide = block or (n, k)
        wide = wide or k
        if code is DType.F8:
            bits, values = f8(rng, (n, k))
        else:
            bits = rng.integers(-128, 128, (n, k)).astype(np.int8)
            values = bits.astype(np.float64)
        stored, scales = floats(rng, (-(-n // high), -(-k // wide)), dtype)
        weight = values * scales.repeat(high, 0)[:n].repeat(wide, 1)[:, :k]
        return {name: (code, bits), scale: (dtype, stored.reshape(-1) if flat else stored)}, weight

    return pack


def fp4(codes: str, group: int, *, factor: str = "", divides: bool = False) -> Packer:
    """NVFP4 with a factor, MXFP4 without."""

    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        nibble = rng.integers(0, 16, (n, k)).astype(np.uint8)
        tensors: Tensors = {codes: (DType.U8, nibble[:, 0::2] | nibble[:, 1::2] << 4)}
        if factor:
            byte, scales = f8(rng, (n, k // group))
            number = np.float32(rng.uniform(200, 300) if divides else 1 / rng.uniform(200, 300))
            tensors |= {"weight_scale": (DType.F8, byte), factor: (DType.F32, np.array([number], np.float32))}
            scales = scales / float(number) if divides else scales * float(number)
        else:
            byte = rng.integers(110, 125, (n, k // group)).astype(np.uint8)
            tensors["weight_scale"] = (DType.U8, byte)
            scales = 2.0 ** (byte.astype(int) - 127)
        return tensors, E2M1[nibble] * scales.repeat(group, 1)

    return pack


def with_columns(packer: Packer) -> Packer:
    """Of ModelOpt: factors of the input's columns."""

    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        tensors, weight = packer(rng, n, k)
        stored, columns = floats(rng, (k,), DType.BF16, 1.0)
        idle: Tensors = {"input_scale": (DType.F32, np.array([3], np.float32))}
        return {**tensors, "pre_quant_scale": (DType.BF16, stored), **idle}, weight * columns

    return pack


def modelopt_int4(group: int) -> Packer:
    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        codes = rng.integers(-8, 8, (n, k))
        stored, scales = floats(rng, (n, k // group), DType.F32)
        nibble = (codes & 15).astype(np.uint8)
        tensors: Tensors = {"weight": (DType.U8, nibble[0::2] | nibble[1::2] << 4), "weight_scale": (DType.F32, stored)}
        return tensors, codes * scales.repeat(group, 1)

    return with_columns(pack)


def int8_groups(group: int) -> Packer:
    """int-quantized of compressed-tensors with zero points, in an order of columns."""

    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        codes, zeros = (rng.integers(-128, 128, (n, size)).astype(np.int8) for size in (k, k // group))
        stored, scales = floats(rng, (n, k // group), DType.F32, 0.001)
        owner = rng.permutation(np.arange(k) // group)
        tensors: Tensors = {
            "weight": (DType.I8, codes),
            "weight_scale": (DType.F32, stored),
            "weight_zero_point": (DType.I8, zeros),
            "weight_g_idx": (DType.I32, owner.astype(np.int32)),
        }
        return tensors, (codes.astype(int) - zeros[:, owner]) * scales[:, owner]

    return pack


def bnb4(block: int, *, nested: bool = False, kind: str = "nf4") -> Packer:
    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        table = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
        if kind == "fp4":  # as bitsandbytes has it: 192ths
            table = (np.array([0, 1, 128, 192, 64, 96, 32, 48] * 2) * np.repeat([1, -1], 8) / 192).astype(np.float32)
        nibble = rng.integers(0, 16, n * k).astype(np.uint8)
        blocks = -(-n * k // block)
        state: dict[str, object] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [n, k]}
        if nested:
            absmax = rng.integers(0, 256, blocks).astype(np.uint8)
            inner = rng.uniform(-0.01, 0.01, 256).astype(np.float32)
            outer = rng.uniform(0.5, 1, -(-blocks // 4)).astype(np.float32)
            state |= {"nested_blocksize": 4, "nested_offset": 0.04, "nested_dtype": "float32"}
            scales = inner[absmax] * outer[np.arange(blocks) // 4] + np.float32(0.04)
            stored: Tensors = {
                "weight.absmax": (DType.U8, absmax),
                "weight.nested_absmax": (DType.F32, outer),
                "weight.nested_quant_map": (DType.F32, inner),
            }
        else:
            bits, scales = floats(rng, (blocks,), DType.F32, 0.1)
            stored = {"weight.absmax": (DType.F32, bits)}
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        tensors: Tensors = {
            "weight": (DType.U8, (nibble[0::2] << 4 | nibble[1::2]).reshape(-1, 1)),
            "weight.quant_map": (DType.F32, table),
            f"weight.quant_state.bitsandbytes__{kind}": (DType.U8, text),
        }
        weight = table.astype(np.float64)[nibble] * np.asarray(scales, np.float64).repeat(block)[: n * k]
        return tensors | stored, weight.reshape(n, k)

    return pack


def bnb8(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
    codes = rng.integers(-127, 128, (n, k)).astype(np.int8)
    scb = rng.uniform(1, 4, n).astype(np.float32)
    tensors: Tensors = {"weight": (DType.I8, codes), "SCB": (DType.F32, scb)}
    tensors["weight_format"] = (DType.U8, np.array(0, np.uint8))
    return tensors, codes * np.float64(np.float32(1 / 127)) * scb[:, None]


def hqq(bits: int, group: int, axis: int) -> Packer:
    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        groups, top = n * k // group, 1 << bits
        shape = (groups, group) if axis else (group, groups)
        codes = rng.integers(0, top, shape)
        one = (groups, 1) if axis else (1, groups)
        stored, scales = floats(rng, one, DType.F16)
        zero_bits, zeros = floats(rng, one, DType.F16, top / 2)
        per = 10 if bits == 3 else 8 // bits
        filled = np.concatenate([codes, np.zeros((-len(codes) % per, codes.shape[1]), int)])
        parts = filled.reshape(per, -1, codes.shape[1])
        word = sum(part << bits * (per - 1 - i) for i, part in enumerate(parts))
        kind = DType.I32 if bits == 3 else DType.U8
        tensors: Tensors = {
            "W_q": (kind, np.asarray(word).astype(kind.storage)),
            "scale": (DType.F16, stored),
            "zero": (DType.F16, zero_bits),
            "shape": (DType.I64, np.array([n, k], np.int64)),
        }
        scalars = {"nbits": bits, "axis": axis, "group_size": group}
        tensors |= {key: (DType.I32, np.array(value, np.int32)) for key, value in scalars.items()}
        return tensors, ((codes - zeros) * scales).reshape(n, k)

    return pack


def torchao(group: int) -> Packer:
    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        codes = rng.integers(-8, 8, (n, k)).astype(np.int8)
        zeros = rng.integers(-8, 8, (n, k // group)).astype(np.int8)
        stored, scales = floats(rng, (n, k // group), DType.BF16)
        tensors: Tensors = {
            "_weight_qdata": (DType.I8, codes),
            "_weight_scale": (DType.BF16, stored),
            "_weight_zero_point": (DType.I8, zeros),
        }
        return tensors, (codes.astype(int) - zeros.repeat(group, 1)) * scales.repeat(group, 1)

    return pack


def bitnet(*, divides: bool) -> Packer:
    def pack(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
        codes, (stored, scale) = rng.integers(0, 3, (n, k)), floats(rng, (1,), DType.BF16)
        quarters = codes.reshape(4, n // 4, k).astype(np.uint8)
        packed = quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6
        factor = 1 / scale.astype(np.float64) if divides else scale
        return {"weight": (DType.U8, packed), "weight_scale": (DType.BF16, stored)}, (codes - 1) * factor

    return pack


def as_floats(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, Array]:
    """Of a product that is not quantised."""
    weight = (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32)
    return {"weight": (DType.F32, weight)}, weight


def write_model(
    folder: Path,
    settings: Mapping[str, object] | None,
    packer: Packer,
    *,
    seed: int = 0,
    config: Mapping[str, object] | None = None,
    products: Mapping[str, tuple[int, int]] | None = None,
    others: Mapping[str, Packer] | None = None,
) -> dict[str, Array]:
    """A model directory; returns its weights in float32, by Hugging Face's names. settings None: these are stored.
    others: the packers of some products."""
    rng = np.random.default_rng(seed)
    values: dict[str, Any] = {**CONFIG, **(config or {})}
    family, hidden, vocab = values["model_type"], values["hidden_size"], values["vocab_size"]
    stored: Tensors = {}
    weights: dict[str, Array] = {}

    def plain(name: str, shape: tuple[int, ...], around: float) -> None:
        weights[name] = (around + 0.2 * rng.standard_normal(shape)).astype(np.float32)
        stored[name] = (DType.F32, weights[name])

    plain("model.embed_tokens.weight", (vocab, hidden), 0)
    plain("model.norm.weight", (hidden,), 1)
    if not values["tie_word_embeddings"]:
        plain("lm_head.weight", (vocab, hidden), 0)
    for layer in (f"model.layers.{number}" for number in range(values["num_hidden_layers"])):
        plain(f"{layer}.input_layernorm.weight", (hidden,), 1)
        plain(f"{layer}.post_attention_layernorm.weight", (hidden,), 1)
        for name in ("q_norm", "k_norm") if family == "qwen3" else ():
            plain(f"{layer}.self_attn.{name}.weight", (values["head_dim"],), 1)
        for name, (n, k) in (products or PRODUCTS).items():
            module = f"{layer}.{name}"
            tensors, weight = (others or {}).get(name, packer)(rng, n, k)
            weights[f"{module}.weight"] = weight.astype(np.float32)
            if settings is None:
                stored[f"{module}.weight"] = (DType.F32, weights[f"{module}.weight"])
            else:
                stored |= {f"{module}.{part}": each for part, each in tensors.items()}
            attention = values["attention_bias"] and not (family == "qwen2" and "o_proj" in name)
            if attention if "self_attn" in name else values.get("mlp_bias"):
                plain(f"{module}.bias", (n,), 0)
    save(folder, values if settings is None else {**values, "quantization_config": dict(settings)}, stored)
    return weights


def save(folder: Path, config: Mapping[str, object], tensors: Tensors) -> None:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    specs = [TensorSpec(name=name, dtype=dtype, shape=bits.shape) for name, (dtype, bits) in tensors.items()]
    with TensorFileWriter(folder / "model.safetensors", specs) as file:
        for _, bits in tensors.values():
            file.write(bits)


def names(file: Path) -> list[str]:
    """Of the tensors in a safetensors file."""
    return list(read_header(file))
