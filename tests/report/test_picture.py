"""Pictures of schedules: what is in them, and that they are the same every time."""

import re
from xml.dom import minidom

import pytest

from adl_dist.report.picture import draw
from adl_dist.schedule import METHODS, Costs, Pipeline, method
from tests.support.commands import ROOT
from tools import docs_picture


def drawn(pipeline, path, **how):
    draw(pipeline, path / "a.svg", **how)
    minidom.parse(str(path / "a.svg"))
    return (path / "a.svg").read_text()


@pytest.mark.parametrize("costs", [None, Costs.balanced(3, link=0.3)])
def test_every_forward_backward_update_and_message_is_drawn_once(costs, tmp_path):
    svg = drawn(Pipeline(method("adl", accumulation_steps=2), 3), tmp_path, num_micro_batches=6, costs=costs)
    words = re.findall(r'<text x="50%"[^>]*>([^<]*)</text>', svg)
    for b in range(6):
        assert words.count(str(b)) == 2 * 3
    assert [words.count(f"U{s}") for s in range(4)] == [3, 3, 3, 0]
    # d = 4, 2, 0 with M = 2: stage 0 counts 0 0 1 1 2 2, stage 1 0 0 1 1 1 1, stage 2 nothing but 0.
    assert [svg.count(f", staleness {n}</title>") for n in range(3)] == [2 + 2 + 6, 2 + 4, 2]
    assert svg.count("<line ") == 6 * 2 * 2
    assert ">Accumulated Decoupled Learning (Zhuang et al., ICML 2021)<" in svg
    assert ">K = 3 stages, M = 2, stash weights, 6 micro-batches<" in svg


@pytest.mark.parametrize("chosen", [*map(method, METHODS), method("adl", split_backward=True)], ids=lambda m: m.name)
def test_every_method_can_be_drawn(chosen, tmp_path):
    svg = drawn(Pipeline(chosen, 3), tmp_path, num_micro_batches=6)
    places = [(float(x), float(width)) for x, width in re.findall(r'x="([\d.]+)%" y="[\d.]+" width="([\d.]+)%"', svg)]
    assert all(x >= 0 and x + width < 100.01 for x, width in places)


def test_the_same_schedule_gives_the_same_bytes(tmp_path):
    first, second = (drawn(Pipeline(method("adl"), 2), tmp_path, num_micro_batches=4) for _ in range(2))
    assert first == second
    assert [file.name for file in tmp_path.iterdir()] == ["a.svg"]


def test_the_pictures_of_the_docs_are_those_of_their_script(tmp_path):
    """The same bytes with the versions of constraints.txt, since letters are drawn as shapes."""
    docs_picture.draw(tmp_path)
    for name in ("light", "dark"):
        made = (tmp_path / f"schedule-{name}.svg").read_bytes()
        assert made == (ROOT / f"docs/images/schedule-{name}.svg").read_bytes()
