"""Load generator, raw transfers and figures: what kvpush costs beside vLLM's own connectors.

`serve` measures requests through engine pairs, `transfer` measures bare writes between two processes, `summary` turns
their raw files into one map of figures and a table.
"""
