"""Losses of products beside those of whole matrices."""

from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.builder.calibrated.text_model import TextModel
from ingot.builder.expressions import WeightReader
from ingot.builder.quantise import quantise
from ingot.builder.sensitivity import product_losses
from ingot.builder.stored_weight import StoredWeight
from ingot.checkpoint import Checkpoint
from ingot.configs.build import BuildConfig
from ingot.dtypes import Precision
from ingot.plugins.op import Array
from ingot.plugins.quantised import round_to_int8
from tests.builder.calibrated.test_quantize import MIXTRAL, TEXT, checkpoint_of


def test_losses_are_those_of_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(checkpoint_of(tmp_path))
    text, seen, product = TextModel.open(checkpoint, TEXT, 100), list[tuple[Array, Array]](), StoredWeight.product

    def noted(self: StoredWeight, expert: int, x: Array) -> Array:
        if self.use.name.endswith("1/down.weight"):
            seen.append((x, self.values))
        return product(self, expert, x)

    monkeypatch.setattr(StoredWeight, "product", noted)
    with WeightReader(checkpoint) as reader:
        found = {each.name: each for each in product_losses(text, reader, ("w4g32", "w8", "bf16"), lambda *_: None)}
    assert list(found)[-1] == "lm_head"
    ((x, weight),) = seen
    outputs, own = x @ weight.T, found["layers.1/down"]
    for precision in ("w4g32", "w8"):
        lost = x @ (quantise(weight, Precision.parse(precision)).values - weight).T
        assert own.losses[precision] == pytest.approx(float((lost**2).sum() / (outputs**2).sum()), rel=1e-3)
    codes, scale = round_to_int8(x)
    lost = (codes * scale[:, None] - x) @ weight.T
    assert own.int8 == pytest.approx(float((lost**2).sum() / (outputs**2).sum()), rel=1e-3)


def test_experts_and_bytes(tmp_path: Path) -> None:
    folder = checkpoint_of(tmp_path, MIXTRAL)
    checkpoint = Checkpoint.open(folder)
    text = TextModel.open(checkpoint, TEXT, 60)
    with WeightReader(checkpoint) as reader:
        found = product_losses(text, reader, ("w4g32", "w8"), lambda *_: None)
    assert not [each.name for each in found if "route" in each.name]
    assert all(0 < each.losses["w8"] < each.losses["w4g32"] < 1 for each in found)
    plan = build(BuildConfig(target="cpu/avx2", precision="w8", autotune=False), folder, tmp_path / "e").plan
    packed = {weight.name: weight.nbytes for weight in plan.weights}
    assert {each.name: each.nbytes["w8"] for each in found} == {
        each.name: packed[f"{each.name}.weight"] for each in found
    }
    assert np.isfinite([each.int8 for each in found]).all()
