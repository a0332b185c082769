"""Native LLaDA2 in PyTorch (needs the `torch` extra)."""
