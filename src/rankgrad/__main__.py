"""``python -m rankgrad``: the same as the command ``rankgrad``."""

from rankgrad.cli import main

if __name__ == "__main__":
    main()
