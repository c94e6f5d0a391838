"""Whether the sizes of a step's inputs fit together, op by op: a graph that says otherwise is refused, not run."""

from collections.abc import Callable, Mapping, Sequence

from ingot.plan import Attr

Shape = tuple[int, ...]  # of a weight: as stored in the plan; of an activation: its columns alone
Shapes = Sequence[Shape | None]
Attrs = Mapping[str, Attr]


def size_problem(op: str, shapes: Shapes, attrs: Attrs) -> str | None:
    """Why inputs of these shapes (in the op's order, None where absent) are no use of the op, or None."""
    check = _CHECKS.get(op)
    return None if check is None else check(shapes, attrs)


def _matmul(shapes: Shapes, attrs: Attrs) -> str | None:
    (k,), weight, bias, residual = shapes[0] or (0,), shapes[1] or (), shapes[2], shapes[3]
    if len(weight) != 2 or weight[1] != k:
        return f"an input of {k} columns cannot be multiplied with a weight {weight}"
    if attrs["gated"] and weight[0] % 2:
        return f"a gated product needs an even number of rows, not {weight[0]}"
    out = weight[0] // 2 if attrs["gated"] else weight[0]
    return _unequal("bias", bias, weight[0]) or _unequal("residual", residual, out)


def _moe_route(shapes: Shapes, attrs: Attrs) -> str | None:
    (experts,) = shapes[0] or (0,)
    taken = int(attrs["per_token"])
    return None if 1 <= taken <= experts else f"a row cannot take {taken} of {experts} experts"


def _moe_gate_up(shapes: Shapes, attrs: Attrs) -> str | None:
    (k,), weight = shapes[0] or (0,), shapes[2] or ()
    if len(weight) != 3 or weight[2] != k or weight[1] % 2:
        return f"an input of {k} columns cannot be multiplied with the gates and ups of experts {weight}"
    return None


def _moe_down(shapes: Shapes, attrs: Attrs) -> str | None:
    (k,), (slots,), weight = shapes[0] or (0,), shapes[1] or (0,), shapes[3] or ()
    if len(weight) != 3 or weight[2] * slots != k:
        return f"an input of {slots} slots in {k} columns cannot be multiplied with experts {weight}"
    return _unequal("weights", shapes[2], slots)


def _norm(shapes: Shapes, attrs: Attrs) -> str | None:
    (cols,) = shapes[0] or (0,)
    names = ("weight", "bias or residual", "residual")
    problems = (_unequal(name, shape, cols) for name, shape in zip(names, shapes[1:], strict=False))
    return next((problem for problem in problems if problem), None)


def _same_cols(shapes: Shapes, attrs: Attrs) -> str | None:
    (cols,) = shapes[0] or (0,)
    return _unequal("second input", shapes[1], cols)


def _embedding(shapes: Shapes, attrs: Attrs) -> str | None:
    tables = [shape for shape in shapes if shape is not None]
    if any(len(shape) != 2 for shape in tables) or len({shape[-1] for shape in tables}) != 1:
        return f"tables {tables} are no matrices of one width"
    return None


def _rope_kv_write(shapes: Shapes, attrs: Attrs) -> str | None:
    heads, kv_heads, dim = (int(attrs[name]) for name in ("heads", "kv_heads", "head_dim"))
    if shapes[1] is not None and shapes[1][0] > dim:
        return f"{shapes[1][0]} rotary dimensions do not fit into a head of {dim}"
    for name, norm, count in (("q_norm", shapes[2], heads), ("k_norm", shapes[3], kv_heads)):
        if norm not in (None, (dim,), (count * dim,)):
            return f"{name} has shape {norm} instead of ({dim},), one head, or ({count * dim},), all heads"
    return _unequal("qkv", shapes[0], (heads + 2 * kv_heads) * dim)


def _paged_attention(shapes: Shapes, attrs: Attrs) -> str | None:
    softcap = float(attrs["softcap"])
    return None if softcap >= 0 else f"a soft cap of {softcap:g} is below 0"


def _softcap(shapes: Shapes, attrs: Attrs) -> str | None:
    cap = float(attrs["cap"])
    return None if cap > 0 else f"a soft cap of {cap:g} is not above 0"


def _unequal(name: str, shape: Shape | None, wanted: int) -> str | None:
    return None if shape is None or shape == (wanted,) else f"{name} has shape {shape} instead of ({wanted},)"


_CHECKS: dict[str, Callable[[Shapes, Attrs], str | None]] = {
    "matmul": _matmul,
    "moe_route": _moe_route,
    "moe_gate_up": _moe_gate_up,
    "moe_down": _moe_down,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "add": _same_cols,
    "activation": _same_cols,
    "embedding": _embedding,
    "rope_kv_write": _rope_kv_write,
    "paged_attention": _paged_attention,
    "softcap": _softcap,
}
