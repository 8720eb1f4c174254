"""``dualmap settings``: the settings in effect, and every setting that there is."""

from __future__ import annotations

import pytest
import yaml

from dualmap.cli.main import main
from dualmap.cli.settings import Settings
from dualmap.cli.show_settings import sections


def test_every_setting_is_described() -> None:
    rows = [row for _, _, rows in sections() for row in rows]
    assert len(rows) > 50
    assert [row.path for row in rows if not row.description] == []


def test_every_type_has_a_name_that_no_programmer_needs() -> None:
    rows = {row.path: row.kind for _, _, rows in sections() for row in rows}
    assert rows["router.record_dir"] == "path or none"
    assert [path for path, kind in rows.items() if "<" in kind] == []


def test_nested_lists_are_listed_with_their_items() -> None:
    paths = {row.path for _, _, rows in sections() for row in rows}
    assert {"router.port", "pools[].model", "pools[].instances[].url"} <= paths


def test_the_settings_in_effect_are_printed_as_a_file_that_can_be_read_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    secrets = ["--router.admin_key", "hunter2", "--store.url", "redis://fleet:hunter2@store:6379/0"]
    assert main(["settings", "--router.port", "1234", *secrets]) == 0

    printed = capsys.readouterr().out

    assert "hunter2" not in printed
    assert "store:6379/0" in printed
    assert Settings.model_validate(yaml.safe_load(printed)).router.port == 1234
