"""How the OpenMP threads of the forward behave. Set in the environment, because the runtime reads it when torch is
loaded."""

from __future__ import annotations

from .host import usable_cores

# Threads sleep at the end of a parallel region instead of spinning. By default GNU OpenMP spins for milliseconds: cheap
# while nothing else wants a core, ruinous when the API process or another container does, since the thread that
# everyone waits for is then descheduled in favour of one that only spins.
WAIT_POLICY = {"OMP_WAIT_POLICY": "PASSIVE"}


def thread_environment() -> dict[str, str]:
    """Variables for a process that will run the model on this host; existing ones are the launcher's to respect."""
    return {"OMP_NUM_THREADS": str(usable_cores()), **WAIT_POLICY}
