"""hotswap.server"""

if __name__ != "hotswap.server":
    raise ImportError(f"this folder is the package 'hotswap.server', not {__name__!r}: write 'import hotswap.server'")
