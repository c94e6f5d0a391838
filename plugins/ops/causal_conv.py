"""Each channel's causal convolution over the tokens of its sequence, which keeps the last inputs as its state."""

from collections.abc import Mapping

import numpy as np

from ingot.plan import Attr
from ingot.plugins.activations import ACTIVATIONS
from ingot.plugins.attributes import LARGEST, between, one_of
from ingot.plugins.op import Array, Call, Op, Shapes, unequal
from ingot.plugins.work import OpUse
from ingot.step_work import Work


def reference(call: Call) -> tuple[Array, ...]:
    """y[t, c] = activation(bias[c] + sum over j of weight[j, c] * x[t - width + 1 + j, c])

    x before the first token of a sequence is 0. The state is [width - 1, channels]: the last inputs, oldest first.
    """
    x, attrs = call.required(0), call.attrs
    width, channels = int(attrs["width"]), int(attrs["channels"])
    weight, bias = call.required(1).reshape(width, channels), call.optional(2)
    out = np.empty_like(x)
    for run in call.state_runs(3, 4, 5):
        rows = np.concatenate([run.before.reshape(width - 1, channels), x[run.begin : run.end]])
        count = run.end - run.begin
        total = np.zeros((count, channels)) if bias is None else np.tile(bias.astype(np.float64), (count, 1))
        for j in range(width):
            total += weight[j].astype(np.float64) * rows[j : j + count]
        out[run.begin : run.end] = ACTIVATIONS[str(attrs["activation"])](total.astype(np.float32))
        run.after[...] = rows[count:].reshape(-1)
    return (out,)


def size_problem(shapes: Shapes, attrs: Mapping[str, Attr]) -> str | None:
    """A column for each channel, and `width` factors for it."""
    width, channels = int(attrs["width"]), int(attrs["channels"])
    return (
        unequal("x", shapes[0], channels)
        or unequal("weight", shapes[1], width * channels)
        or unequal("bias", shapes[2], channels)
    )


def work(use: OpUse) -> Work:
    """Each sequence's last inputs are read and written."""
    width = int(use.attrs["width"])
    state = 8 * (width - 1) * int(use.attrs["channels"]) * len(use.load.sequences)
    nbytes = use.activation_bytes + use.weight_bytes + state
    return Work(nbytes=nbytes, operations=2 * width * use.rows * use.out_cols)


OP = Op(
    name="causal_conv",
    # [tokens, channels], [width * channels]: all channels of the oldest input first, [channels]
    inputs=("x", "weight", "bias?", "query_starts", "past_lengths", "block_tables"),
    outputs=("y",),  # [tokens, channels]
    attrs={"layer": int, "channels": int, "width": int, "activation": "none"},
    out_cols=lambda cols, attrs: (int(attrs["channels"]),),
    reference=reference,
    size_problem=size_problem,
    attr_rules={
        "layer": between(0, LARGEST),
        "channels": between(1, LARGEST),
        "width": between(2, 64),
        "activation": one_of("none", "silu"),
    },
    work=work,
    vectors=(1, 2),
    batch_inputs={3: 0, 4: 0, 5: 0},
    of_tokens=True,
    state=lambda attrs: (int(attrs["width"]) - 1) * int(attrs["channels"]),
)
