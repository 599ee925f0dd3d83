"""Fields of the kernels' records, by byte offset: plain numbers that Python and compiled code share."""
