"""The limits on messages sent ahead: how many each edge may have."""

from collections import Counter, defaultdict, deque
from collections.abc import Container, Mapping
from functools import lru_cache

from adl_dist.schedule.actions import LINKS, message_of
from adl_dist.schedule.build_actions import training_actions
from adl_dist.schedule.interleaving import ActionLists, interleave
from adl_dist.schedule.pipeline import Pipeline

Sending = tuple[str, int]  # name of the message, and its sender


@lru_cache(maxsize=32)
def max_pending_of(pipeline: Pipeline) -> Mapping[Sending, int]:
    """Return the most messages under way on each edge before a send waits.

    They are so few that a buffer is released as soon as its sender can know that the message has left, and so many that
    no send waits in steady state. A send may wait while the pipeline fills or drains, but never in a cycle of waiting
    stages (tests/schedule/test_schedule.py).
    """
    K, M = pipeline.num_stages, pipeline.micro_batches_per_update
    if pipeline.spec.local_losses:  # no message comes back
        return {(link.what, k): pipeline.max_pending for link in LINKS.values() for k in range(K)}
    fill = pipeline.updates_to_fill
    groups = [M] * (fill + 1 + fill)
    made = [list(training_actions(pipeline, k, group_sizes=groups)) for k in range(K)]
    steady = range(fill * M, (fill + 1) * M)
    return max_outstanding(made, steady)


def max_outstanding(lists: ActionLists, numbers: Container[int]) -> dict[Sending, int]:
    """Return the most messages under way on each edge when one is sent.

    The receiver may be as slow as it likes: a message counts as received only when later messages to the sender imply
    it. Messages are counted when one of the micro-batches in ``numbers`` is sent.
    """
    known: list[Counter[Sending]] = [Counter() for _ in lists]  # received messages that each stage knows of, per edge
    letters: dict[Sending, deque[Counter[Sending]]] = defaultdict(deque)  # the sender's knowledge
    sent: Counter[Sending] = Counter()
    most: dict[Sending, int] = defaultdict(int)
    for k, action in interleave(lists):
        if (message := message_of(action, k, num_stages=len(lists))) is None:
            continue
        edge = message.what, message.sender
        if action.op in LINKS:
            sent[edge] += 1
            if action.number in numbers:
                most[edge] = max(most[edge], sent[edge] - known[k][edge])
            letters[edge].append(known[k].copy())
        else:
            known[k] |= letters[edge].popleft()  # the larger number of each edge
            known[k][edge] += 1
    return dict(most)
