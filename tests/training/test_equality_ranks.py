"""K gloo processes against K stages in one process: the same bits, for every method, option and kind of model."""

import os
from functools import partial

import pytest
import torch

from adl_dist.optimizers import Muon, with_rules
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.runs import nan_inputs, sgd, toy_trainer, train
from tests.support.tied import TIED_BALANCE, tied_net
from tests.support.tiers import slow
from tests.support.toys import UNET_BALANCE, FixedImages, batch_norm_net, unet
from tests.support.user_code import At, fail
from tests.support.values import QUIET, SILENT
from tests.training import test_losses, test_random_streams, test_structured_batches

pytestmark = pytest.mark.ranks

ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
SPOILT = {"non_finite": "skip", "plant": nan_inputs}
LOWERED = {"autocast": torch.bfloat16}
LINEAR = {"head": "linear"}
SPLIT = {"split_backward": True, "delay": "third"}


def toy(K, M, dtype=torch.float32, *, epochs=1, **options):
    return partial(train, K, M, dtype, epochs=epochs, **options)


def method(name, M=3, options=None, **more):
    return toy(3, M, method=name, options=options, dropout=0.3, **more)


def tied(K, M, dtype=torch.float32, **options):
    return toy(K, M, dtype, model=tied_net, balance=TIED_BALANCE[K], **options)


def unets(M, dtype=torch.float32, **options):
    """Over the cuts go the input itself, a tensor for three stages, booleans, and shapes without a byte."""
    return toy(4, M, dtype, model=unet, balance=UNET_BALANCE, num_samples=11, **options)


# By the number of stages and processes. What does not need a stage between two others has two.
ROWS = {
    2: {
        **{f"M={M}": toy(2, M, epochs=2, verify=True) for M in (1, 2, 3, 4)},
        "float64": toy(2, 2, torch.float64, shuffle=True, dropout=0.3, ema=0.9),
        "muon, clipped": toy(2, 2, optimizer=partial(Muon, lr=0.02), clip_norm=0.3, **SPOILT),
        "int8": toy(2, 2, codec="int8", channels_last=True, **SPOILT),
        "bf16, autocast": toy(2, 2, codec="bf16", **LOWERED),
        "tied": tied(2, 3, optimizer=ADAMW, ema=0.9),
        "tied, split": tied(2, 3, options=SPLIT, clip_norm=0.01, **LOWERED),
        "tied, clipped": tied(2, 3, method="1f1b", options={"split_backward": True}, clip_norm=0.01, **SPOILT),
        "tokens": partial(test_losses.fitted, "tokens", K=2, method="gpipe", options={"recompute": "except_last"}),
        "lengths": partial(test_structured_batches.fitted, "lengths by names", 2, 3),
        "noise": partial(test_random_streams.with_noise, "backward", "adl", 2, {}, balance="even"),
    },
    3: {
        "fdg": method("fdg"),
        "dsp": method("dsp", 1, {"activation_queue": 2}),
        "ddg": method("ddg", channels_last=True),
        "fr": method("fr", options={"split_backward": True}),
        "dgl": method("dgl", 1, LINEAR, optimizer=with_rules(sgd, [{"ndim": 1, "weight_decay": 0.0}])),
        "dni": method("dni", 2, {"head_sees_target": True, "head_delay": 1}, clip_norm=0.3),
        "bp": method("bp", verify=True, clip_norm=1.9),
        "gpipe": method("gpipe", options={"recompute": "except_last"}, clip_norm=1.9, **LOWERED),
        "1f1b": method("1f1b", clip_norm=1.9),
        "zbh1": method("zbh1", clip_norm=1.9),
        "zbh2": method("zbh2"),
        "pipedream": method("pipedream", shuffle=True),
        "2bw": method("2bw", options={"mitigation": ["error_feedback"]}, **LOWERED),
        "paci": toy(3, 3, method="paci", **SPOILT),
        "backward first": method("adl", 2, {"order": "backward_first", "reduction": "sum", "lr_clock": "global"}),
        "mitigated": method("adl", 1, {"mitigation": ["discount", "spike", "predict", "delay_compensation"]}),
        "flushing at first": method("adl", 4, {"mitigation": ["predict"], "flush_epochs": 1}, epochs=2),
        "split": method("adl", 2, {**SPLIT, "mitigation": ["predict", "spike"]}),
        "int4": toy(3, 3, codec="int4", gradient_codec="int8", options=SPLIT),
        "tied": tied(3, 3, method="2bw", clip_norm=0.1),
    },
    4: {
        **{f"M={M}": toy(4, M) for M in (1, 2, 3, 4)},
        "unet": unets(2, torch.float64, verify=True),
        "unet, int8": unets(1, codec="int8"),
    },
}
FIGURES = ("validation_loss", "validation_accuracy", "updates", "skipped_updates")


def run_rows(K, names):
    """Return of each row the state and the figures that must be equal."""
    found = []
    for name in names:
        state, summary = ROWS[K][name]()
        figures = {figure: summary.get(figure) for figure in FIGURES}
        found.append((state, figures | {"staleness": [stage["staleness_max"] for stage in summary["stages"]]}))
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("K", ROWS)
def test_k_processes_equal_one_process_bit_for_bit(K):
    by_rank, in_one_process = run_ranks(K, run_rows, K, [*ROWS[K]], timeout_seconds=200), run_rows(K, ROWS[K])
    for of_rank in by_rank:
        for name, (state, figures), (expected, of_one) in zip(ROWS[K], of_rank, in_one_process, strict=True):
            assert state.keys() == expected.keys(), name
            assert [n for n in expected if not torch.equal(state[n], expected[n])] == [], name
            assert figures == of_one, name


# K, P, v, M and further options; K = 7 leaves the last process one stage, and both ends of the pipeline the first.
SHARED = [(7, 3, 3, 5, {"balance": [1] * 7, "shuffle": True, "clip_norm": 1.9})]
SHARED += [slow(*case, {"dtype": torch.float64}) for case in ((4, 2, 2, 1), (4, 2, 2, 5), (3, 2, 2, 4))]


def train_shared(K, v, M, options):
    options = {"dtype": torch.float32, "options": {"stages_per_process": v}, "dropout": 0.3, **options}
    return train(K, M, method="interleaved", **options)


@pytest.mark.parametrize(("K", "P", "v", "M", "options"), SHARED)
def test_processes_of_several_stages_equal_one_bit_for_bit(K, P, v, M, options):
    expected, in_one = train_shared(K, v, M, options)
    for state, summary in run_ranks(P, train_shared, K, v, M, options, timeout_seconds=110):
        assert [n for n in expected if not torch.equal(state[n], expected[n])] == []
        assert [stage["stage"] for stage in summary["stages"]] == list(range(K))
        assert summary["validation_loss"] == in_one["validation_loss"]


def a_bug_on_stage_1():
    model = batch_norm_net()
    model[4] = At(5, fail)
    toy_trainer(M=4, model=model, timeout_seconds=20).fit(FixedImages(32), epochs=1, batch_size=8, monitoring=QUIET)


def test_every_rank_knows_the_cause_of_a_failure_first():
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, a_bug_on_stage_1)
    text, message = str(failure.value), "a bug of the user's"
    assert "still ran" not in text
    assert text.index("cause-rank1") < text.index("victim-rank0")
    assert message in text[: text.index("victim-rank0")]
    assert message in text[text.index("victim-rank0") :], "through the control plane"


def weights_of_a_checkpoint(checkpoint, run_dir):
    """Load, then continue there: the ranks' own initial weights, of different seeds, mean nothing."""
    trainer = toy_trainer(2, 2, model=batch_norm_net(seed=int(os.environ["RANK"])))
    trainer.load_checkpoint(checkpoint)
    loss = trainer.evaluate(FixedImages(8), batch_size=4)["validation_loss"]
    again = toy_trainer(2, 2, model=batch_norm_net(seed=2 + int(os.environ["RANK"])))
    summary = again.fit(FixedImages(16), epochs=2, batch_size=8, run_dir=run_dir, monitoring=SILENT)
    return loss, summary["updates"]


def test_ranks_with_weights_of_a_checkpoint_need_no_common_seed(tmp_path):
    trainer = toy_trainer(2, 2)
    trainer.fit(FixedImages(16), epochs=1, batch_size=8, run_dir=tmp_path, monitoring=SILENT)
    expected = trainer.evaluate(FixedImages(8), batch_size=4)["validation_loss"]
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    found = run_ranks(2, weights_of_a_checkpoint, str(checkpoint), str(tmp_path))
    assert found == [(expected, 4)] * 2


def evaluated_first():
    """Evaluate, when no stage knows the micro-batches of training, and train then; the last one holds one sample."""
    trainer = toy_trainer(2, 1)
    trainer.evaluate(FixedImages(8), batch_size=4)
    return trainer.fit(FixedImages(9), epochs=1, batch_size=4, monitoring=SILENT)["updates"]


def test_a_small_last_micro_batch_may_come_after_an_evaluation():
    assert run_ranks(2, evaluated_first) == [3, 3]
