"""ModelConfig → the Graph: standard ONNX ops, written once for all families.

                       ┌──────────────── x layers ────────────────┐
input_ids ─ embedding ─┤ norm ─ attention ─ + ─ norm ─ MLP ─ +    ├─ norm ─ lm_head ─ logits
            positions ─┘   cos, sin, window                       ┘

Node names are paths (`layers.3/attn/q/matmul`) for people; nothing reads them. The initialisers of weights are
external data: they point at the bits inside the safetensors files, bf16 stays bf16 and is Cast in the Graph.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ingot import __version__
from ingot.configs.model import ModelConfig, Norm, QkNorm, RopeConfig
from ingot.convert.activations import activated
from ingot.convert.alibi import alibi_mask
from ingot.convert.attention_sinks import with_sinks
from ingot.convert.dequantise import dequantise
from ingot.convert.experts import beside_mlp, experts
from ingot.convert.head import head, of_vocabulary
from ingot.convert.latent import latent_attention
from ingot.convert.layer_input import layer_end
from ingot.convert.mlp import mlp
from ingot.convert.positions import query_growth, rotary_angles, token_positions
from ingot.convert.quantised.form import Quantised
from ingot.convert.recurrent import recurrent_mixer, times
from ingot.convert.streams import as_streams, layer_of_streams, of_streams
from ingot.dtypes import DType
from ingot.tensor_file import StoredTensor

OPSET = 23
IR_VERSION = 10

Attribute = int | float | str | list[int]


def build_graph(
    config: ModelConfig, weights: Mapping[str, StoredTensor], quantised: Mapping[str, Quantised] = MappingProxyType({})
) -> onnx.ModelProto:
    """The model of a Checkpoint; `weights` says where the bits of each name of `weight_shapes` lie, or of the pieces of
    a quantised one."""
    decoder = _Decoder(config, weights, quantised)
    decoder.logits()
    graph = helper.make_graph(
        decoder.nodes,
        config.family,
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", config.vocab_size])],
        list(decoder.initializers.values()),
    )
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="ingot",
        producer_version=__version__,
    )


class _Decoder:
    """Appends nodes in topological order. Every method takes and returns names of values."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, StoredTensor], quantised: Mapping[str, Quantised]
    ) -> None:
        self.config = config
        self.weights = weights
        self.quantised = quantised
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, onnx.TensorProto] = {}
        self._casts: dict[str, str] = {}
        self._angles: dict[RopeConfig, tuple[str, str]] = {}
        self._masks: dict[int, str] = {}
        self._distances = self._alibi = ""
        self._kept: dict[int, tuple[str, str]] = {}  # layer → keys and values that later ones share
        self._embedding = ""

    def logits(self) -> None:
        """The whole model."""
        config = self.config
        positions = token_positions(self, self.config.max_positions)
        x = self._embedding = self.embedding(positions)
        if config.streams is not None:
            x = as_streams(self, x, config)
        for layer in range(config.num_layers):
            x = self.layer(x, layer, positions)
        if config.streams is not None:
            x = of_streams(self, x, config)
        last = self.norm(x, "norm") if config.last_norm else x
        last = head(self, self.linear(last, "lm_head/in") if config.embedding_size else last, config)
        assert self.nodes[-1].name == last, "the logits come last"
        self.nodes[-1].output[0] = "logits"

    def layer(self, x: str, layer: int, positions: str) -> str:
        """[batch, sequence, hidden]"""
        if self.config.streams is not None:
            return layer_of_streams(self, x, self.config, layer, positions, self._embedding)
        path, given, normed = f"layers.{layer}", x, ""
        if self.config.mixes(layer):
            normed = self.pre_norm(x, f"{path}/attn_norm")
            branch = self.mixers(normed, layer, positions)
            branch = self.post_norm(branch, f"{path}/attn_post_norm")
            x = self.node("Add", [x, self.scaled(branch, f"{path}/attn")], f"{path}/attn/residual")
            x = self.norm(x, f"{path}/attn_norm") if self.config.sum_norms else x
        if self.config.has_mlp(layer):
            if not self.config.shared_norm:
                normed = self.pre_norm(given if self.config.parallel_branches else x, f"{path}/mlp_norm")
            x = self.mlp_branch(x, normed, layer)
            x = self.norm(x, f"{path}/mlp_norm") if self.config.sum_norms else x
        return layer_end(self, x, self._embedding, self.config, layer)

    def mlp_branch(self, x: str, normed: str, layer: int) -> str:
        """The residual stream x plus what an MLP or experts make of `normed`; [batch, sequence, hidden]"""
        path = f"layers.{layer}"
        moe = self.config.moe_of(layer)
        if moe is None:
            cut = self.config.mlp_cuts[layer] if self.config.mlp_cuts else 0.0
            branch = mlp(self, normed, self.config, f"{path}/mlp", cut=cut)
        elif moe.beside_mlp:
            branch = beside_mlp(self, mlp(self, normed, self.config, f"{path}/mlp"), x, moe, self.config, path)
        else:
            branch = experts(self, normed, moe, f"{path}/moe")
        branch = times(self, branch, self.config.mlp_scale, f"{path}/mlp_out")
        branch = self.post_norm(branch, f"{path}/mlp_post_norm")
        return self.node("Add", [x, self.scaled(branch, f"{path}/mlp")], f"{path}/mlp/residual")

    def mixers(self, x: str, layer: int, positions: str) -> str:
        """Attention, or what the layer has instead, or both; [batch, sequence, hidden]"""
        config, path = self.config, f"layers.{layer}/mixer"
        made = recurrent_mixer(self, x, config, layer)
        if made is not None:
            made = times(self, made, config.mixer_scale, path)
            if not config.has_attention(layer):
                return made
        read = times(self, x, config.attention_in_scale, f"layers.{layer}/attn_in")
        mixed = self.attention(read, layer, positions)
        mixed = times(self, mixed, config.attention_out_scale, f"layers.{layer}/attn_out")
        return mixed if made is None else self.node("Add", [made, mixed], f"{path}/with_attention")

    def scaled(self, branch: str, path: str) -> str:
        """A branch as it joins the residual stream"""
        return times(self, branch, self.config.residual_scale, path)

    def embedding(self, positions: str) -> str:
        """[batch, sequence, hidden]"""
        tokens = self.rows("embed/weight", "input_ids", "embed")
        if self.config.embedding_scale != 1:
            scale = self.constant("const/embedding_scale", np.float32(self.config.embedding_scale))
            tokens = self.node("Mul", [tokens, scale], "embed/scale")
        if self.config.embedding_size:
            tokens = self.linear(tokens, "embed/out")
        if self.config.learned_positions:
            rows = self.rows("positions/weight", positions, "positions")
            tokens = self.node("Add", [tokens, rows], "embed/add_positions")
        return self.norm(tokens, "embed_norm") if self.config.embedding_norm else tokens

    def rotary_angles(self, rope: RopeConfig, positions: str) -> tuple[str, str]:
        """cos and sin, each [batch, sequence, rotary_dim / 2]; made once for all layers that rotate alike."""
        if rope not in self._angles:
            path = "rope" if rope == self.config.rope else "rope_local"
            self._angles[rope] = rotary_angles(self, rope, positions, path)
        return self._angles[rope]

    def window_mask(self, window: int) -> str:
        """bool [sequence, sequence]: whether a token (row) is less than `window` after another (column)."""
        if window not in self._masks:
            path = f"window_{window}"
            self._masks[window] = self.node("Less", [self.distances(), self.integers(path, window)], f"{path}/mask")
        return self._masks[window]

    def distances(self) -> str:
        """int64 [sequence, sequence]: how far a token (row) is after another (column)."""
        if not self._distances:
            row = self.node("Unsqueeze", ["positions/range", self.integers("axis_1", [1])], "distances/row")
            column = self.node("Unsqueeze", ["positions/range", self.integers("axis_0", [0])], "distances/column")
            self._distances = self.node("Sub", [row, column], "distances")
        return self._distances

    def attention(self, x: str, layer: int, positions: str) -> str:
        """q, k, v → norm → rotate → softmax(q . k * scale) v → out; [batch, sequence, hidden]"""
        config, path = self.config, f"layers.{layer}/attn"
        if config.latent is not None:
            return latent_attention(self, x, config, config.latent, layer, positions)
        window, dim = config.window_of(layer), config.head_dim_of(layer)
        if (writer := config.writer_of(layer)) == layer:
            query, key, value = self.projections(x, layer)
            self._kept[layer] = self.keys(key, layer, positions), self.values(key, value, layer)
        else:
            query = self.linear(x, f"{path}/q")
        query = self.rotated(self.heads(query, config.heads, dim, f"{path}/q"), layer, positions, f"{path}/q")
        if config.query_growth:
            query = self.node("Mul", [query, query_growth(self, config, positions)], f"{path}/q/grown")
        key, value = self._kept[writer]
        scale = config.attention_scale / (layer + 1 if config.scale_by_inverse_layer else 1)
        if config.attention_sinks:
            inputs = [query, *with_sinks(self, key, value, config, window, path)]
        else:
            inputs = [query, key, value, *self.masks(window, scale)]
        causal = int(not config.attention_sinks)  # else the mask is
        cap = {"softcap": config.score_cap} if config.score_cap else {}
        mixed = self.node("Attention", inputs, f"{path}/attention", is_causal=causal, scale=scale, **cap)
        rows = self.node("Transpose", [mixed], f"{path}/merge/transpose", perm=[0, 2, 1, 3])
        width = config.heads * dim
        merged = self.node("Reshape", [rows, self.integers(f"rows_{width}", [0, 0, width])], f"{path}/merge/reshape")
        if config.output_gate:
            gate = self.node("Sigmoid", [self.linear(x, f"{path}/gate")], f"{path}/gate/sigmoid")
            merged = self.node("Mul", [merged, gate], f"{path}/gated")
        merged = self.norm(merged, f"{path}/inner_norm", width) if config.inner_norms else merged
        return self.linear(merged, f"{path}/out")

    def masks(self, window: int, scale: float) -> list[str]:
        """What an attention takes beside keys and values"""
        if self.config.alibi is None:
            return [self.window_mask(window)] if window else []
        if not self._alibi:
            self._alibi = alibi_mask(self, self.config.alibi, scale)
        return [self._alibi]

    def keys(self, key: str, layer: int, positions: str) -> str:
        """[batch, kv_heads, sequence, head_dim], normed and rotated"""
        config, path = self.config, f"layers.{layer}/attn/k"
        key = self.heads(key, config.kv_heads_of(layer), config.head_dim_of(layer), path)
        return self.rotated(key, layer, positions, path)

    def values(self, key: str, value: str, layer: int) -> str:
        """[batch, kv_heads, sequence, head_dim]; key: the product that makes the keys, which may be value's too"""
        config, path = self.config, f"layers.{layer}/attn"
        dim, shared = config.head_dim_of(layer), f"{path}/k/reshape" if value == key else None
        split = shared or self.split(value, config.kv_heads_of(layer), dim, f"{path}/v")
        if config.value_norm:
            inputs = [split, _ones(self, dim)]
            split = self.node("RMSNormalization", inputs, f"{path}/v_norm/rms_norm", axis=-1, epsilon=config.norm_eps)
        return self.node("Transpose", [split], f"{path}/v/heads", perm=[0, 2, 1, 3])

    def projections(self, x: str, layer: int) -> tuple[str, str, str]:
        """q [batch, sequence, heads * head_dim], k and v [batch, sequence, kv_heads * head_dim]"""
        config, path = self.config, f"layers.{layer}/attn"
        if not config.fused_qkv:
            key = self.linear(x, f"{path}/k")
            value = key if config.keys_as_values(layer) else self.linear(x, f"{path}/v")
            return self.linear(x, f"{path}/q"), key, value
        query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        sizes = self.integers("qkv_sizes", [query, kv, kv])
        parts = [f"{path}/q/split", f"{path}/k/split", f"{path}/v/split"]
        fused = self.linear(x, f"{path}/qkv")
        self.nodes.append(helper.make_node("Split", [fused, sizes], parts, f"{path}/split", axis=-1))
        return parts[0], parts[1], parts[2]

    def split(self, x: str, heads: int, dim: int, path: str) -> str:
        """[batch, sequence, heads * head_dim] → [batch, sequence, heads, head_dim]"""
        return self.node("Reshape", [x, self.integers(f"heads_{heads}_{dim}", [0, 0, heads, dim])], f"{path}/reshape")

    def heads(self, x: str, heads: int, dim: int, path: str) -> str:
        """[batch, sequence, heads * head_dim] → [batch, heads, sequence, head_dim], normed where the model does so"""
        kind = self.config.qk_norm
        if kind is QkNorm.WIDTH:
            x = self.norm(x, f"{path}_norm", heads * dim)
        split = self.split(x, heads, dim, path)
        if kind is QkNorm.HEAD:
            split = self.norm(split, f"{path}_norm", dim)
        return self.node("Transpose", [split], f"{path}/heads", perm=[0, 2, 1, 3])

    def rotated(self, x: str, layer: int, positions: str, path: str) -> str:
        """[batch, heads, sequence, head_dim], in most layers its first rotary_dim dimensions rotated in pairs"""
        config = self.config
        rope = config.local_rope if config.window_of(layer) and config.local_rope else config.rope
        if rope is None or layer in config.still_layers:
            return x
        inputs = [x, *self.rotary_angles(rope, positions)]
        partial = rope.rotary_dim if rope.rotary_dim < config.head_dim_of(layer) else 0
        pairs = {"interleaved": 1} if rope.interleaved else {}
        return self.node("RotaryEmbedding", inputs, f"{path}/rotary", rotary_embedding_dim=partial, **pairs)

    def activated(self, x: str, path: str) -> str:
        return activated(self, x, self.config.activation, path)

    def pre_norm(self, x: str, path: str) -> str:
        return self.norm(x, path) if self.config.pre_norms else x

    def post_norm(self, x: str, path: str) -> str:
        return self.norm(x, path) if self.config.post_norms else x

    def norm(self, x: str, path: str, width: int = 0) -> str:
        """The last dimension normed, times the weight, if there is one. width: of the dimension; 0: the hidden size"""
        weighted, epsilon = self.config.norm_weights, self.config.norm_eps
        weight = self.float32(f"{path}/weight") if weighted else _ones(self, width or self.config.hidden_size)
        if self.config.norm_offset:
            offset = self.constant("const/norm_offset", np.float32(self.config.norm_offset))
            weight = self.node("Add", [weight, offset], f"{path}/factor")
        if self.config.norm is Norm.RMS:
            return self.node("RMSNormalization", [x, weight], f"{path}/rms_norm", axis=-1, epsilon=epsilon)
        inputs = [x, weight, *([self.float32(f"{path}/bias")] if self.config.norm_bias else [])]
        return self.node("LayerNormalization", inputs, f"{path}/layer_norm", axis=-1, epsilon=epsilon)

    def linear(self, x: str, path: str, *, scale: float = 1.0) -> str:
        """x @ W (+ bias), W transposed first where it is stored [out, in]; W and bias times a number"""
        weight = times(self, self.float32(f"{path}/weight"), scale, path)
        if not self.config.linear_in_out:
            weight = self.node("Transpose", [weight], f"{path}/transpose", perm=[1, 0])
        y = self.node("MatMul", [x, weight], f"{path}/matmul")
        if f"{path}/bias" in self.weights:
            bias = times(self, self.float32(f"{path}/bias"), scale, f"{path}/bias")
            y = self.node("Add", [y, bias], f"{path}/add_bias")
        return y

    def rows(self, table: str, indices: str, path: str) -> str:
        """Rows of a table as float32: gathered first, cast after, so that the table is never copied."""
        if table in self.quantised:
            return self.node("Gather", [self.float32(table), indices], f"{path}/gather", axis=0)
        stored = self.weight(table)
        if table == "embed/weight":
            stored = of_vocabulary(self, stored, self.config, path)
        found = self.node("Gather", [stored, indices], f"{path}/gather", axis=0)
        if self.weights[table].dtype is DType.F32:
            return found
        return self.node("Cast", [found], f"{path}/cast_rows", to=TensorProto.FLOAT)

    def float32(self, name: str) -> str:
        """A weight as float32 value; one Cast however often it is used."""
        if name in self.quantised:
            if name not in self._casts:
                self._casts[name] = dequantise(self, self.quantised[name])
            return self._casts[name]
        stored = self.weight(name)
        if self.weights[name].dtype is DType.F32:
            return stored
        if name not in self._casts:
            path = name.replace("/weight", "/cast").replace("/bias", "/cast_bias")
            path = f"{name}/cast" if path == name else path  # the name of a value is its node's
            self._casts[name] = self.node("Cast", [stored], path, to=TensorProto.FLOAT)
        return self._casts[name]

    def weight(self, name: str, element: int | None = None, shape: Sequence[int] | None = None) -> str:
        """The initialiser of a stored weight: external data inside a safetensors file. element, shape: ONNX's type of
        its elements, and how many, where the file has them packed."""
        if name not in self.initializers:
            stored = self.weights[name]
            tensor = TensorProto(name=name, data_type=element or stored.dtype.onnx, dims=shape or stored.shape)
            tensor.data_location = TensorProto.EXTERNAL
            places = {"location": stored.file.name, "offset": str(stored.offset), "length": str(stored.nbytes)}
            for key, value in places.items():
                tensor.external_data.add(key=key, value=value)
            self.initializers[name] = tensor
        return name

    def integers(self, name: str, value: int | Sequence[int]) -> str:
        """An int64 constant, scalar or list."""
        return self.constant(f"const/{name}", np.array(value, dtype=np.int64))

    def constant(self, name: str, value: np.ndarray | np.float32) -> str:
        """A small constant, stored inside the Graph."""
        self.initializers.setdefault(name, numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, op: str, inputs: Sequence[str], path: str, **attributes: Attribute) -> str:
        """One node with one output; the path names both."""
        self.nodes.append(helper.make_node(op, inputs, [path], path, None, None, None, **attributes))
        return path


def _ones(g: _Decoder, width: int) -> str:
    """What a norm without a weight is multiplied with."""
    return g.constant(f"const/ones_{width}", np.ones(width, np.float32))
