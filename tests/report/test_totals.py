"""The figures of a run, from the results of its stages; how files and messages are written."""

import io

import pytest

from adl_dist.report.files import write_atomically
from adl_dist.report.totals import CodedResult, TiedResult, Totals, TrainResult
from adl_dist.report.warning import tell


def result(*, seconds, stale, backwards, num_bytes):
    tied = TiedResult(name="first.weight", staleness_sum=stale, staleness_max=1, num_backwards=backwards)
    coded = CodedResult(what="act", codec="int8", num_bytes=num_bytes, plain_bytes=4 * num_bytes, error=0.5)
    return TrainResult(
        stage=0, rank=0, seconds=seconds, busy_seconds=1.0, staleness_sum=stale, staleness_max=1,
        num_backwards=backwards, num_updates=2, num_skipped=0, peak_memory={"peak_memory_bytes": num_bytes},
        tied=[tied], coded=[coded],
    )  # fmt: skip


def test_totals_of_a_run_count_each_segment_by_its_length():
    totals = Totals()
    for num_samples, values in ((2, (1.0, 2, 2, 3)), (6, (3.0, 0, 6, 5))):
        names = dict(zip(("seconds", "stale", "backwards", "num_bytes"), values, strict=True))
        records = {record["name"]: record["value"] for record in totals.add(num_samples, 2.0, [result(**names)])}
        assert records["train/samples_per_second"] == num_samples / 2
        assert records["stage/act_bytes"] == names["num_bytes"]
    summary = totals.summary()
    (row,) = summary["stages"]
    assert (summary["num_samples"], summary["samples_per_second"]) == (8, 2.0)
    assert (row["staleness_mean"], row["busy_share"], row["peak_memory_bytes"]) == (2 / 8, 2 / 4, 5)
    assert row["tied"][0]["staleness_mean"] == 2 / 8
    assert row["coded"] == [{"what": "act", "codec": "int8", "bytes": 8, "plain_bytes": 32, "error": 0.5}]


def test_a_file_is_replaced_only_when_all_of_it_is_written(tmp_path):
    path = tmp_path / "summary.json"
    for text in ("first", "second"):
        with write_atomically(path) as unfinished:
            assert unfinished.suffix == ".json"
            unfinished.write_text(text)
            assert not path.exists() or path.read_text() == "first"
        assert path.read_text() == text
    with pytest.raises(KeyboardInterrupt), write_atomically(path) as unfinished:  # noqa: PT012
        unfinished.write_text("half")
        raise KeyboardInterrupt
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]
    assert path.read_text() == "second"


def test_letters_that_a_stream_does_not_have_are_escapes():
    """As where LC_ALL=C is set; nothing would be shown otherwise."""
    content = io.BytesIO()
    stream = io.TextIOWrapper(content, encoding="ascii")
    tell(stream, "caf\u00e9\n")
    assert content.getvalue() == b"caf\\xe9\n"
