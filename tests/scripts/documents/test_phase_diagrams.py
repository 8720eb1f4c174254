"""The pictures and the table of a request's phases, and the page around them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualmap.cli.show_settings import sections
from dualmap.router.errors import AdminClosedError, ConflictError, ForeignPageError, ReadOnlyError, RouterError
from dualmap.scheduling.request.machine import ON_AN_INSTANCE, TRANSITIONS, Input, Phase
from dualmap.scheduling.request.outcome import FailureKind, Outcome
from scripts.documents.phase_diagrams import DRAWINGS, PAGE, Drawing, Frame, table
from tests.support.metric_names import existing_metrics

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
NAMED = (DOCS / PAGE).read_text("utf-8")


def kinds(root: type[RouterError]) -> Iterator[type[RouterError]]:
    yield root
    for kind in root.__subclasses__():
        yield from kinds(kind)


def test_the_pictures_show_every_transition_to_another_phase() -> None:
    drawn = {(phase, given) for drawing in DRAWINGS for phase, given, _ in drawing.arrows()}
    framed = {
        (phase, given) for drawing in DRAWINGS for frame, given, _ in drawing.framed_arrows() for phase in frame.phases
    }
    told = {(phase, given) for phase in ON_AN_INSTANCE for given in (Input.FAILED, Input.BROKE_OFF)}
    told |= {(phase, Input.ENDED) for phase in Phase} | {(Phase.DISPATCHED, Input.MOVED)}

    assert {
        (phase, given) for (phase, given), target in TRANSITIONS.items() if phase is not target
    } - told <= drawn | framed


def test_an_arrow_from_a_frame_that_is_not_true_of_each_phase_is_an_error() -> None:
    frame = Frame("both", (0, 0), (9, 9), frozenset({Phase.NEW, Phase.DISPATCHED}), (Input.FAILED,))

    with pytest.raises(ValueError, match="does not lead from all of 'both' to one phase"):
        list(Drawing("x", (9, 9), {}, (frame,), frozenset()).framed_arrows())


def test_the_table_has_a_row_for_each_phase_and_says_where_its_inputs_lead() -> None:
    rows = table().splitlines()[2:]

    assert [row.split("**")[1] for row in rows] == [phase.value.replace("_", " ") for phase in Phase]
    assert "| The request waits in the queue of an instance, and can be moved. | taken → **dispatched**;" in rows[4]


def test_the_page_says_of_every_error_and_failure_of_inference_what_the_client_gets() -> None:
    # of /admin, and of paths of the router's own
    elsewhere = {ConflictError.code, ReadOnlyError.code, AdminClosedError.code, ForeignPageError.code}
    codes = {kind.code for kind in kinds(RouterError)} - elsewhere
    words = {*codes, *(kind.value for kind in FailureKind), *(outcome.value for outcome in Outcome)}

    assert {word for word in words - {Outcome.COMPLETED} if f"`{word}`" not in NAMED} == set()
    for status, code in re.findall(r"(\d{3}) `(\w+)`", NAMED):
        assert (int(status), code) in {(kind.status, kind.code) for kind in kinds(RouterError)}


def test_settings_metrics_and_files_that_the_page_names_exist() -> None:
    names = set(re.findall(r"`([^`\n]+)`", NAMED))
    settings = {row.path for _, _, rows in sections() for row in rows}
    files_named = {name for name in names if "/" in name and not name.startswith("/")}

    assert {name for name in names if re.match(r"(router|scheduling|store|pools\[\])\.", name)} <= settings
    assert {name.partition("{")[0] for name in names if name.startswith("dualmap_")} <= existing_metrics()
    assert files_named and all((ROOT / name).exists() for name in files_named)
