"""Tables in documents, written by a command from a file of results: no figure is typed by hand.

A document holds blocks: a line ``<!-- laboratory FOLDER: NAME -->``, what the command writes, and ``<!-- end -->``.
FOLDER is the last part of the folder of results, so that a document can show several. NAME is a table's title in small
letters with ``-`` between the words, or ``made`` for the commit, the day and the command.
"""

from __future__ import annotations

import re

from dualmap.research.suites.orders import order_tables
from dualmap.research.suites.overview import overview_tables
from dualmap.research.suites.results import SuiteResult
from dualmap.research.suites.summary import summary_tables
from dualmap.research.table import Table, markdown_rows
from dualmap.simulation.errors import SimulationError

_BLOCK = re.compile(
    r"(?P<begin><!-- laboratory (?P<folder>\S+): (?P<name>[^>]*?) -->\n).*?(?P<end><!-- end -->)", re.DOTALL
)
MADE = "made"


def filled(text: str, folder: str, outcome: SuiteResult) -> str:
    """The document with every block of that folder written again.

    Raises:
        SimulationError: a block's name is none of a table.
    """
    blocks = blocks_of(outcome)

    def write(found: re.Match[str]) -> str:
        name = found["name"]
        if found["folder"] != folder:
            return found[0]
        if name not in blocks:
            raise SimulationError(f"the document asks for {name!r}; the results have {', '.join(blocks)}")
        return f"{found['begin']}\n{blocks[name]}\n\n{found['end']}"

    return _BLOCK.sub(write, text)


def blocks_of(outcome: SuiteResult) -> dict[str, str]:
    """The blocks that may stand in a document, by name."""
    tables = [*order_tables(outcome), *overview_tables(outcome), *summary_tables(outcome)]
    blocks = {_name(table.title): _markdown(table) for table in tables}
    if outcome.made is not None:
        seeds = {len(own) for own in outcome.seeds.values()}
        requests = outcome.suite.requests_per_instance
        counts = " or ".join(str(count) for count in sorted(seeds))
        blocks[MADE] = f"{outcome.made.sentence}. Seeds: {counts}; {requests} requests an instance."
    return blocks


def _name(title: str) -> str:
    return "-".join(re.findall(r"[a-z0-9.]+", title.lower()))


def _markdown(table: Table) -> str:
    return "\n".join([*markdown_rows(table), "", *filter(None, table.notes)])
