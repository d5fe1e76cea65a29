"""Models on ``torch.device("meta")``: each process makes or reads its own weights, and values are the same."""

import contextlib
import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

import adl_dist
from adl_dist import TextSamples
from adl_dist.checkpoint import tensor_files
from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.errors import ConfigError
from adl_dist.losses import TokenCrossEntropy
from adl_dist.models import gpt, llama, vit
from adl_dist.training import trainer
from adl_dist.training.lazy_weights import prepare_weights
from adl_dist.training.trial.trial import Trial
from tests.support.commands import assert_same
from tests.support.ranks import run_ranks
from tests.support.runs import toy_trainer
from tests.support.tiers import slow
from tests.support.values import QUIET, spec_of

VOCAB, CONTEXT, LAYERS = 11, 6, 2
META = torch.device("meta")
adamw = functools.partial(torch.optim.AdamW, lr=0.01)
MODELS = {
    "gpt": functools.partial(gpt, VOCAB, CONTEXT, layers=LAYERS, heads=2, width=8, dropout=0.2),
    "llama": functools.partial(llama, VOCAB, CONTEXT, layers=LAYERS, heads=4, width=16, kv_heads=2, hidden=12),
    "tied": functools.partial(gpt, VOCAB, CONTEXT, layers=1, heads=2, width=8, tied=True),
    "vit": functools.partial(vit, image_size=8, layers=2, heads=2, width=8),
}


def build(name, *, on_meta, seed=0):
    torch.manual_seed(seed)
    with META if on_meta else contextlib.nullcontext():
        return MODELS[name]()


def made(model, *, files=None, seed=0):
    weights = prepare_weights(model, files, seed)
    weights.make(model)
    return model


def tokens():
    ids = torch.randint(VOCAB, (10, CONTEXT + 1), generator=torch.Generator().manual_seed(3))
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def trained(name, K, *, on_meta, dtype=torch.float32, run_dir=None, updates=None, method="adl", **of_trainer):
    of_trainer = {"optimizer": adamw, "loss_fn": TokenCrossEntropy(), "dtype": dtype, **of_trainer}
    model = build(name, on_meta=on_meta) if isinstance(name, str) else name(on_meta)
    trainer = toy_trainer(K, 2, method, model=model, **of_trainer)
    policy = CheckpointPolicy(every_updates=1, background=False) if run_dir is not None else None
    of_fit = {"max_updates": updates, "checkpoints": policy, "monitoring": QUIET}
    trainer.fit(tokens(), epochs=2, batch_size=4, val_dataset=tokens(), run_dir=run_dir, **of_fit)
    return trainer.full_state_dict(), model, trainer


def kept_state(*args, **options):
    state, model, trainer = trained(*args, **options)
    return state, {name: t.is_meta for name, t in model.state_dict().items()}, trainer._partitioned.notes


@pytest.mark.parametrize("name", MODELS)
def test_weights_made_from_meta_are_those_of_a_built_model(name):
    """Bit for bit, tables that are in no checkpoint included, and tied weights are one tensor again."""
    expected, found = build(name, on_meta=False), made(build(name, on_meta=True))
    assert_same(found.state_dict(), expected.state_dict())
    assert_same(dict(found.named_buffers()), dict(expected.named_buffers()))
    assert [*dict(found.named_parameters())] == [*dict(expected.named_parameters())]


def test_untied_weights_from_meta_are_those_of_a_built_model():
    """Each name has a copy of the first one's values."""
    states = []
    for on_meta in (True, False):
        trainer = toy_trainer(1, model=build("tied", on_meta=on_meta), tied="untie")
        states.append(trainer.full_state_dict())
    assert_same(*states)
    assert torch.equal(states[0]["embedding.tokens.weight"], states[0]["head.output.weight"])


def train_lazily(K, files):
    """Returns (state, which tensors stayed on meta, notes) of some runs, and the names that the first one read."""
    read, storage_read = [], tensor_files.read
    tensor_files.read = lambda tensors: (read.extend(tensors), storage_read(tensors))[1]
    runs = [kept_state("llama", K, on_meta=True, init_from=files)]
    names = list(read)
    runs.append(kept_state("llama", K, on_meta=True, dtype=torch.float64))
    if K == 2:
        runs.append(kept_state("gpt", K, on_meta=True, method="gpipe"))
    return runs, names


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A folder of two files with an index, as the hub has them, and the weights in it."""
    folder = tmp_path_factory.mktemp("sharded")
    state = {name: t.clone() for name, t in build("llama", on_meta=False, seed=5).state_dict().items()}
    names = sorted(state)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: state[name] for name in some}, folder / file)
    index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
    (folder / tensor_files.INDEX).write_text(json.dumps(index))
    return folder, state


@pytest.mark.ranks
@pytest.mark.parametrize("K", [2, slow(3), slow(4)])
def test_k_processes_train_a_model_on_meta_as_a_built_one(K, sharded):
    """Bit for bit, from drawn and from read weights; and each process has and reads tensors of its own stage only."""
    folder, start = sharded
    by_rank = run_ranks(K, train_lazily, K, folder, timeout_seconds=110)

    def loaded(on_meta):
        model = build("llama", on_meta=False)
        model.load_state_dict(start)
        return model

    expected = [trained(loaded, K, on_meta=False), trained("llama", K, on_meta=False, dtype=torch.float64)]
    if K == 2:
        expected.append(trained("gpt", K, on_meta=False, method="gpipe"))
    for runs, _ in by_rank:
        for (state, _, notes), (wanted, *_) in zip(runs, expected, strict=True):
            assert_same(state, wanted)
            assert "values were not compared with the uncut model's" in notes[-1]
    for run, (wanted, *_) in enumerate(expected):
        for name in wanted:
            assert [of_rank[0][run][1][name] for of_rank in by_rank].count(False) == 1
    assert sorted(name for _, read in by_rank for name in read) == sorted(start)


def test_one_process_makes_all_of_a_model_on_meta(sharded, tmp_path):
    state, _, _ = trained("gpt", 2, on_meta=True)
    assert_same(state, trained("gpt", 2, on_meta=False)[0])
    save_file(sharded[1], tmp_path / "model.safetensors")
    for files in (sharded[0], tmp_path, tmp_path / "model.safetensors"):
        for on_meta in (True, False):
            model = build("llama", on_meta=on_meta)
            trainer = toy_trainer(2, 2, model=model, loss_fn=TokenCrossEntropy(), init_from=files)
            assert_same(trainer.full_state_dict(), sharded[1])


def resume_lazily(K, run_dir):
    trained("llama", K, on_meta=True, run_dir=run_dir, updates=2)
    return trained("llama", 2, on_meta=True, run_dir=run_dir)[0]


@pytest.mark.ranks
def test_a_run_of_a_model_on_meta_is_resumed_bit_for_bit(tmp_path):
    expected = trained("llama", 2, on_meta=False, run_dir=tmp_path / "whole")[0]
    for state in run_ranks(2, resume_lazily, 2, tmp_path / "run", timeout_seconds=110):
        assert_same(state, expected)


def grown(layers, width, vocab):
    """Returns the most MiB that this process has held since now, up to the first update, and those of its stage."""

    def most():
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024

    before = most()
    with META:
        model = llama(vocab, 8, layers=layers, heads=4, width=width)
    trainer = toy_trainer(3, 1, model=model, loss_fn=TokenCrossEntropy())
    at_start, train = [], trainer._train
    trainer._train = lambda *args: (at_start.append(most()), train(*args))[1]
    ids = torch.randint(vocab, (4, 8))
    trainer.fit(TensorDataset(ids, ids), epochs=1, batch_size=1, max_updates=1, monitoring=QUIET)
    (part,) = trainer._partitioned.modules.values()
    return at_start[0] - before, sum(t.nbytes for t in part.state_dict().values()) / 2**20


@pytest.mark.ranks
def test_no_process_ever_holds_the_whole_of_a_model_on_meta():
    """Before the first update, by the kernel's own peak: a share of 290 MiB, and what the trial needs."""
    by_rank = run_ranks(3, grown, 6, 1024, 1000, timeout_seconds=110)
    whole = sum(share for _, share in by_rank)
    assert whole > 280
    for growth, share in by_rank:
        assert growth < share + 120 < whole - 50


# --- Refused at the start -------------------------------------------------------------------------------------------


class Half(nn.Module):
    """Fills as many of its four numbers as ``filled`` says."""

    def __init__(self, dtype, filled):
        super().__init__()
        self.filled = filled
        self.register_buffer("table", torch.empty(2, 2, dtype=dtype), persistent=False)

    def reset_parameters(self):
        self.table.view(-1)[: self.filled] = 1


class Smaller(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(8))

    def reset_parameters(self):
        self.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64])
def test_numbers_that_are_not_filled_show_in_any_dtype(dtype):
    with META:
        models = [nn.Sequential(Half(dtype, filled)) for filled in (4, 3)]
    assert made(models[0])[0].table.tolist() == torch.ones(2, 2, dtype=dtype).tolist()
    with pytest.raises(ConfigError, match=r"Half.reset_parameters\(\) does not fill it, or not all of it"):
        made(models[1])


def test_a_model_that_cannot_be_made_on_meta_is_refused(sharded, monkeypatch):
    with META:
        failing, bare, smaller = Half(torch.bool, "x"), nn.ParameterList([torch.empty(2)]), Smaller()
        part, together, elsewhere, autocast = (nn.Linear(2, 2) for _ in range(4))
    together.reset_layer, elsewhere.weights_in = print, sharded[0]
    spec = replace(spec_of(2, torch.optim.SGD), precision=adl_dist.Precision(autocast="bfloat16"))
    for make, told in (
        (lambda: made(nn.Sequential(nn.Linear(2, 2), part)), "in part: '0.weight' is on cpu; build all of it"),
        (lambda: made(bare), r"'0' is on .*: ParameterList has no reset_parameters\(\) that fills"),
        (lambda: made(nn.Sequential(smaller)), r"'0.scale' should have shape \[8\], found \[1\]"),
        (lambda: TextSamples(bare, str), "TextSamples: the model is on torch.device"),
        (lambda: made(failing), r"cannot be made: Half.reset_parameters\(\) fails with TypeError: slice"),
        (lambda: made(together), "a Linear draws all its weights together, so .* from files only: give init_from"),
        (lambda: made(elsewhere), r"meta_init\)? ?=true reads all tensors of this model from the folder .*; use"),
        (lambda: Trial(autocast, spec, None, META), "autocast.* changes what travels between stages"),
    ):
        with pytest.raises(ConfigError, match=told):
            make()
    monkeypatch.setattr(trainer, "_is_distributed", lambda *_: True)
    with pytest.raises(ConfigError, match="measures units with their weights, but the model is on"):
        toy_trainer(2, model=build("gpt", on_meta=True), balance="auto")
    given = toy_trainer(2, model=build("gpt", on_meta=True))._partitioned
    with pytest.raises(ConfigError, match="until fit or evaluate has made each process's part"):
        given.full_state_dict(distributed=False)


def test_a_parameter_on_meta_keeps_its_hooks():
    with META:
        model = nn.Linear(2, 2)
        model.weight.register_hook(lambda grad: grad * 0)
    made(model)(torch.ones(1, 2)).sum().backward()
    assert not model.weight.grad.any()
    assert model.bias.grad.all()
