"""The same GGUF file in ingot and in llama.cpp: after real prompts, do both choose the same tokens?

    python -m tests.programs.gguf_tokens MODEL TEXT [TYPE ...] [--prompts N] [--tokens N] [--tools FOLDER] [...]

MODEL: a directory of Hugging Face, of which llama.cpp's own quantiser makes a file of each type, or a GGUF file, which
is taken as it is. llama.cpp is its programs llama-quantize and llama-server in FOLDER; without --tools, the package
xllamacpp with the package gguf, where the types of tensors follow llama.cpp's mixtures. TEXT: plain, or a JSON list of
texts; prompts are the beginnings of paragraphs or texts. A row counts the prompts after which both choose the
same first token, and the same N tokens; and how often each agrees with an engine of f32, which has the file's exact
values. The last columns say how far the best logit of f32 is above the next one: at most, where the first tokens of the
two differ, and the median of all prompts.
"""

import argparse
import ctypes
import importlib
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.gguf.header import read_gguf_header
from ingot.export.export import export
from ingot.runtime import ModelRunner
from ingot.runtime.tokenizer import Tokenizer
from tests.programs.llama_tools import CONTEXT, Ids, LlamaTools, Prompt, request, tokens_of

# general.file_type
FILE_TYPES = {"Q4_K_M": 15, "Q4_0": 2, "Q8_0": 7, "Q6_K": 18, "IQ4_XS": 30, "F32": 0}
FILE_TYPES |= {"Q2_K": 10, "Q3_K_M": 12, "IQ2_XXS": 19, "IQ2_S": 28, "IQ3_XXS": 23, "IQ3_S": 26, "IQ1_M": 31}
FILE_TYPES |= {"TQ2_0": 37, "Q1_0": 40}
FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # where 256 does not divide the columns
# Types of values and of what ends an MLP, and those of a part of the layers.
_MIXED = {"Q2_K": ("Q3_K", "Q3_K"), "Q3_K_M": ("Q4_K", "Q5_K"), "Q4_K_M": ("Q4_K", "Q6_K")}
SHORTEST, LONGEST = 8, 40  # tokens of a prompt


def tensor_type(kind: str, name: str, columns: int, layers: int, *, tied: bool) -> str:
    """The type of a tensor in a file of this kind, about as llama.cpp mixes them."""
    plain = ("norm", "conv", "ffn_gate_inp")
    if not name.endswith(".weight") or any(each in name for each in plain) or kind == "F32":
        return "F32"
    found = kind.removesuffix("_M") if "_K_" in kind else kind
    if kind != "Q8_0" and (name == "output.weight" or (tied and name == "token_embd.weight")):
        found = "Q6_K"
    elif kind in _MIXED and ("attn_v" in name or "ffn_down" in name):
        layer = int(name.split(".")[1])
        more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
        found = _MIXED[kind][more]
    if columns % 256:
        found = "IQ4_NL" if found.startswith("IQ") else FALLBACK.get(found, found)
    return found if columns % 32 == 0 else "F16"


def write_file(plain: Path, kind: str, path: Path) -> None:
    """A file of floats → one of this kind, by the packages gguf and xllamacpp."""
    gguf, quants, llama = (importlib.import_module(name) for name in ("gguf", "gguf.quants", "xllamacpp.xllamacpp"))
    pack = ctypes.CDLL(llama.__file__).ggml_quantize_chunk
    pack.restype = ctypes.c_size_t
    reader = gguf.GGUFReader(plain)
    settings = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    architecture = settings["general.architecture"].contents()
    layers = int(settings[f"{architecture}.block_count"].contents())
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    writer = gguf.GGUFWriter(path, architecture)
    for key, field in settings.items():
        value = FILE_TYPES[kind] if key == "general.file_type" else field.contents()
        if key != "general.architecture":
            writer.add_key_value(key, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        values = np.ascontiguousarray(quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        own = "F32"
        if values.ndim > 1:
            own = tensor_type(kind, tensor.name, values.shape[-1], layers, tied=tied)
        if own in ("F32", "F16"):
            writer.add_tensor(tensor.name, values.astype(np.float32 if own == "F32" else np.float16))
            continue
        number = gguf.GGMLQuantizationType[own]
        size, nbytes = gguf.GGML_QUANT_SIZES[number]
        rows, columns = values.reshape(-1, values.shape[-1]).shape
        stored = np.empty((rows, columns // size * nbytes), np.uint8)
        pointers = (ctypes.c_void_p(each.ctypes.data) for each in (values, stored))
        counts = (ctypes.c_int64(each) for each in (0, rows, columns))
        importance = np.ones(columns, np.float32) if own.startswith(("IQ1", "IQ2")) else None  # which these ask for
        weights = ctypes.c_void_p(None if importance is None else importance.ctypes.data)
        written = pack(ctypes.c_int(int(number)), *pointers, *counts, weights)
        assert written == stored.nbytes, f"{tensor.name}: {written} bytes, expected {stored.nbytes}"
        writer.add_tensor(tensor.name, stored.reshape(*values.shape[:-1], -1), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_tokens(path: Path, prompts: Sequence[Prompt], count: int) -> Ids:
    """What the package xllamacpp chooses after each prompt, the likeliest token each time."""
    llama = importlib.import_module("xllamacpp")
    options = llama.CommonParams()
    options.model.path = str(path)
    options.n_ctx, options.n_parallel, options.warmup = CONTEXT, 1, False
    options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
    server = llama.Server(options)
    found = []
    for prompt in prompts:
        answer = server.handle_completions(request(prompt, count))
        found.append(tokens_of(json.loads(answer) if isinstance(answer, str) else answer, prompt))
    return found


def ingot_tokens(engine: Path, prompts: Ids, count: int) -> Ids:
    """The same of an engine."""
    with ModelRunner.from_dir(engine) as runner:
        found = [runner.generate([prompt], max_new_tokens=count, end_id=-1)[0, 0, len(prompt) :] for prompt in prompts]
    return [each.tolist() for each in found]


def gaps(engine: Path, prompts: Ids) -> list[float]:
    """How far the best logit after each prompt is above the next one."""
    with ModelRunner.from_dir(engine) as runner:
        out = runner.generate(prompts, max_new_tokens=1, end_id=-1, return_dict=True, output_context_logits=True)
    best = [np.sort(logits[-1])[-2:] for logits in out["context_logits"]]
    return [float(high - low) for low, high in best]


def prompts_of(checkpoint: Path, text: Path, count: int) -> Ids:
    """Beginnings of different lengths, each with the model's first token before it, if it has one."""
    tokenizer = Tokenizer.from_dir(checkpoint)
    first = json.loads((checkpoint / "generation_config.json").read_text()).get("bos_token_id")
    words = text.read_text()
    texts = json.loads(words) if text.suffix == ".json" else words.split("\n\n")
    found: Ids = []
    for each in texts:
        ids = tokenizer.encode(" ".join(each.split()), add_special_tokens=False)
        length = SHORTEST + len(found) % (LONGEST - SHORTEST)
        if len(ids) > LONGEST:
            found.append([*([] if first is None else [first]), *ids[:length]])
        if len(found) == count:
            break
    return found


def same(one: Ids, other: Ids, count: int) -> int:
    """Prompts after which the first tokens, so many, are equal."""
    return sum(a[:count] == b[:count] for a, b in zip(one, other, strict=True))


def row(path: Path, checkpoint: Path, prompts: Ids, config: BuildConfig, count: int, tools: LlamaTools | None) -> str:
    """One file in both. Engines are made beside the Checkpoint of the file."""
    engines = [checkpoint.with_suffix(each) for each in (".engine", ".f32")]
    report = build(config, checkpoint, engines[0])
    build(BuildConfig(precision="f32"), checkpoint, engines[1])
    ours, exact = (ingot_tokens(engine, prompts, count) for engine in engines)
    theirs = tools.tokens(path, prompts, count) if tools else llama_tokens(path, prompts, count)
    kinds = Counter(tensor.type.name for tensor in read_gguf_header(path).tensors.values())
    above = gaps(engines[1], prompts)
    apart = [gap for a, b, gap in zip(ours, theirs, above, strict=True) if a[0] != b[0]]
    cells = (
        f"{path.stem} ({', '.join(f'{number} {name}' for name, number in kinds.most_common())})",
        report.precision,
        *(f"{same(ours, theirs, each)} of {len(prompts)}" for each in (1, count)),
        *(f"{same(each, exact, 1)}, {same(each, exact, count)}" for each in (ours, theirs)),
        f"{max(apart):.3f}" if apart else "",
        f"{statistics.median(above):.3f}",
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a Hugging Face directory, or a GGUF file")
    parser.add_argument("text", type=Path, metavar="TEXT", help="where prompts come from")
    parser.add_argument("types", nargs="*", metavar="TYPE", help=f"of {', '.join(FILE_TYPES)}; default: all but F32")
    parser.add_argument("--prompts", type=int, default=100, help="how many (%(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="after each prompt (%(default)s)")
    parser.add_argument("--tools", type=Path, metavar="FOLDER", help="with llama-quantize and llama-server")
    parser.add_argument("--activations", default="auto", help="as of ingot build (%(default)s)")
    options = parser.parse_args(arguments)
    is_file = options.model.is_file()
    if is_file and options.types:
        parser.error("a GGUF file has the types that it has: leave TYPE out")
    tools = LlamaTools(options.tools) if options.tools else None
    config = BuildConfig(activations=options.activations)
    head = ["file (tensors)", "engine", "same first token", f"same {options.tokens} tokens"]
    head += ["ingot as f32: first, all", "llama.cpp as f32: first, all"]
    head += ["widest gap where the first differ", "median gap"]
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        checkpoint = work / "checkpoint"
        convert(ConvertOptions(model_dir=options.model, output_dir=checkpoint))
        prompts = prompts_of(checkpoint, options.text, options.prompts)
        if is_file:
            print(row(options.model, checkpoint, prompts, config, options.tokens, tools), flush=True)
            return
        export(checkpoint, work / "plain.gguf", "gguf")
        for kind in options.types or [each for each in FILE_TYPES if each != "F32"]:
            path = work / f"{kind}.gguf"
            (tools.write_file if tools else write_file)(work / "plain.gguf", kind, path)
            convert(ConvertOptions(model_dir=path, output_dir=work / kind))
            print(row(path, work / kind, prompts, config, options.tokens, tools), flush=True)


if __name__ == "__main__":
    main()
