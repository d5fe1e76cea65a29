"""``adl-dist report``: where it writes, what it refuses, and the page at the end of a run."""

from tests.support.commands import in_process, shows, words
from tests.support.recorded import recorded_run


def test_writes_into_the_run_folder_or_to_out(tmp_path):
    run = recorded_run(tmp_path / "a")
    for arguments, place in (([str(run)], run / "report.html"), ([f"run_dir={run}", f"out={tmp_path}/b.html"], None)):
        done = in_process("report", *arguments)
        assert (done.code, done.err) == (0, "")
        place = place or tmp_path / "b.html"
        shows(done.out, [f"written: {place};"])
        assert place.read_text().startswith("<!DOCTYPE html>")


def test_of_several_runs_it_writes_to_the_folder_above(tmp_path):
    runs = [str(recorded_run(tmp_path / name)) for name in "ab"]
    shows(in_process("report", *runs).out, [f"written: {tmp_path}/report.html;"])
    assert in_process("report", str(tmp_path)).code == 0


def test_run_ends_with_a_page_and_the_timeline_in_it(tmp_path):
    run = tmp_path / "run"
    long_enough = ["runtime.report=true", "data.num_samples=160", "train.batch_size=8"]
    done = in_process(*words(run, *long_enough))
    assert done.code == 0, done
    shows(done.out, [f"report           {run}/report.html"])
    page = (run / "report.html").read_text()
    shows(page, ["Measured in", "by the schedule, if messages took no time"])
    assert "Cannot be shown" not in page
