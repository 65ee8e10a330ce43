"""Built-in kernels: fast versions of the operations that models are made of."""
