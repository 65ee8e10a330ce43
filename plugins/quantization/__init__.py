"""Built-in quantization methods."""
