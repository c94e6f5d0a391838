"""Engines whose hashes are right and whose contents no build writes: refused in words, by Python and by C++ alike."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.engine import read_manifest
from ingot.errors import EngineError
from ingot.inspect import inspect
from ingot.manifest import ENGINE_SCHEMA
from ingot.plugins.registry import find_target
from ingot.runtime.model_runner import ModelRunner
from ingot.verify import verify
from tests.hall.resealed import Edit, edit_manifest, edit_plans, in_manifest, in_plan
from tests.runtime.tiny_engine import write_tiny
from tests.runtime.tiny_plan import make_model

PROMPTS = [[1, 5, 9, 40], [7, 3]]
TARGETS = ["ref", pytest.param("cpu", marks=pytest.mark.native)]


@pytest.fixture(scope="module", params=TARGETS)
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model for numpy, and for this machine's kernels."""
    target = find_target(request.param)
    model = make_model(None if target.name == "ref" else target)
    return write_tiny(tmp_path_factory.mktemp("odd") / "engine", model, target.name)


@pytest.fixture
def engine(pristine: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(pristine, tmp_path / "engine"))


def tokens(engine: Path) -> list[list[int]]:
    """What the engine makes of the prompts."""
    with ModelRunner.from_dir(engine, threads=1, kv_cache_memory="1MiB") as runner:
        ids = runner.generate(PROMPTS, max_new_tokens=3, end_id=-1, pad_id=0)
    return np.asarray(ids).reshape(len(PROMPTS), -1).tolist()


def test_what_was_not_changed_runs(engine: Path) -> None:
    before = tokens(engine)
    edit_plans(engine, lambda text: text)
    edit_manifest(engine, lambda text: text)
    assert tokens(engine) == before == [make_model().greedy(prompt, 3) + [0] * (4 - len(prompt)) for prompt in PROMPTS]
    verify(engine)


def part(change: Callable[[dict[str, Any]], object], name: str = "rank0.engine") -> Edit:
    def edit(manifest: Any) -> None:
        change(next(each for each in manifest["parts"] if each["name"] == name))

    return in_manifest(edit)


ENTRY = (
    "target",
    "precision",
    "files",
    "built_with",
    "activation_errors",
    "weight_errors",
    "weight_sources",
    "program",
    "lost_codes",
    "verification",
)
SCHEMA = f'"schema_version": {ENGINE_SCHEMA}'
MANIFESTS: dict[str, tuple[Edit, str]] = {
    "a chunk without checksum": (part(lambda p: p.update(crc32=p["crc32"][:-8])), r"0 checksums for the 1 chunks"),
    "no checksums": (part(lambda p: p.update(crc32="")), r"crc32(.|\n)*0 checksums"),
    "a checksum without chunk": (part(lambda p: p.update(crc32=p["crc32"] + "00000000")), "2 checksums for the 1"),
    "half a checksum": (part(lambda p: p.update(crc32=p["crc32"][:-4])), "8 hexadecimal digits for each chunk"),
    "a checksum in capitals": (part(lambda p: p.update(crc32="ABCDEF01")), "8 hexadecimal digits for each chunk"),
    "a size in words": (part(lambda p: p.update(nbytes="f32")), r"parts\.0\.nbytes(.|\n)*a whole number"),
    "a negative size": (part(lambda p: p.update(nbytes=-1)), "a whole number from 0"),
    "a size that is true": (part(lambda p: p.update(nbytes=True)), "a whole number"),
    "no hash": (part(lambda p: p.update(sha256=3)), r"parts\.0\.sha256(.|\n)*a string"),
    "half a hash": (part(lambda p: p.update(sha256="ab")), "64 hexadecimal digits"),
    "a part elsewhere": (part(lambda p: p.update(name="../x")), "a file's name in the engine"),
    "a part under the root": (part(lambda p: p.update(name="/etc/passwd")), "a file's name in the engine"),
    "a part here": (part(lambda p: p.update(name="./rank0.engine")), "a file's name in the engine"),
    "a part with a zero byte": (part(lambda p: p.update(name="a\0b")), "a file's name in the engine"),
    "a part of half a character": (part(lambda p: p.update(name="\ud800")), "Unicode"),
    "a part twice": (in_manifest(lambda m: m["parts"].append(m["parts"][0])), "rank0.engine is there twice"),
    "no parts": (in_manifest(lambda m: m.update(parts=[])), "rank files none"),
    "parts in a word": (in_manifest(lambda m: m.update(parts="rank0.engine")), "a list"),
    "a part in a word": (in_manifest(lambda m: m.update(parts=["rank0.engine"])), r"parts\.0(.|\n)*an object"),
    "the manifest as a part": (part(lambda p: p.update(name="config.json")), "the manifest is one of them"),
    "a part too many keys": (part(lambda p: p.update(crc64="")), "unknown: crc64"),
    "a target twice": (in_manifest(lambda m: m["others"].append({key: m[key] for key in ENTRY})), "is there twice"),
    "a target without a plan": (
        in_manifest(lambda m: m["others"].append({key: m[key] for key in ENTRY} | {"target": "cpu/mmx"})),
        r"not hold the plans of its targets(.|\n)*expected: .*cpu/mmx",
    ),
    "a target without a rank file": (
        in_manifest(
            lambda m: m["others"].append({key: m[key] for key in ENTRY} | {"target": "cpu/mmx", "files": "cpu"})
        ),
        r"need rank0\.cpu\.engine, rank0\.engine",
    ),
    "another target's name": (in_manifest(lambda m: m.update(target=["ref"])), r"target(.|\n)*a string"),
    "no target": (in_manifest(lambda m: m.update(target="")), "a name"),
    "others in a word": (in_manifest(lambda m: m.update(others=3)), "a list"),
    "ranks": (in_manifest(lambda m: m.update(ranks=2)), r"rank1\.engine"),
    "no ranks": (in_manifest(lambda m: m.update(ranks=0)), "from 1 to"),
    "ranks by the billion": (in_manifest(lambda m: m.update(ranks=10**9)), "from 1 to"),
    "an end that is no token": (in_manifest(lambda m: m.update(eos_ids=[2, 51])), r"eos_ids of the manifest are \[51"),
    "an end below zero": (in_manifest(lambda m: m.update(eos_ids=[-1])), r"eos_ids\.0"),
    "an end in words": (in_manifest(lambda m: m.update(eos_ids=["</s>"])), r"eos_ids\.0(.|\n)*a whole number"),
    "one end": (in_manifest(lambda m: m.update(eos_ids=2)), r"eos_ids(.|\n)*a list"),
    "a begin that is no token": (in_manifest(lambda m: m.update(bos_id=51)), r"bos_id of the manifest are \[51\]"),
    "a pad in words": (in_manifest(lambda m: m.update(pad_id="<pad>")), r"pad_id(.|\n)*a whole number or null"),
    "a pad beyond int32": (in_manifest(lambda m: m.update(pad_id=1 << 40)), "pad_id"),
    "a pad with a point": (in_manifest(lambda m: m.update(pad_id=1.0)), "pad_id"),
    "limits in words": (in_manifest(lambda m: m["limits"].update(max_seq_len="65")), r"limits\.max_seq_len"),
    "no limits": (in_manifest(lambda m: m.update(limits=None)), "limits"),
    "other limits": (in_manifest(lambda m: m["limits"].update(max_seq_len=64)), "contradict each other"),
    "an unknown key": (in_manifest(lambda m: m.update(notes="")), "unknown: notes"),
    "a key twice": (lambda text: text.replace(' "ranks": 1', ' "ranks": 2,\n "ranks": 1'), "'ranks' appears twice"),
    "another spelling": (lambda text: text.replace('"ranks": 1', '"ranks": 1.0'), "ranks(.|\n)*a whole number"),
    "another spacing": (lambda text: text.replace('"ranks": 1', '"ranks":  1'), "canonical spacing"),
    "an escaped letter": (lambda text: text.replace('"ranks"', '"r\\u0061nks"'), "canonical spacing"),
    "a fact that is no number": (in_manifest(lambda m: m["model"].update(x=float("nan"))), r"model\.x"),
    "a fact of many digits": (lambda text: text.replace('"ranks": 1', f'"ranks": {"9" * 5000}'), "not JSON"),
    "a list as fact": (in_manifest(lambda m: m["model"].update(x=[])), r"model\.x"),
    "nested facts": (lambda text: text.replace('"tiny"', "[" * 100_000 + "]" * 100_000), "not JSON"),
    "a schema in words": (in_manifest(lambda m: m.update(schema_version=str(ENGINE_SCHEMA))), "cannot be read"),
    "a schema with a point": (
        lambda text: text.replace(f'"schema_version": {ENGINE_SCHEMA}', f'"schema_version": {ENGINE_SCHEMA}.0'),
        "cannot be",
    ),
    "capabilities in a word": (in_manifest(lambda m: m.update(capabilities="all")), "capabilities(.|\n)*a list"),
    "a verification in words": (in_manifest(lambda m: m.update(verification="yes")), "verification(.|\n)*an object"),
}


@pytest.mark.parametrize("pristine", ["ref"], indirect=True)
@pytest.mark.parametrize("odd", MANIFESTS)
def test_an_odd_manifest_is_refused(odd: str, engine: Path) -> None:
    edit, words = MANIFESTS[odd]
    edit_manifest(engine, edit)
    for work in (tokens, verify):
        with pytest.raises(EngineError, match=words) as refused:
            work(engine)
        assert refused.value.hint


def on(key: str, change: Callable[[Any], Any]) -> Edit:
    """An edit of one field of the plan."""
    return in_plan(lambda plan: plan.update({key: change(plan[key])}))


def kv(**values: object) -> Edit:
    return first("caches", **values)


def first(key: str, **values: object) -> Edit:
    return on(key, lambda items: [items[0] | values, *items[1:]])


Calls = Callable[[dict[str, Any]], list[dict[str, Any]]]


def every(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """A call of each step."""
    one = {"inside": [], "kv_only": False, "private": False, "reads_private": False, "waits": True}
    return [{"step": step["name"], **one} for step in plan["steps"]]


def last(**values: object) -> Calls:
    """The last call with other values."""
    return lambda plan: [*every(plan)[:-1], every(plan)[-1] | values]


def calls(found: list[dict[str, Any]]) -> Calls:
    return lambda plan: found


def variants(made: Calls, most_tokens: int = 96) -> Edit:
    """One variant in place of all."""
    return in_plan(lambda p: p.update(variants=[{"name": "v", "most_tokens": most_tokens, "calls": made(p)}]))


PLANS: dict[str, tuple[Edit, str]] = {
    "nesting": (lambda text: text.replace('"tactics":{}', f'"tactics":{"[" * 100_000}'), "not readable"),
    "no layers": (kv(layers=[]), r"caches(.|\n)*none"),
    "no heads": (kv(kv_heads=0), r"caches.*kv_heads(.|\n)*from 1"),
    "odd heads": (kv(head_dim=6), r"caches.*head_dim(.|\n)*a multiple of 4"),
    "no tokens in a block": (kv(tokens_per_block=0), r"caches.*tokens_per_block"),
    "odd blocks": (kv(tokens_per_block=24), "a multiple of 16"),
    "a cache of booleans": (kv(dtype="bool"), r"caches.*dtype(.|\n)*bool"),
    "a cache of nothing": (kv(dtype=None), r"caches.*dtype"),
    "a layer in words": (kv(layers=["2"]), r"caches.*layers(.|\n)*a whole number"),
    "no cache": (on("caches", lambda caches: []), r"caches(.|\n)*each from 0 on once"),
    "a layer in two groups": (on("caches", lambda caches: [*caches, *caches]), r"caches(.|\n)*each from 0 on once"),
    "a layer in no group": (kv(layers=[0, 2]), r"caches(.|\n)*each from 0 on once"),
    "a window that a step looks behind": (kv(window=7), r"window(.|\n)*its cache keeps 7 tokens"),
    "a negative window": (kv(window=-1), r"caches.*window"),
    "no vocabulary": (on("vocab_size", lambda size: 0), "vocab_size"),
    "another vocabulary": (on("vocab_size", lambda size: size + 1), "logit rows with 52 columns"),
    "no positions": (on("max_positions", lambda size: None), "max_positions"),
    "few positions": (on("max_positions", lambda size: 32), r"65 tokens for 32 positions"),
    "a long input": (on("limits", lambda x: x | {"max_input_len": 66}), "beyond what a sequence may have"),
    "many rows": (on("limits", lambda x: x | {"max_logit_rows": 97}), "97 rows of 96 tokens"),
    "millions of tokens": (on("limits", lambda x: x | {"max_num_tokens": 1 << 21}), "max_num_tokens(.|\n)*from 1 to"),
    "no steps": (on("steps", lambda steps: []), "the last one of 0 does not write logits"),
    "a step less": (on("steps", lambda steps: steps[:-1]), "does not write logits"),
    "an input that nobody reads": (
        on("inputs", lambda inputs: [*inputs, inputs[0] | {"name": "adapters"}]),
        r"inputs\.adapters(.|\n)*no kernel call reads it",
    ),
    "an input less": (on("inputs", lambda inputs: inputs[1:]), "no buffer, weight or input input_ids"),
    "an input twice": (on("inputs", lambda inputs: [*inputs, inputs[0]]), "two are called input_ids"),
    "a weight called as an input": (first("weights", name="positions"), "two are called positions"),
    "an input by what": (first("inputs", extent="words"), r"inputs\.0\.extent"),
    "an input of no type": (first("inputs", dtype="int"), r"inputs\.0\.dtype"),
    "no first step": (on("steps", lambda steps: steps[1:]), "reads x, which no earlier kernel call has written"),
    "a step twice": (on("steps", lambda steps: [*steps, steps[-1]]), "two are called"),
    "steps in words": (on("steps", lambda steps: "all"), "steps(.|\n)*a list"),
    "two buffers of logits": (on("buffers", lambda b: [*b, b[-1] | {"offset": 0}]), "two are called logits"),
    "a weight called as a buffer": (first("weights", name="x"), "two are called x"),
    "a weight without name": (first("weights", name=""), "a name"),
    "no logits": (on("logits", lambda name: "kept"), "kept is not a buffer of logit rows"),
    "logits in a number": (on("logits", lambda name: 3), "a string"),
    "a buffer of nothing": (first("buffers", cols=0), r"buffers\.0\.cols"),
    "a buffer in words": (first("buffers", offset="0"), r"buffers\.0\.offset"),
    "a buffer off its line": (first("buffers", offset=4), "a multiple of 64"),
    "rows of what": (first("buffers", rows="blocks"), "tokens or logits"),
    "a large arena": (on("arena_bytes", lambda size: size + 64), "its buffers end at"),
    "a huge arena": (on("arena_bytes", lambda size: 1 << 60), "its buffers end at"),
    "a negative arena": (on("arena_bytes", lambda size: -64), "from 0"),
    "fewer weights": (on("weight_bytes", lambda size: size - 64), "they end at"),
    "more weights": (on("weight_bytes", lambda size: size + 64), "contradict each other"),
    "weights in the same place": (
        on("weights", lambda w: [w[0], w[1] | {"pieces": [w[1]["pieces"][0] | {"offset": 0}]}, *w[2:]]),
        "same place",
    ),
    "weights outside": (
        on("weights", lambda w: [w[0] | {"pieces": [w[0]["pieces"][0] | {"offset": 1 << 40}]}, *w[1:]]),
        "they end at",
    ),
    "a weight without pieces": (first("weights", pieces=[]), r"weights\.table(.|\n)*0 equal parts"),
    "a weight of five dimensions": (first("weights", shape=[1, 1, 1, 51, 24]), "5 dimensions"),
    "a weight without shape": (first("weights", shape=[]), "0 dimensions"),
    "a piece that begins late": (
        on("weights", lambda w: [w[0] | {"pieces": [w[0]["pieces"][0] | {"begin": 1}]}, *w[1:]]),
        "1 to 51 after 0",
    ),
    "an unknown type": (first("weights", dtype="f7"), r"weights\.0\.dtype"),
    "an unknown weight": (first("steps", inputs=["tables", "", "input_ids", ""]), "no buffer, weight or input tables"),
    "an unknown buffer": (first("steps", outputs=["xx"]), "there is no buffer xx"),
    "a kernel of one word": (first("steps", kernel="embedding"), r"steps\.0\.kernel"),
    "inputs in a word": (first("steps", inputs="table"), r"steps\.0\.inputs(.|\n)*a list"),
    "attributes in a list": (first("steps", attrs=[]), r"steps\.0\.attrs(.|\n)*an object"),
    "an attribute that is true": (first("steps", attrs={"scale": True}), r"steps\.0\.attrs\.scale"),
    "an attribute that is nothing": (first("steps", attrs={"scale": None}), r"steps\.0\.attrs\.scale"),
    "an attribute beyond all": (first("steps", attrs={"scale": 1 << 80}), r"steps\.0\.attrs\.scale"),
    "an attribute without end": (
        lambda text: text.replace('"scale":1.0', '"scale":Infinity', 1),
        r"steps\.0\.attrs\.scale",
    ),
    "tactics in a list": (on("tactics", lambda tactics: []), "tactics(.|\n)*an object"),
    "tactics of nobody": (on("tactics", lambda tactics: {"x": "0000"}), "there is no kernel call x"),
    "odd tactics": (on("tactics", lambda tactics: {"0.embedding": "00"}), "four digits"),
    "sums in three parts": (on("sum_parts", lambda parts: 3), r"sum_parts(.|\n)*a power of two"),
    "sums in no part": (on("sum_parts", lambda parts: 0), "sum_parts(.|\n)*from 1"),
    "variants in an object": (on("variants", lambda variants: {}), "variants(.|\n)*a list"),
    "a variant without calls": (variants(calls([])), r"variants\.v(.|\n)*0\.embedding is not computed once"),
    "a variant for fewer tokens": (
        variants(every, most_tokens=95),
        "the last one is for 95 tokens, a step may have 96",
    ),
    "a variant for no tokens": (variants(every, most_tokens=0), r"variants\.0\.most_tokens"),
    "a variant without an end": (variants(last(waits=False)), "its last call is not waited for"),
    "a call that leaves out queries": (variants(last(kv_only=True)), "writes keys and values alone, and no call"),
    "a call with two answers": (variants(last(waits=2)), r"variants\.0\.calls\.\d+\.waits"),
    "no plan": (lambda text: "{}", "not hold the plans of its targets"),
    "a plan too many": (lambda text: text.replace("{", '{"cpu/mmx":' + text[text.index(":") + 1 : -1] + ",", 1), "mmx"),
    "a plan in a word": (lambda text: text[: text.index(":")] + ':"plan"}', "not readable"),
    "plans in a list": (lambda text: "[]", "an object with a plan for each target"),
    "another schema": (on("plan_schema", lambda schema: schema + 1), "another version of ingot"),
    "the schema before": (on("plan_schema", lambda schema: schema - 1), "another version of ingot"),
    "a schema that is true": (on("plan_schema", lambda schema: True), "another version of ingot"),
    "no schema": (in_plan(lambda plan: plan.pop("plan_schema")), "another version of ingot"),
    "a key less": (in_plan(lambda plan: plan.pop("tactics")), "missing: tactics"),
    "a key more": (in_plan(lambda plan: plan.update(outputs=[])), "unknown: outputs"),
    "a key twice": (lambda text: text.replace('"tactics":{}', '"tactics":{},"tactics":{}'), "'tactics' appears twice"),
    "a plan twice": (lambda text: text[:-1] + "," + text[1:], "appears twice"),
    "another order": (
        lambda text: json.dumps(dict(reversed(json.loads(text).popitem()[1].items())), separators=(",", ":")),
        "canonical form",
    ),
    "another number": (lambda text: text.replace('"eps":1e-05', '"eps":0.00001'), "canonical form"),
    "a space": (lambda text: text + " ", "canonical form"),
}


@pytest.mark.daily(17)
@pytest.mark.parametrize("odd", PLANS)
def test_an_odd_plan_is_refused(odd: str, engine: Path, pristine: Path) -> None:
    """`verify` and `inspect` read the plan without a session: one of the two targets tells what they say."""
    edit, words = PLANS[odd]
    edit_plans(engine, edit)
    for work in (tokens, verify, inspect) if read_manifest(pristine).target == "ref" else (tokens,):
        with pytest.raises(EngineError, match=words) as refused:
            work(engine)
        assert refused.value.hint


@pytest.mark.parametrize("pristine", ["ref"], indirect=True)
def test_a_plan_whose_steps_make_no_sense_is_not_inspected(engine: Path) -> None:
    edit_plans(engine, first("steps", attrs={}, op="paged_attention", inputs=["", "", "", "", "", "input_ids"]))
    with pytest.raises(EngineError, match="cannot be read"):
        inspect(engine)
    with pytest.raises(EngineError, match="input q is missing"):
        tokens(engine)


@pytest.mark.parametrize("changes", [{"name": "adapters"}, {"dtype": "i64"}, {"extent": "sequences"}])
def test_an_input_that_sessions_do_not_give_is_refused(changes: dict[str, str], engine: Path) -> None:
    """Sound as a plan, so that a later version may run it; `inspect` shows it."""

    def ask(plan: dict[str, Any]) -> None:
        asked = plan["inputs"][0] | changes
        assert plan["inputs"][0]["name"] == plan["steps"][0]["inputs"][2] == "input_ids"
        plan["inputs"][0], plan["steps"][0]["inputs"][2] = asked, asked["name"]

    edit_plans(engine, in_plan(ask))
    asked = {"name": "input_ids", "dtype": "i32", "extent": "tokens"} | changes
    assert inspect(engine).document["inputs"][0] == asked
    with pytest.raises(EngineError, match="the plan asks for") as refused:
        tokens(engine)
    said = str(refused.value)
    assert f"{asked['name']} ({asked['dtype']} by {asked['extent']})" in said
    assert "input_ids (i32 by tokens), positions (i32 by tokens), " in said
