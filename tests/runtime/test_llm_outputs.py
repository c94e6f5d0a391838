"""Events of several sequences become one result, and a result that was given out stays as it was."""

import numpy as np
import pytest

from ingot.configs.sampling import SamplingParams
from ingot.runtime.llm_outputs import OutputAccumulator
from ingot.runtime.model_runner import ModelRunner
from ingot.runtime.request import FinishReason
from ingot.runtime.text_stream import TextEvent, TextRequest, make_streams
from ingot.runtime.tokenizer import Tokenizer
from ingot.step_io import NO_LOG_PROB
from tests.runtime.byte_tokenizer import byte_tokenizer
from tests.runtime.tiny_engine import make_runner, ref_session
from tests.runtime.tiny_plan import VOCAB, make_model


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    model = make_model()
    return make_runner(model, ref_session(model, 10))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), VOCAB)


@pytest.fixture
def accumulator(runner: ModelRunner, tokenizer: Tokenizer) -> OutputAccumulator:
    asked = TextRequest(prompt=[1, 2], params=SamplingParams(max_tokens=4, n=2))
    return OutputAccumulator(asked, make_streams(runner, tokenizer, 0, asked))


def event(sequence: int, token: int, log_prob: float = -1.0, reason: FinishReason | None = None) -> TextEvent:
    return TextEvent(
        index=0, sequence=sequence, text=str(token), token_ids=(token,), log_probs=(log_prob,), finish_reason=reason
    )


def test_it_is_finished_with_its_last_sequence(accumulator: OutputAccumulator) -> None:
    accumulator.add(event(1, 5, reason=FinishReason.STOP))
    assert not accumulator.output().finished
    assert [part.finish_reason for part in accumulator.output().outputs] == [None, "stop"]
    accumulator.add(event(0, 6, reason=FinishReason.LENGTH))
    result = accumulator.output()
    assert result.finished
    assert [(part.index, part.text, part.token_ids) for part in result.outputs] == [(0, "6", [6]), (1, "5", [5])]


def test_results_do_not_change_afterwards(accumulator: OutputAccumulator) -> None:
    accumulator.add(event(0, 5))
    before = accumulator.output()
    before.prompt_token_ids.append(9)
    accumulator.add(event(0, 6))
    assert (before.outputs[0].text, before.outputs[0].token_ids) == ("5", [5])
    after = accumulator.output()
    assert (after.outputs[0].text, after.outputs[0].token_ids, after.prompt_token_ids) == ("56", [5, 6], [1, 2])


def test_what_was_left_out_has_no_sum(accumulator: OutputAccumulator) -> None:
    accumulator.add(event(0, 5))
    accumulator.add(event(0, 6, -2.0))
    assert accumulator.output().outputs[0].cumulative_logprob == -3
    accumulator.add(event(0, 7, float(np.float32(NO_LOG_PROB))))
    assert accumulator.output().outputs[0].cumulative_logprob is None
