"""Log lines of the serving commands."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from dualmap.cli.logs import log_to_stderr


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("loud", "dualmap.loud"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_a_line_is_one_json_object_whatever_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("info", style="json")

    logging.getLogger("dualmap.router.serving.serve").warning('two\nlines of "%s"', "schlüssel")
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("dualmap.workers").exception("failed")

    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert first["message"] == 'two\nlines of "schlüssel"'
    assert (first["level"], first["logger"]) == ("warning", "dualmap.router.serving.serve")
    assert first["time"].endswith("+00:00")
    assert "ValueError: no" in second["exception"]


def test_a_package_may_have_a_level_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("warning", levels={"loud": "debug"})

    logging.getLogger("loud.part").debug("heard")
    logging.getLogger("other").info("not heard")

    assert capsys.readouterr().err.endswith("DEBUG   loud.part: heard\n")


def test_a_package_of_ours_is_named_with_or_without_the_namespace(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("warning", levels={"loud": "debug"})
    logging.getLogger("dualmap.loud.part").debug("heard")
    log_to_stderr("warning", levels={"dualmap.loud": "info"})
    logging.getLogger("dualmap.loud.part").debug("not heard")

    assert capsys.readouterr().err.endswith("DEBUG   dualmap.loud.part: heard\n")
