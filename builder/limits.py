"""The limits of an engine: what was asked for, fitted to the model. Defaults are lowered, given values refused."""

from ingot.builder.positions import UNLIMITED
from ingot.configs.build import (
    DEFAULT_MAX_BATCH_SIZE,
    DEFAULT_MAX_INPUT_LEN,
    DEFAULT_MAX_NUM_TOKENS,
    DEFAULT_MAX_SEQ_LEN,
    BuildConfig,
)
from ingot.errors import UsageError
from ingot.plan import Limits

_MIN_LOGIT_ROWS = 256  # so that the logits of a whole prompt come in large pieces


def fit_limits(config: BuildConfig, positions: int, *, sparse_beyond: int = 0) -> tuple[Limits, list[str]]:
    """(limits, one sentence per lowered default). positions: of the model; sparse_beyond: of `ModelConfig`."""
    notes: list[str] = []
    has = f"the model has {positions} positions"
    if sparse_beyond == positions:
        has += " here, since it attends to chosen tokens alone beyond them (sparse attention), which is not supported"
    reason = f"{has}, and the last generated token needs none"
    longest = positions + 1 if positions < UNLIMITED else UNLIMITED
    output = config.max_output_len or 1  # room that the default of max_input_len leaves for generated tokens
    given = config.max_seq_len
    if config.max_output_len is not None:
        prompt = config.max_input_len or max(min(DEFAULT_MAX_INPUT_LEN, longest - output), 1)
        given = prompt + output
        if given > longest:
            raise UsageError(
                "max_input_len and max_output_len are together more than the model allows",
                where="--max_output_len",
                expected=f"a sum of at most {longest}: {reason}",
                got=f"{prompt} + {output}",
                hint="give less of one of them",
            )
    if given is not None and config.lower_limits:
        given = min(given, longest)
    max_seq_len = _fit("max_seq_len", given, DEFAULT_MAX_SEQ_LEN, longest, reason, notes)

    longest_input = min(max_seq_len, positions)
    reason = f"max_seq_len is {max_seq_len} and {has}"
    default = min(DEFAULT_MAX_INPUT_LEN, longest_input, max_seq_len - output)
    if config.max_input_len is None and default < DEFAULT_MAX_INPUT_LEN:
        notes.append(f"max_input_len lowered from {DEFAULT_MAX_INPUT_LEN} to {default}: max_seq_len is {max_seq_len}")
    given = config.max_input_len
    if given is not None and config.lower_limits:
        given = min(given, longest_input)
    max_input_len = _fit("max_input_len", given, default, longest_input, reason, notes)

    max_batch_size = config.max_batch_size or DEFAULT_MAX_BATCH_SIZE
    useful = max_batch_size * positions if positions < UNLIMITED else UNLIMITED
    max_num_tokens = config.max_num_tokens or min(DEFAULT_MAX_NUM_TOKENS, useful)
    if max_num_tokens < DEFAULT_MAX_NUM_TOKENS and config.max_num_tokens is None:
        notes.append(
            f"max_num_tokens lowered from {DEFAULT_MAX_NUM_TOKENS} to {max_num_tokens}: {max_batch_size} requests of "
            f"{positions} positions"
        )
    limits = Limits(
        max_batch_size=max_batch_size,
        max_input_len=max_input_len,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        max_logit_rows=min(max_num_tokens, max(max_batch_size * (1 + (config.max_draft_len or 0)), _MIN_LOGIT_ROWS)),
    )
    return limits, notes


def _fit(name: str, given: int | None, default: int, most: int, reason: str, notes: list[str]) -> int:
    if given is not None and given > most:
        raise UsageError(
            f"{name} {given} is more than the model allows",
            where=f"--{name}",
            expected=f"at most {most}: {reason}",
            got=str(given),
            hint=f"give at most {most}, or leave it out" + ("; raise --max_seq_len" if name == "max_input_len" else ""),
        )
    if given is not None:
        return given
    if default > most:
        notes.append(f"{name} lowered from {default} to {most}: {reason}")
    return min(default, most)
