"""Every Python block of the README runs, in order, and prints what the text block after it says."""

from pathlib import Path

import code_blocks

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_blocks(digits_run):
    ran, compared = code_blocks.run_python(README, "README.md")
    assert ran == 2 and compared == 1


def test_the_first_screen_says_how_to_run_and_test():
    first = "\n".join(README.splitlines()[:12])
    assert "make run" in first and "make test" in first and "pip install" in first
    assert 600 <= len(README.split()) <= 900


def test_the_smallest_loop():
    from examples.digits import train

    before, after = train(epochs=5)
    assert after > before + 0.05


def test_a_multi_label_classifier():
    from examples.multi_label import train

    before, after = train(steps=60)
    assert after > before + 10
