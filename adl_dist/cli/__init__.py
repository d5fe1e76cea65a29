"""The commands. Nothing below this package sees a Hydra configuration."""

from adl_dist.cli.main import main

__all__ = ["main"]
