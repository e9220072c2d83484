"""What the user can mend is told in one line; everything else keeps its traceback."""


class UserError(ValueError):
    """A wrong setting, a missing file, a run that cannot go on: the command line shows the message alone."""
