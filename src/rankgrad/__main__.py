"""``python -m rankgrad``."""

from rankgrad.cli import main

main()
