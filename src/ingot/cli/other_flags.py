"""Flags of vLLM and llama.cpp: which option of ingot does the same, or why there is none.

`app` answers an unknown option with its row. `python -m tests.house.flag_pages` writes the tables of docs/from from
the same rows; a test keeps them in step.
"""

import dataclasses
from collections.abc import Iterator, Sequence

LORA = "an engine holds no adapters: merge the adapter into its base model with `ingot convert --lora`"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """A row: flags of the other program that have one answer.

    flags  as the program's help writes them, a value behind a space: ("--max-num-seqs N",)
    way    what to use in ingot, or why there is nothing: Markdown without links
    where  the command of ingot, or "request": a field of a request; "" where nothing is given
    link   Markdown behind `way` in the documents, which the command line leaves out
    """

    flags: tuple[str, ...]
    way: str
    where: str = ""
    link: str = ""

    def names(self) -> Iterator[str]:
        """As an unknown option is called: "--max_num_seqs", "-ngl"."""
        return (canonical(flag.split()[0]) for flag in self.flags)

    def hint(self) -> str:
        """The next step for somebody who gave this flag to a command."""
        if self.where in ("", "request"):
            return self.way
        return f"in `ingot {'` or `ingot '.join(self.where.split(', '))}`: {self.way}"

    def markdown(self) -> str:
        """The row of a table."""
        flags = ", ".join(f"`{flag}`" for flag in self.flags).replace("|", "\\|")
        return f"| {flags} | {self.way}{' ' if self.link else ''}{self.link} | {self.where} |"


def canonical(name: str) -> str:
    """`--max-num-seqs` and `--max_num_seqs` are the same flag."""
    dashes = name[: len(name) - len(name.lstrip("-"))]
    return dashes + name.lstrip("-").replace("-", "_")


def flag(*flags: str, way: str, where: str = "", link: str = "") -> Flag:
    """A row, in the order of its cells."""
    return Flag(flags=flags, way=way, where=where, link=link)


def table(rows: Sequence[Flag], program: str) -> str:
    """Markdown."""
    return "\n".join([f"| {program} | ingot | where |", "|---|---|---|", *(row.markdown() for row in rows)])
