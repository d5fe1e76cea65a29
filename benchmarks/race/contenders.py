"""The contenders of a race: their names, entries of a bench, and the runs that have the same values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from adl_dist.cli.bench.entries import Entry, entries, our_entry
from adl_dist.cli.config.compose import compose_run, method_words
from adl_dist.cli.config.schema import RunConfig
from adl_dist.codecs import Codec
from adl_dist.errors import AdlError, ConfigError
from adl_dist.schedule import Method

TRAIN, REPLICAS = ("adl_dist", "train"), "benchmarks.race.replicas"
EVERYTHING = {"name": "adl", "split_backward": True, "delay": "auto", "mitigation": ("predict",)}
# Besides the user's own settings: of torch's the entry of a bench, of ours a method and other settings.
REPLICATED = {"ddp": "torch-ddp", "diloco-50": "torch-diloco-50", "diloco-500": "torch-diloco-500"}
TORCHS_PIPELINES = {"torch-1f1b": "torch-1f1b", "torch-zb": "torch-zb"}
ONE_DEVICE = "one-device"
OURS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"name": name} for name in ("bp", "1f1b", "zbh1", "2bw", "paci", "adl")},
    **{"zbh1-int8": {"name": "zbh1"}, "adl-int8": {"name": "adl"}},
    **{"adl-full": EVERYTHING, "adl-full-int8": EVERYTHING},
}
CODECS: Mapping[str, Codec] = {name: "int8" for name in OURS if name.endswith("-int8")}
NAMES = (ONE_DEVICE, *REPLICATED, *TORCHS_PIPELINES, *OURS)
SYNCHRONOUS = (*TORCHS_PIPELINES, "1f1b", "zbh1", "zbh1-int8")  # pipelines that flush
WARMUP = 3  # updates that do not count, at least


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A way to train; contenders with equal values share one set of runs."""

    name: str  # of its folder: equal for equal values only
    program: Sequence[str]  # takes the settings, after ``python -m``
    settings: Sequence[str]  # besides the user's


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One of those who race."""

    name: str
    entry: Entry  # as which it is measured; its method may still have delays to be found
    codec: Codec = "none"  # of ours

    @property
    def sends(self) -> bool:
        """Whether it sends messages over links."""
        return self.entry.num_processes > 1

    @property
    def awaits_delays(self) -> bool:
        """Whether its delays follow from the link."""
        return self.entry.method.awaits_delays

    def with_method(self, method: Method) -> "Contender":
        """Return it with the delays that were found."""
        return replace(self, entry=replace(self.entry, method=method))

    @property
    def values(self) -> Recipe:
        """Return the run that has its values: that of one device with a flush and exact messages, else its own."""
        entry, method = self.entry, self.entry.method
        if self.name in REPLICATED:
            inner = [str(entry.inner_updates)] if entry.inner_updates else []
            return Recipe(name=self.name, program=[REPLICAS, entry.kind, *inner], settings=())
        is_like_one_device = entry.kind != "ours" or (method.spec.flush and self.codec == "none")
        words = ["method=bp"] if is_like_one_device else method_words(method)
        M = f"method.accumulation_steps={method.micro_batches_per_update}"
        name = f"{'bp' if is_like_one_device else self.name}-M{method.micro_batches_per_update}"
        if isinstance(method.delay, tuple) and not is_like_one_device:
            name += f"-delay{'-'.join(map(str, method.delay))}"
        return Recipe(name=name, program=TRAIN, settings=[*words, M, *self.entry.settings])


def contenders(
    names: Sequence[str], words: Sequence[str], *, num_stages: int, M: int, large_M: int
) -> tuple[list[Contender], dict[str, str]]:
    """Return those of ``names`` that can run as configured by ``words``, and the reason for each that cannot.

    ``M``: micro-batches per update of our methods; ``large_M``: of torch's pipelines.

    Raises:
        ConfigError: If a name is unknown.
    """
    if unknown := [name for name in names if name not in NAMES]:
        raise ConfigError(f"--contenders: there is no '{unknown[0]}'; choose of {', '.join(NAMES)}")
    able, left_out = list[Contender](), dict[str, str]()
    stages = f"partition.num_stages={num_stages}"
    config, _ = compose_run([*words, stages, f"method.accumulation_steps={M}"])
    for name in dict.fromkeys(names):
        try:
            if name in OURS:
                able.append(_of_ours(name, config, M))
            else:
                able.append(_of_torch(name, config, large_M if name in TORCHS_PIPELINES else M))
        except AdlError as error:
            left_out[name] = str(error)
    return able, left_out


def _of_torch(name: str, config: RunConfig, M: int) -> Contender:
    config = replace(config, method=Method(name="1f1b", accumulation_steps=M))
    known = {ONE_DEVICE: "torch-bp-whole", **REPLICATED, **TORCHS_PIPELINES}
    found, left_out = entries([known[name]], config, warmup=WARMUP)
    if not found:
        raise ConfigError(*left_out.values())
    return Contender(name=name, entry=replace(found[0], name=name))


def _of_ours(name: str, config: RunConfig, M: int) -> Contender:
    codec, method = CODECS.get(name, "none"), Method(accumulation_steps=M, **OURS[name])
    settings = () if codec == "none" else (f"runtime.codec={codec}",)
    return Contender(name=name, entry=our_entry(name, method, config, WARMUP, settings=settings), codec=codec)
