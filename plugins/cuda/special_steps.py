"""The work of steps that few families have: states, latents, residual streams side by side, output gates; and of inputs
that are rounded to FP8."""

from ingot.plan import Step
from ingot.plugins.cuda.attention import rotate_queries_launch
from ingot.plugins.cuda.fp8_products import round_launch
from ingot.plugins.cuda.latent import (
    HeadProduct,
    head_kernels,
    head_launch,
    latent_attention_launches,
    write_latent_launch,
)
from ingot.plugins.cuda.plan_places import ROW_THREADS, STRIP, PlanPlaces
from ingot.plugins.cuda.states import convolution_launches, gated_norm_launch, linear_attention_launches
from ingot.plugins.cuda.streams import (
    add_launch,
    cut_launch,
    gather_launch,
    join_launch,
    match_launch,
    mix_launch,
    take_launch,
)
from ingot.plugins.cuda.tilings import in_ranges, require_tile
from ingot.plugins.cuda.work import Launch, Work, integer, pointer, row_grid


class SpecialSteps(PlanPlaces):
    """One method per op, as in bind.py."""

    def rope_query(self, step: Step, narrow: bool) -> list[Work]:
        x, cos_sin, norm = step.inputs
        launch = rotate_queries_launch(
            y=self._buffer(step.outputs[0]),
            x=self._buffer(x),
            cos_sin=self._any(cos_sin),
            norm=self._weight(norm),
            positions=self._table_at("positions"),
            sequences=self._table_at("token_sequences"),
            heads=int(step.attrs["heads"]),
            head_dim=int(step.attrs["head_dim"]),
            rotary_dim=self._buffers[cos_sin].cols if cos_sin else 0,
            interleaved=bool(step.attrs["interleaved"]),
            wide_norm=bool(norm) and self._weights[norm].shape[0] != step.attrs["head_dim"],
            eps=float(step.attrs["norm_eps"]),
        )
        return [launch]

    def round_to_fp8(self, step: Step, narrow: bool) -> list[Work]:
        (x,), (codes, scales), slots = step.inputs, step.outputs, int(step.attrs.get("slots", 1))
        launch = round_launch(
            *map(self._buffer, (codes, scales, x)),
            k=self._buffers[x].cols // slots,
            filled=self._buffers[codes].cols // slots,
            group=int(step.attrs["group"]),
            rows=self._buffers[x].rows,
            slots=slots,
        )
        return [launch]

    def take_columns(self, step: Step, narrow: bool) -> list[Work]:
        buffer, cols = self._shape(step)
        y, x = self._buffer(buffer.name), self._buffer(step.inputs[0])
        return [take_launch(step.attrs, y=y, x=x, cols=cols, rows=buffer.rows)]

    def gather_columns(self, step: Step, narrow: bool) -> list[Work]:
        buffer, cols = self._shape(step)
        x, order = step.inputs
        launch = gather_launch(
            y=self._buffer(buffer.name),
            x=self._buffer(x),
            order=self._weight(order),
            cols=cols,
            columns=self._buffers[x].cols,
            rows=buffer.rows,
            narrow=narrow,
        )
        return [launch]

    def join_columns(self, step: Step, narrow: bool) -> list[Work]:
        buffer, _ = self._shape(step)
        parts = [(self._buffer(name), self._buffers[name].cols) for name in step.inputs if name]
        return [join_launch(y=self._buffer(buffer.name), parts=parts, rows=buffer.rows)]

    def mix_streams(self, step: Step, narrow: bool) -> list[Work]:
        buffer, cols = self._shape(step)
        y, x, coefs = (self._buffer(name) for name in (buffer.name, *step.inputs))
        streams = int(step.attrs["streams"])
        return [mix_launch(y=y, x=x, coefs=coefs, columns=cols // streams, streams=streams, rows=buffer.rows)]

    def add_to_streams(self, step: Step, narrow: bool) -> list[Work]:
        buffer, cols = self._shape(step)
        x, made, coefs = step.inputs
        streams = int(step.attrs["streams"])
        launch = add_launch(
            y=self._buffer(buffer.name),
            x=self._buffer(x),
            made=self._buffer(made),
            coefs=self._any(coefs),
            columns=cols // streams,
            streams=streams,
            active=int(step.attrs["active"]),
            rows=buffer.rows,
        )
        return [launch]

    def match_magnitude(self, step: Step, narrow: bool) -> list[Work]:
        buffer, _ = self._shape(step)
        y, x, like = (self._buffer(name) for name in (buffer.name, *step.inputs))
        columns = self._buffers[step.inputs[1]].cols
        return [match_launch(step.attrs, y=y, x=x, like=like, columns=columns, rows=buffer.rows)]

    def cut_below(self, step: Step, narrow: bool) -> list[Work]:
        buffer, cols = self._shape(step)
        y, x = self._buffer(buffer.name), self._buffer(step.inputs[0])
        deviations = float(step.attrs["deviations"])
        return [cut_launch(y=y, x=x, columns=cols, deviations=deviations, rows=buffer.rows)]

    def latent_kv_write(self, step: Step, narrow: bool) -> list[Work]:
        x, latent, cos_sin, norm, positions, sequences, _ = step.inputs
        places, _ = self._places(step, q=step.outputs[0])
        launch = write_latent_launch(
            places,
            step.attrs,
            x=self._buffer(x),
            latent=self._buffer(latent),
            cos_sin=self._any(cos_sin),
            norm=self._weight(norm),
            positions=self._table_at(positions),
            sequences=self._table_at(sequences),
            columns=self._buffers[x].cols // int(step.attrs["heads"]),
            rotary_dim=self._buffers[cos_sin].cols if cos_sin else 0,
        )
        return [launch]

    def latent_attention(self, step: Step, narrow: bool) -> list[Work]:
        launches = latent_attention_launches(
            *self._places(step, q=step.inputs[0]),
            self._tiles,
            y=self._buffer(step.outputs[0]),
            heads=int(step.attrs["heads"]),
            scale=float(step.attrs["scale"]),
            narrow=narrow,
        )
        return [*launches]

    def head_matmul(self, step: Step, narrow: bool) -> list[Work]:
        x, name, tail = step.inputs
        weight, buffer = self._weights[name], self._buffers[step.outputs[0]]
        heads, n, k = weight.shape
        product = HeadProduct(
            y=self._buffer(buffer.name),
            x=self._buffer(x),
            kept_from=self._buffer(tail or x),
            weight=self._weight(name),
            counts=self._counts(buffer.rows),
            heads=heads,
            n=n,
            k=k,
            kept=int(step.attrs["kept"]),
            narrow=narrow,
            dtype=weight.dtype,
            rows=buffer.rows,
        )
        work: list[Work] = []
        for tile, rows in in_ranges(self._plan, step):
            require_tile(step, tile, head_kernels(weight.dtype))
            work.append(head_launch(product, tile, rows))
        return work

    def causal_conv(self, step: Step, narrow: bool) -> list[Work]:
        x, weight, bias = step.inputs[:3]
        launches = convolution_launches(
            self._slots(step),
            step.attrs,
            y=self._buffer(step.outputs[0]),
            x=self._buffer(x),
            weight=self._weight(weight),
            bias=self._weight(bias),
            sequences=self._table_at("token_sequences"),
        )
        return [*launches]

    def linear_attention(self, step: Step, narrow: bool) -> list[Work]:
        x, dt, beta, a_log, skip = step.inputs[:5]
        launches = linear_attention_launches(
            self._slots(step),
            step.attrs,
            y=self._buffer(step.outputs[0]),
            x=self._buffer(x),
            dt=self._buffer(dt),
            beta=self._any(beta),
            a_log=self._weight(a_log),
            skip=self._weight(skip),
        )
        return [*launches]

    def gated_norm(self, step: Step, narrow: bool) -> list[Work]:
        x, gate, weight = step.inputs
        buffer, cols = self._shape(step)
        launch = gated_norm_launch(
            step.attrs,
            y=self._buffer(buffer.name),
            x=self._buffer(x),
            gate=self._buffer(gate),
            weight=self._weight(weight),
            cols=cols,
            weights=self._weights[weight].shape[0],
            rows=buffer.rows,
            narrow=narrow,
        )
        return [launch]

    def sigmoid_gate(self, step: Step, narrow: bool) -> list[Work]:
        buffer, cols = self._shape(step)
        y, x, gate = (pointer(self._buffer(name)) for name in (buffer.name, *step.inputs))
        grid, arguments = row_grid(buffer.rows, -(-cols // STRIP)), (y, x, gate, integer(cols), integer(narrow))
        return [Launch(kernel="gate_rows", grid=grid, threads=ROW_THREADS, shared=0, arguments=arguments)]
