"""What the platforms `cuda` and `rocm` share. Only `platform` imports torch."""
