"""What is asked of an engine: when requests come, how long they are, how fast the answers must be. Used by `hotswap bench` and
by the simulator."""
