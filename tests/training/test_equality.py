"""The values of a run, all stages in one process: against the equations, against plain torch, in any order."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from adl_dist.optimizers import Muon, mark_roles
from adl_dist.schedule.replay import at_random
from tests.support.commands import assert_same
from tests.support.equations import assert_close, by_the_equations, differ, micro_batches, run
from tests.support.runs import BALANCE, EPOCHS, sgd, train, warm_up_schedule
from tests.support.slices import cut
from tests.support.tiers import slow
from tests.support.toys import batch_norm_net


@pytest.mark.parametrize("M", [1, 2, 3, 4])
@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_k_stages_follow_the_equations_of_the_paper_to_1e_12(K, M):
    assert_close(run(K, M, "adl"), by_the_equations(K, M, None, "stash"))


PLAIN = [(M, dtype, None) for M in (1, 3) for dtype in (torch.float32, torch.float64)]


@pytest.mark.parametrize(("M", "dtype", "clip_norm"), [*PLAIN, (1, torch.float32, 0.3)])
def test_one_stage_equals_a_plain_torch_loop_bit_for_bit(M, dtype, clip_norm):
    """With M = 1 this is the loop of every torch tutorial."""
    model = batch_norm_net().to(dtype)
    optimizer = sgd(model.parameters())
    schedule = warm_up_schedule(optimizer)
    loss_fn = nn.CrossEntropyLoss()
    batches = micro_batches(dtype=dtype)
    for _ in range(EPOCHS):
        for start in range(0, len(batches), M):
            group = batches[start : start + M]
            for x, target in group:
                share = len(target) / sum(len(t) for _, t in group)
                loss_fn(model(x), target).backward(torch.tensor(share, dtype=dtype) if M > 1 else None)
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    state, _ = train(1, M, dtype, clip_norm=clip_norm)
    assert_same(state, model.state_dict())


@pytest.mark.parametrize("K", [2, 3, 4])
def test_staleness_changes_the_values(K):
    """The equality tests would pass for a synchronous pipeline if it did not."""
    assert differ(run(K, 2, "adl"), run(1, 2, "adl")) > 1e-3


@pytest.mark.parametrize("num_orders", [4, slow(40)])
@pytest.mark.parametrize("weights", ["stash", "latest"])
def test_the_order_of_events_does_not_change_a_bit(weights, num_orders):
    """Random interleavings of real tensors, dropout included; see test_engine.py for thousands without."""
    options = {"options": {"weights": weights}, "dropout": 0.3, "epochs": 1}
    expected, _ = train(4, 2, torch.float32, **options)
    for seed in range(num_orders):
        assert_same(train(4, 2, torch.float32, **options, pick_next=at_random(seed))[0], expected)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, fused=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, foreach=False),
        lambda p: Muon(p, lr=0.02, rest_lr=0.01),
    ],
    ids=["adamw", "adamw fused", "sgd fused", "rmsprop for-loop", "muon"],
)
def test_fused_and_foreach_optimizers_give_the_stashed_gradient(optimizer):
    """Fused steps bypass autograd's check; stashing must not rely on it. Reference: every version kept as a copy."""
    K, model = 3, batch_norm_net().double()
    mark_roles(model)
    modules = cut(model, num_stages=K, balance=BALANCE[K])
    optimizers = [optimizer(module.parameters()) for module in modules]
    schedules = [warm_up_schedule(one) for one in optimizers]
    weights = [[copies(module)] for module in modules]  # of each stage, by version
    batches = micro_batches()
    for _ in range(EPOCHS):
        base = len(weights[0]) - 1
        for b, (x, target) in enumerate(batches):
            z = x
            for k, module in enumerate(modules):
                version = base + max(0, (b - 2 * (K - 1 - k)) // 2)
                z = functional_call(module, weights[k][version], (z,))
            group = batches[b // 2 * 2 : b // 2 * 2 + 2]
            (nn.CrossEntropyLoss()(z, target) * (len(target) / sum(len(t) for _, t in group))).backward()
            if b % 2 == 0 and b + 1 < len(batches):
                continue
            for k, module in enumerate(modules):
                for name, p in module.named_parameters():
                    p.grad = sum(version[name].grad for version in weights[k] if version[name].grad is not None)
                optimizers[k].step()
                schedules[k].step()
                weights[k] = [{n: w.detach().requires_grad_() for n, w in version.items()} for version in weights[k]]
                weights[k].append(copies(module))
    expected = {name: tensor for module in modules for name, tensor in module.state_dict().items()}
    assert_close(train(K, 2, torch.float64, optimizer=optimizer)[0], expected)


def copies(module):
    return {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}
