"""The files of a checkpoint: the library's own bytes, every kind of tensor, and readable without this package."""

import json
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml
from torch import nn

from adl_dist.checkpoint import layout, state, tensor_files
from adl_dist.checkpoint.nested import Packer, unpacked
from adl_dist.checkpoint.tensor_files import Shard
from adl_dist.cli.config.compose import compose_run
from adl_dist.cli.config.instantiate import build_model
from adl_dist.errors import ConfigError
from tests.support.commands import assert_same, in_process, words
from tests.support.runs import trainer_of
from tests.support.saved import FIRST, MOMENTUM, SECOND, SIGNATURE, saved
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import values

DOCS = Path(__file__).parents[2] / "docs" / "runs.md"


def written(folder, tensors, **metadata):
    tensor_files.write(folder, {FIRST: Shard(tensors, metadata)})
    return folder / FIRST


def test_views_and_shared_memory_are_stored_by_their_values(tmp_path):
    complex_numbers = torch.randn(3, dtype=torch.complex64)
    one = torch.randn(4)
    tensors = {
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": torch.randn(3, 4).t(),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "a part": torch.randn(10)[2:7:2],
        "conjugated": complex_numbers.conj(),
        "negated": complex_numbers.conj().imag,
        "a parameter": nn.Parameter(torch.randn(3)),
        **{"one": one, "the same": one, "half of it": one[:2]},
    }
    assert_same(safetensors.torch.load_file(written(tmp_path, tensors)), tensors)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(2, dtype=torch.complex128), "its dtype is torch.complex128"),
        (torch.eye(2).to_sparse(), "its layout is torch.sparse_coo"),
    ],
)
def test_what_no_file_can_hold_is_refused_before_training(tensor, reason):
    model = batch_norm_net()
    model.register_buffer("table", tensor)
    with pytest.raises(ConfigError, match=f"of the model cannot be saved: table: {reason}.* text$"):
        state.signature(model)  # which the trainer asks for when it is made


def test_the_index_names_the_file_of_each_tensor_of_the_model(tmp_path):
    path = saved(tmp_path, 1)
    index = json.loads((path / tensor_files.INDEX).read_text())
    assert index["weight_map"] == {"bias": SECOND, "num_batches_tracked": FIRST, "weight": FIRST}
    assert index["metadata"] == {"total_size": 12 * 4 + 4 * 4 + 8}
    assert {file.name for file in path.iterdir()} == {FIRST, SECOND, MOMENTUM, tensor_files.INDEX, layout.MANIFEST}
    for name, file in index["weight_map"].items():
        assert list(safetensors.torch.load_file(path / file)[name].shape) == SIGNATURE[name]


# --- optimizers ------------------------------------------------------------------------------------------------------


def test_what_is_packed_comes_back_with_its_strides(tmp_path):
    """A file holds tensors in the plain format, with which a product of matrices could be rounded otherwise."""
    packer = Packer()
    text = json.dumps(packer.packed("m", [torch.arange(6.0).view(2, 3).t(), torch.zeros(2, 3)]))
    stored, _ = tensor_files.header(written(tmp_path, packer.tensors))
    back = unpacked({"m": text}, stored)["m"]
    assert [tensor.stride() for tensor in back] == [(1, 3), (3, 1)]
    assert back[0].tolist() == [[0, 3], [1, 4], [2, 5]]


# --- other programs --------------------------------------------------------------------------------------------------


def test_the_five_lines_of_the_docs_read_a_checkpoint(tmp_path, monkeypatch):
    (program,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len([line for line in program.splitlines() if line]) == 5
    trainer = trainer_of(batch_norm_net())
    run_dir = tmp_path / "runs" / "NAME"
    trainer.fit(FixedImages(8), epochs=1, batch_size=4, run_dir=run_dir, **values(quiet=True, tensorboard=False))
    (path,) = (run_dir / "checkpoints").iterdir()
    (path.parent / "update-00000042").symlink_to(path)
    assert "adl_dist" not in program
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(program, names)
    assert_same(names["state"], trainer.full_state_dict())


def test_a_run_starts_from_an_export_or_a_checkpoint(tmp_path):
    run_dir, out = tmp_path / "run", tmp_path / "model.safetensors"
    assert in_process(*words(run_dir)).code == 0
    outcome = in_process("export", f"run_dir={run_dir}", f"out={out}")
    assert f"model.load_state_dict(safetensors.torch.load_file('{out}')) takes them" in outcome.out
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["model.safetensors", "run"]
    expected = safetensors.torch.load_file(out)
    (path,) = (run_dir / "checkpoints").iterdir()
    for start in (out, path):
        config, *_ = compose_run([*words(tmp_path / "new")[1:], f"init_from={start}", "seed=1"])
        assert_same(build_model(config).state_dict(), expected)
    outcome = in_process(*words(tmp_path / "new", f"init_from={run_dir}"))
    assert f"init_from: {run_dir} is a run folder; give its checkpoint: {path}\n" in outcome.err
    out.write_bytes(out.read_bytes()[:-1])
    (path / tensor_files.INDEX).unlink()
    for start, said in ((out, "cannot be read (ValueError: "), (path, "is damaged: model.safetensors.index.json")):
        outcome = in_process(*words(tmp_path / "new", f"init_from={start}"))
        assert outcome.code == 2
        assert f"{start} {said}" in outcome.err


def test_a_folder_with_a_removed_key_is_resumed_and_evaluated(tmp_path):
    run_dir = tmp_path / "run"
    dgl = ["method=dgl", "partition.num_stages=1"]
    assert in_process(*words(run_dir, "train.max_updates=1", *dgl)).code == 0
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    config["runtime"] |= {"cuda_graphs": "tick"}
    config["method"] |= {"buffer_size": 0, "buffer_reuse": None, "stage_speeds": None}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    continued = words(run_dir, "train.max_updates=2", *dgl)
    for command in (["report", str(run_dir)], ["evaluate", f"run_dir={run_dir}"], continued):
        outcome = in_process(*command)
        assert (outcome.code, outcome.err) == (0, "")
        page = (run_dir / "report.html").read_text()
        assert "cannot be used" not in page
        assert "dgl buffer_size" not in page
    assert len([*(run_dir / "checkpoints").iterdir()]) == 2
