"""Timed steps are the steps that are served, with times that add up."""

from pathlib import Path

import numpy as np
import pytest

from ingot.configs.runtime import runtime_config
from ingot.engine import read_plan
from ingot.fixed_tables import blocks_needed
from ingot.plugins.cpu.native import detect_isa
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.session import load_engine
from ingot.step_io import Int32, TimedSession
from ingot.timed_run import TimedRun, TimedStep
from tests.e2e.command import ingot
from tests.handmade import TINY_LLAMA, write_model

pytestmark = [pytest.mark.native, pytest.mark.skipif(detect_isa() == "none", reason="this machine runs no cpu target")]
PROMPT = np.array([5, 9, 1, 44, 17, 60, 3, 3, 8, 21, 30, 2, 7], np.int32)


@pytest.fixture(scope="module", params=["f32", "int8"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("timed")
    ingot("convert", "--model_dir", write_model(folder / "m", TINY_LLAMA), "--output_dir", folder / "c").succeeds()
    options = ("--max_num_tokens", 8, "--tokens_per_block", 16, "--kv_cache_dtype", request.param)
    ingot("build", "--checkpoint_dir", folder / "c", "--output_dir", folder / "e", *options).succeeds()
    return folder / "e"


def test_prompts_and_decode_steps_draw_what_is_served(engine: Path) -> None:
    with ModelRunner.from_dir(engine) as runner:
        expected = runner.generate([PROMPT.tolist()], max_new_tokens=4, end_id=-1)[0, 0, len(PROMPT) :].tolist()
    loaded = load_engine(engine, runtime_config(threads=2))
    session, plan = loaded.session, loaded.engine.plan
    assert isinstance(session, TimedSession)
    assert min(session.num_blocks) >= max(blocks_needed(plan, sequences=3, length=30))
    run = TimedRun(session, plan, sequences=3, length=30)
    chunks = run.prefill(PROMPT)
    run.share_prompt()
    assert [chunk.load.sequences for chunk in chunks] == [((0, 8),), ((8, 5),)]
    assert [chunk.load.logit_rows for chunk in chunks] == [0, 1]
    found: list[Int32] = [np.repeat(chunks[-1].ids, 3)]
    steps: list[TimedStep] = [*chunks]
    for past in range(len(PROMPT), len(PROMPT) + 3):
        steps.append(run.decode(found[-1], past))
        found.append(steps[-1].ids)
    assert [ids.tolist() for ids in found] == [[token] * 3 for token in expected]
    for step in steps:
        assert len(step.times.parts) == len(plan.steps) + 1
        assert (step.times.parts >= 0).all()
        assert 0 < step.times.parts.sum() <= step.seconds
    session.close()


def test_nothing_is_timed_unless_asked(engine: Path) -> None:
    loaded = load_engine(engine, runtime_config())
    session = loaded.session
    assert isinstance(session, TimedSession)
    run = TimedRun(session, loaded.engine.plan, sequences=1, length=30)
    (step,) = run.prefill(PROMPT[:3])
    assert step.times.parts.sum() > 0
    assert session.native.step_seconds() == []  # type: ignore[attr-defined]
    session.close()


def test_every_token_has_a_place_in_the_cache(engine: Path) -> None:
    plan = read_plan(engine)
    size = plan.tokens_per_block
    for length, blocks in ((1, 1), (size, 1), (size + 1, 2), (2 * size, 2)):
        assert blocks_needed(plan, sequences=3, length=length) == (3 * blocks,)
