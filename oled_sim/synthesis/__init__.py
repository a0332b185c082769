"""Synthetic traces: a generative model of block-diffusion routing, fitted to real ones.

docs/synthetic-traces.md explains the model, its parameters and what it cannot show.
"""
