"""An encoder with a mask, sentences of several lengths for it, and what pads them."""

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

WORDS, WIDTH, LONGEST, IGNORED = 11, 8, 9, -100


class Encoder(nn.Module):
    """From ids [B, T] and which of them count, mask [B, T], to a score for each word, [B, WORDS, T]."""

    def __init__(self, num_layers=3, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.place = nn.Embedding(LONGEST, WIDTH)
        layer = {"dim_feedforward": 12, "dropout": dropout, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, **layer) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids, mask):
        num_words = ids.shape[1]
        assert num_words <= LONGEST, "too long"
        x = self.embed(ids) + self.place(torch.arange(num_words, device=ids.device))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=~mask)
        return self.head(x).transpose(1, 2)


def encoder(**options):
    torch.manual_seed(0)
    return Encoder(**options)


def sentence(index, *, length=None):
    """Return ids [T] and targets [T] of a sentence, of which a third is ignored; all of the second and third one."""
    generator = torch.Generator().manual_seed(index)
    drawn = int(torch.randint(2, LONGEST + 1, (1,), generator=generator))
    ids = torch.randint(WORDS, (length or drawn,), generator=generator)
    target = ids.roll(1)
    target[torch.rand(len(ids), generator=generator) < (2.0 if index in (1, 2) else 0.3)] = IGNORED
    return ids, target


def padded(sentences):
    """Return ((ids, mask), targets) of sentences, as long as the longest: what a collate_fn does."""
    longest = max(len(ids) for ids, _ in sentences)
    ids = torch.zeros(len(sentences), longest, dtype=torch.int64)
    target, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids, dtype=torch.bool)
    for row, (some, wanted) in enumerate(sentences):
        ids[row, : len(some)], target[row, : len(some)], mask[row, : len(some)] = some, wanted, True
    return (ids, mask), target


def by_names(sentences):
    """Return the same with names, in another order than that of the model's arguments."""
    (ids, mask), target = padded(sentences)
    return {"mask": mask, "ids": ids}, target


class Sentences(Dataset):
    """Sentences of their own lengths."""

    def __init__(self, num=20, first=0):
        self.num, self.first = num, first

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        return sentence(self.first + index)


def both():
    """Return sentences to train and to validate on."""
    return Sentences(), Sentences(10, 100)


class Masked(Dataset):
    """Sentences of one length with a mask, in a tuple, or by names."""

    def __init__(self, num=20, first=0, *, named=False):
        self.num, self.first, self.named = num, first, named

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        ids, target = sentence(self.first + index, length=LONGEST)
        mask = torch.arange(LONGEST) < 3 + index % 6
        return ({"mask": mask, "ids": ids} if self.named else (ids, mask)), target


class Streamed(IterableDataset):
    """The sentences one after the other, some of them left out at random."""

    def __init__(self, num=20):
        self.num, self.epoch, self.start = num, 0, 0

    def __len__(self):
        return self.num

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        self.index, self.start = self.start, 0
        while True:
            self.index += 1 + int(torch.randint(3, ()))
            yield sentence(1000 * self.epoch + self.index)


class Resumable(Streamed):
    """The same, which says where it is; it counts the samples that it has made."""

    made = 0

    def __iter__(self):
        for one in super().__iter__():
            Resumable.made += 1
            yield one

    def state_dict(self):
        return {"index": self.index}

    def load_state_dict(self, state):
        self.start = state["index"]
