"""A build takes nothing from a Checkpoint's weights that does not have the checksums that convert wrote."""

import json
import shutil
from pathlib import Path

import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.errors import CheckpointError
from tests.handmade import write_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tiny llama."""
    folder = tmp_path_factory.mktemp("checked")
    convert(ConvertOptions(model_dir=write_model(folder / "m"), output_dir=folder / "c"))
    return folder / "c"


def build_ref(checkpoint: Path, engine: Path) -> None:
    build(BuildConfig(target="ref", precision="f32"), checkpoint, engine)


def test_a_flipped_bit_of_the_weights_is_found(checkpoint: Path, tmp_path: Path) -> None:
    """Whichever it is, those of the file's header too."""
    damaged = Path(shutil.copytree(checkpoint, tmp_path / "c"))
    weights = damaged / "model.safetensors"
    data = bytearray(weights.read_bytes())
    for offset in (0, 20, len(data) // 2, len(data) - 1):
        data[offset] ^= 1
        weights.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"checksum does not match(.|\n)*model\.safetensors(.|\n)*convert"):
            build_ref(damaged, tmp_path / "e")
        assert not (tmp_path / "e").exists()
        data[offset] ^= 1
    weights.write_bytes(data)
    build_ref(damaged, tmp_path / "e")


def test_weights_without_checksums_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(checkpoint, tmp_path / "c"))
    document = json.loads((other / "config.json").read_text())
    document["weights"] = {"other.safetensors": document["weights"]["model.safetensors"]}
    (other / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"not the one that was converted(.|\n)*with checksums in config\.json"):
        build_ref(other, tmp_path / "e")
