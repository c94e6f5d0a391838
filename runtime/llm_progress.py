"""How many prompts are done: a bar on stderr."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn


@contextlib.contextmanager
def show_progress(wanted: bool | None, count: int) -> Iterator[Callable[[], object]]:
    """What to call when one of `count` prompts is done.

    wanted  None: on a terminal, for more than one prompt. In a log a bar is one line, at its end
    """
    console = Console(stderr=True)
    if not (console.is_terminal and count > 1 if wanted is None else wanted):
        yield lambda: None
        return
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("prompts", total=count)
        yield lambda: bar.advance(task)
    if not console.is_terminal:
        console.line()
