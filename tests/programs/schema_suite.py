"""The official JSON-Schema test suite: what a grammar takes has to be valid.

python -m tests.programs.schema_suite FOLDER [--show 0]

FOLDER holds files of the suite, `tests/draft2020-12` of github.com/json-schema-org/JSON-Schema-Test-Suite for example.
Each instance is judged as json.dumps writes it. Ends with an error if a grammar takes an instance that the suite calls
not valid, or if a schema is refused without words. Prints for each file what was refused, and valid instances that are
not taken.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.programs.schema_judge import Found, Judge


def main() -> int:
    """See the head of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--show", type=int, default=0, help="so many valid instances of each file that are not taken")
    options = parser.parse_args()
    files = sorted(options.folder.glob("*.json"))
    if not files:
        print(f"no files of the suite in {options.folder}: give a folder such as tests/draft2020-12", file=sys.stderr)
        return 2
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory(prefix="suite-") as folder:
        judge = Judge(Path(folder))
        for file in files:
            counts = found[file.stem] = Found()
            for case in json.loads(file.read_text(encoding="utf-8")):
                cases = [(json.dumps(test["data"], ensure_ascii=False), test["valid"]) for test in case["tests"]]
                judge.judge(counts, case["schema"], cases)
    print("| file | schemas | refused | texts taken | not valid | of these taken | valid and not taken |")
    print("|---|---|---|---|---|---|---|")
    total = Found()
    for name, each in [*found.items(), ("all", total)]:
        print(f"| {name} | {' | '.join(map(str, each.counts()))} |")
        total.add(each)
    for name, each in found.items():
        for what, pairs in (("TAKEN", each.wrong), ("not taken", each.missed[: options.show])):
            for schema, text in pairs:
                print(f"{what}, {name}: {json.dumps(schema)} {text}")
    return 1 if total.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
