"""Graph of plugins → Program → Plan: steps in execution order, weights by name, buffers in one arena.

PagedAttention becomes rope_kv_write and paged_attention; SharedAttention, which reads what another one has written,
rope_query and paged_attention. The last step writes the logits; drawing from them is the
session's. Between Program and Plan come the step passes of `pipeline.py`.
"""

import dataclasses
from collections.abc import Collection, Sequence

import onnx_graphsurgeon as gs

from ingot.builder.expressions import key, matrix_shape
from ingot.builder.graph import DOMAIN, Graph, is_weight, ours, weight_shape
from ingot.builder.memory import Use, Value, plan_arena
from ingot.builder.node_kinds import attends, count_of, is_matmul, reads_table, writes_kv
from ingot.builder.pack import WeightUse, place_weights, slice_count
from ingot.builder.positions import UNLIMITED
from ingot.builder.program import Draft, Program
from ingot.builder.select import ATTENTIONS, plan_ops
from ingot.dtypes import DType
from ingot.errors import PassError
from ingot.plan import STATE_WINDOW, Attr, CacheGroup, Limits, Plan, Rows, Step
from ingot.plugins.registry import find_op
from ingot.step_inputs import inputs_among


@dataclasses.dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer keeps of each token, and for how many tokens: 0 for all. All as of a CacheGroup."""

    window: int
    kv_heads: int
    head_dim: int
    latent: int = 0
    heads_before: int = 0
    heads_behind: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What the limits and the KV cache need to know of a graph of plugins. positions: UNLIMITED if it does not say;
    states: float32 numbers of each layer that keeps a state, which come after those with keys and values."""

    positions: int
    vocab_size: int
    hidden_size: int
    heads: int
    layers: tuple[LayerShape, ...]
    states: tuple[int, ...]
    kv_dtype: DType


def read_shape(graph: Graph) -> ModelShape:
    """Raises PassError for a graph without attention or token embedding."""
    nodes = [node for node in graph.nodes if node.domain == DOMAIN]
    attentions = [node for node in nodes if attends(node)]
    if not attentions:
        raise PassError("the graph has no attention", expected="at least one layer with keys and values")
    layers = {int(node.attrs["layer"]): _layer(node) for node in nodes if writes_kv(node)}
    table = next((node.inputs[1] for node in nodes if reads_table(node)), None)
    head = next(node for node in reversed(nodes) if is_matmul(node))
    if table is None:
        raise PassError("the graph has no token embedding", expected="a Gather of a table by the token ids")
    vocab_size, table_rows = weight_shape(head.inputs[1])[0], weight_shape(table)[0]
    if table_rows < vocab_size:
        raise PassError(
            "the token table has fewer rows than lm_head, so that a drawn token could not be read",
            where="the token table",
            expected=f"at least {vocab_size} rows, as lm_head has",
            got=f"{table_rows} rows",
            hint="the files of the model do not belong together: download the model again, then convert it",
        )
    return ModelShape(
        positions=min(int(node.attrs.get("positions", UNLIMITED)) for node in nodes),
        vocab_size=vocab_size,
        hidden_size=weight_shape(table)[1],
        heads=max(node.attrs["heads"] for node in attentions),
        layers=tuple(layers[number] for number in sorted(layers)),
        states=_states(nodes),
        kv_dtype=DType(attentions[0].attrs["dtype"]),
    )


def _layer(node: gs.Node) -> LayerShape:
    return LayerShape(
        window=int(node.attrs.get("window", 0)),
        kv_heads=int(node.attrs["kv_heads"]),
        head_dim=int(node.attrs["head_dim"]),
        latent=int(node.attrs.get("rank", 0)),
    )


def _states(nodes: Sequence[gs.Node]) -> tuple[int, ...]:
    found: dict[int, int] = {}
    for node in nodes:
        op = find_op(plan_ops(node.op)[-1])
        if op.state is not None:
            found[int(node.attrs["layer"])] = op.state(node.attrs)
    return tuple(found[layer] for layer in sorted(found))


def cache_groups(
    shape: ModelShape, limits: Limits, tokens_per_block: int, dtype: DType, *, frees_windows: bool
) -> tuple[CacheGroup, ...]:
    """Layers that are alike share a group, in the order of their first layers. A window as long as the longest sequence
    counts as no window.

    frees_windows  False: sessions take one group and keep everything. Raises PassError where sizes differ
    """
    kinds: dict[LayerShape, list[int]] = {}
    for number, layer in enumerate(shape.layers):
        window = layer.window if frees_windows and layer.window < limits.max_seq_len else 0
        kinds.setdefault(dataclasses.replace(layer, window=window), []).append(number)
    if not frees_windows and len(kinds) > 1:
        raise PassError(
            "the layers have KV caches of different shapes",
            expected="one (kv_heads, head_dim) for all layers, which is what this target's sessions take",
            got=", ".join(f"{kind.kv_heads} x {kind.head_dim}" for kind in kinds),
            hint="build for a cuda or CPU target",
        )
    first = len(shape.layers)
    states = CacheGroup(
        window=STATE_WINDOW,
        layers=tuple(range(first, first + len(shape.states))),
        kv_heads=0,
        head_dim=0,
        tokens_per_block=tokens_per_block,
        dtype=DType.F32,
        state=shape.states,
    )
    groups = tuple(
        CacheGroup(
            window=kind.window,
            layers=tuple(layers),
            kv_heads=kind.kv_heads,
            head_dim=kind.head_dim,
            tokens_per_block=tokens_per_block,
            dtype=dtype,
            latent=kind.latent,
            heads_before=kind.heads_before,
            heads_behind=kind.heads_behind,
        )
        for kind, layers in kinds.items()
    )
    return (*groups, states) if shape.states else groups


class Lowering:
    """Collects steps and weights node by node; `plan` puts them together."""

    def __init__(self, graph: Graph, *, panels: bool = True) -> None:
        """panels: the target's products take packed floats; codes are always packed."""
        self._panels = panels
        self._drafts: list[Draft] = []
        self._values: list[Value] = []
        self._index: dict[int, int] = {}  # id of a tensor → its value
        self._known: dict[tuple[object, ...], str] = {}  # equal weights are stored once
        self._uses: dict[str, WeightUse] = {}
        self._weights: dict[tuple[int, int], str] = {}  # ids of a node and of a weight that it reads → its name
        self._kv_layers = count_of(graph, writes_kv)
        for node in graph.nodes:
            if node.domain == DOMAIN:
                self._lower(node)
        self._logits = self._index[id(graph.logits)]

    def add_weight(self, use: WeightUse) -> str:
        """A weight that a step pass wants; the name that it is stored under, which an equal one may have given it."""
        name = self._known.setdefault((key(use.tensor), use.layout, use.dtype, use.made), use.name)
        self._uses.setdefault(name, use)
        return name

    def drop_weights(self, names: Collection[str]) -> None:
        """Weights that no step reads any more."""
        self._uses = {name: use for name, use in self._uses.items() if name not in names}
        self._known = {what: name for what, name in self._known.items() if name not in names}

    def use(self, name: str) -> WeightUse:
        """A weight by the name that it is stored under."""
        return self._uses[name]

    @property
    def uses(self) -> list[WeightUse]:
        """Every weight once, in the order of first use."""
        return list(self._uses.values())

    def weight_name(self, node: gs.Node, tensor: gs.Tensor) -> str:
        """What the plan calls a weight that a node reads."""
        return self._weights[id(node), id(tensor)]

    def value(self, tensor: gs.Tensor) -> Value:
        """Rows and columns of an activation."""
        return self._values[self._index[id(tensor)]]

    @property
    def program(self) -> Program:
        """The steps as the graph has them."""
        return Program(steps=tuple(self._drafts), values=tuple(self._values), logits=self._logits)

    def plan(self, program: Program, limits: Limits, caches: tuple[CacheGroup, ...], shape: ModelShape) -> Plan:
        """The Plan of this program, or of what passes have made of it, under these limits."""
        rows = {Rows.TOKENS: limits.max_num_tokens, Rows.LOGITS: limits.max_logit_rows}
        buffers, arena_bytes = plan_arena(
            program.values,
            [_use(step) for step in program.steps],
            rows,
            [] if program.logits is None else [program.logits],
        )
        weights, weight_bytes = place_weights(self.uses, slice_count(self.uses))
        names = [buffer.name for buffer in buffers]
        used = {index for step in program.steps for index in (*step.inputs, *step.outputs)}
        max_positions = limits.max_seq_len if shape.positions == UNLIMITED else shape.positions
        return Plan(
            vocab_size=shape.vocab_size,
            max_positions=max_positions,
            limits=limits,
            caches=caches,
            inputs=inputs_among({ref for step in program.steps for ref in step.inputs if isinstance(ref, str)}),
            buffers=tuple(dict.fromkeys(buffer for index, buffer in enumerate(buffers) if index in used)),
            weights=tuple(weights),
            steps=tuple(_step(each, names) for each in program.steps),
            arena_bytes=arena_bytes,
            weight_bytes=weight_bytes,
            logits="" if program.logits is None else names[program.logits],
            draw_kernel="" if program.logits is None else program.draw_kernel,
            sum_parts=program.sum_parts,
            decode_tokens=program.decode_tokens,
        )

    def _lower(self, node: gs.Node) -> None:
        kernels = node.attrs["kernel"].split(" ")
        if ours(node, *ATTENTIONS):
            query = self._new_value(Rows.TOKENS, node.attrs["heads"] * node.attrs["head_dim"])
            first, second = plan_ops(node.op)
            written, of_heads = node.inputs[:4], node.inputs[4:]  # sinks and slopes
            self._draft(node, node.name.replace("/attention", f"/{first}"), first, kernels[0], written, [query])
            self._draft(node, node.name, second, kernels[1], [query, *of_heads], node.outputs)
        elif reads_table(node):  # the token ids are an input of the plan
            self._draft(node, node.name, plan_ops(node.op)[0], kernels[0], node.inputs[1:], node.outputs)
        else:
            self._draft(node, node.name, plan_ops(node.op)[0], kernels[0], node.inputs, node.outputs)

    def _draft(
        self,
        node: gs.Node,
        name: str,
        op_name: str,
        kernel: str,
        inputs: Sequence[gs.Tensor | int],
        outputs: Sequence[gs.Tensor | int],
    ) -> None:
        """One step of `node`; inputs and outputs are tensors of the graph, or values made here."""
        op = find_op(op_name)
        attrs: dict[str, Attr] = {
            each: node.attrs.get(each, default)
            for each, default in op.attrs.items()
            if each in node.attrs or not isinstance(default, type)
        }
        if op.state is not None:
            attrs["layer"] = self._kv_layers + int(attrs["layer"])
        refs = [
            self._ref(node, op_name, f"{name}.{op.inputs[i].rstrip('?')}", i, each) for i, each in enumerate(inputs)
        ]
        given = op.with_batch(["" if ref is None else str(ref) for ref in refs])
        refs += [None] * (len(op.inputs) - len(refs))
        problem = op.problem(given, attrs)
        problem = problem or op.size_problem([self._shape(ref) for ref in refs], attrs)
        activations = [self._values[ref] for ref in refs if isinstance(ref, int)]
        if len({value.rows for value in activations}) > 1:
            problem = "some of its inputs have a row per token, others a row per wanted logit"
        if problem is not None:
            raise PassError(f"kernel call {name} does not fit op {op_name}", where=node.name, got=problem)
        rows = op.rows or activations[0].rows
        cols = op.out_cols([self._cols(ref, product=op.packed == i) for i, ref in enumerate(refs)], attrs)
        made: list[int | None] = [
            each if isinstance(each, int) else self._new_value(rows, cols[i], each) for i, each in enumerate(outputs)
        ]
        made += [None] * (len(op.outputs) - len(made))
        self._drafts.append(
            Draft(
                name=name,
                op=op_name,
                kernel=kernel,
                inputs=tuple(given[i] if i in op.batch_inputs else ref for i, ref in enumerate(refs)),
                outputs=tuple(made),
                attrs=attrs,
            )
        )

    def _ref(self, node: gs.Node, op: str, name: str, index: int, each: gs.Tensor | int) -> str | int | None:
        if isinstance(each, int):
            return each
        if each.is_empty():
            return None
        return self._weight(node, op, name, index, each) if is_weight(each) else self._index[id(each)]

    def _weight(self, node: gs.Node, op: str, name: str, index: int, tensor: gs.Tensor) -> str:
        product = find_op(op).packed == index
        matrix = product or index in find_op(op).tables
        dtype = DType(node.attrs["dtype"]) if matrix else DType.F32
        panels = product and (self._panels or dtype.is_quantised)
        gated = panels and find_op(op).gated(node.attrs)
        shape = weight_shape(tensor) if len(weight_shape(tensor)) >= 2 and matrix else None
        use = WeightUse(
            name=name,
            tensor=tensor,
            dtype=dtype,
            shape=shape or (matrix_shape(tensor)[0],),
            panels=panels,
            gated=gated,
            group=node.attrs.get("group", 0) if panels else 0,
        )
        known = self.add_weight(use)
        self._weights[id(node), id(tensor)] = known
        return known

    def _shape(self, ref: str | int | None) -> tuple[int, ...] | None:
        """Shape of a weight, (columns,) of an activation."""
        if ref is None:
            return None
        return (self._values[ref].cols,) if isinstance(ref, int) else self._uses[ref].shape

    def _cols(self, ref: str | int | None, *, product: bool) -> int | None:
        """Columns of an activation; rows of a product's weight, columns of a table, length of a vector."""
        shape = self._shape(ref)
        if shape is None or isinstance(ref, int):
            return None if shape is None else shape[0]
        return shape[-2] if product else shape[-1]

    def _new_value(self, rows: Rows, cols: int, tensor: gs.Tensor | None = None) -> int:
        self._values.append(Value(rows=rows, cols=cols, tensor="" if tensor is None else tensor.name))
        if tensor is not None:
            self._index[id(tensor)] = len(self._values) - 1
        return len(self._values) - 1


def _use(draft: Draft) -> Use:
    op = find_op(draft.op)
    return Use(
        inputs=tuple(ref if isinstance(ref, int) else None for ref in draft.inputs),
        outputs=draft.outputs,
        in_place=op.in_place,
        keeps_inputs=op.keeps_inputs,
        of_ranks=op.collective is not None,
    )


def _step(draft: Draft, names: Sequence[str]) -> Step:
    return Step(
        name=draft.name,
        op=draft.op,
        kernel=draft.kernel,
        attrs=draft.attrs,
        inputs=tuple(names[ref] if isinstance(ref, int) else ref or "" for ref in draft.inputs),
        outputs=tuple("" if index is None else names[index] for index in draft.outputs),
    )
