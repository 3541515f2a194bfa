"""KV cache transfer by push between vLLM prefill and decode instances."""

__version__ = "0.1.0"
