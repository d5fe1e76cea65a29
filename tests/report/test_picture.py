"""Pictures of schedules: what is in them, and that they are the same every time."""

import re

import pytest

from adl_dist.report.picture import draw, picture
from adl_dist.schedule import METHODS, Costs, Pipeline, method
from tests.support.commands import ROOT
from tools import docs_picture


def texts(figure):
    return [text.get_text() for text in (*figure.axes[0].texts, *figure.texts) if text.get_text()]


def arrows(figure):
    return [text for text in figure.axes[0].texts if getattr(text, "arrow_patch", None) is not None]


@pytest.mark.parametrize("costs", [None, Costs.balanced(3, link=0.3)])
def test_every_forward_backward_update_and_message_is_drawn_once(costs):
    figure = picture(Pipeline(method("adl", accumulation_steps=2), 3), num_micro_batches=6, costs=costs)
    words = texts(figure)
    for b in range(6):
        assert words.count(str(b)) == 2 * 3
    assert [words.count(f"U{s}") for s in range(4)] == [3, 3, 3, 0]
    # d = 4, 2, 0 with M = 2: stage 0 counts 0 0 1 1 2 2, stage 1 0 0 1 1 1 1, stage 2 nothing but 0.
    assert [words.count(f"LoS {n}") for n in range(3)] == [2 + 2 + 6, 2 + 4, 2]
    assert len(arrows(figure)) == 6 * 2 * 2
    assert "Accumulated Decoupled Learning (Zhuang et al., ICML 2021)" in words
    assert "K = 3 stages, M = 2, stash weights, 6 micro-batches" in words


@pytest.mark.parametrize("chosen", [*map(method, METHODS), method("adl", split_backward=True)], ids=lambda m: m.name)
def test_every_method_can_be_drawn_without_words_over_each_other(chosen):
    figure = picture(Pipeline(chosen, 3), num_micro_batches=6)
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    found = [t for t in (*figure.axes[0].texts, *figure.texts) if t.get_text()]
    extents = [(t.get_text(), t.get_window_extent(renderer)) for t in found]
    for i, (text, box) in enumerate(extents):
        assert box.x0 >= 0, text
        assert box.x1 <= figure.bbox.x1, text
        for other, there in extents[:i]:
            assert not box.overlaps(there), (text, other)


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_the_same_schedule_gives_the_same_bytes(tmp_path, suffix):
    for name in ("a", "b"):
        draw(Pipeline(method("adl"), 2), tmp_path / f"{name}{suffix}", num_micro_batches=4)
    first, second = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("a", "b"))
    assert first == second
    assert len(list(tmp_path.iterdir())) == 2
    if suffix == ".svg":
        assert not re.search(r"<dc:date>|20\d\d-\d\d", first.decode())


def test_the_pictures_of_the_docs_are_those_of_their_script(tmp_path):
    """The same bytes with the versions of constraints.txt, since letters are drawn as shapes."""
    docs_picture.draw(tmp_path)
    for name in ("light", "dark"):
        made = (tmp_path / f"schedule-{name}.svg").read_bytes()
        assert made == (ROOT / f"docs/images/schedule-{name}.svg").read_bytes()
