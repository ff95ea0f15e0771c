"""The one kind of error that a person, not a programmer, has to mend."""


class UserError(ValueError):
    """A mistake in what a person gave us: one sentence with the problem and the mend.

    Raised before anything is written. The command line prints the sentence and exits with status 2; any other
    exception that reaches it is a defect of ours and keeps its traceback.
    """
