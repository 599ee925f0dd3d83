"""Quantities as people read them: bytes, rates and durations. GB is 10^9 bytes, GiB is 2^30."""

from __future__ import annotations

from headrace.errors import OptionError

_BYTE_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def format_bytes(num_bytes: float) -> str:
    """1_234_567 -> '1.23 MB': decimal units, three significant digits."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.3g} {unit}" if num_bytes < 999.5 * scale else f"{num_bytes / scale:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """0.00123 -> '1.23 ms': the unit that leaves one to three digits before the point."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def parse_bytes(text: str) -> int:
    """'2GB' -> 2_000_000_000, '1.5 GiB' -> 1_610_612_736, '4096' -> 4096.

    Raises:
        OptionError: the text is not a non-negative number followed by a known unit.
    """
    compact = text.strip().replace(" ", "").replace("_", "")
    digits = compact.rstrip("BbKkMmGgTtIi")
    scale = _BYTE_UNITS.get(compact[len(digits) :].upper())
    try:
        value = float(digits)
    except ValueError:
        value = -1.0
    if scale is None or not 0 <= value < 2**63 / (scale or 1):
        raise OptionError(f"{text!r} is not a size: write a number and a unit, such as 2GB or 512MiB")
    return int(value * scale)
