"""What turns thinking on and off, by what a template has; and switches that have nothing to turn off."""

import pytest

from ingot.runtime.thinking_switch import find_switch, without_idle_switches


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"messages", "enable_thinking"}, ("enable_thinking", True, False)),
        ({"thinking"}, ("thinking", True, False)),
        ({"thinking_mode"}, ("thinking_mode", "enabled", "disabled")),
        ({"messages"}, None),
    ],
)
def test_the_switch_of_a_template(variables: set[str], expected: object) -> None:
    assert find_switch(variables) == expected


def test_what_turns_off_nothing_is_left_out_and_all_else_stays() -> None:
    given = {"enable_thinking": False, "thinking": 0, "thinking_mode": "disabled", "loud": False}
    assert without_idle_switches(given, set(), reasons=False) == {"thinking": 0, "loud": False}
    assert without_idle_switches(given, set(), reasons=True) == given
    assert without_idle_switches(given, {"thinking"}, reasons=False) == given
