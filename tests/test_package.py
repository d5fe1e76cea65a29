"""What the wheel and the source archive hold, and that their version is told in one place."""

import importlib
import re
import subprocess
import sys
import tarfile
import zipfile

import pytest
import yaml

import adl_dist
from tests.support.commands import ROOT, in_process

NAMED = r"\badl_dist\.([a-z]+)\.[A-Za-z]"  # in Python and as targets of the command line


def test_modules_that_the_docs_name_are_there_from_the_start():
    named = {name for page in (ROOT / "docs").rglob("*.md") for name in re.findall(NAMED, page.read_text())}
    assert "losses" in named
    for name in named:
        assert adl_dist.__getattr__(name) is importlib.import_module(f"adl_dist.{name}")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The names in the wheel and in the source archive, and the wheel's METADATA."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (wheel,), (archive,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened:
        wheel_names = opened.namelist()
        (metadata,) = (opened.read(name).decode() for name in wheel_names if name.endswith(".dist-info/METADATA"))
    with tarfile.open(archive) as opened:
        archive_names = [name.partition("/")[2] for name in opened.getnames()]
    return {"wheel": wheel_names, "metadata": metadata, "archive": archive_names}


def test_the_wheel_holds_the_package_its_keys_and_types(built):
    names = set(built["wheel"])
    assert {"adl_dist/py.typed", "adl_dist/__main__.py", "adl_dist/conf/config.yaml"} <= names
    assert "adl_dist/report/page/page.html.j2" in names
    keys = {f"adl_dist/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert keys == {name for name in names if name.endswith(".yaml")}
    shipped = {name.split("/")[0] for name in names}
    assert shipped == {"adl_dist", f"adl_dist-{adl_dist.__version__}.dist-info"}, "no tests, no tools"


def test_the_source_archive_holds_what_tests_and_readers_need(built):
    folders = ("adl_dist", "benchmarks", "conf", "docs", "launch", "tests", "tools")
    files = ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "constraints.txt")
    assert {*files, *folders} <= {name.split("/")[0] for name in built["archive"]}
    assert "adl_dist/py.typed" in built["archive"]


def test_one_version_in_package_wheel_and_citation(built):
    version = adl_dist.__version__
    assert f"\nVersion: {version}\n" in built["metadata"]
    assert in_process("--version").out == f"adl-dist {version}\n"
    assert citation()["version"] == version
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest[1] == version
    assert "0.1.0" not in (ROOT / "pyproject.toml").read_text()


def citation():
    """CITATION.cff, whose keys are those of the format's schema 1.2.0."""
    read = yaml.load((ROOT / "CITATION.cff").read_text(), yaml.BaseLoader)
    required = {"cff-version", "message", "title", "authors"}
    known = required | {"abstract", "date-released", "keywords", "license", "preferred-citation", "references", "type"}
    assert required <= set(read) <= known | {"version", "repository-code", "doi", "url"}
    return read
