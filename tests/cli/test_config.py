"""The configuration: every file composes, every key is read, and the wheel carries it all."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
import yaml
from torch import nn

from adl_dist.checkpoint.policy import CheckpointPolicy
from adl_dist.checkpoint.run_dir import RunFolder
from adl_dist.cli.config import compose, instantiate
from adl_dist.cli.config.compose import compose_run, config_folder, known_run, parse
from adl_dist.cli.config.schema import GROUPS, RunConfig, keys_of
from adl_dist.cli.sweep import requested
from adl_dist.errors import ConfigError
from adl_dist.report.callbacks import EarlyStopping
from adl_dist.schedule import METHODS, Method
from adl_dist.settings import RENAMED, settings_of
from adl_dist.training.options import PartitionSpec
from adl_dist.wording import keys_shown
from tests.support.commands import in_process, shows

CONF = config_folder()
# Experiments are composed in test_experiments.py.
CHOICES = [(p.parent.name, p.stem) for p in sorted(CONF.glob("*/*.yaml")) if p.parent.name != "experiment"]
NEEDS = {
    ("model", "custom"): ["model._target_=torch.nn.Sequential"],
    ("data", "custom"): ["data._target_=adl_dist.data.digits", "data.num_classes=10", "data.in_channels=1"],
    ("data", "imagefolder"): ["data.root=images"],
    # A row has data and a model that need not go together.
    (
        "data",
        "tokens",
    ): ["data.train=a", "data.validation=b", "data.vocab_size=9", "data.num_classes=9", "data.in_channels=1"],
    ("model", "gpt"): ["model.vocab_size=9", "model.context=4"],
    ("model", "llama"): ["model.vocab_size=9", "model.context=4"],
    ("model", "hf"): ["model.config=a"],
    ("optimizer", "custom"): ["optimizer._target_=torch.optim.RMSprop"],
    ("lr_schedule", "custom"): ["lr_schedule._target_=torch.optim.lr_scheduler.StepLR"],
}


def in_few_runs():
    """Every choice of every group in one of as many command lines as the largest group has choices."""
    groups = sorted({group for group, _ in CHOICES})
    choices = [[choice for each, choice in CHOICES if each == group] for group in groups]
    for row in range(max(map(len, choices))):
        chosen = [(group, each[row % len(each)]) for group, each in zip(groups, choices, strict=True)]
        yield [word for pair in chosen for word in ("=".join(pair), *NEEDS.get(pair, []))]


def test_every_choice_of_every_group_composes():
    for overrides in in_few_runs():
        assert compose_run(overrides)[1]["run_dir"].startswith("runs/"), overrides


def test_without_a_vocabulary_model_hf_counts_the_tokens(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(vocab_size=37, n_layer=1).save_pretrained(tmp_path)
    (tmp_path / "a.bin").write_bytes(bytes(8))
    files = [f"data.train={tmp_path / 'a.bin'}", f"data.validation={tmp_path / 'a.bin'}"]
    _, plain = compose_run(["data=tokens", *files, "model=hf", f"model.config={tmp_path}"])
    assert plain["data"]["vocab_size"] == 37


def test_the_help_of_train_explains_every_key():
    """Each key of the dataclasses with one line of help; ``made_from`` hands each to the object that reads it."""
    told, of_method = in_process("train", "--help").out, compose_run([])[1]["method"]
    for group in GROUPS:
        for key in keys_of(group):
            if group != "method" or key in of_method:
                assert re.search(rf"^  {key}: .*  # \w", told, re.MULTILINE), f"{group}.{key}"
    for key in keys_of(""):
        assert re.search(rf"^{key}: .*  # \w", told, re.MULTILINE), key
    shows(in_process("train", "--help", "method=fr").out, ["after method=fr", "  weights: recompute  # "])
    shows(in_process("train", "--help", "data=tokens").out, ["  train: ???  # file", "Groups (GROUP=CHOICE)"])
    shows(told, ["  sweep.jobs: null  # runs at the same time"])
    for option in settings_of(Method).values():
        assert f"{option.name}: {option.metadata['help']}" in Method.__doc__


def test_a_run_records_the_options_of_its_mitigation():
    words = ["method.mitigation=[predict,error_feedback]", "method.error_feedback_lag=2"]
    config, plain = compose_run(words)
    chosen = {"predict_horizon": "linear", "predict_from": "displacement"}
    chosen |= {"error_feedback_coefficient": 1.0, "error_feedback_lag": 2, "mitigation": ["predict", "error_feedback"]}
    assert plain["method"] == {**compose_run([])[1]["method"], **chosen}
    assert Method(**plain["method"]) == config.method


OTHERS = {
    "lr_clock": "global", "weights": "latest", "delay": "minimal", "gradient_shrink": 0.5, "order": "backward_first",
    "recompute": "always", "activation_queue": 2, "gradient_queue": 2, "head": "cnn",
    "mitigation": ["spike"], "flush_epochs": 2,
}  # fmt: skip


def test_a_key_that_means_nothing_to_a_method_is_refused():
    for name, key in itertools.product(METHODS, OTHERS):
        if key not in METHODS[name].options:
            with pytest.raises(ConfigError, match=rf"method.{key}=.* means nothing to method={name}"):
                Method(name=name, **{key: OTHERS[key]})


IMPOSSIBLE = {
    "method.delay=[3,2,1]": "has 3 numbers, but there are 2 stages; give 2",
    "method.delay=fast": "choose one of decoupled, minimal, third, auto, none, or a list",
    "method.delay=minimal method.lr_clock=global": "needs the clock of method.delay=decoupled",
    "method=2bw partition.num_stages=4 method.accumulation_steps=2": "use method.accumulation_steps=3",
    "method=dsp method.delay=minimal method.gradient_queue=2": "say the same in two ways",
    "method=dgl method.head=transformer": "choose one of mlp_sr, mlp, cnn, linear, predsim",
    "method.flush_epochs=1 method.lr_clock=global": "method.flush_epochs stops the clock of method.lr_clock=global",
    "method.mitigation=[hope]": "method.mitigation: there is no 'hope'; choose of discount, spike, predict",
    "method.mitigation=[predict,nesterov]": "predict and nesterov both decide the weights that a forward sees",
    "method=2bw method.mitigation=[predict]": "predict is not defined with method.weights=2bw; use one of stash",
    "method.mitigation=[predict] method.nesterov_gamma=0.5": r"without method.mitigation=\[nesterov\]",
    "method.mitigation=[nesterov] method.nesterov_gamma=1": "must be above 0 and below 1, got 1",
}


@pytest.mark.parametrize("words", IMPOSSIBLE)
def test_a_value_that_a_method_cannot_run_with_is_refused(words):
    """The values as Hydra reads them, without the tenth of a second that it takes to compose."""

    def configure():
        overrides = map(parse, words.split())
        values = {override.key_or_group.removeprefix("method."): override.value() for override in overrides}
        partition = {"num_stages": values.pop("partition.num_stages", 2)}
        RunConfig.of({"method": {"name": values.pop("method", "adl"), **values}, "partition": partition})

    with keys_shown(), pytest.raises(ConfigError, match=IMPOSSIBLE[words]):
        configure()


RUN_FOLDERS = {
    "": "runs/digits-resnet8-adl-k2-m4-seed0",
    "partition.num_stages=3 seed=7 data=cifar10": "runs/cifar10-resnet8-adl-k3-m4-seed7",
    "model._target_=torch.nn.Sequential": "runs/digits-Sequential-adl-k2-m4-seed0",
    "model=torchvision model.name=vgg11": "runs/digits-torchvision-vgg11-adl-k2-m4-seed0",
}


def test_a_wheel_has_its_own_configuration(tmp_path, monkeypatch):
    """tests/test_package.py looks at the files in it."""
    monkeypatch.setattr(compose, "__file__", str(tmp_path / "cli" / "config" / "compose.py"))
    (tmp_path / "conf").mkdir()
    assert config_folder() == tmp_path / "conf"


def test_the_run_folder_is_named_after_what_was_chosen():
    assert {words: compose_run(words.split())[0].run_dir for words in RUN_FOLDERS} == RUN_FOLDERS


def test_words_and_numbers_are_read_as_what_their_keys_expect(monkeypatch):
    monkeypatch.setenv("SEED", "17")
    words = ["run_dir=2024", "init_from=5", "resume=1.5", "runtime.trace=1", "runtime.tensorboard=off"]
    words += ["runtime.processes=no", "method.split_backward=yes", "train.batch_size='64'", "train.ema='0.5'"]
    words += ["model._target_=my.Net", "model.width=64", "optimizer.nesterov=true"]
    config, plain = compose_run([*words, "seed='${oc.decode:${oc.env:SEED}}'"])
    assert (config.run_dir, config.init_from, config.resume, config.seed) == ("2024", "5", "1.5", 17)
    runtime = plain["runtime"]
    assert (runtime["trace"], runtime["tensorboard"], runtime["processes"]) == (True, False, False)
    assert (config.method.split_backward, config.train.batch_size, config.train.ema) == (True, 64, 0.5)
    assert config.model == {"_target_": "my.Net", "width": 64}, "a target of one's own starts from an empty node"
    assert (config.optimizer["nesterov"], config.optimizer["momentum"]) == (True, 0.9)
    assert [job.folder.parts[0] for job in requested(["-m", "seed=1,2", "run_dir=2024"]).jobs] == ["2024"] * 2


@pytest.mark.parametrize(
    "loss",
    [
        ["loss._target_=torch.nn.CrossEntropyLoss"],
        ["loss._target_=torch.nn.functional.cross_entropy", "loss._partial_=true"],
        ["loss._target_=tests.support.user_code.cross_entropy", "loss.scale=1.0"],
        ["loss=model"],
    ],
    ids="+".join,
)
def test_a_loss_may_be_a_function_or_what_makes_one(loss):
    config, _ = compose_run([*loss, "loss.label_smoothing=0.25"] if "torch" in loss[0] else loss)
    instantiate.check_targets(config)
    output, target = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    expected = nn.functional.cross_entropy(output, target, label_smoothing=0.25 if "torch" in loss[0] else 0.0)
    given = (output, target) if loss != ["loss=model"] else ((output, expected), None)
    assert instantiate.build_loss(config)(*given) == expected


def own_sgd(weights, lr):
    return torch.optim.SGD(weights, lr=lr)


def own_warm(opt, total_updates, length=2):
    return torch.optim.lr_scheduler.LinearLR(opt, total_iters=min(total_updates, length))


def test_the_first_argument_of_a_factory_may_have_any_name():
    own = [f"optimizer._target_={__name__}.own_sgd", "optimizer.lr=0.1", f"lr_schedule._target_={__name__}.own_warm"]
    instantiate.check_targets(compose_run([*own, "lr_schedule.length=3"])[0])


ABORT_SECONDS = {
    "runtime.watchdog_abort_seconds=90.5": 90.5,
    "runtime.watchdog_abort_seconds=null": None,
    "runtime.watchdog_warn_seconds=900": 1800,
    "seed=0": 600,
}


def test_a_command_ends_a_standstill_after_so_many_seconds():
    assert {word: compose_run([word])[0].timeouts.abort_seconds for word in ABORT_SECONDS} == ABORT_SECONDS


def test_an_old_name_is_read_as_the_new_one_with_a_line(tmp_path, capsys):
    old = ["partition.grain=block", "method.lr_index=slot", "runtime.best_metric=validation_f1"]
    old += ["runtime.best_is=highest", "runtime.lazy=true", "runtime.memory=true", "runtime.stall_seconds=7"]
    old += ["runtime.abort_seconds=null", "partition.balance=auto", "partition.speeds=[1,2]"]
    config, plain = compose_run(old)
    told = capsys.readouterr().err
    assert told.count("\n") == len(RENAMED)
    shows(told, ["runtime.best_is is called runtime.best_mode since 0.4.0; read as runtime.best_mode=max\n"])
    chosen = config.partition.granularity, config.method.lr_clock, config.runtime.best_mode
    assert chosen == ("block", "global", "max")
    assert (config.runtime.meta_init, config.runtime.profile_memory) == (True, True)
    assert (config.timeouts.stall_seconds, config.timeouts.abort_seconds) == (7, None)
    assert config.build(PartitionSpec).speeds == [1, 2]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(as_before(plain)))
    assert known_run(tmp_path) == config
    assert capsys.readouterr().err == "", "an older run folder"
    RunFolder(tmp_path).recognise(plain)


OLD_NAMES = {
    "replaced": lambda: replace(CheckpointPolicy(best_metric="validation_f1", best_is="lowest"), keep=3).goal,
    "stopping": lambda: EarlyStopping(metric="validation_f1", best_is="lowest").goal,
    "place": lambda: EarlyStopping(3, "validation_f1", "lowest").goal,
    "class": lambda: Method(lr_index="slot").lr_clock,
}


@pytest.mark.parametrize("make", OLD_NAMES.values(), ids=OLD_NAMES)
def test_an_old_name_in_python_is_read_with_a_warning(make):
    with pytest.warns(DeprecationWarning, match=r"^(best_is|lr_index) is called \w+ since 0.4.0") as told:
        made = make()
    assert made in ("global", CheckpointPolicy(best_metric="validation_f1", best_mode="min").goal)
    assert [each.filename for each in told] == [__file__], "the line of the user"


def as_before(plain):
    """The same with the names of keys and values of version 0.3.8, as an older run folder has them."""
    old = yaml.safe_load(yaml.safe_dump(plain))
    for former, (key, values) in RENAMED.items():
        (group, name), (_, present) = former.split("."), key.split(".")
        value = old[group].pop(present)
        back = {new: was for was, new in values.items()}
        old[group][name] = back.get(value, value) if isinstance(value, str) else value
    return old
