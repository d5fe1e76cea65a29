"""``adl-dist report``: where the page goes, and what is refused."""

from tests.support.commands import in_process, shows, words


def test_report_writes_into_the_run_folder_or_to_out(tmp_path):
    run = tmp_path / "run"
    assert in_process(*words(run)).code == 0
    shows(in_process("report", str(run)).out, ["written", str(run / "report.html")])
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    elsewhere = tmp_path / "page.html"
    assert in_process("report", f"run_dir={run}", f"out={elsewhere}").code == 0
    assert elsewhere.is_file()
    shows(
        in_process("report", str(run), f"out={tmp_path / 'no' / 'page.html'}").refusal(), ["cannot be written", "out="]
    )


def test_report_refuses_what_is_no_run(tmp_path):
    shows(in_process("report").refusal(), ["takes run folders", "out=FILE.html"])
    shows(in_process("report", str(tmp_path)).refusal(), ["holds no run", str(tmp_path)])
    (tmp_path / "config.yaml").write_text("seed: [")
    shows(in_process("report", str(tmp_path)).refusal(), ["expected the folder of a run"])
