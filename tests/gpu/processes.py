"""Processes of a job, for the programs beside this one."""
import os
import pathlib


def processes_with(text):
    """The ids of processes that have a text in their command line; torchrun gives each rank a session of its own."""
    found = []
    for p in pathlib.Path("/proc").iterdir():
        try:
            if p.name.isdigit() and int(p.name) != os.getpid() and text.encode() in (p / "cmdline").read_bytes():
                found.append(int(p.name))
        except OSError:
            pass
    return found
