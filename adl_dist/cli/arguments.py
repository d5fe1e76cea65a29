"""Parse the flags of commands that take more than settings. No torch."""

import argparse
from typing import NoReturn

from adl_dist.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An argparse parser that refuses as the project does: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line by a ConfigError."""
        raise ConfigError(f"{self.prog}: {message}; {self.prog} --help lists what it takes")
