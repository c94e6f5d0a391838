"""The PTX of the kernels that put together what ranks have exchanged."""

import pytest

from tests.plugins.cuda import test_exchanges
from tests.plugins.cuda.ptx.launches import Interpreted


@pytest.mark.slow
def test_what_ranks_have_exchanged(interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch) -> None:
    for sums in test_exchanges.SUMS:
        test_exchanges.check_sums(interpreted.driver, *sums, monkeypatch)
    for columns in test_exchanges.COLUMNS:
        test_exchanges.check_columns(interpreted.driver, *columns)
    assert {name for name, _ in interpreted.counted} == {"add_ranks", "join_ranks"}
