"""The Python API as users start it: plainly, and under torchrun."""

import json

import pytest

from tests.support import user_script
from tests.support.commands import TORCHRUN, as_command

pytestmark = pytest.mark.ranks


def test_a_users_script_gives_the_same_bits_under_torchrun(tmp_path, capsys):
    user_script.main(str(tmp_path / "plain"))
    plain = json.loads(capsys.readouterr().out)
    command = (*TORCHRUN, "--standalone", "--nproc-per-node=2", user_script.__file__, "torchrun")
    done = as_command(*command, cwd=tmp_path, timeout_seconds=100)
    assert done.code == 0, done.err
    assert "tensorpipe" not in done.err, "RPC takes the end of the others for a fault"
    assert json.loads(done.out) == plain
    assert plain["accuracy"] >= 0.9
    assert plain["keys"][0] == "0.0.weight"
    assert {p.name for p in (tmp_path / "torchrun" / "logs").iterdir()} == {"rank0.log", "rank1.log"}
