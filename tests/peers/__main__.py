"""Options → everything installed, built, measured in turn → results.json, record.json, table.md, plot.png in --work."""

import argparse
import dataclasses
import datetime
import difflib
import json
import os
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ingot.engine import read_plan
from ingot.errors import IngotError, UsageError
from ingot.plugins.cpu.native import core_count, detect_isa, offered_isas
from tests.peers.adapters.ingot import engine_dir
from tests.peers.adapters.protocol import Job
from tests.peers.load import RUNNING
from tests.peers.mixed import MixedOptions, run_mixed
from tests.peers.models import SHAPES
from tests.peers.peers import CLASSES, GGUF, INGOT, ISAS, PEERS, Peer, Variant, cap, variants
from tests.peers.picture import draw
from tests.peers.record import record_of, written
from tests.peers.regimes import DEFAULT, Regime, parse_regimes
from tests.peers.report import NO_TRACE, Heading, markdown
from tests.peers.rounds import Entrant, Outcome, run_rounds
from tests.peers.steps import Workshop, steps_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line says."""

    work: Path
    model: str
    peers: Sequence[Peer]
    precisions: Sequence[str]
    regimes: Sequence[Regime]
    mixed: MixedOptions | None
    rounds: int
    threads: int
    isa: str
    json: bool
    dry_run: bool

    @property
    def command(self) -> str:
        """What measures the same again."""
        words = ["python -m tests.peers --work DIR --model", self.model]
        words += ["--peers", ",".join(peer.name for peer in self.peers) or "none"]
        words += ["--precisions", ",".join(self.precisions)]
        words += ["--regimes", ",".join(regime.name for regime in self.regimes) or "none"]
        words += ["--rounds", str(self.rounds), "--threads", str(self.threads), "--isa", self.isa]
        if self.mixed is not None:
            mixed = self.mixed
            words += ["--trace", mixed.trace.name, "--requests", str(mixed.requests)]
            words += ["--length_scale", f"{mixed.length_scale:g}", "--ttft_ms", f"{1e3 * mixed.ttft:g}"]
            words += ["--tpot_ms", ",".join(f"{1e3 * tpot:g}" for tpot in mixed.tpots)]
        return " ".join(words)

    def job(self, variant: Variant) -> Job:
        """What an adapter is told."""
        return Job(
            work=self.work,
            model=self.model,
            peer=variant.peer.name,
            weights=variant.weights,
            isa=self.isa,
            threads=self.threads,
            regimes=",".join(regime.name for regime in self.regimes),
        )


def parse(arguments: Sequence[str], offered: Sequence[str]) -> Options:
    """offered: ISAs of this machine, the preferred one first. Ends the process with code 2 and words if need be."""
    names, best = {peer.name: peer for peer in PEERS}, next(iter(offered), "none")
    parser = argparse.ArgumentParser(
        prog="python -m tests.peers",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Compare ingot with other engines on this machine. What is installed and built is kept below "
        "--work and used again.\n\npeers: " + ", ".join(names),
        epilog="Example: python -m tests.peers --work DIR --model tinyllama --peers llama.cpp,openvino --rounds 3",
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for environments, checkpoints and results")
    parser.add_argument("--model", required=True, choices=SHAPES, help="whose shape; the weights are random")
    parser.add_argument("--peers", default="all", help="names, comma between them; all; none")
    parser.add_argument(
        "--precisions",
        default=",".join(CLASSES),
        help=f"classes of weights (%(default)s); for the same GGUF file in several engines: {', '.join(GGUF)}",
    )
    parser.add_argument(
        "--regimes",
        default=DEFAULT,
        help="decode:SEQUENCES, decode:SEQUENCES@CONTEXT, prefill:TOKENS; none (%(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine (%(default)s)")
    parser.add_argument("--threads", type=int, default=core_count(), help="of each engine (%(default)s)")
    parser.add_argument("--isa", choices=ISAS, default=best, help="every engine is held to it (%(default)s)")
    _add_mixed(parser)
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of the table")
    parser.add_argument("--dry_run", "--list", action="store_true", help="print what would be done, and what is there")
    given = parser.parse_args(arguments)
    try:
        peers = [] if given.peers == "none" else _chosen(given.peers, names, "peer")
        precisions = _chosen(given.precisions, dict.fromkeys((*CLASSES, *GGUF), ""), "precision")
        regimes, mixed = parse_regimes(given.regimes), _mixed(given)
        if min(given.rounds, given.threads) < 1:
            raise ValueError("--rounds and --threads must be at least 1")
        if given.isa not in offered:
            raise ValueError(f"--isa {given.isa}: this machine has {best}")
    except (ValueError, UsageError) as error:
        parser.error(str(error))
    return Options(
        work=given.work.resolve(),
        model=given.model,
        peers=[names[name] for name in peers],
        precisions=precisions,
        regimes=regimes,
        mixed=mixed,
        rounds=given.rounds,
        threads=given.threads,
        isa=given.isa,
        json=given.json,
        dry_run=given.dry_run,
    )


def _add_mixed(parser: argparse.ArgumentParser) -> None:
    plain = {field.name: field.default for field in dataclasses.fields(MixedOptions)}
    group = parser.add_argument_group("mixed load", "requests of a recorded trace, at the rates that engines bear")
    group.add_argument("--trace", type=Path, help="Azure's CSV, or JSONL; without one there is no mixed load")
    group.add_argument("--requests", type=int, default=plain["requests"], help="of its beginning (%(default)s)")
    group.add_argument("--length_scale", type=float, default=plain["length_scale"], help="of its lengths (%(default)s)")
    group.add_argument("--ttft_ms", type=float, default=2000, help="limit of a good request (%(default)s)")
    group.add_argument("--tpot_ms", default="200,50", help="limits, comma between them: a goodput each (%(default)s)")


def _mixed(given: argparse.Namespace) -> MixedOptions | None:
    """Raises ValueError and UsageError."""
    if given.trace is None:
        return None
    try:
        tpots = sorted({float(part) / 1e3 for part in given.tpot_ms.split(",")}, reverse=True)
    except ValueError as error:
        raise ValueError(f"--tpot_ms {given.tpot_ms}: expected numbers with commas between them") from error
    if min(given.requests, given.ttft_ms, given.length_scale, *tpots) <= 0:
        raise ValueError("--requests, --length_scale, --ttft_ms and --tpot_ms must be above 0")
    options = MixedOptions(
        trace=given.trace.resolve(),
        requests=given.requests,
        ttft=given.ttft_ms / 1e3,
        tpots=tpots,
        length_scale=given.length_scale,
    )
    options.rows()
    return options


def _chosen(text: str, known: Mapping[str, object], what: str) -> list[str]:
    """Names in the order of `known`. Raises ValueError for one that is not in it."""
    names = list(known) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected {', '.join(known)}"
            raise ValueError(f"unknown {what} {name!r}: {hint}")
    return [name for name in known if name in names]


def say(words: str) -> None:
    """Progress."""
    print(f"{datetime.datetime.now():%H:%M:%S} {words}", file=sys.stderr, flush=True)


def show_steps(options: Options, chosen: Sequence[Variant], best: str) -> None:
    """Every step of every variant once, with what is there already."""
    workshop, seen = Workshop(options.work, say), set()
    for variant in chosen:
        try:
            caps, mixed = cap(variant.peer, options.isa, best), options.mixed is not None
            steps = steps_of(variant, options.job(variant), caps, mixed=mixed)
        except ValueError as error:
            print(f"not run  {variant.name}: {error}")
            continue
        for step in steps:
            if step.what not in seen:
                seen.add(step.what)
                print(f"{'there  ' if workshop.done(step) else 'to do  '}  {step.what}: {' '.join(step.command)}")
    for variant in chosen:
        print(f"measure  {variant.name}: {', '.join(regime.name for regime in options.regimes) or 'no regime'}")
    if options.mixed is None:
        print(f"left out mixed load: {NO_TRACE}")
        return
    for variant in chosen:
        serving = variant.peer.serving
        print(f"load     {variant.name}: {'no continuous batching' if serving is None else serving.value}")
    print(f"         {options.mixed.words}")


def compare(options: Options, best: str) -> int:
    """The whole comparison; 1 if ingot itself did not run."""
    chosen = variants(options.peers, options.precisions)
    if options.dry_run:
        show_steps(options, chosen, best)
        return 0
    outcomes, entrants = prepare(options, chosen, best)
    heading = Heading(
        model=options.model,
        date=f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        machine=_processor(),
        isa=options.isa,
        threads=options.threads,
        rounds=options.rounds,
        regimes=[regime.name for regime in options.regimes],
        load=None if options.mixed is None else options.mixed.words,
        tpots=() if options.mixed is None else options.mixed.tpots,
    )
    folder = options.work / "results" / f"{options.model}-{options.isa}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    try:
        run_rounds(entrants, options.regimes, options.rounds if options.regimes else 1, say)
        write(folder, heading, outcomes, options)
        if options.mixed is not None:
            run_mixed(entrants, options.mixed, say)
    except KeyboardInterrupt:
        say("interrupted; what was measured is written, and what is built is used again")
    write(folder, heading, outcomes, options)
    print((folder / ("results.json" if options.json else "table.md")).read_text())
    say(f"written: {folder}")
    return 0 if all(_ran(options, outcome) for outcome in outcomes if outcome.engine == INGOT.name) else 1


def _ran(options: Options, outcome: Outcome) -> bool:
    """Whether all that was asked for was measured."""
    mixed = outcome.mixed
    loaded = options.mixed is None or (mixed is not None and mixed.at_once is not None and mixed.reason is None)
    return outcome.reason is None and loaded and bool(outcome.turns)


def prepare(options: Options, chosen: Sequence[Variant], best: str) -> tuple[list[Outcome], list[Entrant]]:
    """An outcome for every variant, with its reason where it cannot run; the others are ready."""
    options.work.mkdir(parents=True, exist_ok=True)
    workshop, outcomes, entrants, plans = Workshop(options.work, say), [], [], {}
    for variant in chosen:
        job, caps = options.job(variant), {}
        outcome = Outcome(engine=variant.peer.name, precision=variant.precision, weights=variant.weights)
        outcomes.append(outcome)
        try:
            caps = dict(cap(variant.peer, options.isa, best))
            outcome.reason = workshop.do(steps_of(variant, job, caps, mixed=options.mixed is not None))
        except ValueError as error:
            outcome.reason = str(error)
        if outcome.reason is None and variant.peer is INGOT:
            plans[variant.precision] = read_plan(engine_dir(job))
        if outcome.reason is None and variant.precision not in plans:
            outcome.reason = f"there is no {variant.precision} engine of ingot to take limits for"
        if outcome.reason is None:
            plan = plans[variant.precision]
            entrants.append(Entrant(outcome=outcome, variant=variant, job=job, caps=caps, plan=plan))
    return outcomes, entrants


def write(folder: Path, heading: Heading, outcomes: Sequence[Outcome], options: Options) -> None:
    """What is known so far."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {**dataclasses.asdict(heading), "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes]}
    (folder / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    ttft = None if options.mixed is None else options.mixed.ttft
    (folder / "record.json").write_text(written(record_of(heading, outcomes, options.command, RUNNING, ttft)))
    (folder / "table.md").write_text(markdown(heading, outcomes))
    draw(heading, outcomes, folder / "plot.png")


def _processor() -> str:
    """Its name, and how many cores this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {core_count()} cores"


if __name__ == "__main__":
    for ending in (signal.SIGINT, signal.SIGTERM):  # servers are ended, and results written, in the background too
        signal.signal(ending, signal.default_int_handler)
    try:
        sys.exit(compare(parse(sys.argv[1:], offered_isas()), detect_isa()))
    except IngotError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; what is built stays, and is used again")
