"""Drawing tokens: the torch references of the sampling ops in `contracts/kernels.py`."""
