"""What the first 64 bytes of a TensorRT-RTX engine say, without the library.

 0  magic "vtrt"          16  bytes of the file     24  version, 4 bytes: 1, 7, 1, 116
28  magic once more       32  compute capabilities, a bit each
"""

import dataclasses
import struct

from ingot.errors import EngineError

HEADER_BYTES = 64
CAPABILITIES = {0x01: "7.5", 0x02: "8.0", 0x04: "8.6", 0x08: "8.9", 0x10: "12.0", 0x20: "12.1", 0x40: "newer"}

_MAGIC = b"vtrt"
_HEADER = struct.Struct("<4s12xQ4B4sI28x")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanHeader:
    """version: "1.7.1.116"; mask: of the compute capabilities that the engine is for."""

    nbytes: int
    version: str
    mask: int

    @property
    def capabilities(self) -> tuple[str, ...]:
        """In words; an unknown bit is its number."""
        return tuple(CAPABILITIES.get(bit, hex(bit)) for bit in (1 << i for i in range(32)) if self.mask & bit)


def read_header(data: bytes | memoryview, where: str) -> PlanHeader:
    """Raises EngineError for what is not a TensorRT-RTX engine, or one cut short."""
    if len(data) < HEADER_BYTES:
        raise EngineError("the TensorRT engine is cut short", where=where, got=f"{len(data)} bytes")
    magic, nbytes, *version, again, mask = _HEADER.unpack(bytes(data[:HEADER_BYTES]))
    if magic != _MAGIC or again != _MAGIC:
        raise EngineError("this is not a TensorRT-RTX engine", where=where, expected=repr(_MAGIC), got=repr(magic))
    return PlanHeader(nbytes=nbytes, version=".".join(map(str, version)), mask=mask)
