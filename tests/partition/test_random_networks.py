"""The random networks themselves: in plain torch each runs, trains, and is the same when it is built again."""

import random

import pytest
import torch

from tests.support.random_networks import SNIPPETS, WRAPS, call, loss_of, random_network, tensors_in

BATCH_OF_SEEDS, NUM_SEEDS = 20, 120


def outputs_of(case):
    """Return all outputs of three updates and of an evaluation, from the same random streams each time."""
    torch.manual_seed(case.seed)
    random.seed(case.seed)
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    outputs = []
    for batch in case.batches[:3]:
        output = call(model, batch)
        optimizer.zero_grad()
        loss_of(output).backward()
        optimizer.step()
        outputs += [t.detach() for t in tensors_in(output)]
    model.eval()
    with torch.no_grad():
        outputs += [t for batch in case.batches for t in tensors_in(call(model, batch))]
    return outputs


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BATCH_OF_SEEDS))
def test_each_network_trains_and_is_built_the_same_again(first):
    for seed in range(first, first + BATCH_OF_SEEDS):
        outputs, again = outputs_of(random_network(seed)), outputs_of(random_network(seed))
        assert all(torch.isfinite(t).all() for t in outputs), seed
        assert len(outputs) == len(again), seed
        assert all(torch.equal(a, b) for a, b in zip(outputs, again, strict=True)), seed


def test_batches_have_four_sizes_and_all_snippets_occur():
    cases = [random_network(seed) for seed in range(NUM_SEEDS)]
    for case in cases:
        firsts = [tensors_in(batch)[0] for batch in case.batches]
        assert len({len(x) for x in firsts}) == 4
    occurring = frozenset().union(*(case.features for case in cases))
    assert {template.name for template in SNIPPETS + WRAPS} <= occurring
