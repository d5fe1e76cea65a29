"""The pages of README and docs: their blocks are marked, their commands known, their links lead somewhere."""

import importlib.util
import pkgutil
import re

import pytest
import yaml

from adl_dist.cli.config.compose import composed_of, parse
from adl_dist.cli.main import COMMANDS
from tests.docs.blocks import (
    BLOCKS,
    MARKS,
    NAMED,
    PAGES,
    RUNNABLE,
    SHELL,
    indented_commands,
)
from tests.docs.shim import TAKE_SETTINGS
from tests.support.commands import ROOT
from tools import docs_figures, docs_site

HAS_SUBMITIT = importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec("submitit")
DOCS = ROOT / "docs"
IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]
LINK = re.compile(r"(?<!!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")


def text_of(page):
    """The page without its code."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*(?:\n[^`\n]+)?`", lambda code: code[0].replace("(", " ").replace("#", " "), text)


def anchors_of(page):
    """The anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings]
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower().replace("*", "")).replace(" ", "-") for heading in plain]
    return {slug if slugs[:i].count(slug) == 0 else f"{slug}-{slugs[:i].count(slug)}" for i, slug in enumerate(slugs)}


def test_marks_of_blocks_are_known_and_lead_to_blocks():
    assert len(BLOCKS) > 50
    for block in BLOCKS:
        unknown = [mark for mark in block.marks if mark not in MARKS]
        missing = [name for name in block.before if name not in NAMED]
        assert (unknown, missing) == ([], []), block.where
        assert not block.marks or block.language in RUNNABLE, f"{block.where}: only {RUNNABLE} are run"
        if block.language not in RUNNABLE:
            assert not re.search(r"^(\$|adl-dist|import) ", block.text, re.MULTILINE) or block.language == "text", (
                f"{block.where}: say that it is sh, python or console, or text, which is not run"
            )


def words_that_compose(words):
    """The overrides among the words of a command, with one value where there are several, and figures for K and M."""
    for before, word in zip(["", *words], words, strict=False):
        if "=" not in word or word.startswith("--") or before == "--target":
            continue
        word = re.sub(r"(?<==)[KMN]$", "2", word)
        override = parse(word, several=True)
        yield re.sub(r"=.*", f"={override.value().list[0]}", word) if override.is_choice_sweep() else word


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_of_a_page_are_commands_with_settings(page):
    """Also those that are not run here."""
    blocks = [*(block for block in BLOCKS if ROOT / block.page == page), *indented_commands(page)]
    for block in blocks:
        if block.language not in SHELL:
            continue
        for words in block.commands:
            if "adl-dist" in words:
                rest = words[words.index("adl-dist") + 1 :]
            elif "adl_dist" in words:
                rest = words[words.index("adl_dist") + 1 :]
            else:
                continue
            assert rest, block.where
            assert rest[0] in COMMANDS, block.where
            uses_submitit = any("submitit" in word for word in rest)
            if rest[0] in TAKE_SETTINGS[:4] and not (uses_submitit and not HAS_SUBMITIT):
                composed_of([*words_that_compose(rest[1:])])


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("[CS]*.md")], ids=lambda page: page.name)
def test_links_and_anchors_of_a_page_resolve(page):
    text = text_of(page)
    targets = [*LINK.findall(text), *(one or other for one, other in IMAGE.findall(text))]
    for target in targets:
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors_of(file), f"{page}: {target}; there are {sorted(anchors_of(file))}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_names_of_the_package_on_a_page_are_there(page):
    for name in re.findall(r"\badl_dist(?:\.\w+)+", page.read_text()):
        pkgutil.resolve_name(name)


def navigation(node):
    for value in node if isinstance(node, list) else node.values():
        yield from [value] if isinstance(value, str) else navigation(value)


def test_each_page_is_in_the_navigation_once():
    text = re.sub(r"!!?[\w/:.]+", "", (ROOT / "mkdocs.yml").read_text())
    named = [*navigation(yaml.safe_load(text)["nav"])]
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md") if not page.is_relative_to(DOCS / "dev")]
    generated = ["reference/settings.md", "reference/python.md"]
    assert sorted(named) == sorted([*pages, *generated])


def test_figures_of_the_results_are_those_of_their_tables(tmp_path):
    docs_figures.draw(tmp_path)
    assert len([*tmp_path.iterdir()]) == 4
    for made in tmp_path.iterdir():
        assert made.read_bytes() == (DOCS / "results" / made.name).read_bytes(), "run python -m tools.docs_figures"


def leaves(node, path=()):
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield ".".join((*path, key))


def test_the_page_of_settings_has_each_key_of_each_file():
    text = docs_site.settings_page()
    for group in docs_site.GROUPS:
        for file in (docs_site.CONF / group).glob("*.yaml"):
            keys = {key for key in leaves(yaml.safe_load(file.read_text())) if not key.startswith("defaults")}
            assert {key for key, _, _ in docs_site.keys_of(file, group)} >= {f"{group}.{key}" for key in keys}, file
    assert "| `train.clip_norm` | `null` | scale the gradient down" in text
    assert "By default `accumulation_steps: 1`, `weights: recompute`, `delay: minimal`." in text
    assert "| `data.root` | `datasets/imagenet` |" in text
    assert "`experiment=` | what it is" in text


def test_the_page_of_python_names_what_is_public():
    assert "::: adl_dist.Trainer\n" in docs_site.python_page()
    assert "::: adl_dist.losses.TokenCrossEntropy\n" in docs_site.python_page()
