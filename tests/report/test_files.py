"""A file written atomically is complete or unchanged; a message reaches the user in any encoding."""

import io

import pytest

from adl_dist.report.files import write_atomically
from adl_dist.report.warning import tell


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
