"""What NVIDIA's data sheets say of GPUs: the figures that estimates rest on, and where each comes from.

Rates are dense (without sparsity), of products that add up in float32.
"""

import dataclasses

from ingot.dtypes import DType

BYTES, OPERATIONS = 0.8, 0.6  # what good kernels reach of a data sheet; what published figures of engines agree with
LAUNCH = 3e-6  # seconds within a graph: an assumption until a GPU has run one
EXCHANGE = 8e-6  # seconds of a call of NCCL between GPUs of one machine: an assumption, as in `ingot plan`


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU.

    name       on the command line
    title      as its data sheet calls it
    code       the machine code that runs on it, as the compiler calls it
    memory, l2 bytes
    bandwidth  of its memory, bytes per second
    link       to other GPUs, bytes per second in one direction: NVLink, or PCIe where it has none
    rate, rate_fp8, rate_f32  operations per second of products in 16 bits, in FP8 (0: it has none), in float32
    source     of all of them
    """

    name: str
    title: str
    code: str
    memory: float
    bandwidth: float
    link: float
    rate: float
    rate_fp8: float
    rate_f32: float
    multiprocessors: int
    l2: float
    source: str

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor number."""
        digits = self.code.removeprefix("sm_").rstrip("a")
        return int(digits[:-1]), int(digits[-1])

    def rate_of(self, dtype: DType) -> float:
        """Operations per second of products in a type."""
        return self.rate_f32 if dtype is DType.F32 else self.rate

    def seconds(self, nbytes: float, operations: float, launches: int = 0, *, rate: float | None = None) -> float:
        """One op: the larger of what its bytes and its operations take, and its launches. rate: default in 16 bits."""
        reached = OPERATIONS * (self.rate if rate is None else rate)
        return max(nbytes / (BYTES * self.bandwidth), operations / reached) + LAUNCH * launches

    def exchange_seconds(self, nbytes: float, calls: int) -> float:
        """What it gets from other ranks of the machine, in calls of NCCL."""
        return nbytes / (BYTES * self.link) + EXCHANGE * calls


def _device(
    name: str,
    title: str,
    code: str,
    memory: float,
    bandwidth: float,
    link: float,
    rates: tuple[float, float, float],
    multiprocessors: int,
    l2: float,
    source: str,
) -> Device:
    """memory in GB, bandwidth and link in GB/s, rates (16 bits, FP8, float32) in TFLOP/s, l2 in MiB."""
    rate, rate_fp8, rate_f32 = (1e12 * each for each in rates)
    return Device(
        name=name,
        title=title,
        code=code,
        memory=1e9 * memory,
        bandwidth=1e9 * bandwidth,
        link=1e9 * link,
        rate=rate,
        rate_fp8=rate_fp8,
        rate_f32=rate_f32,
        multiprocessors=multiprocessors,
        l2=float(l2 * (1 << 20)),
        source=source,
    )


_AMPERE, _HOPPER = "NVIDIA A100 data sheet and Ampere white paper", "NVIDIA H100 data sheet and Hopper white paper"
_ADA, _BLACKWELL = "NVIDIA Ada white paper", "NVIDIA RTX Blackwell white paper"
_SXM = (989, 1979, 67)

DEVICES = {
    each.name: each
    for each in (
        _device("a100-40", "A100 40 GB", "sm_80", 40, 1555, 300, (312, 0, 19.5), 108, 40, _AMPERE),
        _device("a100-80", "A100 80 GB SXM", "sm_80", 80, 2039, 300, (312, 0, 19.5), 108, 40, _AMPERE),
        _device("a10", "A10", "sm_86", 24, 600, 32, (125, 0, 31.2), 72, 6, "NVIDIA A10 data sheet"),
        _device("l4", "L4", "sm_89", 24, 300, 32, (121, 242, 30.3), 58, 48, "NVIDIA L4 data sheet"),
        _device("l40s", "L40S", "sm_89", 48, 864, 32, (362, 733, 91.6), 142, 96, "NVIDIA L40S data sheet"),
        _device("rtx4090", "GeForce RTX 4090", "sm_89", 24, 1008, 32, (165.2, 330.3, 82.6), 128, 72, _ADA),
        _device("h100", "H100 SXM", "sm_90a", 80, 3350, 450, _SXM, 132, 50, _HOPPER),
        _device("h100-pcie", "H100 PCIe", "sm_90a", 80, 2000, 300, (756, 1513, 51), 114, 50, _HOPPER),
        _device("h100-nvl", "H100 NVL", "sm_90a", 94, 3900, 300, (835, 1671, 60), 132, 50, _HOPPER),
        _device("h200", "H200 SXM", "sm_90a", 141, 4800, 450, _SXM, 132, 50, "NVIDIA H200 data sheet"),
        _device("gh200", "GH200 96 GB", "sm_90a", 96, 4000, 450, _SXM, 132, 50, "NVIDIA GH200 data sheet"),
        _device(
            "b200", "B200 (HGX)", "sm_100", 180, 7700, 900, (2250, 4500, 75), 148, 126, "NVIDIA HGX B200 data sheet"
        ),
        _device("rtx5090", "GeForce RTX 5090", "sm_120", 32, 1792, 64, (209.5, 419, 104.8), 170, 96, _BLACKWELL),
    )
}


def devices_of(code: str) -> tuple[Device, ...]:
    """GPUs of the table that a target is for. code: its machine code."""
    return tuple(each for each in DEVICES.values() if each.code == code)
