"""The live line: every figure is that of the epoch so far, whenever it is drawn."""

import fcntl
import io
import os
import re
import select
import struct
import termios

import pyte
import pytest

from adl_dist.report import progress as progress_module
from adl_dist.report.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def lines(monkeypatch):
    """A terminal on which every record draws the line again."""
    monkeypatch.setattr(progress_module, "REDRAW_SECONDS", -1.0)
    return Terminal()


@pytest.fixture
def screen():
    """A stream to a pseudo-terminal of 80 columns, and what it shows and was sent."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    shown, sent = pyte.Screen(80, 24), []
    stream = pyte.ByteStream(shown)

    def lines_now():
        while select.select([master], [], [], 0)[0]:
            sent.append(os.read(master, 1 << 16))
            stream.feed(sent[-1])
        return [line.rstrip() for line in shown.display if line.strip()], b"".join(sent).decode()

    with open(slave, "w") as out:
        yield out, lines_now
    os.close(master)


def test_the_live_line_fits_a_terminal_and_leaves_no_litter(screen, monkeypatch):
    monkeypatch.setattr(progress_module, "REDRAW_SECONDS", -1.0)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    out, lines_now = screen
    progress = Progress(num_stages=16, out=out)
    progress.note("a note of more than eighty letters " * 4)
    before, _ = lines_now()
    assert max(map(len, before)) <= 80
    progress.begin(0, 2, 400)
    for update in range(200):
        progress.update({**loss(update, 4), "elapsed_seconds": update / 100})
        shown, _ = lines_now()
        assert len(shown) == len(before) + 1, "one line is drawn again and again"
    assert re.search(r"epoch 1/2 .* update 200/400  loss 0.5000 .*\d:\d\d:\d\d$", shown[-1])
    progress.end(0.25, 0.5)
    shown, sent = lines_now()
    assert len(shown) == len(before) + 1
    assert re.fullmatch(r"epoch 1/2  loss 0.5000 \| val loss 0.2500  acc 50.00%  [\d,]+ images/s", shown[-1])
    progress.close()
    assert "\x1b[?25l" not in sent, "the cursor stays"


def loss(update, size):
    return {"name": "train/loss", "value": 0.5, "num_samples": size, "elapsed_seconds": 1.0, "update": update}


def staleness(stage, *offsets):
    return {"name": "stage/staleness", "stage": stage, "value": sum(offsets) / len(offsets), "by_offset": offsets}


def test_accuracy_is_that_of_the_samples_it_was_counted_on(lines):
    progress = Progress(num_stages=1, out=lines)
    progress.begin(0, 1, 3)
    for update, size in enumerate((4, 4, 2)):
        progress.update(loss(update, size))
        progress.update({"name": "train/accuracy", "value": 1.0, "update": update})
    progress.end(None, None)
    assert set(re.findall(r"acc +([\d.]+)%", lines.getvalue())) == {"100.00"}


def test_staleness_is_the_mean_of_the_epoch_not_of_a_group():
    lines = io.StringIO()
    progress = Progress(num_stages=2, out=lines)
    progress.begin(0, 2, 4)
    for record in (staleness(0, 1, 1, 1, 1), staleness(0, 2), staleness(1, 0)):
        progress.update(record)
    progress.update(loss(0, 4))
    progress.end(None, None)
    assert "staleness 1.2/0" in lines.getvalue()
    progress.begin(1, 2, 4)
    progress.update(staleness(0, 3))
    progress.update(loss(1, 4))
    progress.end(None, None)
    assert "staleness 3/-" in lines.getvalue().splitlines()[-1]


def test_the_loss_of_training_is_the_mean_over_the_epoch(lines):
    progress = Progress(num_stages=1, out=lines)
    for epoch, losses, mean in ((0, (1.0, 3.0), 7 / 3), (1, (5.0, 6.0), 17 / 3)):
        progress.begin(epoch, 2, 4)
        assert progress.train_loss is None
        for update, value in enumerate(losses):
            progress.update({**loss(update, 1 + update), "value": value})
        assert progress.train_loss == mean


def test_without_a_terminal_a_line_comes_every_minute(monkeypatch):
    out, clock = io.StringIO(), [1000.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
    progress = Progress(num_stages=1, out=out)
    for update in range(200):  # a second each
        if update % 25 == 0:
            progress.begin(0, 1, 200, goes_on=update > 0)
        clock[0] += 1
        progress.update(loss(update, 4))
    shown = [int(number) for number in re.findall(r"update +(\d+)/200", out.getvalue())]
    assert shown == [61, 122, 183]
