"""What can be known of the images without a container engine: files are there, commands exist, settings compose."""

import fnmatch
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from adl_dist.cli.config.compose import compose_run
from tests.support.commands import ROOT

INSTRUCTIONS = ("FROM", "ARG", "ENV", "COPY", "RUN", "USER", "WORKDIR", "ENTRYPOINT", "CMD")
# Of the base image beside its python; all are of Debian's essential packages but apt, which it is made with.
OF_THE_BASE = {"python", "useradd", "mkdir", "chown", "apt-get", "rm", "sh", "hostname"}


def instructions():
    """Each instruction of the Dockerfile with its words; lines that are continued are one."""
    text = (ROOT / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]


def compose():
    return yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())


def ignored(path: str) -> bool:
    verdict = False
    for line in (ROOT / "docker" / "Dockerfile.dockerignore").read_text().split():
        if fnmatch.fnmatch(path, line.lstrip("!")):
            verdict = not line.startswith("!")
    return verdict


def test_the_dockerfile_holds_nothing_that_this_test_does_not_understand():
    assert {name for name, _ in instructions()} <= set(INSTRUCTIONS)
    names = {match[1] for name, rest in instructions() if name == "FROM" and (match := re.search(r" AS (\w+)$", rest))}
    assert names == {"base", "cpu", "cuda"}


def test_whatever_is_copied_into_the_image_is_there_and_not_ignored():
    sources = [source for name, rest in instructions() if name == "COPY" for source in rest.split()[:-1]]
    assert [s for s in sources if not (ROOT / s).exists() or ignored(s)] == []
    # The wheel is built from these alone.
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, target = wheel["project"], wheel["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*target["packages"], *target["force-include"], project["readme"], *project["license-files"]}
    assert [path for path in needed if Path(path).parts[0] not in sources] == []


def test_the_commands_of_the_build_are_those_of_the_base_image():
    ran = [part for name, rest in instructions() if name == "RUN" for part in re.split(r"&&|;|\|\|", rest)]
    assert {shlex.split(part)[0] for part in ran} <= OF_THE_BASE


def test_the_python_of_the_image_is_one_that_the_package_takes():
    (image,) = [rest.split()[0] for name, rest in instructions() if name == "FROM" and ":" in rest]
    version = tuple(int(number) for number in re.findall(r"\d+", image)[:2])
    assert version >= (3, 11)
    assert image.startswith("python:")


def test_the_image_starts_a_command_that_the_package_installs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (entry,) = [yaml.safe_load(rest) for name, rest in instructions() if name == "ENTRYPOINT"]
    assert set(entry) <= set(project["scripts"])


@pytest.mark.parametrize("service", ["stage0", "stage1"])
def test_a_service_is_reached_by_its_name_and_trains_one_of_two_stages(service):
    file = compose()
    described = file["services"][service]
    assert described["hostname"] == service
    assert set(described["networks"]) <= set(file["networks"])
    assert {volume.split(":")[0] for volume in described["volumes"]} <= set(file["volumes"])
    assert (ROOT / "docker" / described["build"]["context"] / described["build"]["dockerfile"]).is_file()
    assert int(described["stop_grace_period"].removesuffix("s")) > 30  # what torchrun gives its ranks to stop and save
    (command,) = described["command"]
    words = shlex.split(command.replace("$$SETTINGS", "").replace("$$", "$"))
    assert words[:2] == ["exec", "torchrun"]
    told = get_args_parser().parse_args(words[2:])
    assert told.rdzv_endpoint.split(":")[0] in file["services"]
    assert (told.module, told.training_script, told.training_script_args[0]) == (True, "adl_dist", "train")
    # A name is known once its container is there, and who does not know it does not wait.
    assert described.get("depends_on", []) == [one for one in [told.rdzv_endpoint.split(":")[0]] if one != service]
    assert int(told.nnodes) * int(told.nproc_per_node) == len(file["services"])
    assert compose_run(told.training_script_args[1:])[0].partition.num_stages == len(file["services"])
