#!/usr/bin/env python3
"""What one GPU can show, in parts of at most ten minutes; each prints Markdown for docs/results, with its commands.

    PYTHONPATH=. python benchmarks/gpu.py overhead | ranks [MINUTES] [--rows REGEX]
    PYTHONPATH=. python benchmarks/gpu.py launches | memory
    PYTHONPATH=. python benchmarks/gpu.py accuracy CIFAR10_FOLDER MINUTES EPOCHS RUNS_FOLDER

    overhead  our engine and torch's own loop where the GPU is busy: ResNet-18 at batch 128, ResNet-50 at 224x224
    ranks     ResNet-56 in micro-batches of 32: 2 and 4 ranks on the GPU, and BP in one process, eager and compiled
    launches  the same network by torch's profiler: kernels, and host and GPU milliseconds per micro-batch
    memory    Table 4 of the paper: four ranks on the GPU
    accuracy  Table 2(a) of the paper, K = 16, M = 1 to 4, side by side; in CIFAR10_FOLDER the images are in train/CLASS
              and test/CLASS. When the MINUTES are over, the runs save and stop, and the same command continues them

``launches`` needs only torch, all others Hydra as well; ``make test-gpu`` runs the tests. PYTHONPATH=. is for a package
that is not installed. Where our runs are compared with torch's own loop, both draw the same images from the same
loader, which has them in memory; what that takes by itself is printed.

Of ``overhead`` and ``ranks`` each row is measured up to three times, while the MINUTES (9) last; ``--rows``
takes those alone in whose names REGEX is found, and the first one, to which ratios are. Runs with one process are
made in this one, so that none pays for the start of another; one that hangs holds up the call. Speeds are those of a
run's last epoch.

Further words KEY=VALUE are settings of ``adl-dist train`` for all runs, also of the same names on a CPU:
``runtime.device=cpu`` tries the commands out. Figures of one call were taken in turns and may be compared; a further
round is begun only if it will end in time. Where the files are there without git's history, the environment variable
COMMIT tells which commit they are of.
"""

import contextlib
import gc
import io
import itertools
import json
import math
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import adl_dist
from adl_dist.errors import AdlError, in_one_line
from adl_dist.models import cifar_resnet, cifar_resnet18, torchvision_model
from adl_dist.training.input import DeviceLoader

ROOT = Path(__file__).parents[1]

ROUNDS, SECONDS, LOADING_SECONDS = 3, 4.0, 1.0
MOST_SECONDS = 540.0  # of one call; the machine that it is for gives a command ten minutes
RUN_SECONDS = 150.0  # of one run of ours, with its start
STOP_SECONDS = 45.0  # for runs that were told to stop, to save and to end
BEGAN = time.monotonic()
DISTINCT = 512  # images in memory; an epoch has them again and again
COMMON = ("data._target_=benchmarks.gpu.images", "data.in_channels=3", "data.num_classes=10", "data.image_size=32")
COMMON += ("runtime.tensorboard=false", "runtime.checkpoint_every_epochs=0")
RESNET56 = ("model=resnet56", "train.batch_size=128", "runtime.channels_last=false")  # as torch's loop has it
WORDS, ROWS = sys.argv[1:], ""
if "--rows" in WORDS[:-1]:
    ROWS = WORDS.pop(WORDS.index("--rows") + 1)
    WORDS.remove("--rows")
OTHERS = tuple(word for word in WORDS if "=" in word)
DEVICE = "cpu" if "runtime.device=cpu" in OTHERS else "cuda"
# torch's own default is TF32 for convolutions; that of our runs is float32.
IN_OUR_PRECISION = adl_dist.Precision(tf32="runtime.tf32=true" in OTHERS).apply(threads=torch.get_num_threads())
Update = Callable[[], None]
Rows = dict[str, Callable[[], float]]


def main() -> None:
    """Do one part."""
    words = [word for word in WORDS if "=" not in word]
    timed = {"overhead": overhead, "ranks": ranks}
    parts = {"launches": launches, "memory": memory}
    print(machine(), "\n", flush=True)
    if words and words[0] == "accuracy" and len(words) == 5:
        accuracy(Path(words[1]), float(words[2]), int(words[3]), Path(words[4]))
    elif words and len(words) < 3 and words[0] in timed:
        timed[words[0]](Limits(60 * float(words[1]) if len(words) > 1 else MOST_SECONDS, ROWS))
    elif len(words) == 1 and words[0] in parts:
        parts[words[0]]()
    else:
        sys.exit(__doc__)


def machine() -> str:
    """Return in one line what this runs on."""
    gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or platform.machine()
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if DEVICE == "cuda" else "-"
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        at = commit.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        at = os.environ.get("COMMIT", "unknown")
    return f"{gpu}; {versions}, NCCL {nccl}; commit {at}"


class RunFailed(Exception):
    """A run that has not ended well; the text says how."""


def images_per_second(*words: str) -> float:
    """Return the speed of a run's last epoch; not a number if it failed, which is said."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [*COMMON, f"runtime.device={DEVICE}", *words, *OTHERS, f"run_dir={folder}/run"]
        last = list({word.partition("=")[0]: word for word in settings}.values())  # of several values for a key
        has_one_process = {"runtime.processes=false", "partition.num_stages=1"} & set(last)
        try:
            (train_here if has_one_process else train)(last)
        except RunFailed as failed:
            print(f"    {shlex.join(words)}: {failed}", flush=True)
            return float("nan")
        records = map(json.loads, (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines())
        return [float(each["value"]) for each in records if each["name"] == "train/samples_per_second"][-1]


def train(settings: Sequence[str]) -> None:
    """Train by the command line."""
    try:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path}  # there are the images
        command = [sys.executable, "-m", "adl_dist", "train", *settings]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, env=environment)
    except subprocess.TimeoutExpired:  # its ranks end with it
        raise RunFailed(f"not ended after {RUN_SECONDS:.0f} s") from None
    if done.returncode:
        raise RunFailed(" ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]))


def train_here(settings: Sequence[str]) -> None:
    """Train by the command's own function, in this process."""
    from adl_dist.cli.train import train as command  # and with it Hydra, which other parts do without

    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # there are the images
    threads, said = torch.get_num_threads(), None
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            command([*settings, "runtime.processes=false"])
    except (AdlError, RuntimeError) as error:
        said = in_one_line(error)
    torch.set_num_threads(threads)
    gc.collect()  # now that no error holds what the run held
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    if said is not None:
        raise RunFailed(said)


def images(
    num_samples: int = 25600, image_size: int = 32, num_classes: int = 10, in_channels: int = 3
) -> tuple[Dataset[tuple[Tensor, Tensor]], Dataset[tuple[Tensor, Tensor]]]:
    """Return the data of all that is compared, in memory: a micro-batch of them is taken at once."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(DISTINCT, in_channels, image_size, image_size, generator=generator)
    distinct = TensorDataset(inputs, torch.randint(num_classes, (DISTINCT,), generator=generator))
    return Subset(distinct, [i % DISTINCT for i in range(num_samples)]), Subset(distinct, range(64))


def batches(size: int, side: int, num_classes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield micro-batches for ever, as our first stage gets them: input on the device, target on the CPU."""
    dataset, _ = images(image_size=side, num_classes=num_classes)
    device = torch.device("cuda", torch.cuda.current_device()) if DEVICE == "cuda" else torch.device("cpu")
    how = {"seed": 0, "shuffle": True, "num_workers": 0, "device": device, "precision": adl_dist.Precision()}
    loader = DeviceLoader(dataset, "training", **how)  # type: ignore[arg-type]
    for epoch in itertools.count():
        yield from loader.batches(epoch, [size] * (loader.num_samples // size))  # type: ignore[misc]


def tell_loading(size: int, side: int, num_classes: int = 10) -> None:
    """Print what it takes to load, which is part of all that is compared."""
    loaded = batches(size, side, num_classes)
    next(loaded)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < LOADING_SECONDS:
        next(loaded)
        count += 1
    _wait()
    print(f"Loading alone: {1e3 * (time.perf_counter() - begin) / count:.2f} ms for {size} images\n", flush=True)


@IN_OUR_PRECISION
def by_hand(kind: str, model: nn.Module, size: int, num_micro_batches: int, side: int, num_classes: int = 10) -> float:
    """Return the images/s of torch's own loop, ``eager`` or ``compiled``."""
    model = model.to(DEVICE).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loaded, loss_fn = batches(size, side, num_classes), nn.CrossEntropyLoss()
    call: Callable[[Tensor], Tensor] = torch.compile(model) if kind == "compiled" else model

    def update() -> None:
        for x, y in itertools.islice(loaded, num_micro_batches):
            (loss_fn(call(x), y.to(DEVICE, non_blocking=True)) / num_micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        update()
    return num_micro_batches * size * _per_second(update)


def _per_second(update: Update) -> float:
    """Return how often ``update`` runs in a second."""
    _wait()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < SECONDS:
        update()
        count += 1
        if count % 10 == 0:  # or the host would run ahead of the clock
            _wait()
    _wait()
    return count / (time.perf_counter() - begin)


def _wait() -> None:
    """Return when the GPU has done all that was launched."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Limits:
    """What a call is to measure: for how many ``seconds``, and which rows besides the first."""

    seconds: float = MOST_SECONDS
    rows: str = ""


def in_turns(rows: Rows, limits: Limits) -> None:
    """Measure each row ROUNDS times, in turns, and print medians and ratios to the first.

    Fewer times, or a row not at all, if the call would last too long, which is said. What fails is not a number.
    """
    base = next(iter(rows))
    found: dict[str, list[float]] = {row: [] for row in rows if row == base or re.search(limits.rows, row)}
    longest = 0.0
    for number in range(ROUNDS):
        begin = time.monotonic()
        if number and begin - BEGAN + longest > limits.seconds:
            break
        for row in list(found)[:: 1 if number % 2 == 0 else -1]:
            if row != base and time.monotonic() - BEGAN > limits.seconds:
                print(f"    {row}: no time left", file=sys.stderr, flush=True)
                continue
            try:
                figure = rows[row]()
            except RuntimeError as error:
                print(f"    {row}: {in_one_line(error)}", file=sys.stderr, flush=True)
                figure = float("nan")
            found[row].append(figure)
            print(f"    {row}: {figure:,.0f}", file=sys.stderr, flush=True)  # should a later one not end
        longest = max(longest, time.monotonic() - begin)
    measured = {row: [figure for figure in figures if not math.isnan(figure)] for row, figures in found.items()}
    medians = {row: statistics.median(figures or [math.nan]) for row, figures in measured.items()}
    print(f"Rounds: {len(found[base])}\n\n| | images/s, median | least .. most | ratio |\n|---|---|---|---|")
    for row, median in medians.items():
        each = measured[row] or [math.nan]
        print(f"| {row} | {median:,.0f} | {min(each):,.0f} .. {max(each):,.0f} | {median / medians[base]:.2f} |")
    print(flush=True)


def overhead(limits: Limits) -> None:
    """Our engine next to torch's loop, where the GPU is the limit."""
    print("ResNet-18 (CIFAR form), batch 128, M = 1, float32; and K = 4 stages in one process\n")
    tell_loading(128, 32)
    ours = ("model=resnet18", "train.batch_size=128", "data.num_samples=25600", "train.epochs=2")
    one = ("method=bp", "partition.num_stages=1", "method.accumulation_steps=1", "runtime.channels_last=false")
    four = ("method=fdg", "partition.num_stages=4", "runtime.processes=false", "runtime.channels_last=false")
    rows: Rows = {
        "torch's loop": lambda: by_hand("eager", cifar_resnet18(), 128, 1, 32),
        "bp, our engine": lambda: images_per_second(*ours, *one),
        "fdg, K = 4 in one process": lambda: images_per_second(*ours, *four),
    }
    in_turns(rows, limits)
    print("ResNet-50, 224x224, batch 64, M = 1\n")
    tell_loading(64, 224, 1000)
    ours = ("model=torchvision", "model.name=resnet50", "data.image_size=224", "data.num_classes=1000")
    ours += ("train.batch_size=64", "data.num_samples=2560", "train.epochs=2")
    rows = {
        "torch's loop": lambda: by_hand("eager", torchvision_model("resnet50"), 64, 1, 224, 1000),
        "bp, our engine": lambda: images_per_second(*ours, *one),
    }
    in_turns(rows, limits)


def ranks(limits: Limits) -> None:
    """Compare one and more processes on one GPU for a network of small kernels."""
    print("ResNet-56, M = 4 micro-batches of 32, float32; ranks share the GPU and send through host memory\n")
    tell_loading(32, 32)
    ours = (*RESNET56, "method.accumulation_steps=4", "data.num_samples=25600", "train.epochs=2")
    rows: Rows = {
        f"BP by hand, {kind}": lambda kind=kind: by_hand(kind, cifar_resnet(56), 32, 4, 32)  # type: ignore[misc]
        for kind in ("eager", "compiled")
    }
    rows["bp, our engine"] = lambda: images_per_second(*ours, "method=bp", "partition.num_stages=1")
    for k in (2, 4):
        cut = (f"partition.num_stages={k}", "partition.balance=auto")
        rows[f"adl, {k} ranks"] = lambda cut=cut: images_per_second(*ours, "method=adl", *cut)  # type: ignore[misc]
    in_turns(rows, limits)


@IN_OUR_PRECISION
def launches() -> None:
    """Count kernels, and the milliseconds of host and GPU, of one micro-batch."""
    from torch.profiler import ProfilerActivity, profile

    model, x = cifar_resnet(56).to(DEVICE).train(), torch.randn(32, 3, 32, 32, device=DEVICE)
    y = torch.randint(10, (32,), device=DEVICE)

    def once() -> None:
        nn.functional.cross_entropy(model(x), y).backward()

    for _ in range(5):
        once()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE == "cuda" else [])]
    with profile(activities=activities) as found:
        once()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    events = found.key_averages()
    kernels = [event for event in events if str(event.device_type).endswith("CUDA")]
    host = 1e3 / _per_second(once)
    gpu = sum(event.self_device_time_total for event in kernels) / 1e3
    count = sum(event.count for event in kernels)
    print(f"ResNet-56, 32 images: {count} kernels, {gpu:.2f} ms of the GPU, {host:.2f} ms in all")


def memory() -> None:
    """Table 4, with all four ranks on this GPU, in MB.

    What is allocated understates what is held: memory that another stream may still use is active, but not allocated.
    A GPU's allocator counts by itself, without torch's profiler, so that runs may go on side by side.
    """
    counted = ["runtime.profile_memory=false", "sweep.jobs=3"] if DEVICE == "cuda" else []
    command = ["train", "experiment=table4", f"runtime.device={DEVICE}", *counted, *OTHERS]
    print(f"    adl-dist {shlex.join(command)}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "adl_dist", *command, f"run_dir={folder}/runs"], check=False)
        print("| run | MB of | stage 0 | 1 | 2 | 3 |\n|---|---|---|---|---|---|")
        for summary in sorted(Path(folder).glob("runs/*/*/summary.json")):
            stages = json.loads(summary.read_text())["stages"]
            for name in ("memory", "active", "reserved"):
                if f"peak_{name}_bytes" not in stages[0]:  # of a GPU's allocator alone
                    continue
                megabytes = [f"{stage[f'peak_{name}_bytes'] / 1e6:,.0f}" for stage in stages]
                what = "allocated" if name == "memory" else name
                print(f"| {summary.parent.parent.name} | {what} | {' | '.join(megabytes)} |")


def accuracy(folder: Path, minutes: float, epochs: int, runs: Path) -> None:
    """Train M = 1 to 4 side by side in ``runs``, from where they are; when the minutes are over they save and stop."""
    words = [*of_table2a(folder), f"train.epochs={epochs}", *milestones(epochs), *OTHERS]
    _side_by_side(words, runs, seconds=60 * minutes - STOP_SECONDS)
    _print_accuracy(words, runs)


def of_table2a(folder: Path) -> list[str]:
    """Return the settings of ResNet-56 with K = 16 in one process, with the images in ``folder``."""
    words = ["experiment=table2a", "hydra.mode=RUN", "data=imagefolder", f"data.root={folder.resolve()}"]
    words += ["data.cache=true", "runtime.processes=false", "runtime.tensorboard=false"]
    return [*words, f"runtime.device={DEVICE}", "seed=0"]


def milestones(epochs: int) -> list[str]:
    """Return the paper's schedule of 300 epochs (150, 225, 275), scaled to ``epochs``."""
    return [f"lr_schedule.milestones=[{epochs // 2},{3 * epochs // 4},{11 * epochs // 12}]"] if epochs > 11 else []


def _side_by_side(words: Sequence[str], runs: Path, seconds: float) -> None:
    """Train M = 1 to 4 at once; after so many ``seconds`` let them save and stop."""
    started = [_started([*words, f"method.accumulation_steps={m}"], runs / f"M{m}") for m in (1, 2, 3, 4)]
    end = time.monotonic() + seconds
    for process in started:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            break
    for process in (process for process in started if process.poll() is None):
        process.send_signal(signal.SIGTERM)
    for process in started:
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def _print_accuracy(words: Sequence[str], runs: Path) -> None:
    print(f"    adl-dist train {shlex.join(words)} method.accumulation_steps=M\n")
    print("| M | accuracy after the last epoch |\n|---|---|")
    for m in (1, 2, 3, 4):
        print(f"| {m} | {_result(runs / f'M{m}')} |")


def _started(words: Sequence[str], folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "adl_dist", "train", *words, f"run_dir={folder}"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".log").open("a") as output:
        return subprocess.Popen(command, stdout=output, stderr=output)


def _result(folder: Path) -> str:
    if (folder / "diverged.json").exists():
        return f"diverged at update {json.loads((folder / 'diverged.json').read_text())['update']}"
    if (folder / "summary.json").exists():
        summary = json.loads((folder / "summary.json").read_text())
        reached = f"{summary['validation_accuracy']:.2%}" if "validation_accuracy" in summary else "none yet"
        return f"{reached}, stopped in epoch {summary['stopped']['epoch'] + 1}" if "stopped" in summary else reached
    said = folder.with_suffix(".log").read_text().splitlines() if folder.with_suffix(".log").exists() else []
    return ": ".join(["no result", *said[-1:]])


if __name__ == "__main__":
    main()
