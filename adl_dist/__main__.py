"""``python -m adl_dist``: the same as ``adl-dist``."""

from adl_dist.cli import main

if __name__ == "__main__":
    main()
