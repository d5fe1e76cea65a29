"""What a run leaves behind and tells about itself, all stages in one process."""

import gc
import hashlib
import json
import statistics
import weakref

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import Dataset

import adl_dist
from adl_dist import engine
from adl_dist.errors import PartitionError
from adl_dist.partition import cut, even_balance
from adl_dist.schedule import Pipeline, work
from tests.support.toys import NUM_CLASSES, FixedImages, batch_norm_net
from tests.support.values import QUIET, SILENT, values


def trainer_of(K, M=2, model=None, **options):
    return adl_dist.Trainer(
        model or batch_norm_net(),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        method=adl_dist.method("adl", accumulation_steps=M),
        num_stages=K,
        **values(threads=1, **options),
    )


def records_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("K", "M"), [(1, 2), (2, 4), (3, 1), (4, 3), (4, 4)])
def test_recorded_staleness_is_that_of_the_formula(K, M, tmp_path):
    N = 26
    trainer_of(K, M).fit(
        FixedImages(N * 2 - 1),
        epochs=2,
        batch_size=2 * M,
        run_dir=tmp_path,
        monitoring=SILENT,
    )
    seen = [r for r in records_of(tmp_path) if r["name"] == "stage/staleness"]
    num_updates = -(-N // M)
    for k in range(K):
        delay, adl = 2 * (K - 1 - k), adl_dist.method("adl", accumulation_steps=M)
        for epoch in range(2):
            groups = [r for r in seen if r["stage"] == k and r["epoch"] == epoch]
            assert [r["update"] for r in groups] == list(range(epoch * num_updates, (epoch + 1) * num_updates))
            by_micro_batch = [value for r in groups for value in r["by_offset"]]
            assert by_micro_batch == [Pipeline(adl, K).staleness(k, b) for b in range(N)]
            for r in groups:
                assert r["value"] == statistics.mean(r["by_offset"])
                assert r["unit"] == "updates"
            steady = groups[-(-delay // M) + 1 : -1]
            for r in steady:
                assert r["by_offset"] == Pipeline(adl, K).steady_staleness(k)
                assert r["value"] == pytest.approx(delay / M)


class Recording(Dataset):
    """Draws a random number per sample, as an augmentation would, and writes down what it gave out."""

    def __init__(self, num_samples):
        self.images = FixedImages(num_samples)
        self.given = []

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, label = self.images[index]
        image = image + torch.rand(())
        self.given.append((index, hashlib.sha256(image.numpy().tobytes()).hexdigest()))
        return image, label


def test_k_and_m_do_not_change_samples_order_or_augmentation():
    """K and m do not change which samples come in which order with which augmentation."""
    given = {}
    for K in (1, 2, 3, 4):
        for M in (1, 2, 4):
            data = Recording(22)
            trainer_of(K, M, seed=5).fit(data, epochs=3, batch_size=8, monitoring=QUIET)
            given[K, M] = data.given[1:]  # the first is the sample that shapes are agreed with
    reference = given[1, 1]
    assert len(reference) == 3 * 22
    assert [i for i, _ in reference[:22]] != [i for i, _ in reference[22:44]], "each epoch has an order of its own"
    assert all(sequence == reference for sequence in given.values())
    another = Recording(22)
    trainer_of(1, 1, seed=6).fit(another, epochs=3, batch_size=8, monitoring=QUIET)
    assert another.given[1:] != reference


@pytest.mark.parametrize("K", [1, 3])
def test_pipelined_evaluation_counts_every_sample_once(K):
    """Evaluation in the pipeline counts every sample once and equals the uncut model."""
    data, validation = FixedImages(20), FixedImages(17, seed=3)
    trainer = trainer_of(K)
    summary = trainer.fit(data, epochs=2, batch_size=8, val_dataset=validation, monitoring=QUIET)
    model = batch_norm_net(seed=9)
    model.load_state_dict(trainer.full_state_dict(), strict=True)
    model.eval()
    with torch.no_grad():
        out = model(validation.images)
    labels = torch.tensor(validation.labels)
    assert summary["validation_accuracy"] == (out.argmax(1) == labels).sum().item() / 17
    assert summary["validation_loss"] == pytest.approx(nn.functional.cross_entropy(out, labels).item(), rel=1e-6)
    assert trainer.evaluate(validation, batch_size=5)["validation_accuracy"] == summary["validation_accuracy"]


def test_evaluation_leaves_the_training_as_it_was():
    plain, evaluated = trainer_of(2), trainer_of(2)
    plain.fit(FixedImages(20), epochs=3, batch_size=8, monitoring=QUIET)
    evaluated.fit(FixedImages(20), epochs=3, batch_size=8, val_dataset=FixedImages(7), monitoring=QUIET)
    a, b = plain.full_state_dict(), evaluated.full_state_dict()
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_batch_norm_statistics_move_once_per_micro_batch():
    trainer = trainer_of(3)
    trainer.fit(FixedImages(22), epochs=2, batch_size=8, monitoring=QUIET)  # micro-batches of 4: 6 per epoch
    counts = {n: int(t) for n, t in trainer.full_state_dict().items() if n.endswith("num_batches_tracked")}
    assert len(counts) == 5
    assert set(counts.values()) == {12}


def test_the_run_folder_holds_what_the_design_says(tmp_path):
    summary = trainer_of(2).fit(
        FixedImages(20),
        epochs=2,
        batch_size=8,
        val_dataset=FixedImages(7),
        run_dir=tmp_path,
        monitoring=QUIET,
    )
    names = {"config.yaml", "metrics.jsonl", "summary.json", "tensorboard", "logs", "checkpoints", "lock"}
    assert {p.name for p in tmp_path.iterdir()} == names
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["num_stages"] == 2
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["update-00000003", "update-00000006"]
    assert [p.name for p in (tmp_path / "logs").iterdir()] == ["rank0.log"]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    records = records_of(tmp_path)
    assert {r["name"] for r in records} == {
        "train/loss",
        "train/accuracy",
        "train/learning_rate",
        "train/samples_per_second",
        "validation/loss",
        "validation/accuracy",
        "stage/staleness",
        "stage/busy_share",
        "stage/peak_memory",
        "stage/gradient_norm",
    }
    for r in records:
        assert {"name", "value", "update", "epoch"} <= r.keys()
    for stage in summary["stages"]:
        assert stage.keys() == {"stage", "staleness_mean", "staleness_max", "busy_share", "peak_memory_bytes"}
        assert 0 < stage["busy_share"] <= 1
        assert stage["peak_memory_bytes"] > 2**20
    assert {"validation_accuracy", "validation_loss", "samples_per_second", "seconds"} <= summary.keys()


def test_the_logged_loss_is_the_mean_over_the_groups_samples(tmp_path):
    """The first group meets the initial weights, so its loss can be had from the uncut model."""
    data, model = FixedImages(7), batch_norm_net()
    trainer = trainer_of(1, M=3)
    trainer.fit(FixedImages(7), epochs=1, batch_size=6, run_dir=tmp_path, monitoring=SILENT, shuffle=False)
    model.train()
    losses = [
        nn.functional.cross_entropy(model(data.images[i:j]), torch.tensor(data.labels[i:j])).item() * (j - i)
        for i, j in ((0, 2), (2, 4), (4, 6))
    ]
    first = next(r for r in records_of(tmp_path) if r["name"] == "train/loss")
    assert first["value"] == pytest.approx(sum(losses) / 6, rel=1e-6)
    assert first["num_samples"] == 6


def test_the_callers_random_stream_and_threads_are_left_alone(request):
    request.addfinalizer(lambda: torch.set_num_threads(1))
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    torch.set_num_threads(2)
    trainer = trainer_of(2, model=batch_norm_net(dropout=0.5))
    torch.manual_seed(3)
    trainer.fit(Recording(12), epochs=1, batch_size=4, monitoring=QUIET)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == 2


def test_a_run_keeps_one_tensor_for_equal_loss_weights(monkeypatch):
    stages, weights, run = [], [], engine.run

    def seen(order, contexts, *rest):
        stages.extend(weakref.ref(context.stage) for context in contexts.values())
        weights.append([id(weight) for weight in contexts[1].loss_grads])
        run(order, contexts, *rest)

    monkeypatch.setattr(engine, "run", seen)
    trainer_of(2, M=2).fit(FixedImages(2 * 2 * 10 + 1), epochs=1, batch_size=4, monitoring=QUIET)
    gc.collect()
    assert len(stages) == 2
    assert [ref() for ref in stages] == [None, None]
    assert work._actions.cache_info().currsize == 0
    assert len(weights[0]) == 21
    assert len(set(weights[0])) == 2, "of whole groups, and of the last"


def test_a_run_that_fails_keeps_no_stage_alive_either(monkeypatch):
    class Broken(FixedImages):
        def __getitem__(self, index):
            if index == 30:
                raise OSError("gone")
            return super().__getitem__(index)

    stages, run = [], engine.run

    def seen(order, contexts, *rest):
        stages.extend(weakref.ref(context.stage) for context in contexts.values())
        run(order, contexts, *rest)

    monkeypatch.setattr(engine, "run", seen)
    with pytest.raises(OSError, match="gone"):
        trainer_of(2, M=2).fit(Broken(40), epochs=1, batch_size=4, monitoring=QUIET)
    gc.collect()
    assert [ref() for ref in stages] == [None, None]


def test_a_second_fit_goes_on_from_the_weights_of_the_first():
    trainer = trainer_of(2)
    trainer.fit(FixedImages(20), epochs=1, batch_size=8, monitoring=QUIET)
    before = trainer.full_state_dict()
    trainer.fit(FixedImages(20), epochs=1, batch_size=8, monitoring=QUIET, max_updates=1)
    after = trainer.full_state_dict()
    change = max((before[n].double() - after[n].double()).abs().max() for n in before if "weight" in n)
    assert 0 < change < 0.1


# --- The cut -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("balance", "K"), [(None, 3), ([1, 5, 1], 3), ([6, 1], 2), (None, 7)])
def test_stages_together_hold_exactly_the_uncut_models_state(balance, K):
    model = batch_norm_net()
    stages = cut(model, num_stages=K, balance=balance)
    names = [name for stage in stages for name in stage.state_dict()]
    assert len(stages) == K
    assert names == list(model.state_dict())
    x = FixedImages(3).images
    model.eval()
    out = x
    for stage in stages:
        out = stage.eval()(out)
    assert torch.equal(out, model(x))


@pytest.mark.parametrize(("units", "K", "expected"), [(7, 3, [2, 2, 3]), (8, 4, [2, 2, 2, 2]), (5, 5, [1] * 5)])
def test_an_even_balance_differs_by_at_most_one(units, K, expected):
    assert even_balance(units, K) == expected


@pytest.mark.parametrize(
    ("K", "balance", "message"),
    [
        (8, None, "needs at least 8 units, but the model has 7; use at most partition.num_stages=7"),
        (2, [3, 3], r"add up to the model's 7 units .* got 2 that add up to 6"),
        (2, [7], r"expected 2 numbers"),
        (2, [7, 0], r"each at least 1"),
    ],
)
def test_a_cut_that_cannot_be_made_is_refused(K, balance, message):
    with pytest.raises(PartitionError, match=message):
        cut(batch_norm_net(), num_stages=K, balance=balance)


def test_a_parameter_shared_by_two_stages_is_refused_by_name():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, NUM_CLASSES))
    model[2].weight = model[0].weight
    with pytest.raises(PartitionError, match=r"cannot be cut after 1: '0.weight' and '2.weight' are one and the same"):
        cut(model, num_stages=2, balance=[2, 2])
    assert [len(stage) for stage in cut(model, num_stages=2, balance=[3, 1])] == [3, 1]
    assert [len(stage) for stage in cut(model, num_stages=2)] == [3, 1], "an even cut keeps them together"
    with pytest.raises(PartitionError, match=r"1 place.* where it can be cut.*'0.weight' and '2.weight' are one"):
        cut(model, num_stages=3)


def test_a_module_that_stands_twice_is_run_twice():
    act = nn.Tanh()
    model = nn.Sequential(nn.Linear(3, 3), act, nn.Linear(3, 3), act, nn.Linear(3, 2))
    stages = cut(model, num_stages=2, balance=[2, 3])
    x = torch.randn(4, 3)
    assert torch.equal(stages[1](stages[0](x)), model(x))


class Doubling(nn.Sequential):
    def forward(self, x):
        return super().forward(2 * x)


def test_a_sequential_with_its_own_forward_is_cut_as_that_says():
    model, x = Doubling(nn.Linear(3, 3), nn.Linear(3, 2)), torch.randn(4, 3)
    stages = cut(model, num_stages=2, balance=["1"])
    assert [[*stage.state_dict()] for stage in stages] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    assert torch.equal(stages[1](stages[0](x)), model(x))
    assert len(cut(Doubling(nn.Linear(3, 3), nn.Linear(3, 2)), num_stages=1)) == 1


# --- What must not leak, and what must be refused --------------------------------------------------------------


def test_gradients_of_an_interrupted_group_do_not_reach_the_next():
    left, fresh = trainer_of(2, model=(model := batch_norm_net())), trainer_of(2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    for trainer in (left, fresh):
        trainer.fit(FixedImages(12), epochs=1, batch_size=4, monitoring=QUIET)
    a, b = left.full_state_dict(), fresh.full_state_dict()
    assert all(torch.equal(a[n], b[n]) for n in a)


def test_a_second_fit_equals_a_fresh_trainer():
    trainer = trainer_of(3)
    trainer.fit(FixedImages(20), epochs=1, batch_size=8, monitoring=QUIET)
    model = batch_norm_net(seed=5)
    model.load_state_dict(trainer.full_state_dict())
    fresh = trainer_of(3, model=model)
    for one in (trainer, fresh):
        one.fit(FixedImages(20), epochs=2, batch_size=8, monitoring=QUIET)
    a, b = trainer.full_state_dict(), fresh.full_state_dict()
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("channels_last", [False, True])
def test_stages_that_start_in_place_train_like_the_uncut_model(channels_last):
    """Cut into single units: one is a ReLU that overwrites its input, two have nothing to train. lr = 0 compares."""

    def states(K):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, NUM_CLASSES)
        )
        trainer = adl_dist.Trainer(
            model,
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
            num_stages=K,
            **values(dtype=torch.float64, channels_last=channels_last, threads=1),
        )
        summary = trainer.fit(
            FixedImages(20, dtype=torch.float64),
            epochs=1,
            batch_size=8,
            val_dataset=FixedImages(9),
            monitoring=QUIET,
        )
        return trainer.full_state_dict(), summary["validation_loss"]

    (uncut, loss), (cut_up, cut_loss) = states(1), states(5)
    assert cut_loss == pytest.approx(loss, rel=1e-12)
    for name in uncut:
        torch.testing.assert_close(cut_up[name], uncut[name], rtol=1e-12, atol=1e-12)


def test_a_three_dimensional_net_trains_with_channels_last():
    """A three dimensional net trains with channels last as the command line sets it."""
    model = nn.Sequential(nn.Unflatten(1, (1, 2)), nn.Conv3d(1, 2, (2, 3, 3)), nn.Flatten(), nn.Linear(32, NUM_CLASSES))
    trainer_of(2, model=model, channels_last=True).fit(FixedImages(8), epochs=1, batch_size=4, monitoring=QUIET)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"resume": "runs/elsewhere"}, "resume=runs/elsewhere needs a run_dir"),
        ({"keep": 0}, "keep_checkpoints must be at least 1"),
        ({"val_dataset": FixedImages(4, dtype=torch.float64)}, None),
        ({"batch_size": 1}, "leaves no sample for each"),
        ({"epochs": 0}, "train.epochs must be at least 1"),
    ],
)
def test_arguments_of_fit_are_checked_before_anything_happens(arguments, message):
    options = {"epochs": 1, "batch_size": 4, "quiet": True, **arguments}
    if message is None:  # float64 images are taken in the run's dtype, so they do fit
        trainer_of(2).fit(FixedImages(8), **values(**options))
        return
    with pytest.raises(adl_dist.AdlError, match=message):
        trainer_of(2).fit(FixedImages(8), **values(**options))


def test_validation_data_of_another_shape_is_refused():
    class Larger(FixedImages):
        def __getitem__(self, index):
            return torch.zeros(2, 7, 7), self.labels[index]

    with pytest.raises(adl_dist.AdlError, match=r"validation dataset: its samples are float32\[B, 2, 7, 7\]"):
        trainer_of(2).fit(FixedImages(8), epochs=1, batch_size=4, val_dataset=Larger(4), monitoring=QUIET)


def test_a_loss_that_is_a_sum_is_refused():
    trainer = adl_dist.Trainer(
        batch_norm_net(),
        loss_fn=nn.CrossEntropyLoss(reduction="sum"),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    with pytest.raises(adl_dist.AdlError, match="the loss is a sum; expected the mean"):
        trainer.fit(FixedImages(8), epochs=1, batch_size=4, monitoring=QUIET)


def test_a_checkpoint_continues_only_the_run_that_wrote_it(tmp_path):
    """Other data, another optimizer, an older checkpoint: each is told, and nothing is written over."""

    def fit(samples=12, optimizer=torch.optim.SGD, epochs=2, resume="auto"):
        trainer = adl_dist.Trainer(
            batch_norm_net(),
            loss_fn=nn.CrossEntropyLoss(),
            optimizer=lambda p: optimizer(p, lr=0.1),
            processes=adl_dist.ProcessOptions(threads=1),
        )
        trainer.fit(
            FixedImages(samples),
            epochs=epochs,
            batch_size=4,
            run_dir=tmp_path,
            resume=resume,
            **values(quiet=True, tensorboard=False),
        )

    fit()
    saved = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    for options, message in (
        ({"samples": 40}, "num_samples is 12 there and 40 here"),
        ({"optimizer": torch.optim.AdamW, "epochs": 3}, "optimizer is SGD there and AdamW here"),
        ({"epochs": 3, "resume": str(tmp_path / "checkpoints" / saved[0])}, "would write over"),
    ):
        with pytest.raises(adl_dist.AdlError, match=message):
            fit(**options)
        assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == saved


def test_a_script_started_again_by_its_launcher_resumes(tmp_path, monkeypatch):
    """A script that its launcher starts again continues whatever it was told to resume."""

    def fit(epochs):
        told = {"run_dir": tmp_path, "resume": "never", "quiet": True, "tensorboard": False}
        return trainer_of(2).fit(FixedImages(8), epochs=epochs, batch_size=4, **values(**told))["updates"]

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    assert [fit(epochs=1), fit(epochs=2)] == [2, 4]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    with pytest.raises(adl_dist.AdlError, match="resume=never would write over it"):
        fit(epochs=3)


def test_changed_bytes_in_a_checkpoint_end_in_one_readable_error(tmp_path):
    trainer = trainer_of(2)
    trainer.fit(FixedImages(8), epochs=1, batch_size=4, run_dir=tmp_path, monitoring=SILENT)
    (path,) = (tmp_path / "checkpoints").iterdir()
    data = path / "model-00001-of-00002.safetensors"
    data.write_bytes(bytes(255 - b for b in data.read_bytes()))
    with pytest.raises(adl_dist.AdlError, match=r"model-00001-of-00002.safetensors should have the SHA-256"):
        trainer_of(2).load_checkpoint(path)


def test_two_runs_in_one_folder_at_the_same_time_are_refused(tmp_path):
    from adl_dist.checkpoint.run_dir import RunFolder

    first = RunFolder(tmp_path)
    first.open(resume="auto")
    with pytest.raises(adl_dist.AdlError, match="another process is training here"):
        RunFolder(tmp_path).open(resume="auto")
    first.close()
    RunFolder(tmp_path).open(resume="auto")
