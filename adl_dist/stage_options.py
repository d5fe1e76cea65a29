"""Options of the computation in a stage, without loading torch."""

from dataclasses import dataclass
from typing import Any, Literal

from adl_dist.codecs import Codec, Codecs
from adl_dist.errors import ConfigError
from adl_dist.schedule import METHODS, Pipeline
from adl_dist.settings import check_settings, documented, setting


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings:
    """The settings of :class:`adl_dist.Precision`, with dtypes by name."""

    autocast: Any = setting(None, "bfloat16: run forward and loss under torch.autocast; parameters stay float32")
    codec: Codec = setting("none", "of activations and gradients sent in training: none | bf16 | int8 | int4")
    gradient_codec: Codec | None = setting(None, "of gradients, if it is another one; null: the same")
    compile: bool = setting(False, "torch.compile the modules of each stage; needs a C++ compiler, on a GPU Triton")
    tf32: bool = setting(False, "let a GPU round float32 to 10 bits of mantissa in products and convolutions")
    cudnn_benchmark: bool = setting(False, "let cuDNN choose its kernels by timing them, again in each run")
    deterministic: bool = setting(False, "use only kernels that repeat a run to the last bit, and refuse others")
    channels_last: bool | None = setting(
        False, "store and send images as [B, H, W, C]; null: where the model allows it"
    )

    @property
    def codecs(self) -> Codecs:
        """The codecs of activations and of gradients."""
        return Codecs(self.codec, self.codec if self.gradient_codec is None else self.gradient_codec)


@documented("train")
@dataclass(frozen=True, kw_only=True)
class GradientPolicy:
    """Treatment of the gradients of a group before they reach the weights."""

    clip_norm: float | None = setting(
        None,
        "scale the gradient down to this norm if it is longer; docs/own.md",
        above=0,
        way_out="null clips nothing",
    )
    clip_scope: Literal["model", "stage"] = setting(
        "model", "norm for clip_norm: model, as in torch, where stages wait for each other | stage, each by itself"
    )
    non_finite: Literal["stop", "skip"] = setting(
        "stop", "on a loss or gradient that is not finite: stop the run | skip the update in all stages"
    )
    max_skipped: int = setting(
        10, "updates that may be skipped in a row", least=1, way_out="to skip none, use train.non_finite=stop"
    )

    def check(self, pipeline: Pipeline) -> None:
        """Raise ConfigError if a value is out of range or unfit for ``pipeline``."""
        check_settings(self, "train")
        if self.skips and pipeline.spec.has_heads and pipeline.num_stages > 1:
            raise ConfigError(
                f"train.non_finite=skip cannot skip an update in all stages of method={pipeline.method.name}, whose "
                "stages wait for no gradient that could carry the decision; use train.non_finite=stop, or another "
                "method"
            )
        if pipeline.spec.early and self.note(pipeline) is not None:
            able = ", ".join(name for name, spec in METHODS.items() if spec.flush and not spec.early)
            raise ConfigError(
                f"train.clip_norm: method={pipeline.method.name} updates its first stages before the norm of the whole "
                f"gradient is known; use one of {able}, or train.clip_scope=stage"
            )

    def clips_model(self, pipeline: Pipeline) -> bool:
        """Return whether gradients are clipped by the norm of the whole model."""
        is_possible = pipeline.num_stages == 1 or (pipeline.spec.flush and not pipeline.spec.early)
        return self.clip_norm is not None and self.clip_scope == "model" and is_possible

    def note(self, pipeline: Pipeline) -> str | None:
        """Return a note if clip_scope=model is not possible, otherwise None."""
        if self.clip_norm is None or self.clip_scope == "stage" or self.clips_model(pipeline):
            return None
        return (
            f"train.clip_norm: with method={pipeline.method.name} each stage clips its own gradient, because none "
            "waits for the norms of the others; the whole gradient may have up to sqrt(K) times that norm"
        )

    @property
    def skips(self) -> bool:
        """Whether an update may be skipped."""
        return self.non_finite == "skip"
