"""The samples of a run are functions of (seed, epoch, index), and bad data gets a message."""

import hashlib
import itertools
import multiprocessing
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import traceback
import weakref

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from adl_dist.data import (
    Loader,
    Loading,
    cifar10,
    cifar100,
    epoch_order,
    imagefolder,
    imagenet,
    synthetic,
)
from adl_dist.data.datasets import (
    CIFAR10_STATISTICS,
    CIFAR100_STATISTICS,
    crop_and_flip,
    transform,
)
from adl_dist.errors import ConfigError, DataError
from adl_dist.seeds import stream_seed
from adl_dist.stage import Precision
from adl_dist.training.input import DeviceLoader
from tests.support.tiers import grid

# Every worker imports this file, so what is slow to import (torchvision, scikit-learn, Hydra) is imported in tests.
# torch advises against more workers than there are cores; here they are the point.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Augmented(Dataset):
    """What any user's transform may do: draw from all three global streams."""

    def __init__(self, num_samples=20):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(1).item(), random.random(), np.random.rand()]), index


class Returns(Augmented):
    """Sample ``index`` is ``value``, or raises it."""

    def __init__(self, value, *, index=3):
        super().__init__(8)
        self.value, self.index = value, index

    def __getitem__(self, index):
        if index == self.index and isinstance(self.value, Exception):
            raise self.value
        return self.value if index == self.index else super().__getitem__(index)


def loaded(sizes, *, num_workers=0, shuffle=True, dataset=None):
    loader = Loader(dataset or Augmented(), seed=5, shuffle=shuffle, num_workers=num_workers)
    return list(loader.batches(2, sizes))


def joined(batches):
    batches = list(batches)
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def global_streams():
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), name, keys.tolist(), rest


def test_the_order_of_an_epoch_is_pinned():
    """A change here silently changes what every resumed run trains on."""
    assert epoch_order(8, seed=0, epoch=0, shuffle=True).tolist() == [1, 7, 4, 6, 3, 2, 5, 0]
    assert epoch_order(8, seed=0, epoch=1, shuffle=True).tolist() == [2, 7, 3, 4, 6, 5, 1, 0]
    assert epoch_order(8, seed=6, epoch=0, shuffle=True).tolist() == [0, 1, 4, 2, 6, 5, 7, 3]
    assert epoch_order(5, seed=1, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3, 4]
    assert joined(loaded([4, 4], shuffle=False))[1].tolist() == list(range(8))


def test_micro_batches_have_exactly_the_sizes_asked_for():
    """The rest is not visited; an epoch may begin in its middle. No size changes a sample."""
    order, (whole_x, whole_y) = epoch_order(20, seed=5, epoch=2, shuffle=True).tolist(), joined(loaded([20]))
    assert whole_y.tolist() == order
    for first, sizes in ((0, [7, 1, 4]), (7, [4, 5]), (0, [1] * 20)):
        batches = list(Loader(Augmented(), seed=5, shuffle=True).batches(2, sizes, first_sample=first))
        assert [(len(x), len(y)) for x, y in batches] == [(size, size) for size in sizes]
        x, y = joined(batches)
        assert y.tolist() == order[first : first + sum(sizes)]
        assert torch.equal(x, whole_x[first : first + sum(sizes)])
    assert loaded([]) == []


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("end", ["exhausted", "closed early", "raises"])
def test_an_epoch_that_ends_leaves_random_streams_and_no_worker(end, num_workers):
    """However it ends, also by what the user's dataset raises."""
    np.random.randn()  # numpy makes them in pairs, and keeps the second one
    before = global_streams()
    dataset = Augmented() if end == "exhausted" else Returns(LookupError("the user's own words"), index=7)
    batches = Loader(dataset, seed=1, shuffle=False, num_workers=2 * num_workers).batches(0, [4, 4])
    next(batches)
    assert len(multiprocessing.active_children()) == num_workers  # none is started without a micro-batch to load
    if end == "exhausted":
        assert len(list(batches)) == 1
    elif end == "raises":
        with pytest.raises(DataError, match="sample 7: Returns raised LookupError: the user's own words at") as failure:
            list(batches)
        assert failure.traceback  # it is alive, and so is whatever its frames hold
    else:
        batches.close()
    assert multiprocessing.active_children() == []
    assert global_streams() == before


class Placed(Augmented):
    """The target is the process that has loaded the sample."""

    def __getitem__(self, index):
        return super().__getitem__(index)[0], os.getpid()


@pytest.mark.parametrize("dataset", [Placed(), TensorDataset(torch.arange(20.0), torch.arange(20))])
def test_workers_that_are_kept_load_what_others_load(dataset):
    """In each epoch, also where one was not taken to its end; they end when the loader is closed."""
    kept = Loader(dataset, seed=5, shuffle=True, num_workers=2, loading=Loading(persistent_workers=True))
    given = kept.batches(0, [4] * 5)
    next(given)
    given.close()
    workers = {child.pid for child in multiprocessing.active_children()}
    assert len(workers) == 2
    for epoch, sizes in ((1, [4] * 5), (2, [3, 5, 2])):
        own = list(Loader(dataset, seed=5, shuffle=True).batches(epoch, sizes))
        for (x, y), (expected, target) in zip(kept.batches(epoch, sizes), own, strict=True):
            assert torch.equal(x, expected)
            assert {*y.tolist()} <= workers if isinstance(dataset, Placed) else torch.equal(y, target)
    assert {child.pid for child in multiprocessing.active_children()} == workers
    kept.close()
    assert multiprocessing.active_children() == []


INPUTS = {
    "channels_last": torch.rand(8, 2, 3, 3).contiguous(memory_format=torch.channels_last),
    "transposed": torch.rand(3, 8, dtype=torch.float64).T,
    "expanded": torch.rand(1, 4).expand(8, 4),
    "bool": torch.arange(8) % 3 == 0,
    "frames in channels_last": torch.rand(8, 2, 4, 4, 3).permute(0, 1, 4, 2, 3),
    "frames of one channel": torch.rand(8, 2, 1, 4, 4),
}
AT_ONCE = [(inputs, subset, 0) for inputs in INPUTS for subset in ("all", "some")]
BY_A_WORKER = [("channels_last", "some", 1), ("frames of one channel", "all", 1)]


@pytest.mark.parametrize(
    ("inputs", "subset", "num_workers"), grid(INPUTS, ["all", "some"], [0, 1], default=[*AT_ONCE, *BY_A_WORKER])
)
def test_rows_taken_at_once_are_the_samples_taken_one_by_one(inputs, subset, num_workers):
    dataset = TensorDataset(INPUTS[inputs], torch.arange(8))
    if subset == "some":
        dataset = Subset(dataset, np.array([5, 2, 7, 7, 0]))
    at_once = list(Loader(dataset, seed=1, shuffle=True, num_workers=num_workers).batches(3, [2, 3]))
    samples = [dataset[index] for index in range(len(dataset))]
    one_by_one = list(Loader(samples, seed=1, shuffle=True).batches(3, [2, 3]))
    for ours, theirs in zip(itertools.chain(*at_once), itertools.chain(*one_by_one), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())


def test_signals_to_all_processes_leave_workers_alone():
    expected, _ = joined(loaded([2] * 10))
    batches = Loader(Augmented(), seed=5, shuffle=True, num_workers=2).batches(2, [2] * 10)
    found = [next(batches), next(batches)]  # one of each worker, which has begun by then
    to_all = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
    for worker, number in itertools.product(multiprocessing.active_children(), to_all):
        os.kill(worker.pid, number)
    found += batches
    assert torch.equal(joined(found)[0], expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"expected a pair .* got NoneType; [^\n]*$"),
        ((1.0, 2.0, 3.0), r"expected a pair \(input, target\), got tuple of 3"),
        (torch.zeros(2), r"expected a pair \(input, target\), got torch\.Tensor"),
        ((Image.new("L", (4, 4)), 0), r"expected an input that is a tensor.*got PIL\.Image\.Image; add a transform"),
        (([[1.0, 2.0], [3.0, 4.0]], 0), r"got list; make one tensor of it, by torch\.tensor of numbers"),
        ((torch.zeros(4), "cat"), "expected a target that is a tensor.*got str"),
        ((np.array(["a", "b"]), 0), r"expected an input that is a tensor.*got numpy\.ndarray"),
        (
            (torch.zeros(5), 0),
            r"expected \(input float32\[4\], target int64\[\]\) like sample 0 of the same micro-batch, "
            r"got \(input float32\[5\], target int64\[\]\)",
        ),
        ((torch.zeros(4), 0.5), r"got \(input float32\[4\], target float32\[\]\)"),
    ],
)
def test_a_sample_that_cannot_be_used_is_named_with_what_it_is(value, message):
    """In the same one line where a worker finds it."""
    with pytest.raises(DataError, match=f"^sample 3: .*{message}"):
        loaded([8], dataset=Returns(value), shuffle=False, num_workers=int(value is None))


def divides_by_zero(index):
    return 1 / (index - 5), 0


class Computed(Dataset):
    """Sample ``index`` is ``make(index)``."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.make(index)


@pytest.mark.parametrize(("name", "num_workers"), [("training", 1), ("validation", 0)])
def test_what_a_dataset_raises_is_told_with_index_and_line(name, num_workers):
    how = {"seed": 0, "shuffle": False, "device": torch.device("cpu"), "precision": Precision()}
    loader = DeviceLoader(Computed(divides_by_zero), name, num_workers=num_workers, **how)
    line = rf"^{name} dataset: sample 5: Computed raised ZeroDivisionError: .*division by zero at .*test_data.py:\d+$"
    with pytest.raises(DataError, match=line) as failure:
        list(loader.batches(0, [4, 4]))
    assert "divides_by_zero" in "".join(traceback.format_exception(failure.value)), "the log has the whole traceback"


def test_numbers_and_numpy_arrays_of_any_layout_become_tensors():
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    frozen = rows[0].copy()
    frozen.setflags(write=False)
    samples = [(rows[0, ::-1], np.int64(1)), (frozen, 1)]
    samples += [(rows.astype(">f4")[0], torch.tensor(1)), (torch.arange(4.0), 1)]
    ((x, y),) = loaded([4], dataset=samples, shuffle=False)
    assert x.tolist() == [[3, 2, 1, 0]] + [[0, 1, 2, 3]] * 3
    assert (x.dtype, y.dtype, y.tolist()) == (torch.float32, torch.int64, [1, 1, 1, 1])


def as_a_worker_gets_it(dataset):
    return pickle.loads(pickle.dumps(dataset))


CROPS = crop_and_flip(32)
CIFARS = pytest.mark.parametrize("load", [cifar10, cifar100])


def torchvisions(load):
    from torchvision.datasets import CIFAR10, CIFAR100

    return CIFAR10 if load is cifar10 else CIFAR100


def write_cifar(folder, kind, monkeypatch):
    """A tiny CIFAR: 2 images in each file, whose checksums torchvision then expects."""
    folder = folder / kind.base_folder
    folder.mkdir(parents=True)
    labels = "fine_labels" if "100" in kind.base_folder else "labels"
    random_bytes = np.random.RandomState(0)

    def write(name, content):
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return hashlib.md5(data).hexdigest()

    def batch(name):
        pixels = random_bytes.randint(0, 256, (2, 3072), dtype=np.uint8)
        return [name, write(name, {"data": pixels, labels: [0, 1]})]

    monkeypatch.setattr(kind, "train_list", [batch(name) for name, _ in kind.train_list])
    monkeypatch.setattr(kind, "test_list", [batch(name) for name, _ in kind.test_list])
    md5 = write(kind.meta["filename"], {kind.meta["key"]: ["cat", "dog"]})
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": md5})
    return folder


@CIFARS
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_micro_batch_of_cifar_has_the_bits_of_torchvision(load, num_workers, tmp_path, monkeypatch):
    """Sample by sample, as any dataset is loaded; also through a subset, whose samples repeat."""
    kind = torchvisions(load)
    write_cifar(tmp_path, kind, monkeypatch)
    statistics = CIFAR10_STATISTICS if load is cifar10 else CIFAR100_STATISTICS
    their = [kind(str(tmp_path), train=t, transform=transform(statistics, g)) for t, g in ((True, CROPS), (False, []))]
    for ours, theirs in zip(load(str(tmp_path)), their, strict=True):
        repeated = [i * len(ours) // 40 for i in range(40)]
        for one, other in ((ours, theirs), (Subset(ours, repeated), Subset(theirs, repeated))):
            sizes, how = [1] + [len(ours) - 1] * (len(one) > 1), {"seed": 3, "shuffle": True}
            expected = Loader(other, **how).batches(2, sizes)
            for got, batch in zip(Loader(one, num_workers=num_workers, **how).batches(2, sizes), expected, strict=True):
                for a, b in zip(got, batch, strict=True):
                    assert torch.equal(a, b)
                    assert (a.dtype, a.stride()) == (b.dtype, b.stride())
        torch.manual_seed(1)
        alone = ours[0]
        torch.manual_seed(1)
        assert torch.equal(alone[0], theirs[0][0])
        assert alone[1] == theirs[0][1]


@pytest.mark.parametrize("content", [b"no image at all", b"cut off"])
def test_an_image_that_cannot_be_read_is_named(content, tmp_path):
    root = pathlib.Path(write_photographs(tmp_path))
    path = root / "train/cat/grey.jpg"
    path.write_bytes(path.read_bytes()[:900] if content == b"cut off" else content)
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: expected an image, but .*; replace or remove .*$"):
        list(Loader(imagefolder(str(root))[0], seed=0, shuffle=False).batches(0, [4]))


@pytest.mark.parametrize("num_classes", [1, 3])
def test_other_numbers_of_classes_than_folders_are_refused(num_classes, tmp_path):
    root = write_photographs(tmp_path)
    with pytest.raises(DataError, match=rf"each of {num_classes} classes, found 2; set num_classes=2"):
        built("data=imagefolder", f"data.root={root}", f"data.num_classes={num_classes}")


def test_folders_of_other_classes_are_refused(tmp_path):
    root = write_photographs(tmp_path)
    (tmp_path / "val/cat").rename(tmp_path / "val/cow")
    with pytest.raises(DataError, match="the same classes in train and val, but only one of them has cat, cow; class"):
        imagefolder(root)
    with pytest.raises(ConfigError, match=r"mean and data.std go together: three numbers each, of red, green and"):
        imagefolder(root, mean=[0, 0, 0])


def write_photographs(root, validation="val"):
    """JPEGs of noise: longer and shorter than 224, upright and not, colour and grey; the same in both folders."""
    random_bytes = np.random.RandomState(0)
    images = {"cat/upright": (320, 240, 3), "cat/grey": (90, 120), "dog/small": (100, 70, 3), "dog/flat": (230, 500, 3)}
    for name, shape in images.items():
        image = Image.fromarray(random_bytes.randint(0, 256, shape, dtype=np.uint8))
        for folder in ("train", validation):
            (root / folder / name).parent.mkdir(parents=True, exist_ok=True)
            image.save(root / folder / f"{name}.jpg")
    return str(root)


def by_hand(path, geometry, mean, std):
    """Everything that is compared with is written out in torchvision's own transforms."""
    from torchvision.transforms import v2

    to_float = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
    return v2.Compose([*geometry, *to_float])(Image.open(path).convert("RGB"))


CIFAR10S = ([0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616])
IMAGENETS = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


@pytest.mark.parametrize(
    ("image_size", "resized", "statistics"),
    [(24, 24, CIFAR10S), (64, 64, CIFAR10S), (65, 74, IMAGENETS), (96, 110, IMAGENETS), (224, 256, IMAGENETS)],
)
def test_validation_images_are_resized_cropped_and_normalised(image_size, resized, statistics, tmp_path):
    from torchvision.models import ResNet18_Weights
    from torchvision.transforms import v2

    root = write_photographs(tmp_path, validation="test" if image_size == 96 else "val")
    geometry = [v2.Resize(resized), v2.CenterCrop(image_size)]
    for dataset in (imagefolder(root, image_size=image_size)[1], imagefolder(root, False, image_size)[0]):
        ((x, y),) = Loader(dataset, seed=0, shuffle=False).batches(0, [4])
        assert (x.shape, x.dtype, y.tolist()) == ((4, 3, image_size, image_size), torch.float32, [0, 0, 1, 1])
        for image, (path, _) in zip(x, dataset.samples, strict=True):
            assert torch.equal(image, by_hand(path, geometry, *statistics))
            if image_size == 224:  # what torchvision's own ImageNet models are validated with
                preset = ResNet18_Weights.IMAGENET1K_V1.transforms()
                torch.testing.assert_close(image, preset(Image.open(path).convert("RGB")))


@pytest.fixture
def images(monkeypatch):
    """All images that are made, as weak references; each has memory of its own."""
    found, make = [], Image.Image.__init__

    def made(image):
        make(image)
        found.append(weakref.ref(image))

    monkeypatch.setattr(Image.Image, "__init__", made)
    return found


@pytest.mark.parametrize(
    ("image_size", "cache", "num_workers"), [(24, False, 0), (24, True, 0), (224, False, 1), (224, True, 0)]
)
def test_training_images_are_cropped_by_their_size(image_size, cache, num_workers, images, tmp_path):
    """Padded and cropped if small, cropped and resized if large; from memory, if they are cached."""
    from torchvision.transforms import v2

    train, _ = imagefolder(write_photographs(tmp_path), image_size=image_size, cache=cache)
    geometry = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()]
    if image_size == 24:
        geometry = [v2.Resize(24), v2.RandomCrop(24, padding=3), v2.RandomHorizontalFlip()]
    expected = {}
    for epoch, (index, (path, _)) in itertools.product(range(2), enumerate(train.samples)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(3, "sample", epoch, index))
            expected[epoch, index] = by_hand(path, geometry, *(CIFAR10S if image_size == 24 else IMAGENETS))
    for epoch in range(2):
        ((x, _),) = Loader(train, seed=3, shuffle=False, num_workers=num_workers).batches(epoch, [4])
        for index, image in enumerate(x):
            assert torch.equal(image, expected[epoch, index])
        if cache:  # nothing is read twice, and no image has memory of its own: it would lie between activations
            shutil.rmtree(tmp_path, ignore_errors=True)
            assert not any(image() for image in images)


def built(*overrides):
    """The datasets that the command line makes."""
    from adl_dist.cli.config.compose import compose_run
    from adl_dist.cli.config.instantiate import build_data

    config, _ = compose_run([*overrides])
    return build_data(config.data)


def test_a_users_own_statistics_replace_the_default_ones(tmp_path):
    root = write_photographs(tmp_path)
    _, plain = imagefolder(root, image_size=24, mean=[0, 0, 0], std=[1, 1, 1])
    of_user = ["data.mean=[0.5,0.25,0]", "data.std=[0.5,2,1]"]
    _, by_user = built("data=imagefolder", f"data.root={root}", "data.image_size=24", "data.num_classes=2", *of_user)
    mean, std = torch.tensor([0.5, 0.25, 0])[:, None, None], torch.tensor([0.5, 2, 1])[:, None, None]
    for (image, _), (values, _) in zip(by_user, plain, strict=True):
        assert torch.equal(image, (values - mean) / std)
        assert 0 <= values.min() < 0.5 < values.max() <= 1


def test_imagenet_is_a_folder_of_large_images(tmp_path):
    from torchvision.transforms import v2

    root = write_photographs(tmp_path)
    data = built("data=imagenet", f"data.root={root}", "data.num_classes=2")
    for dataset, same in zip(data, imagefolder(root, image_size=224), strict=True):
        ((x, y),), ((expected, classes),) = (Loader(d, seed=0, shuffle=True).batches(0, [4]) for d in (dataset, same))
        assert torch.equal(x, expected)
        assert torch.equal(y, classes)
    _, small = imagenet(root, image_size=56, num_classes=2)
    path = small.samples[0][0]
    assert torch.equal(small[0][0], by_hand(path, [v2.Resize(64), v2.CenterCrop(56)], *IMAGENETS))


def test_made_up_images_are_the_same_in_any_order():
    first, second = synthetic(num_samples=6, image_size=8), as_a_worker_gets_it(synthetic(num_samples=12, image_size=8))
    for a, b in zip(first, second, strict=True):
        size = min(len(a), len(b))
        backwards = {index: b[index] for index in reversed(range(size))}
        for index in range(size):
            assert torch.equal(a[index][0], backwards[index][0])
            assert a[index][1] == backwards[index][1] == index % 10
    images = [tuple(x.flatten().tolist()) for dataset in second for x, _ in dataset]
    assert len(set(images)) == 12 + 256
    assert not torch.equal(synthetic(seed=1)[0][0][0], synthetic(seed=0)[0][0][0])
