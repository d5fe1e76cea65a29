"""Every block of README and docs that can be run here is run as a reader would, in a folder of its own."""

import pytest

from tests.docs.blocks import BLOCKS, PAGES, RUNNABLE, SECONDS, indented_commands, run

RUN = [block for block in BLOCKS if block.language in RUNNABLE and "not run" not in block.marks]


@pytest.mark.docs
@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize("block", RUN, ids=[block.where for block in RUN])
def test_a_block_runs(block, tmp_path):
    done = run(block, tmp_path)
    assert done.returncode == 0, f"{block.where}\n{block.text}\n--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"


@pytest.mark.docs
def test_blocks_that_are_not_run_say_why(record_property):
    left_out = [block for block in BLOCKS if block.language in RUNNABLE and "not run" in block.marks]
    indented = sum(1 for page in PAGES for _ in indented_commands(page))
    lines = [f"{block.where}: {block.marks['not run']}" for block in left_out]
    record_property(
        "measured",
        "\n".join([
            f"{len(RUN)} blocks are run, {len(left_out)} are not:", *lines,
            f"{indented} indented commands, with which results were measured, are checked and not run",
        ]),
    )  # fmt: skip
    assert all(len(block.marks["not run"]) > 3 for block in left_out)
