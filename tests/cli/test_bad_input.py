"""Bad input ends with one readable line and exit code 2; nothing is overwritten, nothing is left running.

Here are those that show when the stages meet the data, in training, and with a run folder; others: test_mistakes.py.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from adl_dist.checkpoint.ownership import Ownership
from adl_dist.cli import train
from tests.support.commands import ADL_DIST, as_command, in_process, left_behind, shows, snapshot, words
from tests.support.tiers import slow

USER = "tests.support.user_code"
SMALL = f"model._target_={USER}.good"
OLDER, NEWEST = "update-00000002", "update-00000004"  # checkpoints of epochs of two updates


def refused(*command, code=2):
    """Run it here and return the line that it is refused with."""
    line = in_process(*command).refusal(code)
    run_dir = next((Path(word.removeprefix("run_dir=")) for word in command if word.startswith("run_dir=")), None)
    if run_dir is not None and run_dir.is_absolute():
        assert left_behind(run_dir, seconds=0) == []
    return line


@pytest.fixture
def _no_process(monkeypatch):
    monkeypatch.setattr(train, "launch_local", lambda *_, **__: pytest.fail("processes were started"))


@pytest.mark.parametrize("processes", [False, slow(True)])
def test_adl_dist_refuses_with_one_line_and_finds_a_local_target(processes, tmp_path):
    """Logging and torch's own voice are those of a fresh process only here, and so is the import path."""
    (tmp_path / "mine.py").write_text("def make():\n    raise LookupError('no such weights')\n")
    command = words(tmp_path / "run", "model._target_=mine.make", processes=processes)
    outcome = as_command(ADL_DIST, *command, cwd=tmp_path)
    assert outcome.refusal() == "model: mine.make failed: LookupError: no such weights"
    assert [line.partition(" ")[0] for line in outcome.out.splitlines()] == ["loading", *["starting"] * processes]
    assert left_behind(tmp_path) == []
    assert not (tmp_path / "run").exists()


ONE_STAGE, BY_BLOCKS = "partition.num_stages=1", "partition.granularity=block"
IMAGES, NO_SAMPLES = f"data._target_={USER}.images", ["expected samples", "Images is empty", "data.root"]
# What only shows when the stages meet the data: refused before training, and nothing but a log is left.
MISFITS = [
    (["partition.balance=[1,2]"], ["balance=[1, 2]", "expected 2 numbers", "5 blocks (stem, layer1_0", "add up to 3"]),
    ([BY_BLOCKS, "partition.num_stages=6"], ["needs 5 cuts", "can be cut in 4 place(s)", "use at most"]),
    ([f"model._target_={USER}.second_half_does_not_fit"], ["the model gets", "fails on it in Linear(", "2x8 and 9x8"]),
    (["loss._target_=torch.nn.MSELoss"], ["stage 1: the loss", "float32[B, 10]", "int64[B]", "loss._target_"]),
    ([f"loss._target_={USER}.loss_of_nothing"], ["stage 1: the loss returned None", "expected a tensor of one number"]),
    (
        [f"data._target_={USER}.measured", f"model._target_={USER}.column", "loss._target_=torch.nn.MSELoss"],
        ["stage 1: the model returns [B, 1], but the targets are [B]", "broadcasting", "output.squeeze(1)"],
    ),
    ([IMAGES, "data.num_samples=0"], ["training dataset", *NO_SAMPLES]),
    ([IMAGES, "data.num_samples=15"], ["training dataset", "at least 16 samples", "Images has 15", "=15 or less"]),
    ([f"data._target_={USER}.a_list"], ["sample ", "expected a pair (input, target), got int", "__getitem__"]),
]
IS_NO_CLASS = ["the model has 10 outputs", "[0, 10)", "model.num_classes"]
DIVERGES = ["lower the learning rate", "if the method has staleness, raise method.accumulation_steps"]
BAD_VALIDATION = [f"data._target_={USER}.bad_validation_target"], ["validation dataset", "micro-batch 1", *IS_NO_CLASS]
# What shows at some micro-batch: nothing is saved but what was trained before a validation.
IN_TRAINING = [
    ([f"model._target_={USER}.Branching"], ["user_code.py:", "the answer is False here, and was True in all recorded"]),
    ([IMAGES, "data.last_target=10"], ["training dataset", "of epoch 1", "target 10", *IS_NO_CLASS]),
    BAD_VALIDATION,
    ([f"data._target_={USER}.raises_at_a_sample"], ["training dataset: sample 20: RaisesAt raised ZeroDivisionError"]),
    ([f"model._target_={USER}.exits_at", "model.at=6"], ["sys.exit(3) at", "user_code.py:", "raise an error instead"]),
    (["optimizer.lr=1e20"], ["stage 1: the loss is nan at update 1 (epoch 1)", *DIVERGES, "or NaN in the data?"]),
    (
        [f"loss._target_={USER}.InfiniteLoss"],
        ["stage 1: the loss is inf at update 0 (epoch 1); no rate has acted yet: look in", "an update without targets"],
    ),
    # One update in each epoch: its loss was still that of the weights before.
    (["data.num_samples=16", "optimizer.lr=1e20"], ["stage 1", "validation loss is nan", "(epoch 1)", *DIVERGES]),
]


@pytest.mark.parametrize(("overrides", "parts"), [*MISFITS, *IN_TRAINING])
def test_what_shows_only_with_the_data_is_told_and_not_saved(overrides, parts, tmp_path):
    shows(refused(*words(tmp_path / "run", "lr_schedule=constant", *overrides)), parts)
    assert len(list(tmp_path.glob("run/checkpoints/*"))) == ((overrides, parts) == BAD_VALIDATION)
    assert (overrides, parts) in IN_TRAINING or not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.usefixtures("_no_process")
def test_more_stages_than_the_model_has_start_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "num_cores", lambda: 2)
    line = refused(*words(tmp_path / "run", "partition.num_stages=50", processes=True))
    shows(line, ["partition.num_stages=50 needs 49 cuts", "use at most partition.num_stages="])


# From here on there is a finished run: two epochs, two checkpoints.


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    outcome = in_process(*words(run_dir, SMALL, "train.epochs=2"))
    assert (outcome.code, outcome.err) == (0, "")
    return run_dir


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A checkpoint of another model, and its weights."""
    run_dir, out = tmp_path_factory.mktemp("foreign") / "run", tmp_path_factory.mktemp("foreign") / "model.pt"
    in_process(*words(run_dir, "train.max_updates=1"))
    in_process("export", f"run_dir={run_dir}", f"out={out}")
    return run_dir / "checkpoints/update-00000001", out


@pytest.fixture
def run_dir(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.mark.usefixtures("_no_process")
@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["resume=never"], ["already holds a run", NEWEST, "would write over it", "resume=auto", "another run_dir"]),
        (["resume={older}"], [f" holds {NEWEST}", "would write over", "choose another run_dir"]),
        (["model=resnet8"], ["belongs to another run", "model.depth is None there and 8 here", " more; choose"]),
    ],
    ids=["resume=never", "an older checkpoint", "model"],
)
def test_another_runs_folder_stays_as_it_is_to_the_last_byte(overrides, parts, run_dir):
    before = snapshot(run_dir)
    model = [] if any(word.startswith("model") for word in overrides) else [SMALL]
    overrides = [word.format(older=run_dir / "checkpoints" / OLDER) for word in overrides]
    line = refused(*words(run_dir, *model, "train.epochs=3", *overrides, processes=True))
    shows(line, [f"run_dir={run_dir}", *parts])
    assert snapshot(run_dir) == before


def test_a_run_that_failed_before_an_update_leaves_its_folder(tmp_path):
    data = SMALL, f"data._target_={USER}.images", "data.num_samples=16"
    failed, corrected = (in_process(*words(tmp_path / "run", *data, f"data.last_target={n}")) for n in (99, 1))
    shows(failed.refusal(), ["of epoch 1 has target 99, but the model has"])
    assert (corrected.code, corrected.err) == (0, "")


@pytest.mark.usefixtures("_no_process")
def test_a_run_folder_that_cannot_be_made_says_why(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    before = snapshot(tmp_path)
    reasons = {"file/run": "is a file", "file": "is a file", "r" * 300: "File name too long"}
    for name, reason in reasons.items():
        line = refused(*words(tmp_path / name, processes=True))
        shows(line, [f"run_dir={tmp_path / name} cannot be used", reason, "choose another run_dir"])
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    shows(refused(*words(tmp_path / "run", processes=True)), [f"cannot be used: {tmp_path} is not writable; choose"])
    assert snapshot(tmp_path) == before


def test_a_run_folder_where_another_process_trains_is_left_to_it(run_dir):
    before = snapshot(run_dir)
    owner = Ownership(run_dir)
    assert owner.take()
    line = refused(*words(run_dir, SMALL, "train.epochs=3"))
    owner.release()
    parts = f"pid {os.getpid()} on ", "is training here", "wait for it, or choose another run_dir"
    shows(line, [f"run_dir={run_dir}", *parts])
    assert snapshot(run_dir) == before, "its logs, too"


@pytest.mark.parametrize(
    ("launch", "another"),
    [
        slow("first", "second", id="torchrun"),
        pytest.param("none", "none", id="torchrun without --rdzv-id"),
    ],
)
def test_a_resume_is_refused_to_attempts_of_another_launch(launch, another, foreign, tmp_path, monkeypatch):
    """All attempts get the words of the first; torchrun counts from 0 where an agent or a job takes another's place."""
    run_dir = tmp_path / "run"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
    for resumed_from, updates in ((foreign[0], 2), (run_dir / "checkpoints" / OLDER, 3)):
        outcome = in_process(*words(run_dir, f"train.max_updates={updates}", f"resume={foreign[0]}"))
        assert (outcome.code, outcome.err) == (0, "")
        shows(outcome.out, [f"resumed from {resumed_from}"])
    before = snapshot(run_dir)
    monkeypatch.setattr(os, "getppid", os.getpid)  # of another torchrun
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", another)
    for count, resume in (("0", "never"), ("1", foreign[0])):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        shows(refused(*words(run_dir, "train.max_updates=4", f"resume={resume}")), ["would write over"])
    assert snapshot(run_dir) == before


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


DATA = "model-00001-of-00002.safetensors"
DAMAGES = {
    "cut data": (DATA, cut, [f"{DATA} cannot be read", "it should hold", "bytes, found"]),
    "cut manifest": ("manifest.json", cut, ["manifest.json cannot be read"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_says_what_is_wrong_and_the_way_on(damage, run_dir, tmp_path):
    name, inflict, parts = DAMAGES[damage]
    newest, older = (run_dir / "checkpoints" / each for each in (NEWEST, OLDER))
    inflict(newest / name)
    before = snapshot(run_dir / "checkpoints")
    parts = [f"{newest} is damaged", *parts, "continue from one next to it", "evaluate and export take checkpoint=PATH"]
    train, out = words(run_dir, SMALL, "train.epochs=3"), tmp_path / "model.pt"
    for command in (
        [*train, f"resume={newest}"],
        ["export", f"run_dir={run_dir}", f"out={out}"],
        ["evaluate", f"run_dir={run_dir}"],
    ):
        shows(refused(*command), parts)
    assert not out.exists()
    assert in_process("evaluate", f"run_dir={run_dir}", f"checkpoint={older}").code == 0
    assert snapshot(run_dir / "checkpoints") == before
    outcome = in_process(*train)
    assert outcome.code == 0
    shows(outcome.err, ["adl-dist: warning: ", *parts[:-2], f"resuming from {OLDER}; {NEWEST} is kept as rejected-"])
    assert outcome.err.count("\n") == 1
    shows(outcome.out, [f"resumed from {older}"])
    assert {n.removeprefix("rejected-"): h for n, h in snapshot(newest.parent).items() if "rejected-" in n} == {
        n: h for n, h in before.items() if n.startswith(NEWEST)
    }


def test_a_newer_checkpoint_format_is_refused_with_both_formats(run_dir):
    path = run_dir / "checkpoints" / NEWEST / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["sha256"]
    path.write_text(json.dumps({**manifest, "format": 6}))
    line = refused(*words(run_dir, SMALL, "train.epochs=3"))
    shows(line, [NEWEST, "has format 6", "reads format 5"])


def test_a_checkpoint_of_another_model_names_the_difference(run_dir, foreign, tmp_path):
    parts = [f"{foreign[0]} is of another model", "0.1.bias is [8] in this model and missing in the checkpoint"]
    before = snapshot(run_dir / "checkpoints"), snapshot(foreign[0])
    shows(refused(*words(tmp_path / "new", SMALL, "train.epochs=3", f"resume={foreign[0]}")), parts)
    shows(refused("evaluate", f"run_dir={run_dir}", f"checkpoint={foreign[0]}"), parts)
    out = tmp_path / "model.pt"
    shows(refused("export", f"run_dir={run_dir}", f"checkpoint={foreign[0]}", f"out={out}"), parts)
    assert not out.exists()
    assert (snapshot(run_dir / "checkpoints"), snapshot(foreign[0])) == before
    outcome = in_process(*words(tmp_path / "new", f"resume={foreign[0]}"))
    assert (outcome.code, outcome.err) == (0, ""), "nothing stands in the way of the corrected command"


@pytest.mark.parametrize(("node", "value"), [("model", "3"), ("optimizer", "null")])
def test_a_node_of_a_configuration_without_settings_is_named(node, value, run_dir):
    config = re.sub(rf"^{node}:\n(  .*\n)+", f"{node}: {value}\n", (run_dir / "config.yaml").read_text(), flags=re.M)
    (run_dir / "config.yaml").write_text(config)
    shows(refused("evaluate", f"run_dir={run_dir}"), [f"{node}={None if value == 'null' else 3}: expected settings"])


@pytest.mark.parametrize("garbage", ["a: [1", "\udcff", "foo: 1"])
def test_an_unreadable_configuration_is_reported(garbage, run_dir):
    (run_dir / "config.yaml").write_bytes(garbage.encode(errors="surrogateescape"))
    before = snapshot(run_dir)
    shows(refused("evaluate", f"run_dir={run_dir}"), ["config.yaml is not the configuration of a run"])
    if garbage != "foo: 1":
        shows(refused(*words(run_dir, SMALL, "train.epochs=3")), ["config.yaml cannot be read", "another run_dir"])
    assert snapshot(run_dir) == before


@pytest.mark.parametrize("command", [["evaluate"], ["export", "out={out}"]], ids=["evaluate", "export"])
def test_evaluate_and_export_refuse_a_folder_that_is_no_run(command, run_dir, tmp_path):
    command = [word.format(out=tmp_path / "model.pt") for word in command]
    shows(refused(*command, str(tmp_path)), [f"run_dir={tmp_path} is not a run folder", "no config.yaml"])
    shows(refused(*command, f"run_dir={tmp_path / 'none'}"), ["is not a run folder", "train first"])
    for wanted in (tmp_path, "worst"):
        line = refused(*command, f"run_dir={run_dir}", f"checkpoint={wanted}")
        shows(line, [f"checkpoint={wanted}: ", "expected best, which needs a validation, newest, or a checkpoint"])
    shutil.rmtree(run_dir / "checkpoints")
    line = refused(*command, f"run_dir={run_dir}")
    shows(line, [f"{run_dir} holds no complete checkpoint"])
    assert not (tmp_path / "model.pt").exists()


def test_export_never_writes_over_what_is_there(run_dir, tmp_path):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = snapshot(tmp_path)
    there = dict.fromkeys(("file", "link", "run"), ("is there already", "choose another name"))
    nowhere = {f"{name}/model.pt": [f"there is no folder {tmp_path / name}"] for name in ("none", "file")}
    for name, parts in {**there, **nowhere, "m" * 300 + ".pt": ["File name too long", "choose another place"]}.items():
        line = refused("export", f"run_dir={run_dir}", f"out={tmp_path / name}")
        shows(line, [f"out={tmp_path / name} ", *parts])
    assert snapshot(tmp_path) == before


NO_STATE = ["cannot be read", "expected a state_dict saved by torch.save"]
OTHER_MODEL = ["of another model", "0.1.weight is [8, 192] in this model and missing in the file"]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (slice(-500), NO_STATE),
        ([1, 2], ["holds a list", "save the state_dict alone"]),
        ({"model": {}}, ["holds a dict with model", "save the state_dict alone"]),
        (slice(None), OTHER_MODEL),
    ],
    ids=["cut", "list", "nested", "another model"],
)
def test_initial_weights_that_do_not_fit_say_what_the_file_holds(content, parts, foreign, tmp_path):
    """``content``: a part of the file with the weights of another model, or what torch.save is given."""
    path = tmp_path / "state.pt"
    if isinstance(content, slice):
        path.write_bytes(foreign[1].read_bytes()[content])
    else:
        torch.save(content, path)
    before = snapshot(tmp_path)
    shows(refused(*words(tmp_path / "run", SMALL, f"init_from={path}")), [f"init_from={path}", *parts])
    assert snapshot(tmp_path) == before


def test_a_device_without_memory_is_told_with_what_needs_less(tmp_path):
    outcome = in_process(*words(tmp_path / "run", f"model._target_={USER}.hungry", "model.at=5"))
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    parts = "no memory left: OutOfMemoryError: CUDA out", "GPU 0 has", "method.accumulation_steps", "the traceback"
    shows(outcome.err, parts)
