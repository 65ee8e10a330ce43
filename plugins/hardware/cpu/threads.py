"""How the OpenMP threads of the forward behave. Set in the environment, because the runtime reads it when torch is
loaded."""

from __future__ import annotations

import os

from .host import usable_cores

# Threads sleep at the end of a parallel region instead of spinning. By default GNU OpenMP spins for milliseconds: cheap
# while nothing else wants a core, ruinous when the API process or another container does, since the thread that
# everyone waits for is then descheduled in favour of one that only spins.
WAIT_POLICY = {"OMP_WAIT_POLICY": "PASSIVE"}


def default_threads() -> int:
    """The operator's OMP_NUM_THREADS, else every usable core."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) > 0 else usable_cores()


def thread_environment() -> dict[str, str]:
    """Variables for a process that will run the model on this host. What the operator has set stays."""
    wanted = {"OMP_NUM_THREADS": str(default_threads()), **WAIT_POLICY}
    return {name: value for name, value in wanted.items() if name not in os.environ}
