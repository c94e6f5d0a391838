"""Engine and source → Comparison, the main path of `ingot verify --against`.

source: Checkpoint, or Hugging Face directory converted into one that lives as long as the comparison
→ the same steps, wiring, attributes and shapes? → tokens → for every step, in order:

    weights   packed against source                     names a wrong value, scale, head
    output    kernel against the op's reference         on the engine's own inputs: names a wrong kernel
    output    engine against the source's own graph     names what is right by itself and wrong in its place

of a session without taps: the weights, and of the outputs the logits alone
→ KL divergence, agreement and perplexity of the logits
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ingot.builder.parallel_map import cores
from ingot.builder.source import open_source
from ingot.checkpoint import is_checkpoint
from ingot.compare.blas import one_thread_per_product
from ingot.compare.rank_processes import RankProcesses
from ingot.compare.ranks import Rank, in_stages, join_stages
from ingot.compare.report import Comparison
from ingot.compare.run import Progress, Run
from ingot.compare.structure import require_same_structure
from ingot.compare.taps import longest_sequence
from ingot.compare.tokens import read_tokens
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.gguf.source import is_gguf
from ingot.engine import Engine, open_engine, read_manifest, read_plan
from ingot.errors import UsageError
from ingot.fixed_tables import blocks_needed
from ingot.plan import Plan
from ingot.plugins.registry import Fit, fit_targets
from ingot.plugins.target import JoinsRanks, RunsRanks, SessionOptions, Target
from ingot.step_io import Int32, Session

DEFAULT_TOKENS = 128
GROUP_BYTES = 256 << 20  # of float64 logits at a time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompareOptions:
    """tokens: of the text, at most. text: None is the text that ships with ingot. threads: None takes every core.
    target: of an engine with several.
    """

    tokens: int = DEFAULT_TOKENS
    text: Path | None = None
    threads: int | None = None
    isa: str | None = None
    target: str | None = None


def comparable_targets(directory: Path, options: CompareOptions) -> Fit:
    """Which targets of the engine can be compared on this machine."""

    def plan(target: str) -> Plan:
        return read_plan(directory, target=target)

    names = read_manifest(directory).targets
    return fit_targets(names, where=str(directory), wanted=options.target, isa=options.isa, plan=plan)


def compare(
    directory: Path, against: Path, options: CompareOptions, progress: Progress = lambda what, done, total: None
) -> Comparison:
    """Raises IngotErrors for what cannot be compared; what is wrong in numbers is in the result."""
    target = comparable_targets(directory, options).best()
    with one_thread_per_product(), _checkpoint_of(against, progress) as checkpoint, contextlib.ExitStack() as opened:
        engines = [
            opened.enter_context(open_engine(directory, rank, target=target.name))
            for rank in range(read_manifest(directory).ranks)
        ]
        ranks = opened.enter_context(_ranks(engines, checkpoint, target, against))
        plan = engines[0].plan
        group = max(2, min(512, GROUP_BYTES // (8 * plan.vocab_size)))
        longest = min(longest_sequence(plan), group)
        tokens = read_tokens(directory, plan.vocab_size, options.tokens, options.text, longest)
        at_once = max(1, group // tokens.sequences.shape[1])
        with _session(engines, target, tokens.sequences[:at_once], options) as session:
            run = Run(
                ranks=ranks, session=session, progress=progress, tokens=tokens, threads=options.threads or cores()
            )
            for begin in range(0, len(tokens.sequences), at_once):
                run.compare_group(tokens.sequences[begin : begin + at_once])
        return run.result(directory, against)


@contextlib.contextmanager
def _ranks(engines: Sequence[Engine], checkpoint: Path, target: Target, against: Path) -> Iterator[list[Rank]]:
    """Every rank with its source. Raises EngineError where the engine was made of something else."""
    stages = in_stages([engine.plan for engine in engines])
    places = len(stages[0])
    ranks: dict[int, Rank] = {}
    with contextlib.ExitStack() as opened:
        for place in range(places):
            numbers = [stage[place] for stage in stages]
            plans = [engines[number].plan for number in numbers]
            source = opened.enter_context(open_source(checkpoint, join_stages(plans).plan, target, (place, places)))
            names = str(engines[0].directory), str(against)
            joined = join_stages(plans, source.plan).plan
            require_same_structure(joined, source.plan, source.same, *names, in_stages=len(stages) > 1)
            ranks.update({number: Rank(engines[number], number, source) for number in numbers})
        yield [ranks[number] for number in range(len(engines))]


@contextlib.contextmanager
def _checkpoint_of(against: Path, progress: Progress) -> Iterator[Path]:
    """The Checkpoint itself, or a temporary one of a Hugging Face directory or a GGUF file."""
    if is_checkpoint(against):
        yield against
        return
    if not (is_gguf(against) or (against / "config.json").is_file()):
        raise UsageError(
            "--against is neither a Checkpoint nor a Hugging Face directory nor a GGUF file",
            where=f"--against {against}",
            expected="a directory with config.json, or a file .gguf",
            got="no such directory" if not against.exists() else None,
            hint="give what the engine was built from",
        )
    with tempfile.TemporaryDirectory(prefix="ingot-verify-") as work:
        checkpoint = Path(work) / "checkpoint"
        convert(ConvertOptions(model_dir=against, output_dir=checkpoint), progress)
        yield checkpoint


@contextlib.contextmanager
def _session(engines: Sequence[Engine], target: Target, sequences: Int32, options: CompareOptions) -> Iterator[Session]:
    """For all ranks, whose processes are on this machine, or are this one."""
    count, length = sequences.shape
    first = engines[0]
    num_blocks = blocks_needed(first.plan, sequences=count, length=length)
    wanted = SessionOptions(num_blocks=num_blocks, threads=options.threads, directory=first.directory)
    session: Session
    if len(engines) == 1:
        session = target.open_session(first.plan, first.weights, wanted)
    elif isinstance(target, JoinsRanks):
        session = RankProcesses(target, first, wanted)
    else:
        assert isinstance(target, RunsRanks), "no other target has kernels for several ranks"
        session = target.open_ranks([each.plan for each in engines], [each.weights for each in engines], wanted)
    with contextlib.closing(session):
        yield session
