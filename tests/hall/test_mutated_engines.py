"""Engines changed at random, their hashes made anew: each runs as before, or is refused by an error of ingot's own."""

import dataclasses
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from ingot.engine import read_manifest
from ingot.errors import IngotError, RequestError
from ingot.inspect import inspect
from ingot.plan import Plan, plans_to_json
from ingot.plan_json import plan_from_document, plans_of_targets
from ingot.plugins.registry import find_target
from ingot.plugins.target import Target
from ingot.runtime.model_runner import ModelRunner
from ingot.step_io import Session
from ingot.verify import verify
from tests.hall.mutations import compact, indented, mutated, retold
from tests.hall.resealed import edit_manifest, edit_plans
from tests.runtime.tiny_engine import make_manifest, make_runner, open_session, write_tiny
from tests.runtime.tiny_plan import TinyModel, make_model

PROMPTS = [[1, 5, 9, 40], [7, 3]]
PLANS, MANIFESTS, DIRECTORIES = 600, 250, 30  # how many of each


def tokens(runner: ModelRunner) -> object:
    """What comes out, or the words of the refusal."""
    with runner:
        try:
            ids = runner.generate(PROMPTS, max_new_tokens=3, end_id=-1, pad_id=0)
        except RequestError as error:  # e.g. of numbers beyond float32, which no plan shows beforehand
            return error.what
    return np.asarray(ids).ravel().tolist()


def read(text: str, target: str) -> Plan | None:
    """The plan, which is then the very one of the text; None where it is refused."""
    try:
        plans = {name: plan_from_document(each, name) for name, each in plans_of_targets(text).items()}
    except IngotError:
        return None
    assert plans_to_json(plans) == text
    return plans.get(target)


def opened(model: TinyModel, target: Target) -> Session | None:
    """A session, or None where the target refuses the plan."""
    try:
        return open_session(model, target, num_blocks=8)
    except IngotError:
        return None


@pytest.mark.slow
@pytest.mark.native
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of numbers that a changed attribute makes too large
def test_numpy_and_kernels_take_the_same_plans_and_make_the_same_tokens() -> None:
    cpu, ref, rng, taken = find_target("cpu"), find_target("ref"), random.Random(2026), 0
    model = make_model(cpu)
    document = json.loads(model.plan.to_json())
    for number in range(PLANS):
        text = compact({cpu.name: mutated(document, rng, rng.choice([1, 1, 2]))})
        plan = read(text, cpu.name)
        if plan is None or any(a.kernel != b.kernel for a, b in zip(plan.steps, model.plan.steps, strict=False)):
            continue  # numpy does not look at the names of kernels
        odd = TinyModel(plan=plan, weights=model.weights, logical={})
        one_by_one = dataclasses.replace(odd, plan=dataclasses.replace(plan, variants=()))  # as numpy runs every plan
        alone, first, second = opened(one_by_one, cpu), opened(odd, cpu), opened(odd, ref)
        assert (alone is None) == (second is None), f"mutation {number}: {text}"
        expected = None if second is None else tokens(make_runner(odd, second))
        for session in filter(None, (alone, first)):
            taken += 1
            assert tokens(make_runner(odd, session)) == expected, f"mutation {number}: {text}"
    assert taken > 0, "some changes leave a plan that is sound, such as another order of its weights"


@pytest.mark.slow
def test_a_text_that_is_not_the_plans_own_is_refused() -> None:
    text, rng = plans_to_json({"ref": make_model().plan}), random.Random(2027)
    for _ in range(PLANS):
        read(retold(text, rng), "ref")


def test_a_changed_manifest_is_the_same_or_refused(tmp_path: Path) -> None:
    text, rng = make_manifest(make_model().plan.limits, eos_ids=(2,)).to_json(), random.Random(2028)
    write_tiny(tmp_path / "e", make_model())
    for _ in range(MANIFESTS):
        for odd in (indented(mutated(json.loads(text), rng)), retold(text, rng)):
            (tmp_path / "e" / "config.json").write_bytes(odd.encode("utf-8", "surrogatepass"))
            try:
                found = read_manifest(tmp_path / "e")
            except IngotError:
                continue
            assert found.to_json() == odd


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", ["ref", pytest.param("cpu", marks=pytest.mark.native)])
def test_a_changed_engine_runs_as_before_or_is_refused(name: str, tmp_path: Path) -> None:
    """The whole way from the directory; changes of the manifest leave the tokens as they were."""
    target, rng = find_target(name), random.Random(2029)
    pristine = write_tiny(tmp_path / "pristine", make_model(None if name == "ref" else target), target.name)
    before, engine = run(pristine), tmp_path / "engine"
    for number in range(DIRECTORIES):
        shutil.copytree(pristine, engine)
        in_manifest = number % 2 == 0
        if in_manifest:
            edit_manifest(engine, lambda text: indented(mutated(json.loads(text), rng)))
        else:
            edit_plans(engine, lambda text: compact(mutated(json.loads(text), rng)))
        for work in (run, verify, inspect):
            try:
                made = work(engine)
            except IngotError:
                continue
            assert work is not run or not in_manifest or made == before
        shutil.rmtree(engine)


def run(engine: Path) -> object:
    return tokens(ModelRunner.from_dir(engine, threads=1, kv_cache_memory="1MiB"))
