"""A run folder with made-up numbers in it, for what reads such folders."""

import json

import yaml


def events_of(stage, *, begin=0.0):
    """Forward and backward of eight micro-batches with an update after each fourth, 10 and 20 ms long."""
    found, now = [], begin
    for number in range(8):
        for op, seconds in (("RA", 0.002), ("F", 0.01), ("SA", 0.001), ("B", 0.02)):
            found.append([op, number, now, now + seconds, 1 - stage if op == "B" else None])
            now += seconds
        if number % 4 == 3:
            found.append(["U", number // 4, now, now + 0.003, None])
            now += 0.003
    return found


def recorded_run(folder):
    """Make a run folder as a trainer leaves it, with made-up numbers: K = 2, M = 4, three epochs of four updates."""
    (folder / "logs").mkdir(parents=True)
    config = {
        "method": {"name": "adl", "accumulation_steps": 4},
        "partition": {"num_stages": 2, "links": None},
        "train": {"epochs": 3, "max_updates": None},
        "model": {"_target_": "adl_dist.models.cifar_resnet", "depth": 8},
        "data": {"_target_": "adl_dist.data.digits"},
        "seed": 0,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    stages = [
        {
            "stage": k,
            "staleness_mean": 0.5 - k / 2,
            "staleness_max": 1 - k,
            "busy_share": 0.6,
            "peak_memory_bytes": 2**28,
        }
        for k in range(2)
    ]
    summary = {"validation_loss": 0.25, "validation_accuracy": 0.9375, "epochs": 3, "updates": 12, "seconds": 9.0}
    summary |= {"train_seconds": 6.0, "samples_per_second": 128.0, "num_samples": 768, "skipped_updates": 0}
    (folder / "summary.json").write_text(json.dumps({**summary, "stages": stages}))
    lines = []
    for update in range(12):
        where = {"update": update, "epoch": update // 4}
        lines.append({"name": "train/loss", "value": 2 / (update + 1), "num_samples": 64, "stage": 1,
                      "elapsed_seconds": 0.5 * (update % 4 + 1), **where})  # fmt: skip
        lines.append({"name": "train/learning_rate", "value": 0.1, **where})
        lines += [{"name": "stage/gradient_norm", "value": 1.0 + k, "stage": k, **where} for k in range(2)]
        if update % 4 == 3:
            lines.append({"name": "validation/loss", "value": 1 / (update + 1), **where})
            lines.append({"name": "validation/accuracy", "value": 0.5 + update / 24, **where})
            lines += [{"name": "stage/busy_share", "value": 0.6, "stage": k, **where} for k in range(2)]
            lines += [{"name": "stage/staleness", "value": 0.5, "stage": k, **where} for k in range(2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = {"command": "adl-dist train data=digits", "host": "box", "device": "cpu", "parameters": 75290}
    start["stages"] = [[2, "stem", "layer2_0"], [3, "layer10_0", "head"]]
    (folder / "start.json").write_text(json.dumps(start))
    timeline = {"epoch": 1, "device": "cpu", "is_steady": True, "stages": [events_of(0), events_of(1, begin=0.01)]}
    (folder / "timeline.json").write_text(json.dumps(timeline))
    (folder / "logs" / "rank0.log").write_text("2026-11-24 09:42:17,810 INFO cut: [2, 3] units per stage\n")
    return folder
