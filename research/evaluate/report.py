"""The report: one HTML file that needs nothing else, and the same figures as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape

import orjson

from dualmap.research.evaluate.plan import PAPER_CAPS, PAPER_SLO_S, Plan
from dualmap.research.evaluate.section import Cell, DataTable, Section
from dualmap.scheduling.state.instance import InstanceSpec

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


def render_html(plan: Plan, sections: Sequence[Section], rules: Sequence[str]) -> str:
    """The whole report; ``rules`` are the conditions that hold for all of it."""
    contents = "".join(f'<li><a href="#{s.name}">{escape(s.title)}</a></li>' for s in sections)
    conditions = "".join(f"<li>{escape(rule)}</li>" for rule in rules)
    body = "".join(map(_section, sections))
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>DualMap evaluation</title>"
        f"<style>{_STYLE}</style></head><body><h1>DualMap evaluation ({escape(plan.name)})</h1>"
        f"<ul>{conditions}</ul><ol>{contents}</ol>{body}</body></html>\n"
    )


def rules_of(plan: Plan) -> list[str]:
    """What the reader must know before any figure."""
    window = InstanceSpec("", "").dispatch_window_tokens
    caps = ", ".join(f"{cap:,} ({preset})" for preset, cap in PAPER_CAPS.items())
    return [
        "Simulated in virtual time: the scheduling code and the state of queues are the product's own, the engines are "
        "models, the network takes no time.",
        f"Traces: Conversation from {plan.conversation!r}, Tool&Agent from {plan.toolagent!r}, first "
        f"{plan.conversation_requests:,} and {plan.toolagent_requests:,} requests, the first {plan.skip_requests} left "
        f"out of the figures; prompts capped at {caps} tokens; times scaled to the rate with their bursts; "
        f"seed {plan.seed}.",
        *([f"Engines changed by {plan.engine_changes!r}."] if plan.engine_changes else ()),
        f"TTFT counts from the arrival at the router, time held in the fleet included. SLO {PAPER_SLO_S:g} s.",
        f"DualMap and its variants hold requests in the fleet and dispatch within a window of {window:,} tokens; the "
        "other policies send every request at once, as their own projects do, and see the engines' queues at once.",
        "Other policies run with the product's defaults, which are their projects' parameters or better ones: Dynamo's "
        "prefill scale is the 32 of its own replay, Preble leaves a hot instance at twice the least load.",
        "dualmap is the paper's: queue order first come, first served. dualmap-least-cost is not the paper's: it looks "
        "past the pair and orders its queues by deadline.",
    ]


def _section(section: Section) -> str:
    findings = "".join(f"<p class='finding'>{escape(finding)}</p>" for finding in section.findings)
    figures = "".join(
        f"<figure>{_inline(plot.svg)}<figcaption>{escape(plot.title)}</figcaption></figure>" for plot in section.plots
    )
    tables = "".join(map(_table, section.tables))
    return (
        f"<h2 id='{section.name}'>{escape(section.title)}</h2><p>{escape(section.question)}</p>{findings}"
        f"<div class='plots'>{figures}</div>{tables}"
    )


def _inline(svg: str) -> str:
    """SVG without the XML prologue, which HTML does not know."""
    return svg[svg.index("<svg") :]


def _table(table: DataTable) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(show(cell))}</td>" for cell in row) + "</tr>" for row in table.rows)
    summary = f"{escape(table.title)} ({len(table.rows)} rows)"
    return (
        f"<details{' open' if len(table.rows) <= 24 else ''}><summary>{summary}</summary>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></details>"
    )


def show(cell: Cell) -> str:
    """A number with about three digits, everything else as it is."""
    if not isinstance(cell, float):
        return str(cell)
    if cell == float("inf"):
        return "∞"
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.1f}" if abs(cell) >= 100 else f"{cell:.2f}"


def render_json(plan: Plan, sections: Sequence[Section]) -> str:
    document = {
        "plan": asdict(plan),
        "rules": rules_of(plan),
        "sections": {
            section.name: {
                "title": section.title,
                "findings": list(section.findings),
                "tables": {
                    table.title: [dict(zip(table.columns, row, strict=True)) for row in table.rows]
                    for table in section.tables
                },
                **section.data,
            }
            for section in sections
        },
    }
    return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode()
