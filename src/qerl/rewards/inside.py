"""The program inside the sandbox: it drops privileges, sets its limits, and then runs the model's program.

:mod:`qerl.rewards.sandbox` passes the text of this file to a Python that has the standard library alone, so
nothing of this package can be imported here.
"""

import json
import os
import resource
import sys


def main(job_fd: int, report_fd: int) -> None:
    """Run the program that the job describes, then its check, and report both."""
    with os.fdopen(job_fd, encoding="utf-8") as file:
        job = json.load(file)
    if job["uid"] is not None:
        os.setgroups([])
        os.setresgid(job["uid"], job["uid"], job["uid"])
        os.setresuid(job["uid"], job["uid"], job["uid"])
    # After the change of user, because the limit of processes counts those of the user.
    for name, limit in job["limits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    os.write(report_fd, b"started ")
    own = {"__name__": "__main__"}
    try:
        exec(compile(job["program"], "program.py", "exec"), own)
    except SystemExit:
        if job["check"]:
            raise RuntimeError("the program ended before its check") from None
        raise
    if job["check"]:
        exec(compile(job["check"], "check.py", "exec"), own)
        os.write(report_fd, job["token"].encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
