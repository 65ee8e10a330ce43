"""Built-in platforms: one folder per device family."""
