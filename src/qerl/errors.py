"""The error a user can act on."""


class QeRLError(Exception):
    """One sentence for the user: what is wrong, where, and what to do.

    The command line prints it without a traceback and exits with status 2. Anything else that is raised is a
    defect and keeps its traceback.
    """
