"""What the parts share: the job, and engines that are built once."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.plugins.cuda.gpu import Gpu
from tests.gpu_proof.result import Result


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """work: folder for checkpoints and engines; found: results of the part so far. The rest are the options of
    `__main__.py`."""

    work: Path
    gpu: Gpu
    models: Sequence[Path] = ()
    sort_model: Path | None = None
    shapes: Sequence[str] = ()
    batches: Sequence[int] = ()
    prompts: Sequence[int] = ()
    context: int = 0
    output: int = 0
    repetitions: int = 1
    transformers: bool = True
    found: list[Result] = dataclasses.field(default_factory=list)

    @property
    def target(self) -> str:
        """Machine code for this GPU itself."""
        return f"cuda/sm{self.gpu.sm}"


def checkpoint_of(work: Path, model: Path) -> Path:
    """Converted once."""
    out = work / f"{model.name}-checkpoint"
    if not out.is_dir():
        convert(ConvertOptions(model_dir=model, output_dir=out))
    return out


def engine_place(checkpoint: Path, config: BuildConfig) -> Path:
    """Where its engine lies, or will."""
    word = f"{config.target}-{config.precision}".replace("/", "-")
    return checkpoint.with_name(f"{checkpoint.name.removesuffix('-checkpoint')}-{word}")


def engine_of(checkpoint: Path, config: BuildConfig) -> tuple[Path, str]:
    """Built once; the command that does the same."""
    out = engine_place(checkpoint, config)
    if not out.is_dir():
        build(config, checkpoint, out)
    plain = BuildConfig()
    options = " ".join(
        f"--{field.name} {getattr(config, field.name)}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(plain, field.name)
    )
    return out, f"ingot build --checkpoint_dir {checkpoint} --output_dir {out} {options}"
