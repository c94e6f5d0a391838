"""The attention of a layer as TensorRT's IPluginV3: shapes and types for the builder, launches for the runtime.

The bindings are an argument (`tensorrt_rtx_bindings`, or `tensorrt` itself): the classes derive from theirs.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ingot.plugins.tensorrt.attention import DOMAIN, PLUGIN, VERSION, Attention, workspace_bytes

IN_PLACE = (1, 2)  # outputs that are the inputs of the same numbers: keys and values

Shapes = Sequence[Sequence[int]]
Launcher = Callable[[Attention, Shapes, Sequence[int], Sequence[int], int, int], None]
"""(attention, shapes of the inputs, their addresses, addresses of the outputs, workspace, stream) → None"""


class AttentionPlugin:
    """One layer, as far as it does not depend on the bindings; `plugin_class` adds those.

    Inputs are those of `attention.plugin_inputs`; outputs y, keys, values.
    """

    trt: Any
    attention: Attention
    launcher: Launcher | None

    def get_capability_interface(self, kind: Any) -> Any:
        """One object is core, build and runtime."""
        return self

    def clone(self) -> Any:
        """Another one that does the same."""
        return type(self)(self.attention, self.launcher)  # type: ignore[call-arg]

    # For the builder.

    def get_output_data_types(self, types: Sequence[Any]) -> list[Any]:
        """Types of y, keys, values."""
        y = types[1] if self.attention.narrow else self.trt.float32
        return [y, *(types[index] for index in IN_PLACE)]

    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
        """y: [tokens, heads * head_dim]."""
        y = self.trt.DimsExprs(2)
        y[0] = inputs[0][0]
        y[1] = builder.constant(self.attention.heads * self.attention.head_dim)
        return [y, *(inputs[index] for index in IN_PLACE)]

    def get_aliased_input(self, output: int) -> int:
        """The input whose memory an output is, -1 for one of its own."""
        return output if output in IN_PLACE else -1

    def supports_format_combination(self, index: int, described: Sequence[Any], inputs: int) -> bool:
        """Rows as they are; types are fixed by the network."""
        return bool(described[index].desc.format == self.trt.TensorFormat.LINEAR)

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Nothing depends on it."""

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        """Bytes for the largest step of the profile."""
        return workspace_bytes(self.attention, int(inputs[0].max[0]))

    # For the runtime.

    def get_fields_to_serialize(self) -> Any:
        """What `create_plugin` of the creator makes the same plugin of."""
        return _fields(self.trt, {name: _array(value) for name, value in self.attention.attributes().items()})

    def attach_to_context(self, context: Any) -> Any:
        """Every context has its own."""
        return self.clone()

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Shapes come with each call."""

    def set_tactic(self, tactic: int) -> None:
        """There is one."""

    def enqueue(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        given: Sequence[int],
        made: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        """Launch; inputs and outputs describe tensors, given and made are their addresses.

        A builder enqueues a plugin while it times what is around it, with made-up integers that kernels would take for
        places in memory: without a session nothing is launched.
        """
        if self.launcher is None:
            return
        self.launcher(self.attention, [tuple(each.dims) for each in inputs], given, made, workspace, stream)


@functools.cache
def plugin_class(trt: Any) -> Any:
    """(attention, launcher) → a plugin of these bindings."""
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)

    class Plugin(AttentionPlugin, *bases):  # type: ignore[misc]
        def __init__(self, attention: Attention, launcher: Launcher | None) -> None:
            for base in bases:
                base.__init__(self)
            self.trt, self.attention, self.launcher = trt, attention, launcher
            self.plugin_name, self.plugin_version, self.plugin_namespace = PLUGIN, VERSION, DOMAIN
            self.num_outputs = 1 + len(IN_PLACE)

    return Plugin


@functools.cache
def register_attention(trt: Any) -> Any:
    """The creator of attention plugins, known to the library from now on. Its `launcher` goes to the plugins that it
    creates; while that is None, they are good for building only."""
    plugin = plugin_class(trt)

    class AttentionCreator(trt.IPluginCreatorV3One):  # type: ignore[misc]
        """Makes plugins from the attributes of a node, or from what a plugin serialised."""

        launcher: Launcher | None = None

        def __init__(self) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.name, self.plugin_version, self.plugin_namespace = PLUGIN, VERSION, DOMAIN
            self.field_names = _fields(trt, {field.name: _array(0) for field in dataclasses.fields(Attention)})

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            values = {field.name: field.data[0].item() for field in fields}
            return plugin(Attention(**values), self.launcher)

    creator = AttentionCreator()
    if not trt.get_plugin_registry().register_creator(creator, DOMAIN):
        raise OSError(f"TensorRT has another plugin called {PLUGIN}")
    return creator


def _array(value: int | float) -> "np.ndarray[Any, np.dtype[Any]]":
    return np.array([value], np.float32 if isinstance(value, float) else np.int32)


def _fields(trt: Any, values: "dict[str, np.ndarray[Any, np.dtype[Any]]]") -> Any:
    kinds = {np.dtype(np.float32): trt.PluginFieldType.FLOAT32, np.dtype(np.int32): trt.PluginFieldType.INT32}
    return trt.PluginFieldCollection(
        [trt.PluginField(name, value, kinds[value.dtype]) for name, value in values.items()]
    )
