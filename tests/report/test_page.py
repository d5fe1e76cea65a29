"""The page about a run: what it shows of whole, partial, damaged and hostile folders."""

import json
import re

import pytest
import yaml

from adl_dist.report.page import write_page
from tests.support.commands import shows
from tests.support.recorded import recorded_run

HOSTILE = "<script>alert('x')</script>&\"<b>"
SECTIONS = "Results", "Learning curves", "Throughput", "Stages", "Timeline", "Memory", "Cut", "Links", "Events"


@pytest.fixture
def run(tmp_path):
    return recorded_run(tmp_path / "run")


def page_of(*folders):
    out = folders[0].parent / "page.html"
    write_page(folders, out)
    return out.read_text()


def test_whole_run_has_every_part_and_all_figures(run):
    page = page_of(run)
    shows(page, [f"<h2>{name}</h2>" for name in (*SECTIONS, "Configuration") if name != "Links"])
    shows(page, ["<dd>adl-dist train data=digits</dd>", "<dd>box</dd>", "<dd>75,290</dd>", "Stage 0 was idle for 40%"])
    shows(page, ["adl M=4, K=2: cifar_resnet(depth=8) on digits", "Finished: 3 epochs, 12 updates", "93.75%"])
    assert charts(page) == ["loss", "loss", "accuracy", "accuracy", "learning rate", "gradient norm",
                            "images per second", "busy (%)", "mean staleness (updates)"]  # fmt: skip
    assert page.count('<svg width="100%"') == 2, "measured, schedule"
    assert "Cannot be shown" not in page
    assert "try method=adl" not in page, "which the run has"


def charts(page):
    return re.findall('<div class="chart"><h4>(.*?)</h4>', page)


def test_page_needs_no_other_file_and_no_network(run):
    page = page_of(run)
    named = {part for part in page.split('"') if part.startswith(("http", "file:", "//"))}
    assert named <= {"http://www.w3.org/2000/svg"}, "the name of XML, which nothing loads"
    assert not [word for word in ("<link", "<img", "@import", "src=", "fetch(", "import(") if word in page]
    shows(page, ["Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline';"])
    assert page.count("<script") == 1


def test_a_curve_has_its_values_at_their_places(run):
    """The losses 2, 1, 2/3 .. 2/12 of twelve updates over three epochs, read back from the drawing."""
    plot = page_of(run).split('data-name="training, each update"')[0].rpartition('<div class="plot"')[2]
    x, y = ([float(end) for end in re.search(f'data-{axis}="(.*?)"', plot)[1].split()] for axis in "xy")
    places = [
        [float(part) for part in place.split()] for place in re.findall(r"[ML](\d[^ML\"]*)", plot.rpartition('d="')[2])
    ]
    values = [y[0] + (1 - place[1] / 1000) * (y[1] - y[0]) for place in places]
    assert values == pytest.approx([2 / n for n in range(1, 13)], abs=1e-3)
    assert [x[0] + place[0] / 1000 * (x[1] - x[0]) for place in places] == pytest.approx(
        [n / 4 for n in range(1, 13)], abs=1e-3
    )


def test_a_box_is_as_wide_as_its_action_was_long(run):
    """Of the 273 ms from 10 ms to 283 ms, in which both stages are at work, a forward takes 10."""
    boxes = re.findall(r'<svg class="(\w+)" x="(.*?)%" y="(.*?)" width="(.*?)%".*?<title>(.*?)</title>', page_of(run))
    first = {title: (float(x), float(width)) for _, x, _, width, title in boxes[: len(boxes) // 2]}
    length = 100 * 10 / first["stage 0: forward 5, 10"][1]
    assert first["stage 0: backward 5, 20, staleness 1"][1] == pytest.approx(100 * 20 / length, abs=2e-3)
    begins = [first[f"stage {k}: forward 5, 10"][0] for k in range(2)]
    assert begins[1] - begins[0] == pytest.approx(100 * 10 / length, abs=2e-3)


def test_what_comes_from_a_run_is_escaped(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"] = {"_target_": f"mine.{HOSTILE}", "name": HOSTILE}
    (run / "config.yaml").write_text(yaml.safe_dump({**config, HOSTILE: HOSTILE}))
    (run / "logs" / "rank0.log").write_text(f"2026-11-24 09:42:17,810 WARNING {HOSTILE}\n{HOSTILE}\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"name": f"validation/{HOSTILE}", "value": 1.0, "update": 3, "epoch": 0}) + "\n")
    page = page_of(run)
    shows(page, ["&lt;script&gt;alert"])
    assert "<script>alert" not in page
    assert "<b>" not in page


DAMAGES = {
    "config.yaml": [None, "", "[1", "method: 3\npartition: []\ntrain: x\n", "method: {name: nothing}\n"],
    "summary.json": [None, "{", "[]", '{"stages": 3, "epochs": []}', '{"stages": [{}], "validation_loss": "low"}'],
    "metrics.jsonl": [None, "", "{}\nnull\n{", '{"name": "stage/staleness", "value": 1, "update": 0, "epoch": 0}\n'],
    "timeline.json": [None, "{}", '{"stages": [[["F", 0, 2, 1, null]]], "epoch": 0, "device": "", "is_steady": true}'],
    "logs/rank0.log": [None, "", "no time\n"],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_or_missing_file_costs_its_parts_only(run, name):
    whole = (run / name).read_text()
    for content in [*DAMAGES[name], whole[: len(whole) // 2]]:
        (run / name).unlink(missing_ok=True)
        if content is not None:
            (run / name).write_text(content)
        page = page_of(run)
        assert [
            name for name in SECTIONS if f"<h2>{name}</h2>" not in page and f"Not recorded ({name}): " not in page
        ] == []
        shows(page, ["Not recorded ("] if content is None else [])
        assert "Traceback" not in page


def test_events_name_warnings_restarts_and_skipped_updates(run):
    log = "2026-11-24 09:42:17,810 {} {}\n"
    entries = [("WARNING", "no progress in 61 s"), ("INFO", "resumed from update 8"), ("INFO", "saved")]
    (run / "logs" / "rank0.log").write_text("".join(log.format(*entry) for entry in entries))
    with (run / "metrics.jsonl").open("a") as file:
        for update in (3, 4):
            file.write(json.dumps({"name": "train/skipped_updates", "value": 1, "update": update, "epoch": 0}) + "\n")
    page = page_of(run)
    shows(page, ["no progress in 61 s", "started again from a checkpoint once", "2 updates skipped"])
    assert "saved" not in page


def test_several_runs_are_compared(run, tmp_path):
    other = recorded_run(tmp_path / "other")
    config = yaml.safe_load((other / "config.yaml").read_text())
    config["method"]["accumulation_steps"] = 1
    (other / "config.yaml").write_text(yaml.safe_dump({**config, "seed": 1}))
    page = page_of(run, other)
    shows(page, ["2 runs compared", "adl M=4 K=2", "adl K=2", "method.accumulation_steps"])
    shows(page, ["Training to the same loss", "= 1.00x"])
    assert "Cannot be shown" not in page


@pytest.mark.parametrize(
    ("busy", "why"),
    [
        ([0.6, 0.6], "waiting for messages or for a free core"),
        ([0.45, 0.9], "because the cut is uneven (stage 1 was busy for 90%): try partition.balance=auto"),
        ([0.95, 0.92], "All stages were busy for at least 92% of the time."),
    ],
)
def test_the_sentence_on_stages_tells_an_uneven_cut_from_waits(run, busy, why):
    summary = json.loads((run / "summary.json").read_text())
    for stage, share in zip(summary["stages"], busy, strict=True):
        stage["busy_share"] = share
    (run / "summary.json").write_text(json.dumps(summary))
    shows(page_of(run), [why])
