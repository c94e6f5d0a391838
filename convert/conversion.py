"""Everything that is decided before a conversion writes its first byte: which weights, from where, into which files."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ingot.companions import check_token_ids
from ingot.configs.convert import ConvertOptions
from ingot.configs.model import ModelConfig
from ingot.configs.read import Section
from ingot.configs.token_ids import check_vocabulary, token_ids
from ingot.convert.adapter import MERGE_WITH_PEFT, read_adapter, unread_changes
from ingot.convert.claim import claim, require_rows
from ingot.convert.experts import SELECT_BIAS
from ingot.convert.family import read_model
from ingot.convert.gguf.source import is_gguf, open_gguf
from ingot.convert.hf_rope import choose_factors
from ingot.convert.quantised.combine import as_computed, combined, is_quantised, memory_of_floats
from ingot.convert.quantised.form import FLOATS, Quantised, piece_name
from ingot.convert.quantised.read import read_quantised, refuse_quantised, require_known_format
from ingot.convert.quantised.values import float_values, mixes_columns, values_memory
from ingot.convert.random_weights import random_blocks
from ingot.convert.source import SINGLE_FILE, Source, read_config, safetensors_name
from ingot.convert.tokenizer_files import make_tokenizer
from ingot.convert.weight_shapes import weight_shapes
from ingot.convert.weights import Bits, Drop, Row, Transpose, Unpair, blocks, evaluate, infer, sources
from ingot.convert.wrapped import as_stored, left_out, text_section, text_tensors, wrapper_of
from ingot.dtypes import DType
from ingot.errors import CheckpointError, UnsupportedModelError
from ingot.tensor_file import StoredTensor, TensorSpec, read_elements

BLOCK = 1 << 20  # elements that are in memory at a time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """A weight about to be written.

    read     yields its bits, flat, in type `stored`
    spec     what they become
    memory   bytes that are held while it is made, beyond a few blocks
    """

    spec: TensorSpec
    stored: DType
    read: Callable[[], Iterator[Bits]]
    memory: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """files       name of a safetensors file → its weights in order
    read_files  what the Checkpoint is made from, for the record of hashes
    quantised   weight → how it is quantised, of those that are
    tokenizer   a tokenizer.json made from older files, if that is needed
    settings    a tokenizer_config.json where the source has none
    companions  directory whose tokenizer and generation files are copied, if any
    generation  token ids for a generation_config.json where the source has none
    """

    model: ModelConfig
    files: Mapping[str, Sequence[Weight]]
    read_files: tuple[Path, ...]
    companions: Path | None
    generation: Mapping[str, object]
    warnings: tuple[str, ...]
    quantised: Mapping[str, Quantised] = dataclasses.field(default_factory=dict)
    tokenizer: Mapping[str, object] | None = None
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as written."""
        return sum(weight.spec.nbytes for weights in self.files.values() for weight in weights)


def conversion_from_directory(folder: Path, options: ConvertOptions) -> Conversion:
    """Copy the weights of a Hugging Face directory, or of a GGUF file, file by file in the order of the Graph."""
    if is_gguf(folder):
        return _conversion_from_gguf(folder, options)
    adapter = None if options.lora is None else read_adapter(options.lora)
    config = read_config(folder)  # a model that ingot cannot take is refused before its weights are there
    require_known_format(config, folder)
    read_model(config, None)
    source, wrapper = Source.open(folder), wrapper_of(config)
    found = read_quantised(source.config, source.path, source.tensors)
    floats = found.tensors if adapter is None else adapter.merged(found.tensors, found.quantised)
    everything: dict[str, StoredTensor | Quantised] = {**floats, **found.quantised}
    tensors = text_tensors(wrapper, everything)
    family, model, unknown = read_model(source.config, tensors)
    text, _ = text_section(source.config, tensors)
    model, remarks = choose_factors(model, text, options.rope_factors)
    rows, drops = family.table(model, tensors)
    rows = as_stored(wrapper, rows, tensors, weight_shapes(model))
    if family.in_out:
        rows = [
            _as_quantised(row) if any(name in found.quantised for name in sources(row.expr)) else row for row in rows
        ]
    files, quantised = _weights(model, rows, drops, tensors, options)
    read = {tensors[name].name for row in rows for name in sources(row.expr) if name in tensors}
    return Conversion(
        model=model,
        files=files,
        read_files=(*source.files, *found.files, *(adapter.files if adapter else ())),
        quantised=quantised,
        companions=source.path,
        tokenizer=make_tokenizer(source.path),
        generation=_generation(text, model.vocab_size, source.path),
        warnings=(
            *_unknown_keys(unknown),
            *remarks,
            *left_out(wrapper, everything),
            *_without_drafts(family.drafting(tensors, model.num_layers)),
            *_without_choosers(family.choosing(tensors)),
            *(adapter.without_effect() if adapter else ()),
            *unread_changes(floats.values(), read),
        ),
    )


def _without_drafts(names: Sequence[str]) -> tuple[str, ...]:
    return (f"{len(names):,} tensors that draft tokens are left out: the model drafts none",) if names else ()


def _without_choosers(names: Sequence[str]) -> tuple[str, ...]:
    left = f"{len(names):,} tensors that choose tokens for sparse attention are left out: all tokens are attended to"
    return (left,) if names else ()


def _conversion_from_gguf(path: Path, options: ConvertOptions) -> Conversion:
    if options.lora is not None:
        raise UnsupportedModelError(
            "an adapter is merged into a Hugging Face directory, not into a GGUF file",
            where="--lora",
            got=str(path),
            hint="give the adapter's base model as --model_dir, a Hugging Face directory in bfloat16 or float16",
        )
    source = open_gguf(path)
    _, model, unknown = read_model(source.config, source.tensors)
    assert not unknown, f"the architecture's row writes keys that the family does not read: {unknown}"
    model, remarks = choose_factors(source.adapted(model), source.config, options.rope_factors)
    files, quantised = _weights(model, source.rows(model), [], source.tensors, options)
    return Conversion(
        model=model,
        files=files,
        read_files=(*source.files, *source.beside),
        quantised=quantised,
        companions=None,
        tokenizer=source.tokenizer.tokenizer,
        settings=source.tokenizer.settings,
        generation=_generation(source.config, model.vocab_size),
        warnings=(
            *_too_many_tokens(source.tokenizer.tokens, model.vocab_size),
            *remarks,
            *_without_drafts(source.drafts),
            *_without_choosers(source.choosers),
        ),
    )


def _too_many_tokens(tokens: int, rows: int) -> tuple[str, ...]:
    return (f"the tokenizer has {tokens:,} tokens, the model knows the first {rows:,}",) if tokens > rows else ()


def _weights(
    model: ModelConfig,
    rows: Sequence[Row],
    drops: list[Drop],
    tensors: Mapping[str, StoredTensor | Quantised],
    options: ConvertOptions,
) -> tuple[dict[str, list[Weight]], dict[str, Quantised]]:
    """(name of a safetensors file → its weights, weight → how it is quantised)"""
    if model.tied_embeddings:
        drops = drops + _tied_copy(rows, tensors)
    wanted = weight_shapes(model)
    chosen = {row.name: row for row in claim(rows, drops, as_computed(rows, tensors), wanted)}
    files: dict[str, list[Weight]] = {}
    quantised = {}
    floats = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, StoredTensor)}
    for row in (chosen[name] for name in wanted):  # whatever the source's order, so that equal models are equal files
        file = safetensors_name(tensors[sources(row.expr)[0]].file)
        own = files.setdefault(file, [])
        if mixes_columns(row.expr) and any(isinstance(tensors[name], Quantised) for name in sources(row.expr)):
            own.append(_values(row, tensors))
        elif is_quantised(row.expr, tensors):
            quantised[row.name] = combined(row.name, row.expr, tensors)
            own.extend(_pieces(quantised[row.name], options.dtype))
        else:
            own.append(_weight(row, floats, options.dtype))
    return files, quantised


def conversion_from_seed(config: Path, seed: int, options: ConvertOptions) -> Conversion:
    """A model of the shape that a config.json describes, its weights drawn from a seed (bf16 unless asked)."""
    section = Section.from_file(config)
    refuse_quantised(section)
    family, model, unknown = read_model(section, None)
    text, _ = text_section(section, None)
    model, remarks = choose_factors(model, text, options.rope_factors)
    rows, _ = family.table(model, ())
    require_rows(rows, weight_shapes(model))  # what converts without files converts with them
    dtype = options.dtype or DType.BF16
    weights = [
        Weight(
            spec=TensorSpec(name=name, dtype=dtype, shape=shape),
            stored=dtype,
            read=functools.partial(random_blocks, name, shape, dtype, seed, BLOCK),
        )
        for name, shape in weight_shapes(model).items()
    ]
    return Conversion(
        model=model,
        files={SINGLE_FILE: weights},
        read_files=(config,),
        companions=None,
        generation=_generation(text, model.vocab_size),
        warnings=(*_unknown_keys(unknown), *remarks),
    )


def _as_quantised(row: Row) -> Row:
    """The row of a stack of experts that is stored [experts, out, in], as its family says of others."""
    match row.expr:
        case Transpose(of):
            return Row(row.name, of)
        case Unpair(Transpose(of), heads):
            return Row(row.name, Unpair(of, heads=heads))
    return row


def _weight(row: Row, tensors: Mapping[str, StoredTensor], dtype: DType | None) -> Weight:
    stored, shape = infer(row.expr, tensors)
    if row.name.endswith(
        SELECT_BIAS
    ):  # may be larger than the shares that it is added to, which differ in small digits
        dtype = DType.F32 if stored is DType.F32 else dtype
    spec = TensorSpec(name=row.name, dtype=dtype or stored, shape=shape)
    read = functools.partial(blocks, row.expr, tensors, BLOCK)
    return Weight(spec=spec, stored=stored, read=read, memory=memory_of_floats(row.expr, tensors))


def _values(row: Row, tensors: Mapping[str, StoredTensor | Quantised]) -> Weight:
    """Codes that cannot be kept where they come to stand, as float32."""

    def read() -> Iterator[Bits]:
        whole = evaluate(row.expr, lambda name: float_values(tensors[name])).reshape(-1)
        return (whole[begin : begin + BLOCK] for begin in range(0, whole.size, BLOCK))

    alike = {name: TensorSpec(name=name, dtype=DType.F32, shape=tensors[name].shape) for name in sources(row.expr)}
    spec = TensorSpec(name=row.name, dtype=DType.F32, shape=infer(row.expr, alike)[1])
    return Weight(spec=spec, stored=DType.F32, read=read, memory=values_memory(row.expr, tensors))


def _pieces(weight: Quantised, dtype: DType | None) -> Iterator[Weight]:
    """The tensors that make a quantised weight. dtype: to which floats in place of codes are rounded."""
    for member in weight.members:
        yield from _pieces(member, dtype)
    for kind, piece in weight.pieces.items():
        rounded = dtype if kind == FLOATS else None
        spec = TensorSpec(name=piece_name(weight.name, kind), dtype=rounded or piece.dtype, shape=piece.shape)
        yield Weight(spec=spec, stored=piece.dtype, read=piece.read, memory=piece.memory)


def _tied_copy(rows: Sequence[Row], tensors: Mapping[str, StoredTensor | Quantised]) -> list[Drop]:
    """Some files of tied models hold lm_head too: it may go if it equals the token table, and is an error if not."""
    names = {row.name: sources(row.expr)[0] for row in rows if row.name in ("embed/weight", "lm_head/weight")}
    table, head = tensors.get(names["embed/weight"]), tensors.get(names["lm_head/weight"])
    if head is None or table is None:
        return []
    if isinstance(head, StoredTensor) and head.change is not None:
        raise UnsupportedModelError(
            "the adapter changes lm_head, which the configuration ties to the token table",
            where=head.name,
            hint=MERGE_WITH_PEFT,
        )
    if not (isinstance(head, StoredTensor) and isinstance(table, StoredTensor) and _same_bits(head, table)):
        raise CheckpointError(
            "the configuration ties lm_head to the token table, but the file holds another lm_head",
            where=f"{head.file}: {head.name}",
            expected=f"the bits of {table.name}",
            hint='write "tie_word_embeddings": false into config.json if the stored lm_head is the right one',
        )
    return [Drop(head.name)]


def _same_bits(head: StoredTensor, table: StoredTensor) -> bool:
    return (head.dtype_name, head.shape) == (table.dtype_name, table.shape) and all(
        np.array_equal(read_elements(head, begin, end).view(np.uint8), read_elements(table, begin, end).view(np.uint8))
        for table in [dataclasses.replace(table, change=None)]  # an adapter of the table is one of both
        for begin in range(0, head.nbytes // head.dtype.itemsize, BLOCK)
        for end in [min(begin + BLOCK, head.nbytes // head.dtype.itemsize)]
    )


def _generation(config: Section, vocab_size: int, folder: Path | None = None) -> dict[str, object]:
    """Token ids that older models keep in config.json. Raises ConfigError where they, or those of the folder's
    generation_config.json, which has the last word, are not tokens of the model."""
    ids = token_ids(config)
    if folder is not None and (folder / "generation_config.json").is_file():
        check_token_ids(folder, vocab_size)
    else:
        check_vocabulary(ids, vocab_size, config.where)
    found = {
        "bos_token_id": ids.bos,
        "eos_token_id": config.raw("eos_token_id") if ids.eos else None,
        "pad_token_id": ids.pad,
    }
    return {key: value for key, value in found.items() if value is not None}


def _unknown_keys(keys: Sequence[str]) -> tuple[str, ...]:
    return (f"config.json: these keys have no effect: {', '.join(keys)}",) if keys else ()
