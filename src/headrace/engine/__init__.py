"""Runs models: sequences, steps, sampling, generation."""
