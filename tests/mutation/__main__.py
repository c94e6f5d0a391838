"""python -m tests.mutation [--jobs N] [--only WORDS]: plant every fault, name those that no test noticed."""

import argparse
import sys
from pathlib import Path

from tests.mutation.run import LIST, REPOSITORY, Fault, MutationError, read_faults, run_faults

ENOUGH = 0.9  # share of faults that tests must notice


def main() -> int:
    """Exit status: 0 where enough was noticed, 1 where not, 2 where the list does not fit the tree."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--list", type=Path, default=LIST, help="faults, as in tests/mutation/faults.toml")
    parser.add_argument("--only", default="", help="faults whose file or description has these words")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the tree that work at once")
    parser.add_argument(
        "--seconds", type=float, default=180, help="after which tests that have not ended count as failed"
    )
    options = parser.parse_args()

    def say(fault: Fault, noticed: bool) -> None:
        print(f"{'noticed  ' if noticed else 'UNNOTICED'}  {fault.file}: {fault.what}", flush=True)

    try:
        faults = [
            fault for fault in read_faults(options.list, REPOSITORY) if options.only in f"{fault.file}: {fault.what}"
        ]
        if not faults:
            raise MutationError(f"no fault has the words {options.only!r}")
        missed = run_faults(faults, REPOSITORY, options.jobs, options.seconds, say)
    except MutationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    share = 1 - len(missed) / len(faults)
    print(f"{len(faults) - len(missed)} of {len(faults)} faults noticed: {share:.0%}, expected at least {ENOUGH:.0%}")
    return 0 if share >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
