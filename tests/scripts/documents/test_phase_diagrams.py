"""The pictures and the table of a request's phases, and the page around them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import pytest

from dualmap.cli.show_settings import sections
from dualmap.router.answers import machine as answers
from dualmap.router.errors import AdminClosedError, ConflictError, ForeignPageError, ReadOnlyError, RouterError
from dualmap.scheduling.request.machine import ON_AN_INSTANCE, Input, Phase
from dualmap.scheduling.request.outcome import FailureKind, Outcome
from scripts.documents.phase_diagrams import ANSWER, DRAWINGS, MACHINES, PAGE, REQUEST, Drawing, Frame, Machine, table
from tests.support.metric_names import existing_metrics

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
NAMED = (DOCS / PAGE).read_text("utf-8")


def kinds(root: type[RouterError]) -> Iterator[type[RouterError]]:
    yield root
    for kind in root.__subclasses__():
        yield from kinds(kind)


def shown(machine: Machine) -> set[tuple[StrEnum, StrEnum]]:
    """The transitions that pictures show of a machine."""
    drawings = [drawing for drawing in DRAWINGS if drawing.machine is machine]
    drawn = {(phase, given) for drawing in drawings for phase, given, _ in drawing.arrows()}
    return drawn | {
        (phase, given) for drawing in drawings for frame, given, _ in drawing.framed_arrows() for phase in frame.phases
    }


def moves(machine: Machine) -> set[tuple[StrEnum, StrEnum]]:
    return {(phase, given) for (phase, given), target in machine.transitions.items() if phase is not target}


def test_the_pictures_show_every_transition_of_a_request_to_another_phase() -> None:
    told = {(phase, given) for phase in ON_AN_INSTANCE for given in (Input.FAILED, Input.BROKE_OFF)}
    told |= {(phase, Input.ENDED) for phase in Phase} | {(Phase.DISPATCHED, Input.MOVED)}

    assert moves(REQUEST) - told <= shown(REQUEST)


def test_the_picture_shows_every_transition_of_an_answer_that_the_page_does_not_tell() -> None:
    """Before a part was sent, an answer that is over, or that its client or replica leaves, has no arrow."""
    phase, given = answers.AnswerPhase, answers.AnswerInput
    told = {(each, end) for each in phase for end in (given.LEFT,)}
    told |= {(each, end) for each in answers.HOLDING for end in (given.COMPLETED, given.BROKE_OFF)}
    told |= {(each, given.COMPLETED) for each in (phase.AWAITING_BODY, phase.COLLECTING)}
    told |= {(each, given.FAILED) for each in (phase.AWAITING_HEAD, phase.COLLECTING)}
    told |= {(phase.AWAITING_BODY, given.BROKE_OFF), (phase.WATCHING, given.CONTINUES)}

    assert moves(ANSWER) - told <= shown(ANSWER)


def test_an_arrow_from_a_frame_that_is_not_true_of_each_phase_is_an_error() -> None:
    frame = Frame("both", (0, 0), (9, 9), frozenset({Phase.NEW, Phase.DISPATCHED}), (Input.FAILED,))

    with pytest.raises(ValueError, match="does not lead from all of 'both' to one phase"):
        list(Drawing("x", (9, 9), {}, (frame,), frozenset()).framed_arrows())


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_the_table_has_a_row_for_each_phase(machine: Machine) -> None:
    rows = table(machine).splitlines()[2:]

    assert [row.split("**")[1] for row in rows] == [phase.value.replace("_", " ") for phase in machine.phases]


def test_the_table_says_where_the_inputs_of_a_phase_lead() -> None:
    rows = table(REQUEST).splitlines()[2:]

    assert "| The request waits in the queue of an instance, and can be moved. | taken → **dispatched**;" in rows[5]


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
