"""Tables as aligned text or as Markdown."""

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a table aligned at the left, its first row the head."""
    return [line.rstrip() for line in _aligned(rows, "  ")]


def markdown_table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table, aligned at the right."""
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return [f"| {line} |" for line in _aligned([rows[0], rule, *rows[1:]], " | ")]


def _aligned(rows: Sequence[Sequence[object]], between: str) -> list[str]:
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [between.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, like ``1 epoch`` or ``20 epochs``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
