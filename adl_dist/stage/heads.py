"""Heads on a stage's output, for a local loss or for synthetic gradients.

A head serves only to train its stage; it does not belong to the model and is not exported. The ``shape`` of an output
is that of one sample: [C, H, W] of an image or [C] of features.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adl_dist.batch import Tensors
from adl_dist.errors import ConfigError
from adl_dist.schedule import Method
from adl_dist.stage.nonfinite import NonFiniteCheck
from adl_dist.stage.optimizer import Learner
from adl_dist.stage.spec import LossFn, TrainSpec
from adl_dist.stage.stats import StepStats, norm_of
from adl_dist.streams import streams_kept

# Share of the similarity loss in predsim (Nokland and Eidnes 2019, section 3.3).
SIMILARITY_SHARE = 0.99


class Pool(nn.AdaptiveAvgPool2d):
    """Torch's adaptive average pooling of square outputs.

    It is computed by plain average pooling where both have the same windows, because on a GPU only the plain backward
    is deterministic. Plain pooling divides once, adaptive pooling by height and by width, so the last digit may differ
    unless both are powers of two.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the averages [B, C, S, S] of ``x`` [B, C, H, W]."""
        assert isinstance(self.output_size, int)
        windows = [even_windows(size, self.output_size) for size in x.shape[-2:]]
        if self.output_size == 1 or None in windows:  # of one window the adaptive one is a plain mean
            return super().forward(x)
        widths, strides = zip(*(window for window in windows if window is not None), strict=True)
        return F.avg_pool2d(x, widths, strides)


def even_windows(size: int, number: int) -> tuple[int, int] | None:
    """Return (width, stride) of even windows, or None if they are uneven.

    Window i of ``number`` spans floor(i size / number) to ceil((i + 1) size / number).
    """
    begins = [i * size // number for i in range(number)]
    widths = {-(-(i + 1) * size // number) - begin for i, begin in enumerate(begins)}
    strides = {after - before for before, after in pairwise(begins)}
    if len(widths) > 1 or len(strides) > 1 or 0 in strides:
        return None
    return widths.pop(), strides.pop() if strides else size


class LocalLoss(nn.Module):
    """The model's loss function on the output of an auxiliary classifier."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, out: Tensor, target: Tensor, loss_fn: LossFn) -> Tensor:
        """Return the loss of ``out`` [B, C, H, W] or [B, C] and ``target`` [B]."""
        return loss_fn(self.classifier(out), target)


class PredSim(LocalLoss):
    """Prediction and similarity matching (Nokland and Eidnes 2019).

    The classifier's loss is mixed with a loss that makes samples of one class similar. That is the mean squared
    difference between two [B, B] matrices of cosine similarities: of the standard deviations of a convolution's feature
    maps, and of the one-hot targets.
    """

    def __init__(self, classifier: nn.Module, project: nn.Module, num_classes: int) -> None:
        super().__init__(classifier)
        self.project, self.num_classes = project, num_classes

    def forward(self, out: Tensor, target: Tensor, loss_fn: LossFn) -> Tensor:
        """Return the loss of ``out`` [B, C, H, W] or [B, C] and ``target`` [B]."""
        predicted = super().forward(out, target, loss_fn)
        features = self.project(out)
        if features.ndim == 4:
            # The unbiased deviation of a single pixel is not defined; such a map is its own feature.
            features = features.flatten(2).std(dim=2) if features[0, 0].numel() > 1 else features.flatten(1)
        # What the model's loss ignores is of no class. Its rows and pairs are zeros, not left out, since to leave them
        # out, a GPU would have to be asked how many. Where there are none, the bits are those of a plain mean.
        classes = one_hot(target, self.num_classes, features.dtype)
        known = classes.any(dim=1)
        features = torch.where(known[:, None], features, 0)
        num_pairs, num_known = len(target) ** 2, known.sum().to(features.dtype) ** 2
        similar = F.mse_loss(similarities(features), similarities(classes)) * (num_pairs / num_known)
        return torch.lerp(predicted, similar, SIMILARITY_SHARE)


def one_hot(target: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor:
    """Return the one-hot classes [B, num_classes] of ``target`` [B]."""
    return (target[:, None] == torch.arange(num_classes, device=target.device)).to(dtype)


def similarities(x: Tensor) -> Tensor:
    """Return the cosine similarities [B, B] of centred rows of ``x`` [B, n]."""
    centred = x - x.mean(dim=1, keepdim=True)
    unit = centred / (1e-8 + centred.norm(dim=1, keepdim=True))
    cosines: Tensor = unit @ unit.T
    return cosines.clamp(-1, 1)


def mlp_sr(channels: int, size: int, num_classes: int, *, num_convolutions: int = 3) -> nn.Module:
    """Build the MLP-SR head of DGL (Belilovsky et al. 2020)."""
    convolutions = [_conv(channels, kernel_size=1) for _ in range(num_convolutions)]
    layers = [Pool(2), nn.Flatten(), *_layers(4 * channels), nn.Linear(4 * channels, num_classes)]
    return nn.Sequential(Pool(math.ceil(size / 4)), *convolutions, *layers)


def mlp(channels: int, size: int, num_classes: int) -> nn.Module:
    """Build the MLP head of DGL."""
    if size == 0:
        return nn.Sequential(*_layers(channels), nn.Linear(channels, num_classes))
    return mlp_sr(channels, size, num_classes, num_convolutions=0)


def cnn(channels: int, size: int, num_classes: int) -> nn.Module:
    """Build the CNN head of DGL."""
    convolutions = [_conv(channels, kernel_size=3) for _ in range(2)]
    pool = [Pool(2), nn.BatchNorm2d(channels), nn.Flatten()]
    return nn.Sequential(*convolutions, *pool, nn.Linear(4 * channels, num_classes))


def linear(channels: int, size: int, num_classes: int) -> nn.Module:
    """Build a linear classifier of features, or of images pooled to 2 x 2.

    It is that of Mostafa et al. (2018), but trained; theirs is fixed and random. ``size`` is the height or width in
    pixels, 0 for features.
    """
    if size == 0:
        return nn.Linear(channels, num_classes)
    side = min(size, 2)
    return nn.Sequential(Pool(side), nn.Flatten(), nn.Linear(channels * side**2, num_classes))


def _conv(channels: int, *, kernel_size: int) -> nn.Module:
    convolution = nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU())


def _layers(width: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(3)]


# Each from (channels, height or width in pixels, classes); 0 pixels: features [B, C] instead of images.
CLASSIFIERS = {"mlp_sr": mlp_sr, "mlp": mlp, "cnn": cnn, "linear": linear}
# Heads whose BatchNorm may meet a single value per channel if there is a single sample.
NORMALISES_SAMPLES = ("mlp_sr", "mlp", "cnn")
OF_IMAGES = ("mlp_sr", "cnn")


class GradientNetwork(nn.Module):
    """A predictor of each sample's gradient (DNI, or cDNI with classes).

    Untrained, it predicts 0. Its BatchNorm has no running statistics, because it is never evaluated.
    """

    def __init__(self, shape: tuple[int, ...], *, num_layers: int, width: int | None, num_classes: int) -> None:
        """Build the network for outputs of ``shape``.

        Its input includes the targets, one-hot of ``num_classes`` classes, unless that is 0.
        """
        super().__init__()
        self.num_classes = num_classes
        channels = shape[0]
        widths = [channels + num_classes, *[width or channels] * num_layers]
        layer: Callable[..., nn.Linear | nn.Conv2d] = nn.Linear
        if len(shape) == 3:
            layer = partial(nn.Conv2d, kernel_size=3, padding=1)
        norm = nn.BatchNorm2d if len(shape) == 3 else nn.BatchNorm1d
        hidden = (
            nn.Sequential(layer(before, after, bias=False), norm(after, track_running_stats=False), nn.ReLU())
            for before, after in pairwise(widths)
        )
        last = layer(widths[-1], channels, bias=True)
        for parameter in last.parameters():
            nn.init.zeros_(parameter)
        self.layers = nn.Sequential(*hidden, last)

    def forward(self, out: Tensor, target: Tensor | None) -> Tensor:
        """Return the predicted gradients of ``out``; ``target`` [B] has classes."""
        if self.num_classes:
            assert target is not None
            classes = one_hot(target, self.num_classes, out.dtype)  # a target that the loss ignores is of none
            masks = classes.view(*classes.shape, *[1] * (out.ndim - 2)).expand(-1, -1, *out.shape[2:])
            out = torch.cat([out, masks], dim=1)
        gradient: Tensor = self.layers(out)
        return gradient


def normalises_samples(method: Method) -> bool:
    """Return whether a head of ``method`` has BatchNorm, so needs two samples."""
    return method.head_layers > 0 if method.spec.predicts_gradients else method.head in NORMALISES_SAMPLES


def check_outs(method: Method, stage: int, shapes: Sequence[tuple[int, ...]], *, gets_gradient: bool) -> None:
    """Check that a head of ``method`` fits the output of ``stage``.

    Raises:
        ConfigError: If the output is not one tensor of images or features, if it has no images for the head's
            convolutions, or if it takes no real gradient that could be predicted.
    """
    if len(shapes) != 1 or len(shapes[0]) not in (1, 3):
        received = ", ".join(str(["B", *shape]) for shape in shapes)
        raise ConfigError(
            f"method={method.name} puts a head on the output of stage {stage}: expected one tensor [B, C, H, W] or "
            f"[B, C], got {received}: choose another partition.balance"
        )
    if method.spec.predicts_gradients and not gets_gradient:
        raise ConfigError(
            f"method={method.name} predicts the gradient of what stage {stage} sends on, but none of real numbers "
            "comes back for it; expected one: choose another partition.balance, or another method"
        )
    if method.spec.local_losses and method.head in OF_IMAGES and len(shapes[0]) == 1:
        raise ConfigError(
            f"method.head={method.head} convolves images, but stage {stage} sends on features {['B', *shapes[0]]}; "
            "choose method.head=mlp or linear, or another partition.balance"
        )


def build_gradient_network(
    method: Method, shape: tuple[int, ...], *, num_classes: int | None, seed: int
) -> GradientNetwork:
    """Build the network that predicts gradients of outputs of ``shape``.

    Its weights depend on ``seed`` only. ``num_classes`` is that of the model, or None if it has no classes.
    """
    seen = num_classes if method.head_sees_target else 0
    assert seen is not None, "refused earlier"
    with streams_kept():
        torch.manual_seed(seed)
        return GradientNetwork(shape, num_layers=method.head_layers, width=method.head_width, num_classes=seen)


def build_head(name: str, shape: tuple[int, ...], *, num_classes: int, seed: int) -> LocalLoss:
    """Build the head ``name`` for outputs with samples of ``shape``.

    Its weights depend on ``seed`` only.
    """
    channels, size = shape[0], max(shape[1:], default=0)
    with streams_kept():
        torch.manual_seed(seed)
        if name != "predsim":
            return LocalLoss(CLASSIFIERS[name](channels, size, num_classes))
        project: nn.Module = nn.Linear(channels, channels, bias=False)
        if size > 0:
            project = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        return PredSim(linear(channels, size, num_classes), project, num_classes)


class GradientHead(Learner):
    """A network that predicts an output's gradient (DNI), and its optimizer.

    The stage back-propagates the prediction at once (Jaderberg et al., ICML 2017, section 2). Later the gradient comes
    back, computed by the next stage from its own prediction, or by the last stage from the loss. Only the head learns
    from it. For that it predicts once more, with its present weights, so that its own gradient is never stale.

    It needs an optimizer of its own, because its group is complete only some micro-batches after the stage's own
    update. The optimizer follows the same learning rates, by the index of the update.

    Attributes:
        network: maps an output [B, ...] and targets [B], or None, to the gradient of each sample's own loss, [B, ...].
        predictions: for each gradient received since this list was emptied, two sums over samples, [2]: squared error
            of the prediction, and square of the gradient, each averaged over elements.
    """

    def __init__(
        self, network: nn.Module, stage: int, spec: TrainSpec, device: torch.device, faults: NonFiniteCheck
    ) -> None:
        """Build a head from ``network``, which is on ``device``.

        ``faults`` is the check of its stage.

        Raises:
            ConfigError: If the optimizer cannot train the head.
        """
        factor = spec.pipeline.lr_factor(stage) * spec.pipeline.method.head_lr_factor
        super().__init__(spec, device, where=f"the head of stage {stage}", key=f"head{stage}", lr_factor=factor)
        self.network, self.prefix = network.train(), f"head{stage}:"
        self.make_optimizer(spec.optimizer)
        self.predictions: list[Tensor] = []
        self._faults = faults
        self._within, self._dtype = spec.precision.autocasting(device), spec.precision.dtype
        # By micro-batch that awaits the gradient of its output: the output, the target, and the weight in its group.
        self._awaited: dict[int, tuple[Tensor, Tensor | None, float]] = {}
        self._epoch = 0

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter), each name with ``prefix``."""
        named = self.network.named_parameters(remove_duplicate=remove_duplicate)
        yield from ((f"{self.prefix}{name}", parameter) for name, parameter in named)

    def begin(self, epoch: int) -> None:
        """Begin a segment of ``epoch``."""
        self._epoch = epoch
        self._awaited.clear()
        self.predictions = []
        self.network.zero_grad()

    @torch.no_grad()
    def predict(self, micro_batch: int, outs: Tensors, target: Tensor | None, *, weight: float) -> Tensors:
        """Return the predicted gradient of the stage's output, [B, ...].

        The output is kept until its gradient comes.

        ``target`` [B] is for a network that sees it; ``weight`` is that of the micro-batch in its group.
        """
        (out,) = outs
        if target is not None:
            target = target.to(out.device, non_blocking=True)
        self._awaited[micro_batch] = out, target, weight
        with self._within():
            predicted = self.network(out, target)
        # A sample's own loss is averaged over the micro-batch and then weighted.
        return ((predicted * (weight / len(out))).to(out.dtype),)

    def learn(self, micro_batch: int, grads: Tensors) -> None:
        """Learn from the gradient that has come back for a micro-batch."""
        out, target, weight = self._awaited.pop(micro_batch)
        (grad,) = grads
        with self._within():
            predicted = self.network(out, target)
        wanted = grad.to(self._dtype) * (len(out) / weight)
        error = F.mse_loss(predicted.to(self._dtype), wanted)
        (error * weight).backward()
        self.predictions.append(torch.stack([error.detach(), wanted.square().mean()]) * len(out))

    def update(self) -> None:
        """Apply the gradients of the group.

        Raises:
            DivergedError: If the gradient is not finite, as :meth:`adl_dist.stage.stage.Stage.finish_group` finds it.
        """
        parameters = [p for p in self.network.parameters() if p.grad is not None]
        norm = norm_of([p.grad for p in parameters if p.grad is not None])
        figures = StepStats(gradient_norm=norm, gradient_of="the gradient of its head")
        self._faults.judge(figures, (), update=self.version, epoch=self._epoch)
        self.apply(parameters, norm)
