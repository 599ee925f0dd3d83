"""Compiled kernels, their slow NumPy twins, and the worker team that runs them.

Knows addresses and shapes; knows no models, no requests and no policy.
"""
