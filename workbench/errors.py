"""The one error type that users see: a message that names what is wrong and what to do."""


class WorkbenchError(Exception):
    """Bad input or an unsupported machine. The command line prints its message and no traceback."""


class NotAlike(WorkbenchError):
    """Blocks that a capture cannot take for copies of one another; the message says in what they differ."""
