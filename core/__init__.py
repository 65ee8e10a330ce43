"""hotswap.core"""

if __name__ != "hotswap.core":
    raise ImportError(f"this folder is the package 'hotswap.core', not {__name__!r}: write 'import hotswap.core'")
