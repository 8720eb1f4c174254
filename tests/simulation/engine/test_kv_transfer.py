"""The cost of moves of KV, with times computed by hand."""

from __future__ import annotations

import pytest

from dualmap.simulation.engine.kv_transfer import KvLinks, KvTransfer
from dualmap.simulation.engine.presets import PRESETS

# A thousand tokens take a second on a link, and every move 100 ms besides.
TRANSFER = KvTransfer(bytes_per_token=1000, bytes_per_s=1e6, latency_s=0.1)


def test_a_move_over_idle_links_takes_its_latency_and_its_bytes_over_the_bandwidth() -> None:
    assert KvLinks(TRANSFER).move("p1", "d1", 500, 3.0) == pytest.approx(3.6)
    assert TRANSFER.alone_s(500) == pytest.approx(0.6)


def test_moves_from_one_instance_share_its_link() -> None:
    links = KvLinks(TRANSFER)
    assert links.move("p1", "d1", 1000, 0.0) == pytest.approx(1.1)
    assert links.move("p1", "d2", 1000, 0.5) == pytest.approx(2.1)
    # one between other instances does not wait
    assert links.move("p2", "d3", 1000, 0.5) == pytest.approx(1.6)


def test_moves_to_one_instance_share_its_link() -> None:
    links = KvLinks(TRANSFER)
    links.move("p1", "d1", 2000, 0.0)
    assert links.move("p2", "d1", 500, 1.0) == pytest.approx(2.6)
    # and p2's own link was busy for its own bytes only, until 1.5
    assert links.move("p2", "d2", 500, 1.0) == pytest.approx(2.1)


def test_a_link_that_was_idle_saves_nothing_up() -> None:
    links = KvLinks(TRANSFER)
    links.move("p1", "d1", 1000, 0.0)
    assert links.move("p1", "d1", 1000, 5.0) == pytest.approx(6.1)
    assert links.moved_tokens == 2000


def test_the_presets_move_the_kv_of_their_model() -> None:
    # 28 layers of 4 KV heads of 128, and 48 of 8: keys and values, two bytes each
    names = ("qwen2.5-7b-910b4", "qwen2.5-14b-910b3")
    assert [PRESETS[name].engine.transfer.bytes_per_token for name in names] == [57_344, 196_608]
    # so 8,192 tokens of the smaller model take 28 ms
    assert PRESETS["qwen2.5-7b-910b4"].engine.transfer.alone_s(8192) == pytest.approx(0.0285, abs=1e-4)


@pytest.mark.parametrize("figures", [(0, 1.0, 0.0), (1, 0.0, 0.0), (1, float("inf"), 0.0), (1, 1.0, -0.1)])
def test_figures_that_no_link_has_are_refused(figures: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="a transfer needs"):
        KvTransfer(*figures)
