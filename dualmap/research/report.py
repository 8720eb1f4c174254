"""Reports: what studies hand over, as one HTML file that needs nothing else, and the same figures as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import orjson

from dualmap.research.table import Table, html_table, json_rows

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1150px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.7em } h2 { margin-top: 2.2em; border-bottom: 1px solid #ccc }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: 1px 9px; text-align: right } th:first-child, td:first-child { text-align: left }
thead th { border-bottom: 1px solid #888; vertical-align: bottom } tbody tr:nth-child(odd) { background: #f6f6f6 }
.plots { display: flex; flex-wrap: wrap; gap: 12px } figure { margin: 0 } figcaption { font-size: 12px; color: #555 }
details { margin: .8em 0 } summary { cursor: pointer }
.finding { background: #fff8e1; padding: .3em .8em; margin: .3em 0 }
"""


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    svg: str


@dataclass(frozen=True, slots=True)
class Section:
    """One study's part of a report."""

    name: str
    """The key of the section in the JSON."""
    title: str
    question: str
    """The claim or question of the section, and what was run."""
    findings: Sequence[str] = ()
    """The results, computed from the figures: losses are named like wins."""
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    data: Mapping[str, object] = field(default_factory=dict)
    """The figures for the JSON, where the tables do not hold them all."""


def render_html(title: str, sections: Sequence[Section], rules: Sequence[str]) -> str:
    """The whole report; ``rules`` are the conditions that hold for all of it."""
    contents = "".join(f'<li><a href="#{s.name}">{escape(s.title)}</a></li>' for s in sections)
    conditions = "".join(f"<li>{escape(rule)}</li>" for rule in rules)
    body = "".join(map(_section, sections))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>DualMap evaluation</title>"
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"<ul>{conditions}</ul><ol>{contents}</ol>{body}</body></html>\n"
    )


def _section(section: Section) -> str:
    findings = "".join(f"<p class='finding'>{escape(finding)}</p>" for finding in section.findings)
    figures = "".join(
        f"<figure>{_inline(plot.svg)}<figcaption>{escape(plot.title)}</figcaption></figure>" for plot in section.plots
    )
    tables = "".join(map(html_table, section.tables))
    return (
        f"<h2 id='{section.name}'>{escape(section.title)}</h2><p>{escape(section.question)}</p>{findings}"
        f"<div class='plots'>{figures}</div>{tables}"
    )


def _inline(svg: str) -> str:
    """SVG without the XML prologue, which HTML does not know."""
    return svg[svg.index("<svg") :]


def render_json(plan: Mapping[str, object], sections: Sequence[Section], rules: Sequence[str]) -> str:
    document = {
        "plan": plan,
        "rules": rules,
        "sections": {
            section.name: {
                "title": section.title,
                "findings": list(section.findings),
                "tables": {table.title: json_rows(table) for table in section.tables},
                **section.data,
            }
            for section in sections
        },
    }
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode()
