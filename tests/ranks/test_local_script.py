"""``launch/local.sh``: torchrun on one machine."""

import sys
from getpass import getuser

from tests.support.commands import ROOT, as_command, left_behind, words


def test_the_script_for_one_machine_trains_under_torchrun_and_leaves_nothing(tmp_path):
    _, *settings = words(tmp_path / "run", "partition.num_stages=2", processes=True)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    outcome = as_command(
        str(ROOT / "launch" / "local.sh"), "2", *settings, env={"PYTHON": sys.executable, "TMPDIR": str(temporary)}
    )
    assert outcome.code == 0, outcome
    assert {path.name for path in (tmp_path / "run" / "logs").iterdir()} == {"rank0.log", "rank1.log"}
    assert [
        path.name for path in temporary.iterdir() if path.name != f"torchinductor_{getuser()}"
    ] == []  # torch's cache
    assert left_behind(tmp_path) == []
