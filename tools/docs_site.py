"""Hooks of mkdocs: write the pages of reference at build time, and make links that leave docs/ work in the site.

Nothing that is written here is committed. The settings come from the dataclasses that declare them and from
``conf/*.yaml``, the Python pages from docstrings.
"""

import ast
import json
import os
import re
from pathlib import Path

import yaml

from adl_dist.cli.config import compose, schema
from adl_dist.report.runs import flatten
from adl_dist.schedule import method

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


def settings_page() -> str:
    """Return the page of every key, with its default and its help."""
    parts = [
        "# Settings",
        "Every key of the configuration, with its default. `KEY=VALUE` after `adl-dist train` changes one, "
        "`GROUP=CHOICE` chooses a file of `conf/GROUP`. `adl-dist train --help` prints the keys of the run that you "
        "describe.",
        "## The run",
        _declared("", "train"),
    ]
    for group, title in GROUPS.items():
        names = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
        names.sort(key=lambda name: name != FIRST.get(group))
        parts.append(f"## {title}: `{group}`")
        if len(names) > 1:
            parts.append(f"`{group}=` {' | '.join(f'`{name}`' for name in names)}")
        if group in schema.GROUPS:
            parts.append(_declared(group))
        for name in names if len(names) > 1 else []:
            parts += [f"### `{group}={name}`", _opening(CONF / group / f"{name}.yaml")]
            parts.append(_takes(name) if group == "method" else _table(keys_of(CONF / group / f"{name}.yaml", group)))
    parts += ["## Experiments: `experiment`", _experiments()]
    return "\n\n".join(part for part in parts if part) + "\n"


def keys_of(file: Path, group: str) -> list[tuple[str, object, str]]:
    """Return (key, value, comment) of every leaf of a file of conf/; keys of inner nodes are joined by dots."""
    comments = compose.comments_of(file)
    node = {key: value for key, value in yaml.safe_load(file.read_text()).items() if key != "defaults"}
    flat = flatten(node) | {key: value for key, value in node.items() if value == {}}
    return [(f"{group}.{key}", value, comments.get(key.rpartition(".")[2], "")) for key, value in flat.items()]


def _declared(*groups: str) -> str:
    """Return the table of the keys of groups that dataclasses declare."""
    rows = []
    for group in groups:
        fields = schema.keys_of(group)
        rows += [(f"{group}.{key}".lstrip("."), f.default, f.metadata["help"]) for key, f in fields.items()]
    return _table(rows)


def _takes(name: str) -> str:
    """Return the values of a method that are not the defaults, and the names of its other keys."""
    settings = {key: value for key, value in method(name).settings.items() if key != "name"}
    usual = {key: f.default for key, f in schema.keys_of("method").items()}
    own = [f"`{key}: {_plain(value)}`" for key, value in settings.items() if value != usual[key]]
    others = [f"`{key}`" for key, value in settings.items() if value == usual[key]]
    return f"By default {', '.join(own)}. Other keys: {', '.join(others)}."


def _table(rows: list[tuple[str, object, str]]) -> str:
    cells = ["| key | default | what it is |", "|---|---|---|"]
    told = [f"| `{key}` | `{_cell(_plain(value))}` | {_linked(_text(_cell(text)))} |" for key, value, text in rows]
    return "\n".join([*cells, *told]) if rows else ""


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(list(value) if isinstance(value, tuple) else value)


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
