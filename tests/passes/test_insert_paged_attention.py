"""Everything around an attention becomes one plugin; the rotary tables are shared; what it cannot be is refused."""

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, numpy_helper

from ingot.builder.graph import weight_shape
from ingot.builder.passes import fuse_activation, insert_matmul, recognise_norms
from ingot.builder.passes.insert_paged_attention import PASS
from tests.passes.graphs import GraphMaker, ops_of, run_pass

HEADS, KV_HEADS, DIM = 4, 2, 4
SIZES = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]


def parts(g: GraphMaker, x: str) -> list[str]:
    """q, k, v as parts of one product of x."""
    q = g.node("Split", g.linear(x, 8, sum(SIZES)), g.constant(SIZES), outputs=3, axis=-1)
    return [q, f"{q}.1", f"{q}.2"]


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_rotated(interleaved: int, scale: float) -> None:
    g = GraphMaker()
    angles, rotary = g.angles(2, limit=32, scale=scale), {"interleaved": interleaved}
    graph = g.finish(g.attention(parts(g, g.input()), HEADS, KV_HEADS, DIM, angles=angles, rotary=rotary, scale=0.3))
    assert run_pass(PASS, graph).fired == 1
    assert ops_of(graph) == ["Gather", "MatMul", "RopeTable", "PagedAttention"]
    table, attention = graph.nodes[-2:]
    assert table.attrs == {"scale": pytest.approx(scale), "positions": 32}
    assert attention.attrs == {
        "layer": 0,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 4,
        "scale": pytest.approx(0.3),
        "interleaved": interleaved,
        "window": 0,
        "softcap": 0.0,
        "growth": 0.0,
        "growth_every": 1,
        "norm_eps": 0.0,
        "value_norm": 0,
        "keys_as_values": 0,
    }


def test_partly_rotated() -> None:
    g = GraphMaker()
    rotary = {"rotary_embedding_dim": 2, "num_heads": HEADS}
    graph = g.finish(g.attention(parts(g, g.input()), HEADS, KV_HEADS, DIM, angles=g.angles(1), rotary=rotary))
    assert run_pass(PASS, graph).fired == 1


def test_without_rotation_and_scale() -> None:
    g = GraphMaker()
    graph = g.finish(g.attention(parts(g, g.input()), HEADS, KV_HEADS, DIM))
    assert run_pass(PASS, graph).fired == 1
    assert ops_of(graph) == ["Gather", "MatMul", "PagedAttention"]
    assert graph.nodes[-1].attrs["scale"] == 0.5
    assert len(graph.nodes[-1].inputs) == 1


def test_layers_share_a_table_and_are_counted() -> None:
    g = GraphMaker()
    x = g.input()
    for angles in (g.angles(2), g.angles(2), g.angles(2, scale=2.0)):  # written twice: the same values are found
        x = g.linear(g.attention(parts(g, x), HEADS, KV_HEADS, DIM, angles=angles), 16, 8)
    graph = g.finish(x)
    assert run_pass(PASS, graph).fired == 3
    assert ops_of(graph).count("RopeTable") == 2
    assert [node.attrs["layer"] for node in graph.nodes if node.op == "PagedAttention"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"is_causal": 0}, "the attention is not causal"),
        ({"qk_matmul_output_mode": 1}, "the attention has qk_matmul_output_mode"),
        ({"rotary": {"rotary_embedding_dim": 2, "num_heads": HEADS}}, "2 frequencies do not rotate 2 dimensions"),
    ],
)
def test_other_attentions_are_refused(options: dict[str, Any], reason: str) -> None:
    g = GraphMaker()
    graph = g.finish(g.attention(parts(g, g.input()), HEADS, KV_HEADS, DIM, angles=g.angles(2), **options))
    assert PASS.run(graph).refused == {reason: 1}


def test_a_mask_is_refused() -> None:
    g = GraphMaker()
    q, k, v = (g.heads(x, n, DIM) for x, n in zip(parts(g, g.input()), (4, 2, 2), strict=True))
    mixed = g.node("Attention", q, k, v, g.constant(np.zeros((7, 7), np.float32)), is_causal=1)
    merged = g.node("Reshape", g.node("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, 16]))
    assert run_pass(PASS, g.finish(merged)).refused == {"the attention takes a mask that is not a sliding window": 1}


@pytest.mark.parametrize("options", [{"limit": 3}, {"axes": (0, 1)}])
def test_windows_of_other_positions_are_refused(options: dict[str, Any]) -> None:
    g = GraphMaker()
    mask = g.window(3, **options)
    graph = g.finish(g.attention(parts(g, g.input()), HEADS, KV_HEADS, DIM, mask=mask))
    assert PASS.run(graph).refused == {"the attention takes a mask that is not a sliding window": 1}


def test_a_window_and_a_cap() -> None:
    g = GraphMaker()
    mask = g.window(3)
    graph = g.finish(g.attention(parts(g, g.input()), HEADS, KV_HEADS, DIM, mask=mask, softcap=0.5))
    assert run_pass(PASS, graph).fired == 1
    assert ops_of(graph) == ["Gather", "MatMul", "PagedAttention"]
    assert (graph.nodes[-1].attrs["window"], graph.nodes[-1].attrs["softcap"]) == (3, 0.5)


@pytest.mark.parametrize("norms", ["head", "width"])
def test_q_and_k_norms(norms: str) -> None:
    g = GraphMaker()
    graph = g.finish(g.attention(parts(g, g.input()), HEADS, KV_HEADS, DIM, angles=g.angles(2), norms=norms))
    recognise_norms.PASS.run(graph)
    assert run_pass(PASS, graph).fired == 1
    assert ops_of(graph) == ["Gather", "MatMul", "RopeTable", "PagedAttention"]
    lengths = [weight_shape(tensor)[0] for tensor in graph.nodes[-1].inputs[2:]]
    assert lengths == ([DIM, DIM] if norms == "head" else [HEADS * DIM, KV_HEADS * DIM])
    assert graph.nodes[-1].attrs["norm_eps"] == 0.25


def shared_by_two(
    g: GraphMaker, *, as_values: bool = False, windows: tuple[int, int] = (0, 0), weight: float = 1.0
) -> str:
    """Two attentions to the same keys and normed values, which may be made of one part of the product."""
    x = g.input()
    sizes = SIZES[:2] if as_values else SIZES
    q = g.node("Split", g.linear(x, 8, sum(sizes)), g.constant(sizes), outputs=len(sizes), axis=-1)
    split = g.node("Reshape", f"{q}.1", g.constant([0, 0, KV_HEADS, DIM]))
    values = split if as_values else g.node("Reshape", f"{q}.2", g.constant([0, 0, KV_HEADS, DIM]))
    values = g.node("RMSNormalization", values, g.constant(np.full(DIM, weight, np.float32)), axis=-1, epsilon=0.25)
    k, v = (g.node("Transpose", each, perm=[0, 2, 1, 3]) for each in (split, values))
    angles = g.angles(2)
    k = g.node("RotaryEmbedding", k, *angles)
    for window in windows:
        mask = [g.window(window)] if window else []
        rotated = g.node("RotaryEmbedding", g.heads(q, HEADS, DIM), *angles)
        mixed = g.node("Attention", rotated, k, v, *mask, is_causal=1)
        merged = g.node("Reshape", g.node("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, HEADS * DIM]))
        x = g.linear(merged, HEADS * DIM, 8)
        q = g.linear(x, 8, HEADS * DIM)
    return x


@pytest.mark.parametrize("as_values", [False, True])
@pytest.mark.parametrize("windows", [(0, 0), (5, 5), (5, 3)])
def test_keys_and_values_of_another_attention(as_values: bool, windows: tuple[int, int]) -> None:
    g = GraphMaker()
    graph = g.finish(shared_by_two(g, as_values=as_values, windows=windows))
    recognise_norms.PASS.run(graph)
    assert PASS.run(graph).fired == 2
    first, second = (node for node in graph.nodes if node.op.endswith("Attention"))
    assert (first.op, second.op) == ("PagedAttention", "SharedAttention")
    for node, window in zip((first, second), windows, strict=True):
        assert (node.attrs["layer"], node.attrs["window"]) == (0, window)
        assert (node.attrs["value_norm"], node.attrs["keys_as_values"]) == (1, int(as_values))
    assert second.inputs[1] is first.inputs[1]


@pytest.mark.parametrize("windows", [(3, 5), (3, 0)])
def test_a_window_that_looks_back_further_than_the_writer_keeps_is_refused(windows: tuple[int, int]) -> None:
    g = GraphMaker()
    graph = g.finish(shared_by_two(g, windows=windows))
    recognise_norms.PASS.run(graph)
    report = PASS.run(graph)
    assert (report.fired, list(report.refused)) == (
        1,
        ["the attention shares keys and values that are freed before, or has sinks beside them"],
    )


def test_values_that_are_normed_with_a_weight_are_refused() -> None:
    g = GraphMaker()
    graph = g.finish(shared_by_two(g, weight=1.5))
    recognise_norms.PASS.run(graph)
    assert PASS.run(graph).refused == {"v is normed over more than a head, or with a weight": 2}


def test_q_and_k_rotated_differently_are_refused() -> None:
    g = GraphMaker()
    q, k, v = (g.heads(x, n, DIM) for x, n in zip(parts(g, g.input()), (4, 2, 2), strict=True))
    q = g.node("RotaryEmbedding", q, *g.angles(2))
    k = g.node("RotaryEmbedding", k, *g.angles(2, scale=2.0))
    mixed = g.node("Attention", q, k, v, is_causal=1)
    merged = g.node("Reshape", g.node("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, 16]))
    assert run_pass(PASS, g.finish(merged)).refused == {"q and k are not rotated alike": 1}


def test_cosines_and_sines_of_different_angles_are_refused() -> None:
    g = GraphMaker()
    mixed = (g.angles(2)[0], g.angles(2, scale=2.0)[1])
    graph = g.finish(g.attention(parts(g, g.input()), HEADS, KV_HEADS, DIM, angles=mixed))
    assert run_pass(PASS, graph).refused == {"cosines and sines are not of the same angles": 1}


def test_parts_in_another_order_are_refused() -> None:
    g = GraphMaker()
    q = g.node("Split", g.linear(g.input(), 8, 24), g.constant([8, 8, 8]), outputs=3, axis=-1)
    graph = g.finish(g.attention([q, f"{q}.2", f"{q}.1"], 2, 2, 4))
    assert run_pass(PASS, graph).refused == {"the product does not hold q, k and v in this order": 1}


def test_three_products_are_refused() -> None:
    g = GraphMaker()
    x = g.input()
    graph = g.finish(g.attention([g.linear(x, 8, 8) for _ in range(3)], 2, 2, 4))
    assert run_pass(PASS, graph).refused == {"q, k and v are not parts of one product": 1}


def test_heads_that_do_not_divide_are_refused() -> None:
    g = GraphMaker()
    q = g.node("Split", g.linear(g.input(), 8, 28), g.constant([12, 8, 8]), outputs=3, axis=-1)
    graph = g.finish(g.attention([q, f"{q}.1", f"{q}.2"], 3, 2, 4))
    assert PASS.run(graph).refused == {"heads [3, 2, 2] of [4, 4, 4] do not fit together": 1}


def test_an_attention_that_does_not_say_causal_is_none() -> None:
    """The standard's default is 0."""
    g = GraphMaker()
    q, k, v = (g.heads(x, n, DIM) for x, n in zip(parts(g, g.input()), (4, 2, 2), strict=True))
    merged = g.node(
        "Reshape", g.node("Transpose", g.node("Attention", q, k, v), perm=[0, 2, 1, 3]), g.constant([0, 0, 16])
    )
    assert run_pass(PASS, g.finish(merged)).refused == {"the attention is not causal": 1}


@pytest.mark.parametrize("name", ["a past key", "a past value"])
def test_a_cache_of_the_graphs_own_is_refused(name: str) -> None:
    g = GraphMaker()
    q, k, v = (g.heads(x, n, DIM) for x, n in zip(parts(g, g.input()), (4, 2, 2), strict=True))
    past = g.constant(np.zeros((2, 2, 0, DIM), np.float32))
    inputs = [q, k, v, "", *(["", past] if name == "a past value" else [past])]
    mixed = g.node("Attention", *inputs, is_causal=1)
    merged = g.node("Reshape", g.node("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, 16]))
    assert PASS.run(g.finish(merged)).refused == {f"the attention takes {name}": 1}


def test_an_attention_whose_result_is_used_elsewhere_is_refused() -> None:
    g = GraphMaker()
    q, k, v = (g.heads(x, n, DIM) for x, n in zip(parts(g, g.input()), (4, 2, 2), strict=True))
    mixed = g.node("Attention", q, k, v, is_causal=1)
    merged, other = (
        g.node("Reshape", g.node("Transpose", each, perm=[0, 2, 1, 3]), g.constant([0, 0, 16]))
        for each in (mixed, g.node("Neg", mixed))
    )
    graph = g.finish(g.node("Mul", merged, other))
    assert run_pass(PASS, graph).refused == {"the attention's results are used elsewhere": 1}


def test_heads_that_are_merged_in_another_order_are_refused() -> None:
    g = GraphMaker()
    q, k, v = (g.heads(x, n, DIM) for x, n in zip(parts(g, g.input()), (4, 2, 2), strict=True))
    mixed = g.node("Attention", q, k, v, is_causal=1)
    merged = g.node("Reshape", g.node("Transpose", mixed, perm=[0, 2, 3, 1]), g.constant([0, 0, 16]))
    assert run_pass(PASS, g.finish(merged)).refused == {"the heads are not transposed back": 1}


def test_q_and_k_norms_of_different_epsilon_are_refused() -> None:
    g = GraphMaker()
    q, k, v = parts(g, g.input())
    q, k = (
        g.node("RMSNormalization", x, g.weight(n * DIM), axis=-1, epsilon=epsilon)
        for x, n, epsilon in ((q, HEADS, 0.25), (k, KV_HEADS, 0.5))
    )
    graph = g.finish(g.attention([q, k, v], HEADS, KV_HEADS, DIM))
    recognise_norms.PASS.run(graph)
    assert run_pass(PASS, graph).refused == {"q, k and v are not normed alike": 1}


def with_sinks(g: GraphMaker, *, window: int = 0, **changes: Any) -> str:
    """An attention whose keys and values end in zeros, as convert writes it; `changes` replace one thing each."""
    q, k, v = (g.heads(x, n, DIM) for x, n in zip(parts(g, g.input()), (4, 2, 2), strict=True))
    shape = g.node("Shape", "ids")
    batch = g.node("Gather", shape, g.constant([0]), axis=0)
    fill = {"value": numpy_helper.from_array(np.ones(1, np.float32))} if changes.get("ones") else {}
    zeros = g.node(
        "ConstantOfShape", g.node("Concat", batch, g.constant([KV_HEADS, changes.get("zeros", 1), DIM]), axis=0), **fill
    )
    k, v = (g.node("Concat", each, zeros, axis=2) for each in (k, v))
    seen = g.node("GreaterOrEqual", g.distance(), g.constant(np.int64(changes.get("after", 0))))
    if window:
        seen = g.node("And", seen, g.window(window))
    numbers = [g.constant(np.float32(each)) for each in (0.0, changes.get("never", -np.inf))]
    base = g.node("Expand", g.node("Where", seen, *numbers), g.constant([1, HEADS, 1, 1]))
    column = g.node("Reshape", g.weight(HEADS), g.constant([1, HEADS, 1, 1]))
    length = g.node("Gather", shape, g.constant([1]), axis=0)
    wide = g.node("Concat", g.constant([1, 1]), length, g.constant([1]), axis=0)
    mask = g.node("Concat", base, g.node("Expand", column, wide), axis=3)
    mixed = g.node("Attention", q, k, v, mask, is_causal=changes.get("is_causal", 0))
    return g.node("Reshape", g.node("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, HEADS * DIM]))


@pytest.mark.parametrize("window", [0, 3])
def test_sinks(window: int) -> None:
    g = GraphMaker()
    graph = g.finish(with_sinks(g, window=window))
    assert run_pass(PASS, graph).fired == 1
    assert ops_of(graph) == ["Gather", "MatMul", "Reshape", "Reshape", "PagedAttention"]
    assert graph.nodes[-1].attrs["window"] == window
    assert weight_shape(graph.nodes[-1].inputs[4]) == (HEADS,)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ones": True}, "the attention is not causal"),
        ({"after": 1}, "the attention takes a mask that is not a sliding window"),
        ({"never": -1e9}, "the attention takes a mask that is not a sliding window"),
        ({"is_causal": 1}, "a causal attention has a key or value of zeros"),
    ],
)
def test_other_sinks_are_refused(changes: dict[str, Any], reason: str) -> None:
    g = GraphMaker()
    assert PASS.run(g.finish(with_sinks(g, **changes))).refused == {reason: 1}


def with_slopes(g: GraphMaker, **changes: Any) -> str:
    """An attention whose mask falls with the distance, as convert writes it; `changes` replace one thing each."""
    q, k, v = (g.heads(x, n, DIM) for x, n in zip(parts(g, g.input()), (4, 2, 2), strict=True))
    slopes = np.arange(1, 1 + changes.get("heads", HEADS), dtype=np.float32)[:, None, None]
    if changes.get("bf16"):
        length = g.node("Gather", g.node("Shape", "ids"), g.constant([1]), axis=0)
        scalar_length = g.node("Squeeze", length)
        tokens = g.node("Range", g.constant(np.int64(changes.get("first", 0))), scalar_length, g.constant(np.int64(1)))
        x = g.node("Unsqueeze", tokens, g.constant([0]))
        for factor in (slopes, np.float32(changes.get("scale", 0.5))):
            narrow = g.node("Cast", x, to=changes.get("to", TensorProto.BFLOAT16))
            x = g.node("Mul", g.node("Cast", narrow, to=TensorProto.FLOAT), g.constant(factor))
        mask = g.node("Expand", x, g.node("Concat", g.constant([HEADS]), length, length, axis=0))
    else:
        apart = g.node("Cast", changes.get("apart") or g.distance(), to=TensorProto.FLOAT)
        mask = g.node("Mul", apart, g.constant(-slopes))
    mixed = g.node("Attention", q, k, v, mask, is_causal=1, scale=0.5)
    return g.node("Reshape", g.node("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, HEADS * DIM]))


@pytest.mark.parametrize("bf16", [0, 1])
def test_slopes(bf16: int) -> None:
    g = GraphMaker()
    graph = g.finish(with_slopes(g, bf16=bf16))
    assert run_pass(PASS, graph).fired == 1
    node = graph.nodes[-1]
    assert node.attrs["bf16_bias"] == bf16
    assert node.inputs[5].values.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bf16": 1, "scale": 0.25}, "the attention takes a mask that is not a sliding window"),
        ({"bf16": 1, "first": 1}, "the attention takes a mask that is not a sliding window"),
        ({"bf16": 1, "to": TensorProto.FLOAT16}, "the attention takes a mask that is not a sliding window"),
        ({"heads": 1}, "the mask has not one slope for each head, or keys and values are another layer's"),
    ],
)
def test_other_slopes_are_refused(changes: dict[str, Any], reason: str) -> None:
    g = GraphMaker()
    assert PASS.run(g.finish(with_slopes(g, **changes))).refused == {reason: 1}


@pytest.mark.parametrize("changes", [{}, {"axes": [1, 2]}, {"whole": 2.0}])
def test_queries_that_grow(changes: dict[str, Any]) -> None:
    """As convert writes them; other factors are no growth, and stay."""
    g = GraphMaker()
    q, k, v = (g.heads(x, n, DIM) for x, n in zip(parts(g, g.input()), (4, 2, 2), strict=True))
    length = g.node("Squeeze", g.node("Gather", g.node("Shape", "ids"), g.constant([1]), axis=0))
    positions = g.node("Range", g.constant(np.int64(0)), length, g.constant(np.int64(1)))
    row = g.node("Cast", g.node("Unsqueeze", positions, g.constant([0])), to=TensorProto.FLOAT)
    floor = g.node("Floor", g.node("Div", row, g.constant(np.float32(16))))
    logarithm = g.node("Log", g.node("Add", floor, g.constant(np.float32(changes.get("whole", 1.0)))))
    factor = g.node("Add", g.node("Mul", logarithm, g.constant(np.float32(0.5))), g.constant(np.float32(1.0)))
    q = g.node("Mul", q, g.node("Unsqueeze", factor, g.constant(changes.get("axes", [1, 3]))))
    mixed = g.node("Attention", q, k, v, is_causal=1)
    merged = g.node("Reshape", g.node("Transpose", mixed, perm=[0, 2, 1, 3]), g.constant([0, 0, HEADS * DIM]))
    graph = g.finish(merged)
    insert_matmul.PASS.run(graph)
    assert fuse_activation.PASS.run(graph).fired == bool(changes)
    assert PASS.run(graph).fired == (not changes)
    if not changes:
        (node,) = graph.plugins("PagedAttention")
        assert (node.attrs["growth"], node.attrs["growth_every"]) == (0.5, 16)
