"""Training of small LLaDA2-architecture models."""
