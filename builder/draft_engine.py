"""The draft model of an Engine: an Engine of its own, in a folder of the other one, for the same targets.

    output_dir/           the large model's Engine, whose manifest lists the files of both
    output_dir/draft/     the draft model's

It takes as many requests and tokens as the large model, as far as it has positions: longer requests get no drafts.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.checkpoint import Checkpoint
from ingot.configs.build import BuildConfig
from ingot.configs.read import parse_json
from ingot.errors import UsageError
from ingot.plan import Limits, Plan
from ingot.plugins.target import Target

_TOKENIZER = "tokenizer.json"


def draft_config(config: BuildConfig, limits: Limits) -> BuildConfig:
    """How to build the draft model of an engine that is built by `config` and has `limits`."""
    return dataclasses.replace(
        config,
        draft_dir=None,
        max_draft_len=None,
        lower_limits=True,
        layers=(),
        tp_size=1,
        pp_size=1,
        sum_parts=None,
        max_batch_size=limits.max_batch_size,
        max_input_len=limits.max_input_len,
        max_seq_len=limits.max_seq_len,
        max_output_len=None,
        max_num_tokens=limits.max_num_tokens,
        dump_passes=None,
    )


def planned_only(config: BuildConfig) -> BuildConfig:
    """A build that decides what can be decided at once, and writes nothing."""
    return dataclasses.replace(config, dry_run=True, autotune=False, timing_cache=None)


def check_draft(config: BuildConfig, checkpoint: Checkpoint, targets: Sequence[Target]) -> None:
    """Raises UsageError where an engine could not use the draft model, CheckpointError where it is not one."""
    assert config.draft_dir is not None, "there is a draft model"
    if all(target.on_gpu for target in targets):
        raise UsageError(
            f"--draft_dir: {', '.join(target.name for target in targets)} computes no drafts",
            expected="a CPU target, or ref",
            hint="leave --draft_dir out",
        )
    if config.pp_size > 1:
        raise UsageError(
            "--draft_dir: an engine with pipeline stages computes no drafts",
            got=f"--pp_size {config.pp_size}",
            hint="leave --draft_dir or --pp_size out",
        )
    draft = Checkpoint.open(config.draft_dir)
    own, others = (_vocabulary(each.path / _TOKENIZER) for each in (checkpoint, draft))
    if own is not None and others is not None and own != others:
        raise UsageError(
            "the draft model has another vocabulary: its drafts would be other texts",
            where=str(draft.path / _TOKENIZER),
            expected=f"the tokens of {checkpoint.path / _TOKENIZER}",
            hint="take a smaller model of the same family",
        )


def check_plans(plan: Plan, draft: Plan) -> None:
    """Raises UsageError where one of the models cannot go back behind a wrong draft."""
    for each, name in ((plan, "the model"), (draft, "the draft model")):
        if any(group.state for group in each.caches):
            raise UsageError(
                f"--draft_dir: {name} keeps states, which cannot go back behind a wrong draft",
                hint="leave --draft_dir out",
            )


def draft_files(directory: Path) -> list[Path]:
    """The files of the draft model's Engine."""
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _vocabulary(path: Path) -> Any:
    """Token → id, or a list of tokens; None where the file has neither."""
    try:
        document = parse_json(path.read_bytes(), str(path))
    except OSError:
        return None
    model = document.get("model") if isinstance(document, dict) else None
    return model.get("vocab") if isinstance(model, dict) else None
