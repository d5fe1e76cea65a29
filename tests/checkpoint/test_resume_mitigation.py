"""What a mitigation remembers is in checkpoints: the same cut continues to the bit, another one by parameter name."""

from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn

from adl_dist.checkpoint import state as saved_state
from adl_dist.stage import Stage
from tests.support.commands import assert_same
from tests.support.runs import trained
from tests.support.saved import saved
from tests.support.user_code import At, fail
from tests.support.values import spec_of

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)


def test_a_run_that_broke_off_ends_with_the_same_bits(tmp_path):
    """In the second epoch, with histories that are ahead of those of the checkpoint; others: test_resumed.py."""
    options = {"mitigation": ["nesterov", "discount"], "discount_updates": 30}
    plain = partial(torch.optim.SGD, lr=0.2)
    train = partial(trained, 3, 2, torch.float32, options=options, optimizer=plain, epochs=3)
    whole, _ = train()
    with pytest.raises(KeyError, match="a bug of the user's"):
        train(run_dir=tmp_path, plant=break_off)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["update-00000006"]
    resumed, _ = train(run_dir=tmp_path)
    assert_same(resumed.full_state_dict(), whole.full_state_dict())


def break_off(net, data):
    net[3] = At(11 + 8, fail)


def stage_of(K, k, layers, *mitigation):
    """Stage k of K, which is made of the layers called so."""
    module = nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in layers))
    return Stage(module, k, spec_of(K, SGD, accumulation_steps=1, mitigation=[*mitigation]))


def carried(folder, one, other):
    """Save one stage and load the other; return what it remembers, by name."""
    saved_state.load(saved(folder, 1, saved_state.state_of([one], 3)), [other])
    assert other.mitigation is not None
    return {name: other.mitigation.history[p] for name, p in other.named_parameters() if p in other.mitigation.history}


def test_another_cut_carries_the_histories_by_name(tmp_path):
    one = stage_of(3, 0, "ab", "predict", "error_feedback")
    kept = {}
    for number, (name, p) in enumerate(one.named_parameters()):
        updates = [torch.full_like(p.detach(), number + i / 8) for i in range(4)]
        kept[name] = {"updates": updates, "displacement": torch.full_like(p.detach(), -number), "rate": 0.1 / 3}
        one.mitigation.history[p] = kept[name]
    got = carried(tmp_path, one, stage_of(2, 0, "b", "predict", "error_feedback"))
    assert got.keys() == {"b.weight", "b.bias"}
    for name, past in got.items():
        assert past["rate"] == kept[name]["rate"]
        assert torch.equal(past["displacement"], kept[name]["displacement"])
        assert all(map(torch.equal, past["updates"], kept[name]["updates"]))
        assert len(past["updates"]) == 4
