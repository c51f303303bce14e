"""The one error type that users see: a message that names what is wrong and what to do."""


class WorkbenchError(Exception):
    """Bad input or an unsupported machine. The command line prints its message and no traceback."""
