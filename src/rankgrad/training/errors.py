"""What the user can mend is told in one line; everything else keeps its traceback."""


class UserError(ValueError):
    """A wrong setting, a missing file, a run that cannot go on: the command line shows the message alone."""


def needs(extra: str, error: ModuleNotFoundError) -> UserError:
    """The error for a package that an extra of this library would have installed."""
    return UserError(f"{error.name} is not installed: pip install 'rankgrad[{extra}]'")
