"""From what processes tell to the cause that was planted, and to one picture."""

import pytest

from adl_dist.monitor.diagnosis import cause_of, picture
from adl_dist.monitor.status import COORDINATOR, CoordinatorStatus, ProcessStatus, RankStatus, StageStatus
from adl_dist.schedule import Op

TRAINING = CoordinatorStatus("train", True, 60.0)
OPS = {"forward": "F", "backward": "B", "update": "U", "load": "L", "act": "RA", "grad": "RG"}


def stage(k, doing, *, what="", waits_for=(), seconds=60.0, segment=1, counts=(), last=()):
    """The status of a stage at an action ``what``, like "forward 7"; counts and last by the printed form of ops."""
    name, _, number = what.partition(" ")
    op = Op(OPS[name]) if what else None
    waits_for, counts, last = list(waits_for), *({Op(op): n for op, n in dict(each).items()} for each in (counts, last))
    given = {"op": op, "number": int(number or 0), "waits_for": waits_for, "counts": counts, "last": last}
    return StageStatus(stage=k, doing=doing, seconds=seconds, segment=segment, **given)


def rank(*stages, silent=0.0, state="", phase="train", **seen):
    """The process of the ``stages``."""
    k = stages[0].stage
    known = ProcessStatus(host="node", pid=100 + k, phase=phase, stages=list(stages), **seen)
    return RankStatus(rank=k, seen=known, silent_seconds=silent, state=state)


def at_work(k, what, *, seconds=60.0, segment=1, counts=(), last=(), **more):
    return rank(stage(k, what, what=what, seconds=seconds, segment=segment, counts=counts, last=last), **more)


def waits(k, what, peer, *, counts=(), last=(), **more):
    doing = f"wait for {what} from stage {peer}"
    return rank(stage(k, doing, what=what, waits_for=[peer], counts=counts, last=last), **more)


def idle(k, *, counts=(), **more):
    return rank(stage(k, "wait for the next command", waits_for=[COORDINATOR], counts=counts), phase="idle", **more)


# Stage 2 of three waits for stage 1, and stage 0 for its gradient: the usual victims of a stage 1 that does nothing.
VICTIMS = [waits(0, "grad 4", 1), waits(2, "act 7", 1)]
WAIT_FOR_LOAD = [waits(1, "act 8", 0), waits(2, "act 8", 1)]
SENT = {"SA": 9}
STUCK = "the data loader is stuck: it loads micro-batch 8 since 60 s"
LOST = "the link from stage 1 to stage 2: act 7 was sent and has not arrived in 60 s"
WRITE = "checkpoint.py:9 in write"
AFTER_SAVE = CoordinatorStatus("save", False, 60.0, WRITE)
# The statuses, the rank of the cause, and how its text goes on behind the name of that process.
CAUSES = {
    "at work": ([at_work(1, "forward 7"), *VICTIMS], 1, "still at work: forward 7 since 60 s"),
    "of two the one that most wait for": (
        [at_work(0, "forward 9", seconds=90.0), waits(1, "grad 4", 2), at_work(2, "forward 4")],
        2, "still at work: forward 4 since 60 s",
    ),
    "not the link, where gradients come in descending order as in GPipe": (
        [
            waits(0, "grad 2", 1, last={"SA": 3, "RG": 3}, counts={"SA": 4, "RG": 1}),
            at_work(1, "backward 2", last={"RA": 3, "SG": 3}, counts={"RA": 4, "SG": 1}),
        ], 1, "still at work: backward 2",
    ),
    "not the link, where another segment sent it": (
        [at_work(0, "forward 0", segment=0, counts=SENT), waits(1, "act 3", 0)], 0, "still at work: forward 0",
    ),
    "not the link, where a GPU may not have sent it yet": (
        [at_work(0, "update 9", counts=SENT, runs_ahead=True), waits(1, "act 3", 0, runs_ahead=True)],
        0, "still at work: update 9",
    ),
    "not a save next to it": (
        [at_work(1, "forward 7"), VICTIMS[0], idle(2, saving="saving")], 1, "still at work: forward 7",
    ),
    "a loader": ([at_work(0, "load 8"), *WAIT_FOR_LOAD], 0, STUCK),
    "workers of a loader": (
        [at_work(0, "load 8", loaders=[(7, "S"), (8, "T")]), *WAIT_FOR_LOAD],
        0, f"{STUCK}, by its 2 worker processes (pid 7, pid 8 is stopped)",
    ),
    **{
        f"silent in state {state}": ([waits(1, "act 5", 0, silent=61.0, state=state), *VICTIMS], 1, said)
        for state, said in {
            "gone": "the process is gone", "Z": "the process is gone", "t": "the process is held by a debugger",
            "T": "the process is stopped (SIGSTOP); kill -CONT 101 lets it continue",
            "D": "the process does not answer: it is held in the kernel", "S": "the process runs but does not answer",
            "": "it neither answers nor refuses: its host is down or cut off",
        }.items()
    },
    "a message that all wait for": (
        [
            waits(0, "grad 4", 1, counts={"RG": 4}),
            waits(1, "grad 5", 2, counts={"SA": 8, "SG": 4, "RG": 5}),
            waits(2, "act 7", 1, counts={"RA": 7, "SG": 5}),
        ], None, LOST,
    ),
    "a message of a finished stage": ([idle(1, counts={"SA": 8}), waits(2, "act 7", 1, counts={"RA": 7})], None, LOST),
    "a cycle": ([waits(0, "grad 4", 1), waits(1, "act 9", 0)], None, "a cycle of waits, which is a bug of adl_dist"),
    **{
        f"a slow {what}": (
            [idle(0), rank(stage(1, what), phase=what, at=WRITE), idle(2)],
            1, f"takes long to {what} its part of a checkpoint, since 60 s, at {WRITE}",
        )
        for what in ("save", "load")
    },
}  # fmt: skip


@pytest.mark.parametrize(("statuses", "number", "said"), CAUSES.values(), ids=CAUSES)
def test_the_cause_of_a_stall_is_named(statuses, number, said):
    cause = cause_of(statuses, TRAINING)
    assert cause.rank == number
    name = "" if number is None else f"stage {number} (node, pid {100 + number}): "
    assert cause.text.startswith(name + said)


def test_with_nothing_to_do_for_any_stage_it_is_the_coordinator():
    said = f"the coordinator on rank 0 (node, pid 100): at work after 'save' since 60 s, at {WRITE}"
    assert cause_of([idle(0), idle(1)], AFTER_SAVE) == (0, said)


def test_gone_comes_before_stopped_and_that_before_unseen():
    silent = [at_work(k, "forward 1", silent=9.0, state=state) for k, state in ((1, ""), (2, "T"), (3, "gone"))]
    for worst in (3, 2, 1):
        assert cause_of([at_work(0, "forward 1"), *silent], TRAINING).rank == worst
        silent.pop()


def test_a_background_save_that_is_awaited_is_its_writers_fault():
    waiting = CoordinatorStatus("train", False, 60.0, "saving.py:9 in wait")
    writer = idle(2, saving="saving", saving_at="checkpoint.py:9 in write")
    statuses = [idle(0, saving="committing"), idle(1), writer]
    text = "takes long to write its part of a checkpoint, alongside training, at checkpoint.py:9 in write"
    assert cause_of(statuses, waiting) == (2, f"stage 2 (node, pid 102): {text}")
    assert "; saving a checkpoint alongside, at checkpoint.py:9 in write" in picture(statuses, waiting).splitlines()[2]
    text = cause_of(statuses[:2], waiting).text
    assert text == "stage 0 (node, pid 100): takes long to complete a checkpoint, alongside training"


def test_of_stages_in_one_process_the_one_at_work_is_the_cause():
    others = [stage(k, "wait for its turn", waits_for=[1]) for k in (0, 2)]
    statuses = [rank(others[0], stage(1, "backward 3", what="backward 3"), others[1], at="net.py:3 in f")]
    assert cause_of(statuses, TRAINING).text.startswith("stage 1 (node, pid 100): still at work: backward 3")
    assert picture(statuses, TRAINING).splitlines() == [
        "  stage 0  (node, pid 100)  wait for its turn since 60.0 s",
        "  stage 1  (node, pid 100)  backward 3 since 60.0 s, at net.py:3 in f",
        "  stage 2  (node, pid 100)  wait for its turn since 60.0 s",
        "  coordinator  waits for the results of 'train' since 60.0 s",
    ]


def test_the_picture_holds_the_last_message_on_each_edge():
    known = at_work(1, "forward 7", last={"RA": 7, "SA": 6, "RG": 4, "SG": 3, "B": 3}, silent=9.5, state="T")
    assert picture([known, RankStatus(rank=2)], TRAINING).splitlines()[:2] == [
        "  stage 1  (node, pid 101)  no answer since 9.5 s; before: forward 7 since 60.0 s; last sent act 6, grad 3; "
        "last got act 7, grad 4",
        "  stage 2  (-)  no answer yet since 0.0 s",
    ]
