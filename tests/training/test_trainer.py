"""What a run leaves behind and tells about itself, all stages in one process."""

import contextlib
import gc
import io
import json
import statistics
import weakref

import pytest
import torch
import yaml

import adl_dist
from adl_dist import engine
from adl_dist.errors import DataError
from adl_dist.training import build
from tests.support.commands import assert_same
from tests.support.kill import HeldImages, records
from tests.support.ranks import run_ranks
from tests.support.runs import BALANCE, toy_trainer
from tests.support.toys import FixedImages, Unplugged, batch_norm_net
from tests.support.values import QUIET, SILENT, values


def fitted(K, *, num_samples=20, epochs=1, batch_size=8, trainer=None, **options):
    """Return a trainer of K stages with M = 2, or the one given, after a run."""
    trainer = trainer or toy_trainer(K, 2)
    trainer.fit(FixedImages(num_samples), epochs=epochs, batch_size=batch_size, **{"monitoring": QUIET, **options})
    return trainer


@pytest.mark.parametrize(("K", "M"), [(1, 2), (4, 3)])
def test_recorded_staleness_is_that_of_the_formula(K, M, tmp_path):
    """In each of two epochs; what one epoch records of all methods test_method_runs.py looks at."""
    N = 26
    sizes = {"num_samples": N * 2 - 1, "epochs": 2, "batch_size": 2 * M}
    fitted(K, trainer=toy_trainer(K, M), run_dir=tmp_path, monitoring=SILENT, **sizes)
    seen = [r for r in records(tmp_path) if r["name"] == "stage/staleness"]
    num_updates = -(-N // M)
    for k in range(K):
        delay = 2 * (K - 1 - k)
        for epoch in range(2):
            groups = [r for r in seen if r["stage"] == k and r["epoch"] == epoch]
            assert [r["update"] for r in groups] == list(range(epoch * num_updates, (epoch + 1) * num_updates))
            assert groups[0]["value"] == 0, "it starts from an empty pipeline"
            for r in groups[-(-delay // M) + 1 : -1]:
                assert r["value"] == pytest.approx(delay / M)


def test_of_stages_every_nth_update_is_recorded(tmp_path):
    """Also behind an epoch of seven updates; those of the run and of epochs stay whole."""
    monitoring = adl_dist.Monitoring(quiet=True, tensorboard=False, report=False, stage_records_every=3)
    fitted(2, num_samples=56, epochs=2, run_dir=tmp_path, monitoring=monitoring)
    updates = {}
    for record in records(tmp_path):
        updates.setdefault((record["name"], record.get("stage")), []).append(record["update"])
    for k in range(2):
        assert updates["stage/staleness", k] == updates["stage/gradient_norm", k] == [0, 3, 6, 9, 12]
        assert updates["stage/busy_share", k] == [6, 13]
    assert updates["train/loss", 1] == [*range(14)]
    # Of seven updates with M = 2 and a delay of two micro-batches only an epoch's first one is fresh.
    stale = [0, 1, 1, 1, 1, 1, 1] * 2
    means = [0, *(statistics.mean(stale[n - 2 : n + 1]) for n in (3, 6, 9, 12))]
    assert [r["value"] for r in records(tmp_path) if (r["name"], r.get("stage")) == ("stage/staleness", 0)] == means


def test_evaluation_leaves_the_training_as_it_was():
    plain, evaluated = fitted(2, epochs=3), fitted(2, epochs=3, val_dataset=FixedImages(7))
    assert_same(evaluated.full_state_dict(), plain.full_state_dict())


def test_the_run_folder_holds_what_the_design_says(tmp_path):
    data = {"train_dataset": FixedImages(20), "val_dataset": FixedImages(7)}
    summary = toy_trainer(2, 2).fit(**data, epochs=2, batch_size=8, run_dir=tmp_path, monitoring=QUIET)
    names = {"config.yaml", "start.json", "metrics.jsonl", "summary.json", "tensorboard", "logs", "checkpoints"}
    assert {p.name for p in tmp_path.iterdir()} == names
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["num_stages"] == 2
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["update-00000003", "update-00000006"]
    assert [p.name for p in (tmp_path / "logs").iterdir()] == ["rank0.log"]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    written = records(tmp_path)
    names = {f"train/{name}" for name in ("loss", "accuracy", "learning_rate", "samples_per_second")}
    names |= {f"stage/{name}" for name in ("staleness", "busy_share", "gradient_norm")}
    assert {r["name"] for r in written} == names | {"process/peak_memory", "validation/loss", "validation/accuracy"}
    for r in written:
        assert {"name", "value", "update", "epoch"} <= r.keys()
    for stage in summary["stages"]:
        assert stage.keys() == {"stage", "staleness_mean", "staleness_max", "busy_share"}
        assert 0 < stage["busy_share"] <= 1
    (process,) = summary["processes"]
    assert process.keys() == {"rank", "stages", "peak_memory_bytes"}
    assert process["stages"] == [0, 1], "what the process held is told once, and of neither stage"
    assert process["peak_memory_bytes"] > 2**20
    assert {"validation_accuracy", "validation_loss", "samples_per_second", "seconds"} <= summary.keys()


def test_the_callers_random_stream_and_threads_are_left_alone(request):
    """Though each sample draws random numbers, as an augmentation would."""
    request.addfinalizer(lambda: torch.set_num_threads(1))
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    torch.set_num_threads(2)
    trainer = toy_trainer(2, 2, model=batch_norm_net(dropout=0.5))
    torch.manual_seed(3)
    trainer.fit(HeldImages(12), epochs=1, batch_size=4, monitoring=QUIET)
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == 2


def test_what_a_caller_has_frozen_stays_out_of_collections():
    gc.freeze()
    before = gc.get_freeze_count()
    fitted(2, num_samples=12, batch_size=4)
    assert gc.get_freeze_count() > 0.9 * before


@pytest.mark.parametrize("data", [FixedImages(41), Unplugged(41, after=30)], ids=["ends", "fails"])
def test_a_run_keeps_no_stage_alive(data, monkeypatch):
    """Also one that fails. While it runs it has one tensor for equal weights of losses."""
    stages, weights, run = [], [], engine.run

    def seen(order, contexts, *rest):
        stages.extend(weakref.ref(context.stage) for context in contexts.values())
        weights.extend(id(weight) for weight in contexts[1].loss_grads)
        run(order, contexts, *rest)

    monkeypatch.setattr(engine, "run", seen)
    fails = hasattr(data, "left")
    # Not in a variable, which would keep the error, and so its traceback and the stages there.
    with pytest.raises(DataError, match="raised OSError: unplugged") if fails else contextlib.nullcontext():
        toy_trainer(2, 2).fit(data, epochs=1, batch_size=4, monitoring=QUIET)
    gc.collect()
    assert [ref() for ref in stages] == [None, None]
    assert (len(weights), len(set(weights))) == (21, 2), "of whole groups, and of the last"


# --- What must not leak, and what must be refused --------------------------------------------------------------


def test_gradients_of_an_interrupted_group_do_not_reach_the_next():
    model = batch_norm_net()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    after = fitted(2, trainer=toy_trainer(2, 2, model=model, balance=BALANCE[2]), num_samples=12, batch_size=4)
    assert_same(after.full_state_dict(), fitted(2, num_samples=12, batch_size=4).full_state_dict())


def test_a_second_fit_continues_like_a_fresh_trainer():
    """It starts from the weights of the first."""
    trainer, model = fitted(3), batch_norm_net(seed=5)
    model.load_state_dict(trainer.full_state_dict())
    fresh = toy_trainer(3, 2, model=model, balance=BALANCE[3])
    states = [fitted(3, trainer=one, epochs=2).full_state_dict() for one in (trainer, fresh)]
    assert_same(*states)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"resume": "runs/elsewhere"}, "resume=runs/elsewhere needs a run_dir"),
        ({"checkpoints": adl_dist.CheckpointPolicy(every_updates=2)}, r"every_updates=\.\.\.\) needs a run_dir"),
        ({"eval_every_updates": 2}, "eval_every_updates needs a validation dataset"),
        ({"val_dataset": [(torch.ones(2, 7, 7), 0)]}, r"validation dataset: its samples are float32\[B, 2, 7, 7\]"),
        ({"batch_size": 1}, "leaves no sample for each"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_of_fit_are_checked_before_anything_happens(arguments, message):
    with pytest.raises(adl_dist.AdlError, match=message):
        toy_trainer(2, 2).fit(FixedImages(8), **values(**{"epochs": 1, "batch_size": 4, "quiet": True, **arguments}))


def test_a_checkpoint_continues_only_the_run_that_wrote_it(tmp_path, monkeypatch):
    """Other data, another optimizer, an older checkpoint: each is told, and nothing is written over."""

    def fit(samples=12, optimizer=torch.optim.SGD, epochs=2, resume="auto", run_dir=tmp_path):
        trainer = toy_trainer(1, 4, optimizer=lambda p: optimizer(p, lr=0.1))
        options = {"epochs": epochs, "batch_size": 4, "run_dir": run_dir, "resume": resume, "monitoring": SILENT}
        trainer.fit(FixedImages(samples), **options)

    fit()
    saved = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    elsewhere = {"epochs": 3, "resume": str(tmp_path / "checkpoints" / saved[0]), "run_dir": tmp_path / "other"}
    for options, message in (
        ({"samples": 40}, "num_samples is 12 there and 40 here"),
        ({"optimizer": torch.optim.AdamW, "epochs": 3}, "optimizer.name is '.*SGD' there and '.*AdamW' here"),
        ({"optimizer": torch.optim.AdamW, **elsewhere}, "optimizer is SGD there and AdamW here"),
        ({"epochs": 3, "resume": elsewhere["resume"]}, "would write over"),
    ):
        with pytest.raises(adl_dist.AdlError, match=message):
            fit(**options)
        assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == saved
    monkeypatch.setattr(build, "settle_partition", None)  # other data are refused before the model is cut
    with pytest.raises(adl_dist.AdlError, match="num_samples is 12 there and 40 here"):
        fit(samples=40)


def test_an_update_of_fewer_samples_than_asked_for_is_told(capsys):
    updates = []
    watch = adl_dist.Callback()
    watch.on_update = lambda now: updates.append(now.update)
    fitted(1, batch_size=5, num_samples=12, monitoring=adl_dist.Monitoring(tensorboard=False), callbacks=[watch])
    assert "\nnote: batch_size=5 is no multiple of M=2: an update has 4 samples\n" in f"\n{capsys.readouterr().out}"
    assert len(updates) == 3


class Interrupts(adl_dist.Callback):
    def on_update(self, now):
        raise KeyboardInterrupt


def test_a_stopped_script_says_where_it_stopped(tmp_path, capsys):
    for run_dir in (tmp_path, None):
        trainer = toy_trainer(1, 2, handle_signals=True)
        of_fit = {"monitoring": SILENT, "callbacks": [Interrupts()], "epochs": 3, "batch_size": 8, "run_dir": run_dir}
        update = trainer.fit(FixedImages(80), **of_fit)["stopped"]["update"]
        saved = "nothing is saved, because there is no run_dir"
        if run_dir is not None:
            saved = f"saved {tmp_path}/checkpoints/update-{update:08d}; the same command resumes it"
        why = "by KeyboardInterrupt in Interrupts.on_update"
        expected = f"adl-dist: stopped at update {update} (0 of 3 epochs complete) {why}; {saved}\n"
        assert capsys.readouterr().err == expected


def told_to_the_end():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        trainer = fitted(2, monitoring=adl_dist.Monitoring(tensorboard=False))
        fitted(2, trainer=trainer, monitoring=adl_dist.Monitoring(tensorboard=False))
    return out.getvalue()


@pytest.mark.ranks
def test_rank_0_says_once_before_training_where_weights_are():
    on_0, on_1 = run_ranks(2, told_to_the_end)
    before, *after = on_0.split("note: the model of each process holds the trained weights of its own")
    assert ("epoch" in before, len(after)) == (False, 1)
    assert (on_1, "trained weights" in told_to_the_end()) == ("", False)
