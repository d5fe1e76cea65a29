"""A small GPT learns the characters of a text file, as two stages, and writes new text.

    python examples/gpt_on_text.py FILE [UPDATES]

300 updates are enough for words; more, and a larger network, for sentences.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

import adl_dist
from adl_dist.data import Vocabulary
from adl_dist.losses import TokenCrossEntropy
from adl_dist.models import generate, gpt
from adl_dist.optimizers import Muon

CONTEXT = 64


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of CONTEXT tokens, and as targets the same sequences one token later."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first = index * CONTEXT
        return self.tokens[first : first + CONTEXT], self.tokens[first + 1 : first + CONTEXT + 1]


def main(path: str, updates: int) -> None:
    """Train on the file's text, and write 200 characters behind its beginning."""
    text = Path(path).read_text()
    vocabulary = Vocabulary.of_chars([text])
    tokens = torch.from_numpy(vocabulary.encode(text).astype("int64"))
    torch.manual_seed(0)
    model = gpt(vocabulary.size, CONTEXT, layers=2, heads=4, width=64)
    trainer = adl_dist.Trainer(
        model,
        loss_fn=TokenCrossEntropy(),
        optimizer=Muon,
        method=adl_dist.method("adl", accumulation_steps=4),
        num_stages=2,
    )
    trainer.fit(Windows(tokens), epochs=1000, batch_size=16, max_updates=updates, run_dir=None)
    prompt = vocabulary.encode(text[:20]).tolist()
    print(vocabulary.decode([*prompt, *generate(model, prompt, context=CONTEXT, temperature=0.8)]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 300)
