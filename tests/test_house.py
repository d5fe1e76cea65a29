"""What import-linter (pyproject.toml) cannot see of the rooms' rules."""

import ast
import pathlib
import re
import subprocess
import sys

import torch.distributed

PACKAGE = pathlib.Path(__file__).parents[1] / "adl_dist"


def files():
    return [p for p in PACKAGE.rglob("*.py") if "conf" not in p.relative_to(PACKAGE).parts]


def test_only_one_file_sends_and_receives():
    senders = [p.name for p in files() if re.search(r"\b(isend|irecv)\b", p.read_text())]
    assert senders == ["process.py"]


def test_no_pickled_object_crosses_the_data_plane():
    """All of torch's collectives for Python objects have names that end so."""
    for path in files():
        names = re.findall(r"\w+(?:_object|_object_list)\b", path.read_text())
        assert not [name for name in names if hasattr(torch.distributed, name)], path


def test_schedules_and_the_package_itself_run_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None; "
        "import adl_dist, adl_dist.errors, adl_dist.seeds, adl_dist.schedule; adl_dist.method('adl')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_names_of_tests_have_60_characters_at_most():
    files = (PACKAGE.parent / "tests").rglob("test_*.py")
    names = [name for file in files for name in re.findall(r"^ *def (test_\w+)", file.read_text(), re.MULTILINE)]
    assert [name for name in names if len(name) > 60] == []


def test_no_file_holds_both_sides_of_a_merge():
    listed = subprocess.run(["git", "ls-files"], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60).stdout
    texts = [PACKAGE.parent / name for name in listed.splitlines() if name.endswith((".md", ".py", ".yaml", ".toml"))]
    assert [path for path in texts if re.search(r"^(<{7}|>{7}) ", path.read_text(), re.MULTILINE)] == []


def test_every_file_of_tests_that_a_document_names_is_there():
    root = PACKAGE.parent
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *PACKAGE.rglob("*.py"), *root.glob("conf/**/*.yaml")]
    named = {name for page in pages for name in re.findall(r"tests/[\w/]+\.py", page.read_text())}
    assert len(named) > 20
    assert [name for name in sorted(named) if not (root / name).is_file()] == []


def test_first_lines_of_docstrings_name_things():
    """A noun of torch's vocabulary stands where a clause with "what" or "whose" would; an index shows whole lines."""
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for path in files():
        nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented))
        for line in ((ast.get_docstring(node) or "").partition("\n")[0] for node in nodes):
            assert not re.search(r"\b(what|whose)\b|^Return that\b|; None:", line, re.IGNORECASE), f"{path}: {line}"
            assert len(line) <= 72, f"{path}: {line}"


# Names that were replaced by the field's terms (CONTRIBUTING.md, "Words"), and habits of language.
OLD_WORDS = re.compile(
    r"\b(Seats?|seats?|Tally|[Bb]eacon|Sighting|[Dd]octor|[Dd]eput(?:y|ies)|[Cc]rew|Outbox|Placement|Numerics|Patience|"
    r"[Ss]tretch(?:es)?|heeded|heeding|in_turn|keep_freed_memory|Neighbours|Measurer|Contender|grain|training_stream|"
    r"mend(?:s|ed|ing)?|anew|left away|leave (?:it|them) away|beside|whoever|nobody|go(?:es)? on|going on)\b"
)
FORMER_KEY = "partition.grain"  # still understood


def test_no_old_word_is_left_in_the_product():
    for path in files():
        for number, line in enumerate(path.read_text().replace(FORMER_KEY, "").splitlines(), start=1):
            assert not (old := OLD_WORDS.search(line)), f"{path}:{number}: '{old[0]}' in: {line.strip()}"
