"""Imports point down. A file that needs to point up is in the wrong room."""

import ast
import pathlib
import subprocess
import sys

# Rooms, bottom up. Rooms of one row do not know each other.
ROWS = (
    {"errors", "seeds"},  # no torch
    {"schedule"},  # no torch
    {"partition", "stage", "transport", "models", "data", "optim", "report"},
    {"engine"},
    {"runtime", "baselines"},  # where ranks exist
    {"cli"},  # where Hydra exists
)
WITHOUT_TORCH = ROWS[0] | ROWS[1]
MAY_KNOW_RANKS = {"transport", "runtime", "baselines"}
PACKAGE = pathlib.Path(__file__).parents[2] / "adl_dist"


def room_of(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def files() -> list[pathlib.Path]:
    return [p for p in PACKAGE.rglob("*.py") if room_of(p) not in ("__init__", "__main__", "conf")]


def imported(path: pathlib.Path) -> set[str]:
    """Every module that ``path`` imports, at the top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_every_file_is_in_a_room_of_the_plan():
    assert {room_of(path) for path in files()} == set().union(*ROWS)


def test_imports_point_down():
    below: set[str] = set()
    for row in ROWS:
        for path in files():
            if (room := room_of(path)) in row:
                rooms = {name.split(".")[1] for name in imported(path) if name.startswith("adl_dist.")}
                up = rooms - below - {room} - {"__version__"}
                assert not up, f"{path.relative_to(PACKAGE)} imports {sorted(up)}, which is not below {room}"
        below |= row


def test_only_transport_runtime_and_baselines_know_torch_distributed():
    for path in files():
        if any(name.startswith("torch.distributed") for name in imported(path)):
            assert room_of(path) in MAY_KNOW_RANKS, path


def test_only_cli_knows_hydra():
    for path in files():
        if any(name.split(".")[0] in ("hydra", "omegaconf") for name in imported(path)):
            assert room_of(path) == "cli", path


def test_only_one_file_sends_and_receives():
    senders = [p.name for p in files() if "isend(" in p.read_text() or "irecv(" in p.read_text()]
    assert senders == ["process.py"]


def test_no_pickled_object_crosses_the_data_plane():
    """All of torch's collectives for Python objects have names that end so."""
    for path in files():
        if room_of(path) in MAY_KNOW_RANKS:
            nodes = ast.walk(ast.parse(path.read_text()))
            called = imported(path) | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            assert not [name for name in called if name.endswith(("_object", "_object_list"))], path


def test_the_bottom_rooms_and_the_package_itself_run_without_torch():
    names = ", ".join(f"adl_dist.{name}" for name in sorted(WITHOUT_TORCH))
    code = f"import sys; sys.modules['torch'] = None; import adl_dist, {names}; adl_dist.method('adl')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_files_stay_short_enough_to_read():
    """A file over 300 lines has more than one idea; trainer.py holds the documented public API."""
    lengths = {str(p.relative_to(PACKAGE)): len(p.read_text().splitlines()) for p in files()}
    too_long = {name: n for name, n in lengths.items() if n > (500 if name == "runtime/trainer.py" else 300)}
    assert not too_long
