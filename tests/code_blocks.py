"""Code blocks of Markdown pages: run the Python ones in order, find the command lines in the others."""

import contextlib
import io
import re
import shlex

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(markdown):
    """(language, code) of every fenced block."""
    return _BLOCK.findall(markdown)


def run_python(markdown, name):
    """Run the Python blocks of a page in one namespace; a text block after one must be what it prints.

    Returns how many ran and how many outputs were compared.
    """
    namespace, printed, ran, compared = {"__name__": "page"}, None, 0, 0
    for number, (language, code) in enumerate(blocks(markdown), 1):
        if language == "python":
            assert not printed, f"{name}: block {number} comes before the output {printed!r} is shown"
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(code, f"{name}, block {number}", "exec"), namespace)
            printed, ran = out.getvalue(), ran + 1
        elif language == "text" and printed is not None:
            assert printed == code, f"{name}: block {number}"
            printed, compared = None, compared + 1
    assert not printed, f"{name}: the output {printed!r} is not shown"
    return ran, compared


def command_lines(markdown):
    """The words behind ``rankgrad`` of every command in bash and console blocks, alone or behind torchrun."""
    found = []
    for language, code in blocks(markdown):
        if language in ("bash", "console"):
            for line in code.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words[:1] == ["rankgrad"]:
                    found.append(words[1:])
                elif words[:1] == ["torchrun"] and "rankgrad" in words:
                    found.append(words[words.index("rankgrad") + 1 :])
    return found
