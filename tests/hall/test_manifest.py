"""What an engine says of one of several targets, and the sizes that a plan's cache has."""

import dataclasses

import pytest

from ingot.dtypes import DType
from ingot.errors import EngineError
from ingot.manifest import Manifest, TargetEntry, rank_file
from ingot.plan import CacheGroup
from tests.hall.test_engine import make_manifest


def several() -> Manifest:
    others = tuple(
        TargetEntry(target=name, precision="bf16", files="x", built_with={"nvcc": "1"}) for name in ("a", "b")
    )
    return dataclasses.replace(make_manifest(), others=others)


def test_each_target_as_if_it_were_the_only_one() -> None:
    whole = several()
    assert whole.targets == ("ref", "a", "b")
    assert whole.of("ref") == make_manifest()
    one = whole.of("b")
    assert (one.target, one.precision, one.files, one.built_with, one.others) == ("b", "bf16", "x", {"nvcc": "1"}, ())
    assert (one.limits, one.eos_ids) == (whole.limits, whole.eos_ids)
    with pytest.raises(EngineError, match=r"expected: ref, a, b"):
        whole.of("c")


@pytest.mark.parametrize("target", ["ref", "a", "b"])
def test_a_verification_is_of_one_target(target: str) -> None:
    found = several().with_verification(target, {"kl": 0.5})
    assert {each.target: dict(each.verification) for each in (found, *found.others)} == {
        name: {"kl": 0.5} if name == target else {} for name in ("ref", "a", "b")
    }


def test_names_of_rank_files() -> None:
    assert (rank_file(0), rank_file(3, "cuda")) == ("rank0.engine", "rank3.cuda.engine")


def test_values_are_wider_than_keys_where_a_head_has_odd_dims() -> None:
    kv = CacheGroup(layers=(0, 1, 2), kv_heads=2, head_dim=20, tokens_per_block=16, dtype=DType.BF16)
    assert (kv.padded_dim, kv.scale_bytes) == (32, 0)
    assert (kv.k_block_bytes, kv.v_block_bytes) == (2 * 16 * 40, 2 * 16 * 64)
    assert kv.block_bytes == 3 * 2 * 16 * 104
    codes = dataclasses.replace(kv, dtype=DType.I8)
    assert (codes.k_block_bytes, codes.v_block_bytes) == (2 * 16 * (20 + 4), 2 * 16 * (32 + 4))
