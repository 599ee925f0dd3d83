"""Text in and out: tokenizer, chat template, streaming detokenizer.

Invariant: ids of control tokens come out of a template's own text or an explicit `parse_special`, never out of
what a user wrote. Knows no weights and no files: a vocabulary arrives as a plain mapping of GGUF metadata.

Nothing is re-exported here: each part pulls in a library of its own, and a command imports only what it uses.
"""
