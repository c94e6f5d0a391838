"""Machine code that outlives a process: all runs of the tests on a real GPU, and the tools over them, need the same."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from ingot.plugins.cuda.compiler import MachineCode, Resources, _Work


def kept_on_disk(folder: Path, compiled: Callable[[_Work], MachineCode]) -> Callable[[_Work], MachineCode]:
    """`compiled`, which compiles what is not in the folder yet under the hash of all that it depends on."""

    def found(work: _Work) -> MachineCode:
        texts = [path.read_text() for path in sorted(work.sources.glob("*.cu*"))]
        parts = [str(work.compiler.path), work.compiler.version, work.architecture, *work.specialisation.macros, *texts]
        kept = folder / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.cubin"
        report = kept.with_suffix(".json")
        if not kept.is_file():
            code = compiled(work)
            folder.mkdir(parents=True, exist_ok=True)
            report.write_text(json.dumps({name: dataclasses.asdict(each) for name, each in code.kernels.items()}))
            kept.with_suffix(".part").write_bytes(code.image)
            kept.with_suffix(".part").replace(kept)
        kernels = {name: Resources(**each) for name, each in json.loads(report.read_text()).items()}
        return MachineCode(image=kept.read_bytes(), kernels=kernels)

    return found
