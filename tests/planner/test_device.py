"""Devices of `ingot plan`: how long their steps take, and the files that describe them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.engine import read_plan
from ingot.errors import ConfigError, UsageError
from ingot.planner.cost import plan_cost
from ingot.planner.device import Device, read_devices, step_seconds
from tests.e2e.test_tensor_parallel import made
from tests.planner.test_planner import FILE, MINE


def test_memory_and_arithmetic_overlap_as_the_device_says(tmp_path: Path) -> None:
    """Tokens of a decode step take from the sum of both times down to the longer one."""
    build(BuildConfig(target="ref", autotune=False), made(tmp_path, "llama"), tmp_path / "e")
    cost = plan_cost(read_plan(tmp_path / "e"))
    past, new = np.zeros(64, np.int64), np.ones(64, np.int64)

    bare = dataclasses.replace(MINE, layer_seconds=0, request_seconds=0)

    def seconds(device: Device) -> float:
        return step_seconds(cost, device, 1, past, new, 64).total

    read = seconds(dataclasses.replace(bare, rates={"f32": 1e30, "bf16": 1e30}))
    computed = seconds(dataclasses.replace(bare, bandwidth=1e30))
    assert min(read, computed) > 0.01 * max(read, computed), "both count"
    found = [seconds(dataclasses.replace(bare, overlap=order)) for order in (1, 1.5, 2, 6, 16, 1e6)]
    assert found[0] == pytest.approx(read + computed)
    assert found == sorted(found, reverse=True)
    assert max(read, computed) < found[-1] == found[-2] < 1.1 * max(read, computed)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = [", "not valid TOML"),
        ("", "names no device"),
        (FILE + "colour = 1\n", "colour"),
        (FILE.replace("memory = 8e9", ""), "memory"),
        (FILE.replace("price = 2.0", "price = -1"), "price"),
        (FILE.replace("10e9", "0"), "bandwidth"),
        (FILE.replace("10e9", "nan"), "bandwidth"),
        (FILE.replace("10e9", '"fast"'), "bandwidth"),
        (FILE + "bytes_reached = 0\n", "bytes_reached"),
        (FILE + "overlap = 0.5\n", r"overlap has a wrong value(.|\n)*at least 1"),
        (FILE.replace("{f32 = 1e11, bf16 = 1e11, int8 = 2e11}", "3"), "rates has a wrong value"),
        (FILE.replace("int8", "int7"), "int7"),
        (FILE.replace("rates = {f32 = 1e11, bf16 = 1e11, int8 = 2e11}", ""), "rates is missing"),
        ("device = 3\n", "tables"),
        ("x = " + 2000 * "[" + 2000 * "]", "not valid TOML"),
        ('[[device]]\nname = "a"\nlike = "h1000"\n', "did you mean 'h100'"),
        ('[[device]]\nname = "a"\nlike = 5\n', "like has a wrong value"),
    ],
)
def test_files_of_devices_that_are_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "d.toml"
    path.write_text(text)
    with pytest.raises((UsageError, ConfigError), match=words):
        read_devices(str(path))


def test_devices_by_name(tmp_path: Path) -> None:
    assert [each.name for each in read_devices("h100, l4")] == ["h100", "l4"]
    assert all(each.source for each in read_devices("h100,l4"))
    with pytest.raises(UsageError, match="there is no device"):
        read_devices("abacus")
    path = tmp_path / "d.toml"
    path.write_text('[[device]]\nname = "ours"\nlike = "h100"\nprice = 3\n')
    (device,) = read_devices(str(path))
    assert (device.name, device.price, device.bandwidth) == ("ours", 3, read_devices("h100")[0].bandwidth)
    nvlink, pcie = read_devices("h100,l4")
    assert (nvlink.link_seconds, nvlink.link_bandwidth) == (8e-6, 300e9)
    assert (pcie.link_seconds, round(pcie.link_bandwidth / 1e9)) == (20e-6, 21), "no NVLink"
    assert (pcie.rate("fp8"), read_devices("a10")[0].rate("fp8")) == (242e12, 125e12), (
        "in 16 bits where there is no FP8"
    )
