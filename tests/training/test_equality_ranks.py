"""K gloo processes against K stages in one process: the same bits."""

import pytest
import torch

from adl_dist.schedule import METHODS
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.runs import nan_inputs, train
from tests.support.tiers import slow
from tests.support.values import QUIET

pytestmark = pytest.mark.ranks

FLOATS = (torch.float32, torch.float64)
CASES = [
    *((M, dtype, {}) for M in (1, 2, 3, 4) for dtype in FLOATS),
    *((3, torch.float32, {"method": name, "dropout": 0.3}) for name in METHODS if name != "adl"),
    (2, torch.float32, {"options": {"weights": "latest"}}),
    (2, torch.float32, {"options": {"weights": "recompute"}, "dropout": 0.3}),
    (2, torch.float32, {"options": {"order": "backward_first", "reduction": "sum", "lr_index": "slot"}}),
    (3, torch.float32, {"method": "gpipe", "options": {"recompute": "except_last"}, "dropout": 0.3}),
    (1, torch.float32, {"method": "dsp", "options": {"activation_queue": 2}}),
    (1, torch.float32, {"method": "dgl", "options": {"head": "linear", "buffer_size": 3}}),
    (2, torch.float32, {"dropout": 0.3, "shuffle": True}),
    (2, torch.float32, {"channels_last": True}),
    (2, torch.float32, {"clip_norm": 0.3, "non_finite": "skip", "plant": nan_inputs}),
    (3, torch.float32, {"method": "paci", "non_finite": "skip", "plant": nan_inputs}),
]


ADL = CASES[0 : 2 * 4 : 2]  # M = 1 .. 4


def train_all(K, cases):
    return [train(K, M, dtype, **options) for M, dtype, options in cases]


@pytest.mark.parametrize(
    ("K", "cases"),
    [(2, ADL), (3, CASES), (4, ADL), slow(2, CASES), slow(4, CASES)],
    ids=["2", "3 all", "4", "2 all", "4 all"],
)
def test_k_processes_equal_one_process_bit_for_bit(K, cases):
    """Compare also the float64 runs, of which test_equality.py shows that they follow the equations."""
    by_rank = run_ranks(K, train_all, K, cases, timeout_seconds=110)
    for case, (M, dtype, options) in enumerate(cases):
        expected, expected_summary = train(K, M, dtype, **options)
        for rank in range(K):
            state, summary = by_rank[rank][case]
            assert state.keys() == expected.keys()
            for name in expected:
                assert torch.equal(state[name], expected[name]), f"M={M} {dtype} {options} rank {rank}: {name}"
            for figure in ("validation_loss", "validation_accuracy", "updates", "skipped_updates"):
                assert summary[figure] == expected_summary[figure]
            told = [(s["staleness_mean"], s["staleness_max"]) for s in summary["stages"]]
            assert told == [(s["staleness_mean"], s["staleness_max"]) for s in expected_summary["stages"]]


def stage_1_raises():
    import adl_dist
    from tests.support.toys import FixedImages, batch_norm_net

    class Faulty(torch.nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += self.training
            if self.calls == 5:
                raise ValueError("boom on stage 1")
            return x

    model = batch_norm_net()
    model[4] = Faulty()
    trainer = adl_dist.Trainer(
        model,
        loss_fn=torch.nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        num_stages=2,
        processes=adl_dist.ProcessOptions(timeout_seconds=20),
    )
    trainer.fit(FixedImages(32), epochs=1, batch_size=8, monitoring=QUIET)


def test_every_rank_knows_the_cause_of_a_failure_first():
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, stage_1_raises)
    text = str(failure.value)
    assert "still ran" not in text
    assert text.index("cause-rank1") < text.index("victim-rank0")
    assert "boom on stage 1" in text[text.index("victim-rank0") :], "through the control plane"


def a_head_where_none_can_be():
    import adl_dist
    from tests.support.runs import sgd
    from tests.support.toys import FixedImages, tuple_net

    trainer = adl_dist.Trainer(
        tuple_net(),
        loss_fn=torch.nn.CrossEntropyLoss(),
        optimizer=sgd,
        method=adl_dist.method("dgl"),
        num_stages=2,
        processes=adl_dist.ProcessOptions(timeout_seconds=20),
    )
    trainer.fit(FixedImages(16), epochs=1, batch_size=8, monitoring=QUIET)


def test_a_method_that_does_not_fit_is_refused_on_every_rank():
    with pytest.raises(RanksFailed) as failure:
        run_ranks(2, a_head_where_none_can_be)
    text = str(failure.value)
    assert "still ran" not in text
    for rank in ("cause-rank0", "victim-rank1"):
        assert "expected one tensor [B, C, H, W] or [B, C]" in text[text.index(rank) :]


def different_jobs():
    import os

    from tests.support.runs import train

    return train(2, 1 + int(os.environ["RANK"]), torch.float32)


def test_ranks_that_were_given_different_jobs_refuse_to_start():
    with pytest.raises(RanksFailed, match="were not given the same job: method is"):
        run_ranks(2, different_jobs)
