"""Packs scattered blocks of a paged KV cache into contiguous memory, and copies them into a peer's cache.

Importing this package imports neither torch nor triton: the makers in `factory` do, when they are called.
"""
