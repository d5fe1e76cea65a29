"""The graphs of the stages are recorded before the first receive is posted, on the samples of the trial."""

from collections.abc import Mapping
from contextlib import ExitStack

import torch

from adl_dist.batch import tensors_of
from adl_dist.engine import StageContext
from adl_dist.errors import ConfigError, text_of
from adl_dist.stage import TrainSpec
from adl_dist.stage.graphed import GraphedStage
from adl_dist.stage.graphs import WAY_OUT, Recorder
from adl_dist.stage.loss_terms import LossTerms
from adl_dist.stage.ticks import TickedStage, Ticks
from adl_dist.training.trial.samples import Samples
from adl_dist.training.trial.snapshot import restored_after
from adl_dist.training.warm_up import targets_of, zeros_of
from adl_dist.transport.spec import Specs


def record_graphs(
    contexts: Mapping[int, StageContext],
    spec: TrainSpec,
    recorder: Recorder,
    device: torch.device,
    acts: Mapping[int, Specs],
    samples: Samples,
    terms: LossTerms | None,
) -> Ticks | None:
    """Have each stage record the graphs for the common size of its micro-batches, the greatest.

    Everything that can be seen of a stage is as before. ``acts`` are what arrives at each of them and at the next one,
    ``samples`` what the first stage gets and the last one's targets, ``terms`` what the loss counts, if it does.

    Returns:
        The ticks of all stages, where these are what was recorded.

    Raises:
        ConfigError: a stage does what no graph can hold.
    """
    if samples.varies:
        raise ConfigError(
            f"runtime.cuda_graphs=true replays forwards of one size, but the samples have varying lengths; {WAY_OUT}"
        )
    if not samples.sizes[0]:
        return None  # nothing is trained
    samples, size = samples.to(device, channels_last=bool(spec.precision.channels_last)), max(samples.sizes[0])
    batch = samples.repeated(size)
    stages = {k: context.stage for k, context in contexts.items() if isinstance(context.stage, GraphedStage)}
    with ExitStack() as all_kept:
        try:
            for k, stage in stages.items():
                arriving = zeros_of(acts[k], size, device, training=True) if k in acts else tensors_of(batch.input_)
                back = zeros_of(acts[k + 1].of_gradients(), size, device, training=True) if k + 1 in acts else ()
                wanted = targets_of(batch, terms, size) if stage.has_loss else (None,)
                all_kept.enter_context(restored_after(stage.module, [stage.module], spec, device))
                stage.prepare(recorder, arriving, wanted, back)
            ticked = {k: stage for k, stage in stages.items() if isinstance(stage, TickedStage)}
            ticks = Ticks(ticked, spec.pipeline, terms) if ticked else None
            if ticks is not None:
                ticks.record(recorder)
            else:
                for stage in stages.values():
                    stage.record(recorder)
        except RuntimeError as error:  # what CUDA does not allow, or has no memory for
            raise ConfigError(
                f"runtime.cuda_graphs: the stages cannot be recorded: {text_of(error)}; {WAY_OUT}"
            ) from error
        for stage in stages.values():
            stage.is_recorded()
    return ticks
