"""Which modules the weights of a model pass from its safetensors files to a session, stage by stage.

python -m tests.programs.trace_weight [--model_dir MODEL] [--precision w8]
"""

import argparse
import tempfile
from pathlib import Path

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.runtime import RuntimeConfig
from ingot.convert.convert import convert
from ingot.quickstart import SHIPPED
from ingot.runtime.session import load_engine
from tests.programs.traced import Stages, table, traced

STAGES = {
    ("convert.convert", "write_file"): "convert: read, round if asked, write",
    ("engine_writer", "write_engine"): "build: write packed blocks, in the order of the file",
    ("builder.pack", "_packed"): "build: read a block, quantise it, pack it",
    ("engine", "open_engine"): "open: check every byte",
    ("plugins.cpu.target", "open_session"): "open: bind to kernels",
}


def trace(model: Path, config: BuildConfig) -> dict[str, list[str]]:
    """Modules by stage."""
    with tempfile.TemporaryDirectory() as folder, traced(Stages(STAGES)) as found:
        checkpoint, engine = Path(folder, "checkpoint"), Path(folder, "engine")
        convert(ConvertOptions(model_dir=model, output_dir=checkpoint))
        build(config, checkpoint, engine)
        loaded = load_engine(engine, RuntimeConfig())
        loaded.session.close()
        loaded.engine.close()
    return found.modules


def main() -> None:
    """For the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_dir", type=Path, default=SHIPPED)
    parser.add_argument("--precision", default="w8")
    options = parser.parse_args()
    modules = trace(options.model_dir, BuildConfig(precision=options.precision, target="cpu"))
    print("\n".join(table(modules)))
    print(f"\n{len({name for names in modules.values() for name in names})} modules, {len(modules)} stages")


if __name__ == "__main__":
    main()
