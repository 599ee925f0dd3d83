"""Tiny random models in GGUF, and a slow forward pass to compare with: no download, no real weights."""
