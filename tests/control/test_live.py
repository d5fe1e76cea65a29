"""Live control: the socket of a run, and the commands that use it."""

import contextlib
import gc
import json
import os
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from adl_dist.cli.folders import table
from adl_dist.control.requests import RequestKind, RequestQueue
from adl_dist.control.run_socket import LONGEST_ADDRESS, SOCKET, LiveControl, ask_run, short_address
from adl_dist.errors import ConfigError
from adl_dist.monitor.activity import ActivityLog
from adl_dist.monitor.status import frames_of_threads, process_status, user_frame
from adl_dist.schedule import Action, Op
from tests.support.commands import in_process, shows
from tests.support.runs import toy_trainer
from tests.support.saved import saved
from tests.support.toys import FixedImages, batch_norm_net
from tests.support.values import SILENT

STAGE = {"stage": 1, "host": "node", "pid": 42, "epoch": 2, "update": 17, "micro_batch": 5}
STAGE |= {"images_per_second": 1234.5, "busy_share": 0.875, "staleness_mean": 0.5, "memory_bytes": 300 * 2**20}
STAGE |= {"doing": "forward 6", "seconds": 0.25, "silent_seconds": 0.0, "saving": ""}
STATUS = {"coordinator": "waits for the results of 'train' since 3.0 s", "stages": [STAGE]}


@contextlib.contextmanager
def listening(run_dir, requests=None, status=lambda: STATUS):
    with contextlib.closing(LiveControl(run_dir, status, requests or RequestQueue())) as control:
        control.start()
        yield control


def client_of(run_dir):
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(5)
    with short_address(run_dir / SOCKET) as address:
        client.connect(address)
    return client


def taken(requests):
    deadline = time.monotonic() + 10
    while not (asked := requests.take()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return asked


@pytest.mark.parametrize(("umask", "name"), [(0o000, "short"), (0o277, "short"), (0o022, "long" * 30)])
def test_only_the_owner_may_connect_whatever_the_umask(tmp_path, umask, name):
    """And nothing is left behind; also where the run folder is longer than a socket's path may be."""
    run_dir = tmp_path / name
    run_dir.mkdir()
    assert (len(os.fsencode(run_dir / SOCKET)) > LONGEST_ADDRESS) == (name != "short")
    before = os.umask(umask)
    try:
        with listening(run_dir):
            assert stat.S_IMODE((run_dir / SOCKET).stat().st_mode) == 0o600
            assert ask_run(run_dir, "status") == STATUS
    finally:
        os.umask(before)
    assert list(run_dir.iterdir()) == []


def test_the_socket_of_a_killed_run_is_replaced(tmp_path, caplog):
    """A run that can make none trains without."""
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / SOCKET))
    stale.close()
    with pytest.raises(ConfigError, match="no run is training there"):
        ask_run(tmp_path, "status")
    with listening(tmp_path):
        assert ask_run(tmp_path, "status") == STATUS
    with listening(tmp_path / "none"):
        assert f"no live control of this run: {tmp_path / 'none'}" in caplog.text


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("ask", [RequestKind.CHECKPOINT, RequestKind.STOP])
def test_checkpoint_and_stop_print_the_outcome(tmp_path, ask, fails):
    requests = RequestQueue()

    def coordinate():
        (request,) = taken(requests)
        assert (request.what, request.why) == (ask, f"adl-dist {ask.value}")
        request.answer("the disk is full" if fails else "runs/a/checkpoints/u7", failed=fails)

    with listening(tmp_path, requests), ThreadPoolExecutor() as coordinator:
        ended = coordinator.submit(coordinate)
        outcome = in_process(ask.value, f"run_dir={tmp_path}" if fails else str(tmp_path))
        ended.result()
    if fails:
        assert (outcome.refusal(), outcome.out) == (f"run_dir={tmp_path}: {ask.value}: the disk is full", "")
    else:
        assert (outcome.code, outcome.out, outcome.err) == (0, "runs/a/checkpoints/u7\n", "")


def test_the_end_of_a_run_waits_until_an_answer_has_left(tmp_path):
    asked, left = threading.Event(), []

    def slow_status():
        asked.set()
        time.sleep(0.3)
        left.append(STATUS)
        return STATUS

    with listening(tmp_path, status=slow_status), client_of(tmp_path) as client:
        client.sendall(b'{"ask": "status"}\n')
        asked.wait(5)
    assert left == [STATUS]


def test_status_says_how_the_last_run_ended(tmp_path):
    path = saved(tmp_path / "checkpoints", 7)
    shows(
        in_process("status", str(tmp_path)).refusal(),
        [f"was killed is resumed from {path.name} by"],
    )
    summary = {"updates": 7, "epochs": 1, "stages": [], "skipped_updates": 0}
    for more, how in (({}, "ended like this:"), ({"stopped": {"why": "SIGTERM"}}, "was stopped by SIGTERM, and the")):
        (tmp_path / "summary.json").write_text(json.dumps(summary | more))
        shows(in_process("status", str(tmp_path)).out, [f"the last one there {how}", "1 epoch, 7 updates"])
    for update, how in ((5, "was stopped by SIGTERM"), (9, "diverged at update 9 (epoch 2)")):
        (tmp_path / "diverged.json").write_text(json.dumps({"update": update, "epoch": 1}))
        shows(in_process("status", str(tmp_path)).out, [f"the last one there {how}"])


def test_status_prints_one_line_per_stage_or_json(tmp_path):
    with listening(tmp_path):
        outcome, as_json = in_process("status", str(tmp_path)), in_process("status", str(tmp_path), "--json")
    assert (outcome.code, outcome.out) == (0, table(STATUS) + "\n")
    assert json.loads(as_json.out) == STATUS
    head, row, coordinator = outcome.out.splitlines()
    assert " ".join(head.split()) == "stage host:pid epoch update micro-batch images/s busy staleness memory now"
    assert " ".join(row.split()) == "1 node:42 3 17 5 1,234 88% 0.50 300 MiB forward 6 since 0.2 s"
    assert table({**STATUS, "stages": [{**STAGE, "saving": "saving"}]}).splitlines()[1] == f"{row}; saving a checkpoint"
    assert coordinator == "coordinator  waits for the results of 'train' since 3.0 s"


def test_status_and_results_are_views_of_the_same_actions(monkeypatch):
    """Two stages in one process: what is done, what is being done, who waits, and what the time was spent on."""
    now = [10.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    stages = [SimpleNamespace(version=0, tally=SimpleNamespace(staleness=[k], skipped=None)) for k in range(2)]
    work = SimpleNamespace(sizes=[3, 3])
    log = ActivityLog(2)
    with log.during("train"):
        contexts = {k: SimpleNamespace(work=work, stage=stages[k]) for k in range(2)}
        log.open(contexts, SimpleNamespace(epoch=4), training=True)
        for k, action, seconds in (
            (0, Action(Op.FORWARD, 0), 2.0),
            (0, Action(Op.FORWARD, 1), 0.0),
            (0, Action(Op.BACKWARD, 1), 3.0),
            (1, Action(Op.BACKWARD, 0), 1.0),
            (1, Action(Op.UPDATE, 0), 1.0),
            (0, Action(Op.SEND_ACT, 1), 3.0),
        ):
            log.begin(k, action)
            now[0] += seconds
            log.end()
        log.begin(1, Action(Op.RECV_ACT, 1))
        now[0] += 0.5
        upper, lower = process_status(log).stages
    assert (upper.doing, upper.waits_for, upper.seconds) == ("wait for its turn", [1], pytest.approx(10.5))
    assert (lower.doing, lower.waits_for, lower.seconds) == ("wait for act 1 from stage 0", [0], pytest.approx(0.5))
    assert upper.counts == {Op.FORWARD: 2, Op.BACKWARD: 1, Op.SEND_ACT: 1}
    assert upper.last == {Op.FORWARD: 1, Op.BACKWARD: 1, Op.SEND_ACT: 1}
    assert (upper.epoch, upper.micro_batch, upper.staleness_mean, lower.staleness_mean) == (4, 1, 0.0, 1.0)
    assert upper.images_per_second == pytest.approx(3 / 10.5), "images count when their gradients have come"
    assert (upper.busy_share, lower.busy_share) == (pytest.approx(5 / 10.5), pytest.approx(2 / 10.5))
    done = log.stages[1]
    assert (done.busy_seconds, done.staleness_sum, done.staleness_max, done.num_skipped) == (2.0, 1, 1, 0)
    assert (done.counts[Op.BACKWARD], done.counts[Op.UPDATE]) == (1, 1)
    spent = {share: seconds for share, seconds in log.stages[0].spent(10.5).items() if seconds}
    assert spent == {"forward": 2.0, "backward": 3.0, "send": 3.0, "other": 2.5}
    assert process_status(log).stages[0].doing == "wait for the next command"


@pytest.mark.parametrize(
    ("package", "place"), [("torch", "control/test_live.py:"), ("torchvision", "torchvision/ops.py:1 in hang")]
)
def test_a_hanging_thread_is_at_its_innermost_line_not_torchs(package, place):
    begun, over, of_package = threading.Event(), threading.Event(), {}
    file = Path(torch.__file__).parents[1] / package / "ops.py"
    exec(compile("def hang(begun, over): begun.set(); over.wait()", file, "exec"), of_package)
    thread = threading.Thread(target=lambda: of_package["hang"](begun, over))
    thread.start()
    begun.wait()
    line = user_frame(thread.ident)
    over.set()
    thread.join()
    assert line.startswith(place)


def test_no_garbage_is_collected_while_frames_are_read():
    """Python 3.11 can crash if a collection lets the thread go on whose frame gets its object."""
    begun, over, collections = threading.Event(), threading.Event(), []

    def deep(n):
        return deep(n - 1) if n else (begun.set(), over.wait())

    thread = threading.Thread(target=deep, args=(50,))
    thread.start()
    begun.wait()
    before = gc.get_threshold()
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    gc.set_threshold(1, 1, 1)
    try:
        collections.clear()
        frames = frames_of_threads()[thread.ident]
        num = len(collections)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.pop()
        over.set()
        thread.join()
    assert num == 0
    assert [frame.f_code.co_name for frame in frames].count("deep") == 51
    assert gc.isenabled()


def test_all_stages_of_one_process_report_their_action(tmp_path):
    answers = {True: [], False: []}  # in training, in evaluation

    class Asks(nn.Module):
        def forward(self, x):
            if (tmp_path / SOCKET).exists():  # not while the trainer is set up
                answers[self.training].append(ask_run(tmp_path, "status")["stages"])
            return x

    units = list(batch_norm_net())
    trainer = toy_trainer(2, 2, model=nn.Sequential(*units[:3], nn.Sequential(Asks()), *units[3:]))
    data = {"train_dataset": FixedImages(40), "val_dataset": FixedImages(4)}
    trainer.fit(**data, epochs=2, batch_size=4, run_dir=tmp_path, monitoring=SILENT)
    first, last = (answers[True][number] for number in (3, 39))
    assert [row["stage"] for row in last] == [0, 1]
    assert {row["doing"].split()[0] for row in last} == {"forward", "wait"}
    assert last[0]["update"] > first[0]["update"]
    assert min(last[0]["staleness_mean"], last[0]["images_per_second"]) > 0
    assert 0 < last[0]["busy_share"] <= 1
    assert last[0]["memory_bytes"] > 2**20
    where = [(row["epoch"], row["update"]) for stages in answers[False] for row in stages]
    assert sorted(set(where)) == [(0, 10), (1, 20)]
    assert not (tmp_path / SOCKET).exists()
