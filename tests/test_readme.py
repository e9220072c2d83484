"""Every Python block of the README runs, in order, and prints what the text block after it says."""

import contextlib
import io
import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def test_blocks():
    namespace, printed, ran = {}, "", 0
    for language, code in BLOCKS:
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, "README.md", "exec"), namespace)
            printed, ran = out.getvalue(), ran + 1
        elif language == "text":
            assert printed == code
            printed = ""
    assert ran >= 5


def test_the_first_screen_says_how_to_run_and_test():
    first = "\n".join(README.splitlines()[:30])
    assert "make run" in first
    assert "make test" in first
    assert "pip install" in first


def test_the_smallest_loop():
    from examples.digits import train

    before, after = train(epochs=5)
    assert after > before + 0.05


def test_a_multi_label_classifier():
    from examples.multi_label import train

    before, after = train(steps=60)
    assert after > before + 10
