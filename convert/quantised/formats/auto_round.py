"""AutoRound: the packing of GPTQ or AWQ, with bits and groups by module. Two of its names of GPTQ's packing store zero
points as they are.
"""

from ingot.configs.read import Section
from ingot.convert.quantised.form import Quantised
from ingot.convert.quantised.formats.awq import read_awq
from ingot.convert.quantised.formats.gptq import Packing, read_gptq
from ingot.convert.quantised.module import Format, Module, sections, unsupported
from ingot.convert.quantised.patterns import matches

_LESS = {"auto_round:auto_gptq": 1, "auto_round:gptq": 1, "auto_round": 0, "auto_round:gptqmodel": 0}
_AWQ = ("auto_round:auto_awq", "auto_round:awq")


def read(module: Module) -> Quantised:
    settings, own = module.settings, _own(module.settings, module.name)
    packing = settings.text("packing_format", "auto_round:auto_gptq")
    if packing not in (*_LESS, *_AWQ):
        raise unsupported(
            "AutoRound with this packing_format is not supported",
            settings,
            "packing_format",
            ", ".join((*_LESS, *_AWQ)),
        )
    for section in (settings, own):
        if section.text("data_type", "int") != "int":
            raise unsupported("AutoRound with this data_type is not supported", section, "data_type", "int")
    bits = own.integer("bits", settings.integer("bits", 4))
    group_size = own.integer("group_size", settings.integer("group_size", 128, minimum=-1), minimum=-1)
    if packing in _AWQ:
        if bits != 4:
            raise unsupported("AWQ with this number of bits is not supported", own, "bits", "4")
        return read_awq(module, group_size)
    symmetric = own.boolean("sym", settings.boolean("sym", True))
    return read_gptq(module, Packing(bits=bits, group_size=group_size, symmetric=symmetric, less=_LESS[packing]))


def _own(settings: Section, name: str) -> Section:
    """What extra_config says of a module: by its name, or by a pattern."""
    for key, values in sections(settings, "extra_config").items():
        if key == name or (any(mark in key for mark in "*^$\\") and matches(key, name)):
            return values
    return Section({}, settings.where)


def _skipped(settings: Section) -> tuple[str, ...]:
    own = sections(settings, "extra_config")
    return tuple(name for name, values in own.items() if values.integer("bits", 4) >= 16)


FORMAT = Format(
    names=("auto-round", "auto_round", "intel/auto-round"),
    marks=("qweight",),
    parts=("qweight", "qzeros", "scales", "g_idx"),
    read=read,
    skipped=_skipped,
)
