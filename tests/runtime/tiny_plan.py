"""A two-layer llama-like plan with random weights in every packed layout, and what it should compute."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ingot.builder.schedule import schedule
from ingot.dtypes import DType, from_float32, round_to_bf16, to_float32
from ingot.plan import Attr, Buffer, CacheGroup, Limits, Plan, Rows, Step, Weight, WeightSlice
from ingot.plugins.layouts import interleave_gated, num_panels, pack_panels, panel_bytes, panel_layout
from ingot.plugins.registry import find_op
from ingot.plugins.target import SplitsContexts, Target
from ingot.step_inputs import inputs_among

HIDDEN, HEADS, KV_HEADS, DIM, INTER, VOCAB, POSITIONS = 24, 4, 2, 8, 20, 51, 64
LAYERS, TOKENS_PER_BLOCK = 2, 16
LIMITS = Limits(max_batch_size=64, max_input_len=48, max_seq_len=65, max_num_tokens=96, max_logit_rows=64)

_DTYPES = (DType.F32, DType.BF16)  # of each layer's products

Array = npt.NDArray[np.float32]


def _as_it_is(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return x


def _in_bf16(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return round_to_bf16(x.astype(np.float32)).astype(np.float64)


_INPUTS = {"f32": _as_it_is, "bf16": _in_bf16}  # of products


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyModel:
    """plan and packed weights, the same weights as float32 in their logical shapes, the layers' windows or 0."""

    plan: Plan
    weights: npt.NDArray[np.uint8]
    logical: dict[str, Array]
    windows: tuple[int, ...] = (0,) * LAYERS

    def logits(self, tokens: list[int]) -> npt.NDArray[np.float64]:
        """float64 [tokens, vocab], computed straight from the formulae of a Llama; inputs of products as planned."""
        products = [step for step in self.plan.steps if step.op == "matmul"]
        given = {step.inputs[1]: _INPUTS[str(step.attrs["activations"])] for step in products}

        def product(x: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:
            y: npt.NDArray[np.float64] = given[name](x) @ w[name].T
            return y

        w = {name: value.astype(np.float64) for name, value in self.logical.items()}
        x = w["table"][tokens]
        angle = np.arange(len(tokens))[:, None] * w["inv_freq"][None]
        for layer in range(LAYERS):
            qkv = product(_norm(x) * w[f"norm{layer}"], f"qkv{layer}")
            q, k, v = np.split(qkv, [HEADS * DIM, (HEADS + KV_HEADS) * DIM], axis=1)
            q, k = _rotated(q.reshape(-1, HEADS, DIM), angle), _rotated(k.reshape(-1, KV_HEADS, DIM), angle)
            k, v = (np.repeat(a.reshape(-1, KV_HEADS, DIM), HEADS // KV_HEADS, axis=1) for a in (k, v))
            scores = np.einsum("thd,shd->hts", q, k) * DIM**-0.5
            scores = np.where(self._seen(layer, len(tokens)), scores, -np.inf)
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            scores /= scores.sum(axis=-1, keepdims=True)
            x = x + product(np.einsum("hts,shd->thd", scores, v).reshape(len(tokens), -1), f"out{layer}")
            gate, up = np.split(product(_norm(x) * w[f"post{layer}"], f"gate_up{layer}"), 2, axis=1)
            x = x + product(gate / (1 + np.exp(-gate)) * up, f"down{layer}")
        logits: npt.NDArray[np.float64] = (_norm(x) * w["last"]) @ w["table"].T
        return logits

    def _seen(self, layer: int, count: int) -> npt.NDArray[np.bool_]:
        """Whether a token, by row, sees another one, by column."""
        seen = np.tri(count, dtype=bool)
        return seen & ~np.tri(count, k=-self.windows[layer], dtype=bool) if self.windows[layer] else seen

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The prompt and `count` more tokens."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(np.argmax(self.logits(tokens)[-1])))
        return tokens


def _norm(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    normal: npt.NDArray[np.float64] = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)
    return normal


def _rotated(x: npt.NDArray[np.float64], angle: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


NOBODY = "sample.f32.nobody"


class _Section:
    """Collects packed weights, 64-byte aligned."""

    def __init__(self) -> None:
        self.weights: list[Weight] = []
        self.logical: dict[str, Array] = {}
        self._parts: list[bytes] = []
        self.size = 0

    def add(self, name: str, values: Array, dtype: DType, layout: str) -> None:
        stored = from_float32(values, dtype)
        self.logical[name] = to_float32(stored, dtype)
        if layout == "row":
            pieces: tuple[WeightSlice, ...] = (self._piece(0, values.shape[0], stored.tobytes()),)
        else:
            n, k = values.shape
            gated = layout.endswith(".gated")
            packed = pack_panels(interleave_gated(stored) if gated else stored, dtype)
            total, half = num_panels(n, gated=gated), num_panels(n, gated=gated) // 2
            data, unit = packed.tobytes(), panel_bytes(k, dtype)
            pieces = tuple(
                self._piece(begin, end, data[begin * unit : end * unit])
                for begin, end in ((0, half), (half, total))
                if end > begin
            )
        nbytes = sum(len(part) for part in self._parts[-len(pieces) :]) if layout != "row" else stored.nbytes
        self.weights.append(
            Weight(name=name, dtype=dtype, shape=values.shape, layout=layout, nbytes=nbytes, pieces=pieces)
        )

    def _piece(self, begin: int, end: int, data: bytes) -> WeightSlice:
        piece = WeightSlice(begin=begin, end=end, offset=self.size)
        padded = data.ljust(-(-len(data) // 64) * 64, b"\0")
        self._parts.append(padded)
        self.size += len(padded)
        return piece

    def data(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(b"".join(self._parts), dtype=np.uint8)


def make_model(
    target: Target | None = None,
    limits: Limits = LIMITS,
    kv: DType = DType.F32,
    windows: Sequence[int] = (0,) * LAYERS,
    frees_windows: bool = True,
) -> TinyModel:
    """Random weights. Without a target, kernels have names that nobody has, for ref must not care about them."""
    rng = np.random.default_rng(0)
    section = _Section()

    def matrix(name: str, rows: int, cols: int, dtype: DType, layout: str) -> None:
        section.add(name, (rng.standard_normal((rows, cols)) * cols**-0.5 * 2).astype(np.float32), dtype, layout)

    matrix("table", VOCAB, HIDDEN, DType.F32, "row")
    section.add("inv_freq", (100.0 ** -np.linspace(0, 1, DIM // 2)).astype(np.float32), DType.F32, "row")
    for layer in range(LAYERS):
        dtype = _DTYPES[layer]
        panels = panel_layout(dtype)
        matrix(f"qkv{layer}", (HEADS + 2 * KV_HEADS) * DIM, HIDDEN, dtype, panels)
        matrix(f"out{layer}", HIDDEN, HEADS * DIM, dtype, panels)
        matrix(f"gate_up{layer}", 2 * INTER, HIDDEN, dtype, f"{panels}.gated")
        matrix(f"down{layer}", HIDDEN, INTER, dtype, panels)
        for name in ("norm", "post"):
            section.add(f"{name}{layer}", rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32), DType.F32, "row")
    section.add("last", rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32), DType.F32, "row")
    section.add("head", section.logical["table"], DType.F32, panel_layout(DType.F32))

    buffers, arena = _buffers(limits)
    steps = tuple(_steps(target, kv, windows))
    plan = Plan(
        vocab_size=VOCAB,
        max_positions=POSITIONS,
        limits=limits,
        caches=_caches(windows if frees_windows else (0,) * LAYERS, kv),
        inputs=inputs_among({name for step in steps for name in step.inputs}),
        buffers=buffers,
        weights=tuple(section.weights),
        steps=steps,
        arena_bytes=arena,
        weight_bytes=section.size,
        logits="logits",
        draw_kernel=next((name for name in (target.kernels() if target else ()) if name.startswith("sample.")), NOBODY),
        decode_tokens=16 // (HEADS // KV_HEADS) if isinstance(target, SplitsContexts) else 0,
    )
    plan = plan if target is None else schedule(plan, target)
    return TinyModel(plan=plan, weights=section.data(), logical=section.logical, windows=tuple(windows))


def _caches(windows: Sequence[int], kv: DType) -> tuple[CacheGroup, ...]:
    """Layers of the same window share a group."""
    return tuple(
        CacheGroup(
            window=window,
            layers=tuple(layer for layer in range(LAYERS) if windows[layer] == window),
            kv_heads=KV_HEADS,
            head_dim=DIM,
            tokens_per_block=TOKENS_PER_BLOCK,
            dtype=kv,
        )
        for window in dict.fromkeys(windows)
    )


def _buffers(limits: Limits) -> tuple[tuple[Buffer, ...], int]:
    columns = {
        "x": HIDDEN,
        "cos_sin": DIM,
        "normed": HIDDEN,
        "qkv": (HEADS + 2 * KV_HEADS) * DIM,
        "q": HEADS * DIM,
        "attended": HEADS * DIM,
        "inner": INTER,
        "kept": HIDDEN,
        "logits": VOCAB,
    }
    buffers, offset = [], 0
    for name, cols in columns.items():
        rows = Rows.LOGITS if name in ("kept", "logits") else Rows.TOKENS
        count = limits.max_logit_rows if rows is Rows.LOGITS else limits.max_num_tokens
        buffers.append(Buffer(name=name, rows=rows, cols=cols, offset=offset))
        offset += -(-count * cols * 4 // 64) * 64
    return tuple(buffers), offset


def _steps(target: Target | None, kv: DType, windows: Sequence[int]) -> list[Step]:
    steps: list[Step] = []
    kernels = target.kernels() if target else ()

    def kernel_of(op: str, dtype: str) -> str:
        kind = f"{op}.{dtype}."
        return next((name for name in kernels if name.startswith(kind)), f"{kind}nobody")

    def add(
        op: str, inputs: tuple[str, ...], outputs: tuple[str, ...], attrs: dict[str, Attr], dtype: str = "f32"
    ) -> None:
        name, kernel = f"{len(steps)}.{op}", kernel_of(op, dtype)
        read = find_op(op).with_batch(inputs)
        steps.append(Step(name=name, op=op, kernel=kernel, inputs=read, outputs=outputs, attrs=attrs))

    def matmul(
        x: str, weight: str, y: str, *, dtype: str, residual: str = "", activation: str = "none", gated: int = 0
    ) -> None:
        attrs: dict[str, Attr] = {"activation": activation, "gated": gated, "group": 0}
        attrs["activations"] = target.activations(kernel_of("matmul", dtype)) if target else "f32"
        add("matmul", (x, weight, "", residual), (y,), attrs, dtype)

    heads: dict[str, Attr] = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
    add("embedding", ("table", ""), ("x",), {"scale": 1.0})
    add("rope_table", ("inv_freq",), ("cos_sin",), {"scale": 1.0})
    for layer in range(LAYERS):
        dtype = _DTYPES[layer].value
        add("rms_norm", ("x", f"norm{layer}", ""), ("normed", ""), {"eps": 1e-5})
        matmul("normed", f"qkv{layer}", "qkv", dtype=dtype)
        write: dict[str, Attr] = {"layer": layer, "interleaved": 0, "norm_eps": 0.0}
        write |= {"value_norm": 0, "keys_as_values": 0}
        add("rope_kv_write", ("qkv", "cos_sin", "", ""), ("q",), {**heads, **write}, kv.value)
        attend: dict[str, Attr] = {"layer": layer, "scale": DIM**-0.5, "window": windows[layer]}
        attend |= {"softcap": 0.0, "bf16_bias": 0, "growth": 0.0, "growth_every": 1}
        add("paged_attention", ("q",), ("attended",), {**heads, **attend}, kv.value)
        matmul("attended", f"out{layer}", "x", dtype=dtype, residual="x")
        add("rms_norm", ("x", f"post{layer}", ""), ("normed", ""), {"eps": 1e-5})
        matmul("normed", f"gate_up{layer}", "inner", dtype=dtype, activation="silu", gated=1)
        matmul("inner", f"down{layer}", "x", dtype=dtype, residual="x")
    add("gather_rows", ("x",), ("kept",), {})
    add("rms_norm", ("kept", "last", ""), ("kept", ""), {"eps": 1e-5})
    matmul("kept", "head", "logits", dtype="f32")
    return steps
