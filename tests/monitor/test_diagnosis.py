"""What the doctor makes of what processes tell: the cause that was planted, and one picture."""

import pytest

from adl_dist.monitor.diagnosis import cause_of, picture
from adl_dist.monitor.status import COORDINATOR, CoordinatorStatus, ProcessStatus, RankStatus, StageStatus
from adl_dist.schedule import Op

TRAINING = CoordinatorStatus("train", True, 60.0)


def stage(k, doing, op="", number=0, *, waits_for=(), seconds=60.0, segment=1, **numbers):
    """The status of a stage; ``numbers``: counts and last, by the printed form of ops."""
    return StageStatus(
        stage=k,
        doing=doing,
        op=Op(op) if op else None,
        number=number,
        waits_for=list(waits_for),
        seconds=seconds,
        segment=segment,
        **{name: {Op(op): number for op, number in by_op.items()} for name, by_op in numbers.items()},
    )


def member(told, *, silent=0.0, state="", phase="train", **more):
    seen = ProcessStatus(host="node", pid=100 + told.stage, phase=phase, stages=[told], **more)
    return RankStatus(rank=told.stage, seen=seen, silent_seconds=silent, state=state)


def waits(k, what, op, number, peer, **more):
    return stage(k, f"wait for {what} {number} from stage {peer}", op, number, waits_for=[peer], **more)


def idle(k):
    return stage(k, "wait for the next command", waits_for=[COORDINATOR])


# Stage 2 of three waits for stage 1, and stage 0 for its gradient: the usual victims of a stage 1 that does nothing.
def victims_of_stage_1(second, **more):
    return [member(waits(0, "grad", "RG", 4, 1)), member(second, **more), member(waits(2, "act", "RA", 7, 1))]


def test_a_stage_asleep_in_any_action_is_the_cause():
    for doing, op in (("forward 7", "F"), ("backward 4", "B"), ("update 2", "U")):
        cause = cause_of(victims_of_stage_1(stage(1, doing, op, 7), at="net.py:3 in slow"), TRAINING)
        assert cause == (1, f"stage 1 (node, pid 101): still at work: {doing} since 60 s, at net.py:3 in slow")


def test_a_stuck_data_loader_is_the_cause_with_its_workers():
    chain = [waits(1, "act", "RA", 8, 0), waits(2, "act", "RA", 8, 1)]
    load = stage(0, "load 8", "L", 8)
    text = cause_of([member(load), *map(member, chain)], TRAINING).text
    assert text == "stage 0 (node, pid 100): the data loader is stuck: it loads micro-batch 8 since 60 s"
    workers = member(load, loaders=[(7, "S"), (8, "T")])
    text = cause_of([workers, *map(member, chain)], TRAINING).text
    assert "by its 2 worker processes (pid 7, pid 8 is stopped)" in text


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("gone", "the process is gone"),
        ("Z", "the process is gone"),
        ("T", "the process is stopped (SIGSTOP); kill -CONT 101 lets it continue"),
        ("t", "held by a debugger"),
        ("D", "held in the kernel"),
        ("S", "runs but does not answer"),
        ("", "its host is down or cut off"),
    ],
)
def test_a_process_that_does_not_answer_is_the_cause(state, said):
    last_told = waits(1, "act", "RA", 5, 0)
    cause = cause_of(victims_of_stage_1(last_told, silent=61.0, state=state), TRAINING)
    assert cause.rank == 1
    assert cause.text.startswith("stage 1 (node, pid 101): ")
    assert said in cause.text


def test_gone_comes_before_stopped_and_that_before_unseen():
    """A process that is gone comes before one that is stopped and that before one that cannot be seen."""
    statuses = [
        member(stage(0, "forward 1", "F", 1)),
        member(stage(1, "forward 1", "F", 1), silent=9.0, state=""),
        member(stage(2, "forward 1", "F", 1), silent=9.0, state="T"),
        member(stage(3, "forward 1", "F", 1), silent=9.0, state="gone"),
    ]
    found = []
    while len(statuses) > 1:
        found.append(cause_of(statuses, TRAINING).rank)
        statuses = [m for m in statuses if m.rank != found[-1]]
    assert found == [3, 2, 1]


def test_a_sent_message_that_does_not_arrive_is_the_links_fault():
    statuses = [
        member(waits(0, "grad", "RG", 4, 1, counts={"RG": 4})),
        member(waits(1, "grad", "RG", 5, 2, counts={"SA": 8, "SG": 4, "RG": 5})),
        member(waits(2, "act", "RA", 7, 1, counts={"RA": 7, "SG": 5})),
    ]
    cause = cause_of(statuses, TRAINING)
    assert cause.rank is None
    assert cause.text.startswith("the link from stage 1 to stage 2: act 7 was sent and has not arrived in 60 s")


def test_a_stage_at_work_on_gpipe_is_not_blamed_on_the_link():
    """A stage at work on a gradient of GPipe which come in descending order is not blamed on the link."""
    statuses = [
        member(waits(0, "grad", "RG", 2, 1, last={"SA": 3, "RG": 3}, counts={"SA": 4, "RG": 1})),
        member(stage(1, "backward 2", "B", 2, last={"RA": 3, "SG": 3}, counts={"RA": 4, "SG": 1})),
    ]
    assert cause_of(statuses, TRAINING) == (1, "stage 1 (node, pid 101): still at work: backward 2 since 60 s")


def test_what_was_sent_in_another_segment_is_not_taken_for_lost():
    """What was sent in another segment or only launched on a GPU is not taken for lost."""
    receiver = waits(1, "act", "RA", 3, 0)
    before = stage(0, "forward 0", "F", segment=0, counts={"SA": 9})
    assert cause_of([member(before), member(receiver)], TRAINING).rank == 0
    launched = stage(0, "update 9", "U", 9, counts={"SA": 9})
    on_gpu = [member(launched, runs_ahead=True), member(receiver, runs_ahead=True)]
    assert cause_of(on_gpu, TRAINING).rank == 0


def test_stages_that_wait_for_each_other_are_called_a_bug():
    cause = cause_of([member(waits(0, "grad", "RG", 4, 1)), member(waits(1, "act", "RA", 9, 0))], TRAINING)
    assert cause.rank is None
    assert "stage 0 waits for stage 1 waits for stage 0; that is a bug of adl_dist" in cause.text


def test_the_stage_that_most_wait_for_is_the_cause():
    statuses = [
        member(stage(0, "forward 9", "F", 9, seconds=90.0)),
        member(waits(1, "grad", "RG", 4, 2)),
        member(stage(2, "forward 4", "F", 4)),
    ]
    assert cause_of(statuses, TRAINING).rank == 2


@pytest.mark.parametrize("what", ["save", "load"])
def test_a_slow_save_or_load_is_the_fault_of_its_stage(what):
    slow = member(stage(1, what), phase=what, at="checkpoint.py:9 in write")
    statuses = [member(idle(0), phase="idle"), slow, member(idle(2), phase="idle")]
    said = f"takes long to {what} its part of a checkpoint, since 60 s, at checkpoint.py:9 in write"
    assert cause_of(statuses, CoordinatorStatus(what, True, 60.0)) == (1, f"stage 1 (node, pid 101): {said}")


def test_a_background_save_that_is_awaited_is_its_writers_fault():
    """A save next to training that the coordinator waits for is the fault of the process that still writes."""
    waiting = CoordinatorStatus("train", False, 60.0, "saving.py:9 in wait")
    at = {"saving": "saving", "saving_at": "checkpoint.py:9 in write"}
    statuses = [
        member(idle(0), phase="idle", saving="committing"),
        member(idle(1), phase="idle"),
        member(idle(2), phase="idle", **at),
    ]
    told = "takes long to write its part of a checkpoint, alongside training, at checkpoint.py:9 in write"
    assert cause_of(statuses, waiting) == (2, f"stage 2 (node, pid 102): {told}")
    assert "; saving a checkpoint alongside, at checkpoint.py:9 in write" in picture(statuses, waiting).splitlines()[2]
    text = cause_of(statuses[:2], waiting).text
    assert text == "stage 0 (node, pid 100): takes long to complete a checkpoint, alongside training"


def test_a_background_save_is_not_the_cause_of_a_slow_stage():
    """A save next to training is not the cause while a stage holds up the others."""
    statuses = [*victims_of_stage_1(stage(1, "forward 7", "F", 7))[:2], member(idle(2), saving="saving")]
    assert cause_of(statuses, TRAINING).rank == 1


def test_when_no_stage_has_anything_to_do_it_is_the_coordinator():
    at_work = CoordinatorStatus("save", False, 60.0, "checkpoint.py:9 in commit")
    cause = cause_of([member(idle(k), phase="idle") for k in range(2)], at_work)
    assert cause == (
        0,
        "the coordinator on rank 0 (node, pid 100): at work after 'save' since 60 s, at checkpoint.py:9 in commit",
    )


def test_a_stage_of_a_finished_neighbour_waits_for_the_link():
    """A stage whose neighbour has finished its part waits for the link not for the coordinator."""
    done = stage(0, "wait for the next command", waits_for=[COORDINATOR], counts={"SA": 8})
    behind = waits(1, "act", "RA", 7, 0, counts={"RA": 7})
    cause = cause_of([member(done, phase="idle"), member(behind)], TRAINING)
    assert "the link from stage 0 to stage 1: act 7" in cause.text


def test_of_stages_in_one_process_the_one_at_work_is_the_cause():
    """All stages in one process have one line each and that one at work is the cause."""
    at_work = stage(1, "backward 3", "B", 3)
    others = [stage(k, "wait for its turn", waits_for=[1]) for k in (0, 2)]
    seen = ProcessStatus(host="node", pid=7, phase="train", stages=[others[0], at_work, others[1]], at="net.py:3 in f")
    statuses = [RankStatus(rank=0, seen=seen)]
    assert cause_of(statuses, TRAINING).text.startswith("stage 1 (node, pid 7): still at work: backward 3")
    assert picture(statuses, TRAINING).splitlines() == [
        "  stage 0  (node, pid 7)  wait for its turn since 60.0 s",
        "  stage 1  (node, pid 7)  backward 3 since 60.0 s, at net.py:3 in f",
        "  stage 2  (node, pid 7)  wait for its turn since 60.0 s",
        "  coordinator  waits for the results of 'train' since 60.0 s",
    ]


def test_the_picture_holds_the_last_message_on_each_edge():
    """The picture holds the last message on each edge and how long a silent process has been so."""
    told = stage(1, "forward 7", "F", 7, last={"RA": 7, "SA": 6, "RG": 4, "SG": 3, "B": 3})
    shown = picture([member(told, silent=9.5, state="T"), RankStatus(rank=2)], TRAINING).splitlines()
    assert shown[0] == (
        "  stage 1  (node, pid 101)  no answer since 9.5 s; before: forward 7 since 60.0 s; last sent act 6, grad 3; "
        "last got act 7, grad 4"
    )
    assert shown[1] == "  stage 2  (-)  has told nothing yet since 0.0 s"
