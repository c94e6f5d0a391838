"""The variables of chat templates that turn thinking on and off."""

from collections.abc import Container, Mapping
from typing import NamedTuple


class ThinkingSwitch(NamedTuple):
    """A variable, and its two values."""

    name: str
    on: object = True
    off: object = False


SWITCHES = (
    ThinkingSwitch("enable_thinking"),
    ThinkingSwitch("thinking"),
    ThinkingSwitch("thinking_mode", "enabled", "disabled"),
)


def find_switch(variables: Container[str]) -> ThinkingSwitch | None:
    """The one that a template has. variables: all that it asks for."""
    return next((each for each in SWITCHES if each.name in variables), None)


def without_idle_switches(
    arguments: Mapping[str, object], variables: Container[str], *, reasons: bool
) -> dict[str, object]:
    """Arguments of a template without those that turn off what is not there.

    reasons: the model has a format of reasoning. Without one, and without a switch in the template, a switch that turns
    thinking off has nothing to do.
    """
    if reasons or find_switch(variables) is not None:
        return dict(arguments)
    off = {each.name: each.off for each in SWITCHES}
    idle = {name for name, value in arguments.items() if type(value) is type(off.get(name)) and value == off[name]}
    return {name: value for name, value in arguments.items() if name not in idle}
