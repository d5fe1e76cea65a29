"""One table: a mistaken command line, and parts of the one line that it is refused with, before anything starts.

Most rows take a few hundredths of a second. What only shows when stages meet the data is in test_bad_input.py.
"""

import pytest
import torch

from adl_dist.cli import sweep, train
from adl_dist.cli.bench import command as bench
from tests.support.commands import ROOT, in_process, shows, snapshot, words

USER = "tests.support.user_code"
NOWHERE = "/nowhere/at/all"
TINY = (f"model._target_={USER}.good", f"data._target_={USER}.images", "train.batch_size=16", "runtime.threads=1")
PLAN = ("plan", *TINY, "--links", "8gbit,20us", "--neighbours", "0")
BENCH = ("bench", *TINY, "--out", "out")
COSTS = ("schedule", "--costs")
SPEEDS = ("partition.balance=auto", "partition.device_speeds=[1,2,3]")
SWEEP = ("train", "-m", "run_dir=run")

# Settings of ``train``, next to those of a tiny run.
SETTINGS = {
    # keys
    "train.epoch=2": ["there is no key 'train.epoch'; did you mean 'train.epochs'?; adl-dist train --help"],
    "modle=resnet8": ["there is no key 'modle'; did you mean 'model'?"],
    "batch_size=2": ["there is no key 'batch_size'; did you mean 'train.batch_size'?"],
    "data={foo:1}": ["there is no key 'data.foo'", "adl-dist train --help"],
    "runtime.cuda_graphs=true": ["runtime.cuda_graphs was removed in 0.4.0; remove it, or use version 0.3.8"],
    # choices of a group
    "model=resnet21": ["there is no model=resnet21; did you mean resnet", "choose one of", "resnet18, resnet20, "],
    "method=gpip": ["there is no method=gpip; did you mean gpipe?; choose one of 1f1b, 2bw, adl"],
    "method=null": ["method=null is not a choice of method; choose one of 1f1b, 2bw, adl"],
    "model=resnet50": ["torchvision has resnet50: model=torchvision model.name=resnet50"],
    "optimizer=adam": ["there is no optimizer=adam; did you mean adamw?", "optimizer._target_=torch.optim.NAME"],
    "optimizer=rotated": ["optimizer=rotated was removed in 0.4.0", "examples/rotated_adam.py"],
    # types and ranges, one of each kind
    "train.batch_size=abc": ["train.batch_size must be a whole number, got 'abc'"],
    "optimizer.lr=nan": ["optimizer.lr must be a finite number, got nan"],
    "train=5": ["train=5: expected settings, like train.batch_size=VALUE"],
    "dtype=float16": ["dtype: there is no 'float16'; choose one of float32, float64"],
    "optimizer.rules=[5]": ["optimizer.rules[0]: expected keys and values, like {names: '*bias', ", "}, got 5"],
    "runtime.processes=maybe": ["runtime.processes must be true or false, got 'maybe'"],
    "train.clip_norm=inf": ["train.clip_norm must be a finite number, got inf"],
    "method.weights=foo": ["method.weights: there is no 'foo'; choose one of stash, latest"],
    "train.max_skipped=0": ["must be at least 1, got 0; to skip none, use train.non_finite=stop"],
    "runtime.timeout_seconds=2e6": ["runtime.timeout_seconds must be above 0 and at most 1000000, got 2000000.0"],
    "data.num_workers=abc": ["data.num_workers must be a whole number of at least 0, got 'abc'"],
    # values that do not fit together
    "train.batch_size=3": ["train.batch_size=3", "method.accumulation_steps=4", "use train.batch_size>=4"],
    "runtime.loggers=[mine]": ["there is no 'mine'", "on the command line by what makes it, my.module.make"],
    "runtime.loggers=mlflow": ["runtime.loggers must be a list, like [mlflow], got 'mlflow'"],
    "runtime.watchdog_abort_seconds=9": ["must be above runtime.watchdog_warn_seconds=60.0, or null for never"],
    "partition.balance=evn": ["partition.balance must be one of 'flops', 'even', 'auto', a list of", "got 'evn'"],
    "partition.device_speeds=[1,2]": ["device_speeds weighs a measured cut; it needs partition.balance=auto"],
    # no KEY=VALUE
    "=5": ["'=5' names no key; write KEY=VALUE"],
    "method.name=adl": ["choose a method by method=NAME, which brings its settings along"],
    "train": ["'train' cannot be read; write KEY=VALUE"],
    "--epochs=5": ["unknown option --epochs; did you mean 'train.epochs=5'?"],
    "sweep.variants.x=[method=bp]": ["x=[method=bp]' cannot be read", "sweep.variants.stale=['method=adl','method."],
    "run_dir=runs/\u00e4": ["cannot be read; write KEY=VALUE", "~, letters other than a to z"],
    "train.epochs=[1": ["'train.epochs=[1' cannot be read; write KEY=VALUE", "quote"],
    "train.epochs=1,2": ["train.epochs=1,2 gives several values, but this command takes one", "[1,2]"],
    "train.batch_size=${nosuch}": ["Interpolation key 'nosuch' not found"],
    "run_dir=${nosuch:1}": ["Unsupported interpolation type nosuch; understood are ${KEY}, ${now:%H%M}"],
    "run_dir=${hydra:job.name}": ["HydraConfig was not set; understood are ${KEY}"],
    "seed=${oc.decode:${now:%f}}": ["cannot be read; write KEY=VALUE", " resolvers: ", "seed='${oc.decode:${oc.env:S"],
    # models and data that do not go together
    "model=gpt": ["has no vocab_size, which model=gpt needs; give model.vocab_size=VALUE, or choose another data"],
    "data=imagefolder": ["data.root must be given: add data.root=VALUE"],
    # open nodes: what they name, and its arguments
    "model.dept=3": ["there is no key 'model.dept'; did you mean 'model.depth'?; ", "takes depth, num_classes"],
    "model.depth=abc": ["model.depth=abc: adl_dist.models.cifar_resnet expects int, got a word"],
    "optimizer.momentumm=0.1": ["did you mean 'optimizer.momentum'?", "torch.optim.SGD"],
    "optimizer.lr=-1": ["optimizer: torch.optim.SGD failed: ValueError: Invalid learning rate: -1"],
    "loss.foo=1": ["there is no key 'loss.foo'", "torch.nn.CrossEntropyLoss takes weight"],
    "model._target_=nosuch.Net": ["nosuch.Net cannot be imported", "No module named 'nosuch'", "in this folder"],
    f"model._target_={USER}.answer": [f"{USER}.answer is a int, not something to call"],
    "model._target_=5": ["must name a callable, for example model._target_=my.module.make"],
    "runtime.loggers=[5]": ["loggers[0]: expected my.module.make, or {_target_: my.module.make, KEY: VALUE}, got 5"],
    f"model._target_={USER}.god": [f"model._target_={USER}.god: {USER} has no 'god'; did you mean good?"],
    f"optimizer._target_={USER}.no_optimizer": [f"{USER}.no_optimizer returned list", "torch.optim.Optimizer"],
    "loss._target_=builtins.print": ["builtins.print returned NoneType", "expected a callable that takes (output"],
    "lr_schedule._target_=torch.optim.lr_scheduler.ReduceLROnPlateau": ["follows a metric", "multistep or cosine"],
    # where from and where to
    "resume=alwyas": ["resume=alwyas", "neither 'auto' nor 'never'", "checkpoints/update-"],
    f"resume={ROOT}": [f"{ROOT} is not a checkpoint", "it has no manifest.json"],
    "run_dir=''": ["run_dir is empty; name a folder, like run_dir=runs/NAME"],
}
if not torch.cuda.is_available():
    SETTINGS["runtime.device=cuda"] = ["no CUDA device", "use runtime.device=cpu"]
# Found when a rank builds and cuts the model and looks for the data, which their parent does not do.
BY_RANKS = {
    ("model.depth=9",): ["model.depth=9", "6n+2", "8 and 14"],
    (f"model._target_={USER}.raises",): [f"{USER}.raises failed", "LookupError: no such weights on any server"],
    (f"model._target_={USER}.exits",): [f"{USER}.exits failed", "SystemExit: 3"],
    (f"model._target_={USER}.no_module",): [f"{USER}.no_module returned str", "expected a torch.nn.Module"],
    ("init_from=nosuch.pt",): ["init_from=nosuch.pt cannot be read (FileNotFoundError", "expected a state_dict"],
    ("data=cifar10", f"data.root={NOWHERE}"): ["CIFAR-10", "data.download=true", "cifar-10-batches-py", NOWHERE],
    ("data=imagefolder", f"data.root={NOWHERE}"): [NOWHERE, "one folder for each class", "no train and no val"],
    ("data=imagenet", f"data.root={NOWHERE}"): ["ImageNet: ", "ILSVRC2012_img_train.tar", f"to {NOWHERE} and run"],
    ("runtime.meta_init=true", "model._target_=torch.nn.Identity"): ["Identity has no tensors, or some that are not"],
    ("data._target_=platform.uname",): ["platform.uname returned a tuple of 6; expected a pair (training data"],
}
COMMANDS = [
    (["trian"], ["there is no command 'trian'; did you mean train?; choose one of train, "]),
    (["train", "~model"], ["~model removes model, which every run needs"]),
    (["evaluate"], ["takes one run folder, got ''; adl-dist evaluate --help"]),
    (["evaluate", "rundir=x"], ["does not know 'rundir=x'; adl-dist evaluate --help lists its arguments"]),
    (["export", "run_dir=x"], ["adl-dist export needs out=", "adl-dist export x out=model.safetensors"]),
    (["export", "run_dir=a b"], ["adl-dist export 'a b' out=model.safetensors"]),
    (["compare", ""], ["takes run folders", "adl-dist compare RUNS"]),
    (["export", "x", "out=a", "out=b"], ["adl-dist export takes one out=, got a and b"]),
    (["report", "s3://x"], ["adl-dist report reads a copy of s3://x; say where to write by out="]),
    (["race"], ["adl-dist race has moved in 0.4.0: python -m benchmarks.race"]),
    (["report"], ["takes run folders", "adl-dist report RUNS"]),
    (["report", "."], [" holds no run: expected the folder of a run, or one that holds such folders"]),
    (["train", "model=gpt", "data=tokens", "data.train=null"], ["data.train=None: expected the file of tokens"]),
    (["train", "data=tokens", "data.train=x"], ["data=tokens has no num_classes, which model=resnet8 needs"]),
    # schedule
    (["schedule", "partition.num_stage=3"], ["'partition.num_stage'; did you mean 'partition.num_stages'?"]),
    (["schedule", "--js"], ["--js", "adl-dist schedule --help"]),
    (["schedule", "--micro-batches", "0"], ["expected a whole number of at least 1 and at most 100000, got 0"]),
    (["schedule", "method.delay=auto"], ["method.delay=auto follows from measured stages", "adl-dist plan prints"]),
    (["schedule", "--out", "a.jpg"], ["a.jpg must end in .svg"]),
    ([*COSTS, "{forward: 1}"], ["--costs {forward: 1}: expected forward and backward"]),
    ([*COSTS, "{forward: [1, 2, 3], backward: 2}"], ["forward=[1, 2, 3]: expected a number", "for 2 stages"]),
    ([*COSTS, "nowhere.yaml"], ["nowhere.yaml is neither a YAML mapping nor a file of one: ", "No such file"]),
    # plan
    ([*PLAN, "--stages", "a"], ["--stages: expected a whole number of at least 2, got a"]),
    ([*PLAN, "--stages", "2", *SPEEDS], ["device_speeds=[1, 2, 3] must have one number per stage, 2, got 3"]),
    (["plan", "data=cifar10", f"data.root={NOWHERE}"], ["CIFAR-10: ", "; or describe a sample: --input 3,224,224"]),
    ([*PLAN, "--links", "fast"], ["--links: 'fast' is not a link", "like 100mbit or 100mbit,50ms"]),
    ([*PLAN, "--methods", "adl,nope"], ["no method 'nope'", "gpipe"]),
    ([*PLAN, "--max-staleness", "0.5"], ["--max-staleness was removed in 0.4.0", "method.max_staleness=0.5"]),
    ([*PLAN, "loss._target_=torch.nn.MSELoss"], ["the loss gets float32[B, 10]"]),
    # bench
    ([*BENCH, "--contenders", "adl,nope"], ["there is no 'nope'", "torch-gpipe"]),
    ([*BENCH, "--contenders", "torch-gpipe", "partition.num_stages=1"], ["no contender is left", "several processes"]),
    ([*BENCH, "--repetitions", "0"], ["--repetitions: expected a whole number of at least 1, got 0"]),
    ([*BENCH, "runtime.loggers=[x.y]", "train.non_finite=skip"], ["loggers and train.non_finite would apply to our"]),
    ([*BENCH, f"loss._target_={USER}.sum_and_count"], ["is a mean; here is a loss that returns (sum, count): use adl"]),
    # several runs
    (["train", "sweep.jobs=2"], ["sweep.jobs=2 means nothing to a single run", "--multirun"]),
    (["train", "hydra/launcher=basic"], ["hydra/launcher=basic means nothing to a single run", "--multirun"]),
    ([*SWEEP, "seed=0,1", "hydra/launcher=slurm"], ["pip install -c constraints.txt -e '.[slurm]'"]),
    (["train", "-m", "run_dir=s3://x"], ["run_dir=s3://x: a sweep needs a local folder"]),
    ([*SWEEP, "seed=0,0"], ["would both be written to"]),
    ([*SWEEP, "seed=interval(0,1)"], ["cannot be enumerated", "seed=A,B"]),
    *(
        ([*SWEEP, f"sweep.{value}"], ["sweep={", "and variants, a list of settings by each name, like {"])
        for value in ("jobs=0", "variants=5", "variants.a='method=bp'", "variants.a=[5]")
    ),
    ([*SWEEP, "seed=0,1", "partition.num_stages=2,99"], ["/k99-seed0: ", "partition.num_stages=99 needs 98"]),
    ([*SWEEP, '++sweep.variants.x=["method=bp"]', "method=adl,fdg"], ["'x'", "method is also given for all variants"]),
    ([*SWEEP, '++sweep.variants.x=["seed=0,1"]'], ["'x'", "seed=0,1 gives several values"]),
]


@pytest.fixture(autouse=True)
def _no_process(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for module, name in ((train, "launch_local"), (sweep, "_run_here"), (bench, "measure_once")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("processes were started"))
    monkeypatch.setattr(bench, "apart", lambda function, calls: [function(*each) for each in calls])
    monkeypatch.setattr("adl_dist.cli.plan.command.link_figures", lambda device: {"bandwidth": 1e6, "latency": 1e-3})


@pytest.mark.parametrize("override", [*SETTINGS], ids=lambda word: word.replace(str(ROOT), "ROOT"))
def test_a_mistake_is_one_line_before_any_process_starts(override, tmp_path):
    shows(in_process(*words(tmp_path / "run", override, processes=True)).refusal(), SETTINGS[override])
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("overrides", [*BY_RANKS], ids=" ".join)
def test_a_mistake_is_one_line_before_anything_is_written(overrides, tmp_path):
    shows(in_process(*words(tmp_path / "run", *overrides)).refusal(), BY_RANKS[overrides])
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("command", [["bench"], ["train", "-m"]])
def test_a_rank_of_torchrun_starts_no_processes(command, monkeypatch):
    for module in (bench, sweep):
        monkeypatch.setattr(module, "launched_world_size", lambda: 2)
    shows(in_process(*command).refusal(), ["processes", "; start ", "without torchrun"])


@pytest.mark.parametrize(("command", "parts"), COMMANDS, ids=[" ".join(command) for command, _ in COMMANDS])
def test_a_mistaken_command_is_one_line_and_leaves_nothing(command, parts, tmp_path):
    outcome = in_process(*command)
    shows(outcome.refusal(), parts)
    assert outcome.out == ""
    assert snapshot(tmp_path) == {}
