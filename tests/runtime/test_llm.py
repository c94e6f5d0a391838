"""EngineLLM on a fake model: results as vLLM names them, cancellation at any moment, threads that sleep and end."""

import asyncio
import dataclasses
import gc
import itertools
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from ingot.configs.sampling import SamplingParams
from ingot.errors import RequestError
from ingot.runtime.llm import EngineLLM
from ingot.runtime.llm_outputs import RequestOutput
from ingot.step_io import StepBatch
from tests.runtime.fake_session import VOCAB, FakeSession, continued

LONG = SamplingParams(max_tokens=50, temperature=0, seed=1)


def slow(batch: StepBatch) -> None:
    time.sleep(0.005)


def test_results(llm: EngineLLM) -> None:
    ids = llm.tokenizer.encode("10/3")
    prompts: list[str | list[int]] = ["10/3", [5, 6, 7]]
    results = llm.generate(prompts, SamplingParams(max_tokens=9, temperature=0, n=2))
    assert [result.prompt for result in results] == ["10/3", None]
    assert [result.prompt_token_ids for result in results] == [ids, [5, 6, 7]]
    for result in results:
        assert result.finished
        assert result.prompt_logprobs is None
        assert [output.index for output in result.outputs] == [0, 1]
        for output in result.outputs:
            assert output.token_ids == continued(result.prompt_token_ids, 9)
            detokenizer = llm.tokenizer.detokenizer(result.prompt_token_ids)
            assert output.text == detokenizer.push(output.token_ids) + detokenizer.finish()
            assert (output.finish_reason, output.stop_reason, output.logprobs) == ("length", None, None)
    assert llm.stats()["blocks_used"] == 0


def test_one_prompt_and_params_for_each(llm: EngineLLM) -> None:
    (single,) = llm.generate("10/3", LONG)
    (same,) = llm.generate(llm.tokenizer.encode("10/3"), LONG)
    assert single.outputs == same.outputs
    short, long = llm.generate(["1", "2"], [SamplingParams(max_tokens=2), LONG])
    assert (len(short.outputs[0].token_ids), len(long.outputs[0].token_ids)) == (2, 50)
    assert llm.generate([]) == []
    with pytest.raises(RequestError, match="one for each"):
        llm.generate(["1", "2"], [LONG])


def test_stop_reasons_and_what_follows_them(llm: EngineLLM) -> None:
    (free,) = llm.generate("10", LONG)
    tokens, text = free.outputs[0].token_ids, free.outputs[0].text
    (by_token,) = llm.generate("10", dataclasses.replace(LONG, stop_token_ids=[tokens[7]]))
    assert by_token.outputs[0].stop_reason == tokens[7]
    assert by_token.outputs[0].finish_reason == "stop"
    stop = text[6:9]
    (by_text,) = llm.generate("10", dataclasses.replace(LONG, stop=stop))
    assert by_text.outputs[0].stop_reason == stop
    assert by_text.outputs[0].text == text[: text.index(stop)]
    assert by_text.outputs[0].token_ids == tokens[: len(by_text.outputs[0].token_ids)]


def test_wrong_prompts_run_nothing(llm: EngineLLM) -> None:
    with pytest.raises(RequestError, match="prompt 1"):
        llm.generate([[1], [VOCAB]], LONG)
    assert llm.runner.step_log() == []


@pytest.mark.parametrize("prompts", [3, b"text", np.array(3)])
def test_what_is_no_prompt(llm: EngineLLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompts cannot be read"):
        llm.generate(prompts, LONG)


@pytest.mark.parametrize("params", [{"temperature": 0}, 3, "greedy", [{}], [None]])
def test_what_is_no_sampling_params(llm: EngineLLM, params: Any) -> None:
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate(["1"], params)
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate_async("1", params)


def test_a_failing_step_is_raised(llm: EngineLLM, session: FakeSession) -> None:
    def fail(batch: StepBatch) -> None:
        raise ValueError("the kernel fell over")

    session.before_step = fail
    with pytest.raises(RequestError, match="fell over"):
        llm.generate("1", LONG)
    session.before_step = lambda batch: None
    assert len(llm.generate("1", LONG)[0].outputs[0].token_ids) == 50


async def collect(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


def test_async_results_grow_to_the_same(llm: EngineLLM) -> None:
    async def both() -> list[list[RequestOutput]]:
        return list(await asyncio.gather(*(collect(llm.generate_async(prompt, LONG)) for prompt in ("1", "22"))))

    for grown, whole in zip(asyncio.run(both()), llm.generate(["1", "22"], LONG), strict=True):
        assert grown[-1] == whole
        assert [output.finished for output in grown[:-1]] == [False] * (len(grown) - 1)
        texts = [output.outputs[0].text for output in grown]
        assert all(after.startswith(before) for before, after in itertools.pairwise(texts))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["break", "cancel", "aclose", "timeout"])
def test_leaving_frees_the_blocks_at_once(llm: EngineLLM, session: FakeSession, way: str) -> None:
    session.before_step = slow

    async def leave() -> None:
        outputs = llm.generate_async("1", LONG)
        if way == "break":
            async for _ in outputs:
                break
            del outputs, _
        elif way == "aclose":
            await anext(outputs)
            await outputs.aclose()
            assert [output async for output in outputs] == []
        elif way == "cancel":
            task = asyncio.create_task(collect(outputs))
            await asyncio.sleep(0.03)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(collect(outputs), 0.03)
        gc.collect()
        assert llm.stats()["blocks_used"] == 0
        assert llm.stats()["requests_running"] == 0

    asyncio.run(leave())
    assert llm.stats()["blocks_used"] == 0
    session.before_step = lambda batch: None
    assert llm.generate("1", LONG)[0].outputs[0].finish_reason == "length"


def test_an_iterator_that_never_began_asks_for_nothing(llm: EngineLLM) -> None:
    async def ask() -> None:
        llm.generate_async("1", LONG)

    asyncio.run(ask())
    assert llm.runner.step_log() == []


def test_closing_ends_waiting_calls_and_threads(llm: EngineLLM, session: FakeSession) -> None:
    session.before_step = slow
    failures: list[RequestError] = []

    def ask() -> None:
        with pytest.raises(RequestError, match="closed before the request ended") as failed:
            llm.generate("1", LONG)
        failures.append(failed.value)

    caller = threading.Thread(target=ask)
    caller.start()
    while not llm.runner.step_log():
        time.sleep(0.001)
    llm.close()
    caller.join(5)
    assert len(failures) == 1
    assert session.closed
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ingot")]
    with pytest.raises(RequestError, match="closed"):
        llm.generate("1", LONG)


def test_callers_share_steps_with_the_runner(llm: EngineLLM, session: FakeSession) -> None:
    session.before_step = slow
    results: dict[int, list[int]] = {}

    def work(n: int) -> None:
        if n % 2:
            results[n] = llm.generate([n, n], LONG)[0].outputs[0].token_ids
        else:
            results[n] = llm.runner.generate([[n, n]], max_new_tokens=50)[0, 0, 2:].tolist()

    callers = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(20)
    assert results == {n: continued([n, n], 50) for n in range(6)}
    assert len(llm.runner.step_log()) < 3 * 50


def test_a_step_wakes_the_loop_once_for_all_its_results(
    llm: EngineLLM, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.before_step = slow

    async def wake_ups() -> tuple[int, int]:
        loop, count = asyncio.get_running_loop(), 0
        call = loop.call_soon_threadsafe

        def counted(*args: Any, **named: Any) -> asyncio.Handle:
            nonlocal count
            count += 1
            return call(*args, **named)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        grown = await asyncio.gather(*(collect(llm.generate_async(prompt, LONG)) for prompt in ("1", "22", "333")))
        return count, sum(map(len, grown))

    count, results = asyncio.run(wake_ups())
    assert results > 2 * count
    assert count <= len(llm.runner.step_log())


def test_event_loops_one_after_the_other(llm: EngineLLM) -> None:
    """A closed loop is forgotten, and its requests with it."""
    for _ in range(3):
        assert asyncio.run(collect(llm.generate_async("1", LONG)))[-1].finished
    assert len(llm._bridges._bridges) == 1
