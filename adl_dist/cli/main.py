"""``adl-dist COMMAND``: run commands, and turn errors into exit codes."""

import atexit
import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
import stat
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from adl_dist import __version__
from adl_dist.distributed import parent_process
from adl_dist.distributed.parent_process import RENDEZVOUS_FOLDER, end_with_launcher, end_with_torchrun
from adl_dist.errors import AdlError, ConfigError, Exit, describe, did_you_mean, place_of, text_of
from adl_dist.wording import keys_shown

USAGE = """\
adl-dist COMMAND [KEY=VALUE ...]

train and look
  train       train; every key has a default, so `adl-dist train` runs as it is
  status      what a job is at:            adl-dist status runs/NAME [--json]
  checkpoint  have it save now:            adl-dist checkpoint runs/NAME
  stop        have it save now and end:    adl-dist stop runs/NAME
  tokenize    text to tokens, to train on: adl-dist tokenize FILE... --out DIR

plan and measure
  schedule    print what each stage does in each tick:  adl-dist schedule partition.num_stages=4
  plan        measure, cut, predict:       adl-dist plan model=resnet56 data=cifar10 --stages 2,4
  bench       measure methods and torch's own side by side:  adl-dist bench model=resnet18 data=synthetic

afterwards
  evaluate    evaluate a checkpoint:       adl-dist evaluate runs/NAME
  export      write one plain state_dict:  adl-dist export runs/NAME out=model.pt
  report      a page about runs:           adl-dist report runs/NAME [RUN...]
  compare     table and figure of runs:    adl-dist compare runs/A runs/B [out=FOLDER]
  generate    text from a trained model:   adl-dist generate runs/NAME prompt=TEXT

A run folder is runs/NAME or run_dir=runs/NAME; adl-dist COMMAND --help says what else the command takes.
adl-dist --version prints the version
adl-dist train --help lists the keys, also those of another method: adl-dist train --help method=fr
adl-dist train --multirun KEY=A,B runs all combinations and compares them
On SLURM: sbatch launch/slurm.sbatch KEY=VALUE ... from a checkout
Under torchrun, `python -m adl_dist train ...` is one rank of K.
"""

OF_A_CHECKPOINT = """\
  RUN_DIR            the folder of a run made by adl-dist train; run_dir=RUN_DIR does as well
  checkpoint=best    the best one that is kept: by runtime.best_metric, else validation accuracy, else loss
  checkpoint=PATH    that checkpoint, also of another run of the same model; default: the newest of RUN_DIR
  ema=true           the moving averages of the weights, of a run with train.ema
"""
HELP = {
    "evaluate": f"""\
adl-dist evaluate RUN_DIR [checkpoint=best|PATH] [ema=true] [data.KEY=VALUE ...]

Prints loss and accuracy of the uncut model on the run's validation data, in this process; or on those of the same
dataset with other settings, like data.root=FOLDER.

{OF_A_CHECKPOINT}""",
    "export": f"""\
adl-dist export RUN_DIR out=FILE [checkpoint=best|PATH] [ema=true]

Writes one plain state_dict with the uncut model's own names.

  out=FILE           a new file: FILE.safetensors as safetensors, any other name for torch.load; of model=hf a name
                     without a dot is a folder, which from_pretrained of transformers loads
{OF_A_CHECKPOINT}""",
    "generate": f"""\
adl-dist generate RUN_DIR prompt=TEXT [max_tokens=200] [temperature=1.0] [top_k=K] [seed=0] [checkpoint=best|PATH]
                              [ema=true]

Prints the prompt and the text that a model trained on tokens (data=tokens) continues it with, in this process.

  prompt=TEXT        what to begin with; at least one token
  max_tokens=200     how many tokens to write
  temperature=1.0    above 1: more surprising; below 1: less; 0: always the likeliest token
  top_k=K            choose among the K likeliest tokens only; default: all
  seed=0             of what is drawn
{OF_A_CHECKPOINT}""",
    "report": """\
adl-dist report RUN [RUN...] [out=FILE.html]

Writes one HTML page about a run: results, learning curves, throughput, stages, timeline, memory, cut, links, what the
logs warn of, configuration. Of several runs: a comparison. The page needs no other file and no network.

  out=FILE.html      where to; default: report.html in the run folder, of several runs in the folder that holds all
""",
    "compare": """\
adl-dist compare RUNS... [reference=RUN] [out=FOLDER]

Writes a table, a CSV file and a figure of the runs in or below the folders RUNS, and for each the updates, samples and
seconds until it had the losses that the reference had after 25, 50, 75 and 100 % of its updates.

  reference=RUN      default: for each run that of bp that is most like it; without one the first run
  out=FOLDER         where to; default: the folder that holds all of them
""",
    "status": """\
adl-dist status RUN_DIR [--json]

Prints what each stage of the job that trains in RUN_DIR is at; of a run that has ended, its summary.

  RUN_DIR            the folder of a run, on the machine of its rank 0; run_dir=RUN_DIR does as well
  --json             one JSON object instead of a table; of a run that has ended {"ended": its summary}
""",
    **{
        name: f"adl-dist {name} RUN_DIR\n\nHas the job that trains there save now, and {then}. Prints the checkpoint.\n"
        for name, then in (("checkpoint", "continue"), ("stop", "end"))
    },
}

# The module of each command, whose function has its name. Imported when called: torch takes seconds to load.
COMMANDS = {
    **{name: name for name in ("train", "schedule", "tokenize")},
    **{name: f"{name}.command" for name in ("plan", "bench")},
    **dict.fromkeys(("evaluate", "export", "generate"), "trained"),
    **dict.fromkeys(("compare", "report", "status", "checkpoint", "stop"), "folders"),
}
HAVE_HELP = ("train", "schedule", "tokenize", "plan", "bench")  # made of their keys or flags
SAY_WHY = ("train", "plan", "bench")  # commands that print before torch is loaded

logger = logging.getLogger("adl_dist")
# Until a run has its log file there is no handler, and logging would then print tracebacks on standard error by itself.
logger.addHandler(logging.NullHandler())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code.

    The codes are 0 (done), 2 (the user can fix it), 1 (a peer or adl-dist failed), 75 (stopped), 130 (interrupted).
    """
    ending: list[int] = []
    if arguments is None:
        atexit.register(_end_without_clearing_up, ending)  # first, so that it runs after all others
    end_with_launcher()
    end_with_torchrun()
    # Read when torch is loaded: its networking layers narrate, with stack traces, what they also raise.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    if os.getcwd() not in sys.path and not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # as `python -m adl_dist` does: where the user's _target_ is
    code = _run(list(sys.argv[1:] if arguments is None else arguments), is_own_process=arguments is None)
    _flush()
    if code and "RANK" in os.environ:
        # A rank that failed must not wait in some destructor for peers that wait for it.
        os._exit(code)
    ending.append(code)
    sys.exit(code)


def _end_without_clearing_up(code: Sequence[int]) -> None:
    """End a finished process without Python's slow teardown of modules."""
    if code:  # otherwise it ends by an error of our own, which Python prints
        logging.shutdown()
        _flush()
        os._exit(code[0])


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # its reader is gone, and Python itself would fail over it at its end
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(command_line: list[str], *, is_own_process: bool) -> int:
    name, *arguments = command_line or [""]
    if name == "--version":
        sys.stdout.write(f"adl-dist {__version__}\n")
        return 0
    wants_help = name in ("-h", "--help", "help") or (name in COMMANDS and {"-h", "--help"} & set(arguments))
    if not command_line or (wants_help and name not in HAVE_HELP):
        sys.stdout.write(HELP.get(name, USAGE))
        return 0 if command_line else 2
    is_other_rank = os.environ.get("RANK", "0") != "0" or RENDEZVOUS_FOLDER in os.environ
    if name in SAY_WHY and not (wants_help or "--json" in arguments or is_other_rank or "torch" in sys.modules):
        sys.stdout.write("loading torch ...\n")
        sys.stdout.flush()
    with keys_shown():
        return exit_code_of(lambda: _command(name, is_own_process=is_own_process)(arguments), resumes=name == "train")


def exit_code_of(command: Callable[[], None], *, resumes: bool = False) -> int:
    """Run ``command`` and return its exit code; print and log its error."""
    try:
        command()
        return 0
    except AdlError as error:
        logger.error("%s\n%s", error, traceback.format_exc())
        if error.exit_code == ConfigError.exit_code:
            parent_process.flag_user_error(text_of(error))
        _print_error(text_of(error), kind="error: ")
        return error.exit_code
    except KeyboardInterrupt:
        hint = "; the same command resumes from the last checkpoint, if there is one" if resumes else ""
        sys.stderr.write(f"\nadl-dist: interrupted{hint}\n")
        return 128 + signal.SIGINT
    except Exit as done:
        return int(done.code or 0)
    except SystemExit as error:
        logger.error("%s", traceback.format_exc())
        said = f"sys.exit({error.code}){place_of(error)} ended the command; raise an error instead"
        _print_error(said, kind="error: ")
        return 2
    except BrokenPipeError:
        return 1
    except Exception as error:
        logger.error("unexpected: %s", traceback.format_exc())
        _print_error(describe(error))
        return 1


def _command(name: str, *, is_own_process: bool) -> Callable[[list[str]], None]:
    if name == "race":
        raise ConfigError(
            "adl-dist race has moved in 0.4.0: python -m benchmarks.race, in a checkout, takes its arguments"
        )
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        raise ConfigError(f"there is no command '{name}'{hint}; choose one of {', '.join(COMMANDS)}")
    if pauses := is_own_process and gc.isenabled():
        gc.disable()  # an import leaves no garbage, and looking for it among all of torch's objects takes 0.4 s
    module = importlib.import_module(f"adl_dist.cli.{COMMANDS[name]}")
    if pauses:
        gc.freeze()
        gc.enable()
    command: Callable[[list[str]], None] = getattr(module, name)
    return command


def _print_error(text: str, *, kind: str = "") -> None:
    """Print the error that ends this command, on other ranks after rank 0."""
    if (rank := os.environ.get("RANK")) is None:  # then it need not wait for torch
        sys.stderr.write(f"adl-dist: {kind}{text}\n")
        return
    with contextlib.suppress(KeyboardInterrupt):
        if rank != "0":
            _hang_up()
            time.sleep(parent_process.RANK_0_SECONDS)
        sys.stderr.write(f"adl-dist: {kind}{'' if rank == '0' and kind else f'rank {rank}: '}{text}\n")
        _flush()


def _hang_up() -> None:
    """Shut down all connections, because rank 0 may wait on one (Linux)."""
    with contextlib.suppress(OSError):
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if descriptor > 2 and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    with socket.socket(fileno=os.dup(descriptor)) as connection:
                        connection.getpeername()  # raises OSError for a listener, without which gloo would abort
                        connection.shutdown(socket.SHUT_RDWR)
