"""config.json of a real model cut to few layers, for weights that are random.

python -m tests.programs.model_shapes gpt-oss-20b --layers 2 --output gpt-oss.json
ingot convert --config gpt-oss.json --random_weights 1 --output_dir checkpoint
ingot build --checkpoint_dir checkpoint --precision w4g128 --output_dir engine
ingot bench kernels --engine_dir engine
"""

import argparse
import json
from pathlib import Path

from tests.real_models import REAL_MODELS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(REAL_MODELS), help="the model")
    parser.add_argument("--layers", type=int, required=True, help="keep the first so many layers")
    parser.add_argument("--layer_types", nargs="+", help="the kind of each layer; default: as the first ones")
    parser.add_argument("--vocab_size", type=int, help="keep so many tokens; default: all")
    parser.add_argument("--output", type=Path, required=True, help="write this file")
    options = parser.parse_args()
    model = REAL_MODELS[options.name]
    if not 1 <= options.layers <= model.config["num_hidden_layers"]:
        parser.error(f"--layers: expected 1 to {model.config['num_hidden_layers']}, got {options.layers}")
    config = model.cut(options.layers)
    if options.layer_types is not None:
        known = set(model.config.get("layer_types", ()))
        if len(options.layer_types) != options.layers or not known.issuperset(options.layer_types):
            parser.error(f"--layer_types: expected {options.layers} of {', '.join(sorted(known)) or 'no kind at all'}")
        config["layer_types"] = options.layer_types
    if options.vocab_size is not None:
        config["vocab_size"] = options.vocab_size
    options.output.write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    main()
