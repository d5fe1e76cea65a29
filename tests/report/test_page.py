"""The page of a run: what it shows of a run folder, and what it says of one that lacks or damages a file."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from adl_dist.report.page import write_page
from adl_dist.report.page.records import steady_updates, training_seconds
from adl_dist.report.runs import read_runs
from tests.support.commands import in_process, words

HEADINGS = ["Result", "Learning curves", "Throughput", "Stages: busy share and staleness", "Measured timeline"]
HEADINGS += ["Schedule", "Peak memory", "Cut", "Links", "Warnings", "Settings"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a short run with a trace."""
    folder = tmp_path_factory.mktemp("of") / "run"
    outcome = in_process(*words(folder, "partition.num_stages=2", "runtime.trace=true", "train.epochs=3"))
    assert outcome.code == 0, outcome.err
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy of that folder, to be changed."""
    return shutil.copytree(trained, tmp_path / "run")


def page_of(*folders, trace="trace.json"):
    path = folders[0].parent / "page.html"
    write_page(path, read_runs(folders), trace=trace)
    return path.read_text()


def sections(page):
    """The sections of a page by their headings."""
    return dict(re.findall(r"<section><h2>(.*?)</h2>(.*?)</section>", page, re.DOTALL))


def test_a_page_has_every_section_and_needs_no_other_file(trained):
    page = page_of(trained)
    found = sections(page)
    assert list(found) == HEADINGS
    assert "Cannot be shown" not in page
    drawn = {heading for heading, body in found.items() if "<svg" in body}
    assert drawn == {*HEADINGS[1:7]}
    assert not re.search(r'<script|<link|(src|href)="(?!#)', page)
    summary = json.loads((trained / "summary.json").read_text())
    assert f"{summary['validation_accuracy']:.2%}" in found["Result"]
    assert f"{summary['stages'][0]['staleness_mean']:.3f}" in found[HEADINGS[3]]


def test_text_of_the_run_is_escaped(trained, tmp_path):
    page = page_of(shutil.copytree(trained, tmp_path / "<b>run"))
    assert "<b>" not in page
    assert "&lt;b&gt;run" in page
    HTMLParser().feed(page)


def test_what_is_not_recorded_names_the_setting(run):
    (run / "trace.json").unlink()
    (run / "summary.json").unlink()
    found = sections(page_of(run))
    assert "runtime.trace=true" in found["Measured timeline"]
    assert "partition.balance=auto" in found["Cut"]
    assert "partition.links=auto" in found["Links"]
    assert all("no summary.json" in found[heading] for heading in ("Result", "Peak memory"))


def test_a_damaged_file_costs_its_own_section_only(run):
    (run / "links.json").write_text('{"2 stages": 5}')
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"name": "train/lo')
    found = sections(page_of(run))
    assert [heading for heading, body in found.items() if "Cannot be shown" in body] == ["Links"]
    assert "<svg" in found["Learning curves"]


def test_warnings_of_the_logs_are_shown(run):
    log = run / "logs" / "rank0.log"
    log.write_text("2026-01-01 00:00:00,000 WARNING no progress <for> 60 s\n2026-01-01 00:00:01,000 INFO saved\n")
    found = sections(page_of(run))["Warnings"]
    assert "no progress &lt;for&gt; 60 s" in found
    assert "saved" not in found


def test_several_runs_stand_side_by_side(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other")
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("seed: 0", "seed: 1"))
    found = sections(page_of(run, other))
    assert list(found) == ["Results", "Learning curves", "Runs"]
    assert found["Runs"].count("<tr>") == 3
    assert str(other) in found["Runs"]
    assert "Cannot be shown" not in "".join(found.values())


def test_the_timeline_is_of_steady_updates_in_the_last_epoch(tmp_path):
    events = []
    for epoch in (0, 1):
        for update in range(5):
            begin = 1e6 * (10 * epoch + update)
            args = {"epoch": epoch, "action": "B"}
            events.append({"ph": "X", "pid": 0, "cat": "backward", "ts": begin, "dur": 9e5, "args": args})
            args = {"epoch": epoch, "action": "U", "update": 5 * epoch + update}
            events.append({"ph": "X", "pid": 0, "cat": "update", "ts": begin + 9e5, "dur": 1e5, "args": args})
    events.append({"ph": "X", "pid": 0, "cat": "forward", "ts": 5e7, "dur": 1e6, "args": {"evaluation": True}})
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    found = steady_updates(tmp_path / "trace.json")
    assert (found.first_update, found.num_updates) == (6, 3)
    assert [(share, begin) for share, _, begin, _ in found.stages[0]] == [
        pair for i in range(3) for pair in (("backward", pytest.approx(i)), ("update", pytest.approx(i + 0.9)))
    ]
    assert steady_updates(tmp_path / "nothing.json") is None


def test_seconds_of_training_go_on_over_epochs():
    losses = [{"update": u, "elapsed_seconds": s} for u, s in enumerate((1.0, 2.0, 0.5, 1.5, 0.25))]
    assert training_seconds(losses) == {0: 1.0, 1: 2.0, 2: 2.5, 3: 3.5, 4: 3.75}


def test_a_browser_opens_the_page(trained, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no chromium")
    page = tmp_path / "page.html"
    page.write_text(page_of(trained))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shown = subprocess.run([*command, "--dump-dom", f"file://{page}"], capture_output=True, text=True, timeout=60)
    assert all(f"<h2>{heading}</h2>" in shown.stdout for heading in HEADINGS)
