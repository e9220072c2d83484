"""``python -m rankgrad``: the same as the command ``rankgrad``."""

from rankgrad.lab.cli import main

if __name__ == "__main__":
    main()
