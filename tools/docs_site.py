"""Hooks of mkdocs: write the pages of reference at build time, and make links that leave docs/ work in the site.

Nothing that is written here is committed. The settings come from the comments of ``conf/*.yaml``, the Python pages from
docstrings.
"""

import ast
import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
# Rooms with names for users, besides those of the package itself.
PUBLIC = {
    "adl_dist": "The package",
    "adl_dist.models": "Models",
    "adl_dist.data": "Data",
    "adl_dist.losses": "Losses",
    "adl_dist.optimizers": "Optimizers",
    "adl_dist.optim": "Learning rate schedules",
    "adl_dist.schedule": "Schedules",
    "adl_dist.errors": "Errors",
}
GROUPS = {
    "partition": "The cut",
    "method": "Methods",
    "runtime": "Processes, precision, checkpoints, records",
    "model": "Models",
    "data": "Data",
    "loss": "Losses",
    "optimizer": "Optimizers",
    "lr_schedule": "Learning rate schedules",
}
FIRST = {"method": "adl", "optimizer": "sgd", "lr_schedule": "cosine", "data": "digits", "model": "resnet8"}


def on_files(files, config):
    """Add the generated pages (mkdocs)."""
    from mkdocs.structure.files import File

    for name, text in pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Point links that leave docs/ to the repository, or leave their words alone (mkdocs)."""
    return links_out(markdown, page.file.src_uri, config.get("repo_url") or "")


def on_page_content(html, page, config, files):
    """Drop the roles of docstrings, like :meth:, of which Markdown knows nothing (mkdocs)."""
    return re.sub(r":(?:meth|class|func|attr|mod):(?=<code>)", "", html)


def pages() -> dict[str, str]:
    """Return the generated pages by their path below docs/."""
    return {"reference/settings.md": settings_page(), "reference/python.md": python_page()}


# Links

_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def links_out(markdown: str, source: str, repo_url: str) -> str:
    """Return the text of docs/``source`` with links to files outside of docs/ as links into ``repo_url``.

    Without a ``repo_url`` the words of such a link stay, without a link.
    """
    folder = (ROOT / "docs" / source).parent

    def changed(match: re.Match) -> str:
        words, target, anchor = match.groups()
        path = Path(os.path.normpath(folder / target))
        if path.is_relative_to(ROOT / "docs"):
            return match[0]
        if not repo_url:
            return words
        kind = "tree" if path.is_dir() else "blob"
        return f"[{words}]({repo_url.rstrip('/')}/{kind}/main/{path.relative_to(ROOT).as_posix()}{anchor or ''})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _LINK.sub(changed, part) for part in parts)


# Settings

_KEY = re.compile(r"^(?P<indent> *)(?P<key>[\w]+):(?: (?P<value>.*?))?(?: +# (?P<comment>.*))?$")


def settings_page() -> str:
    """Return the page of every key, with its default and the comment next to it in conf/."""
    parts = [
        "# Settings",
        "Every key of the configuration, with its default. `KEY=VALUE` behind `adl-dist train` changes one, "
        "`GROUP=CHOICE` chooses a file of `conf/GROUP`. `adl-dist train --help` prints the keys of the run that you "
        "describe. This page is made from the comments in `conf/`.",
        "## The run",
        _table(CONF / "config.yaml", "", but=("defaults",)),
    ]
    for group, title in GROUPS.items():
        names = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
        names.sort(key=lambda name: name != FIRST.get(group))
        parts.append(f"## {title}: `{group}`")
        if len(names) > 1:
            parts.append(f"`{group}=` {' | '.join(f'`{name}`' for name in names)}")
        for name in names:
            if len(names) > 1:
                parts.append(f"### `{group}={name}`")
            parts += [_opening(CONF / group / f"{name}.yaml"), _table(CONF / group / f"{name}.yaml", f"{group}.")]
    parts += ["## Experiments: `experiment`", _experiments()]
    return "\n\n".join(part for part in parts if part) + "\n"


def keys_of(file: Path) -> list[tuple[str, str, str]]:
    """Return (key, value, comment) of every leaf of a file of conf/; keys of inner nodes are joined by dots."""
    rows: list[tuple[str, str, str]] = []
    nodes: list[tuple[int, str]] = []
    for line in file.read_text().splitlines():
        if (match := _KEY.match(line)) is None:
            if rows and re.match(r"^ +# ", line):  # a comment that goes over two lines
                key, value, comment = rows[-1]
                rows[-1] = (key, value, f"{comment} {line.strip(' #')}".strip())
            continue
        indent = len(match["indent"])
        nodes = [node for node in nodes if node[0] < indent]
        path = ".".join([*(name for _, name in nodes), match["key"]])
        if match["value"] in (None, "") or match["value"].startswith("#"):
            nodes.append((indent, match["key"]))
        else:
            rows.append((path, match["value"], match["comment"] or ""))
    return rows


def _table(file: Path, prefix: str, but: tuple[str, ...] = ()) -> str:
    rows = [row for row in keys_of(file) if row[0].partition(".")[0] not in (*but, "defaults", "override")]
    if not rows:
        return ""
    cells = ["| key | default | what it is |", "|---|---|---|"]
    return "\n".join([*cells, *(f"| `{prefix}{k}` | `{_cell(v)}` | {_linked(_text(_cell(c)))} |" for k, v, c in rows)])


def _opening(file: Path) -> str:
    """Return the comment at the top of a file."""
    lines = []
    for line in file.read_text().splitlines():
        if not line.startswith("# "):
            break
        lines.append(line[2:])
    return _linked(_text(" ".join(lines)))


def _experiments() -> str:
    rows = ["| `experiment=` | what it is |", "|---|---|"]
    for file in sorted((CONF / "experiment").glob("*.yaml")):
        text = re.sub(r"^# @package .*\n", "", file.read_text())
        first = re.match(r"# (.*(?:\n# (?! |\w+: ).*)*)", text)
        rows.append(f"| `{file.stem}` | {_cell(_text(first[1].replace(chr(10) + '# ', ' '))) if first else ''} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _text(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def _linked(text: str) -> str:
    """Turn docs/NAME.md into a link to that page."""
    return re.sub(r"docs/([\w/-]+)\.md", r"[\1](../\1.md)", text)


# Python


def python_page() -> str:
    """Return the page whose directives mkdocstrings replaces by docstrings."""
    parts = [
        "# Python",
        "The public names, from their docstrings. `Trainer` is where to begin; `adl-dist train` is made of the same "
        "parts.",
    ]
    for module, title in PUBLIC.items():
        parts.append(f"## {title}: `{module}`")
        parts += [f"::: {module}.{name}" for name in public_names(module)]
    return "\n\n".join(parts) + "\n"


def public_names(module: str) -> list[str]:
    """Return the names of ``__all__``, or the public functions and classes of a module without one."""
    file = ROOT / module.replace(".", "/")
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    tree = ast.parse(file.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names = [name for name in ast.literal_eval(node.value) if not name.startswith("__")]
            return sorted(names, key=lambda name: name not in ("Trainer", "method"))  # where to begin
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [name for name in defined if not name.startswith("_")]
