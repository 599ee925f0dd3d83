"""The past: pages of keys and values and who owns them. Knows no requests."""
