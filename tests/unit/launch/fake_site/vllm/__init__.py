"""Stands in for vLLM in tests of what starts and stops engines: same command line, same endpoints, no model."""
