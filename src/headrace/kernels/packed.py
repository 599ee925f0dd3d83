"""Packed layouts: how the weights of 16 rows are interleaved for the kernels, and how activations are quantised.

A matrix is cut into groups of 16 rows (the last one padded with zero rows), a group into units of 32 or 256 columns,
which follow one another in address order. Within a unit, one 64-byte vector holds 4 neighbouring columns of all 16
rows (byte 4 * row + column), so that one instruction multiplies it with 4 activations and no sum crosses lanes.
No layout holds more bytes per weight than the GGUF block it was made from.

A unit is a sequence of sections, each `vectors` x 16 rows:

    nibbles   vector j: low 4 bits are columns 4j.., high 4 bits columns 16 + 4j.. of a sub-block of 32 columns
    high1     bit j of each byte is the fifth (or third) bit of logical vector j of the sub-block
    pairs     2-bit fields; field i of vector h belongs to logical vector 4h + i
    bytes8    whole signed bytes, logical vector j is columns 4j..
    scales    the block's scale bytes as GGUF packs them, one 16-byte vector per byte position
    d, m      float16 scale and minimum (or scale of minimums) of each row
    floats    one 16-row vector per column

Activations are quantised per 32 columns to signed bytes: a row is `columns` bytes, then one 16-byte record per block:
float32 scale, float32 scale * sum, int32 sum, int32 sum of the first 16 columns.

Pure arithmetic on sizes: imports nothing heavy, compiles nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS = 16
BLOCK_COLUMNS = 32
RECORD_BYTES = 16
RECORD_SCALED_SUM, RECORD_SUM, RECORD_FIRST_SUM = 4, 8, 12


@dataclass(frozen=True)
class PackedFormat:
    """The layout of one unit (16 rows x `unit_columns`). Offsets are bytes from the unit's start."""

    name: str
    unit_columns: int
    unit_bytes: int
    sections: tuple[tuple[str, int], ...]
    integer_activations: bool = True

    def offset(self, section: str) -> int:
        """Where a section starts.

        Raises:
            KeyError: this format has no such section.
        """
        return dict(self.sections)[section]


def _layout(name: str, unit_columns: int, *sections: tuple[str, int], integer: bool = True) -> PackedFormat:
    offset, placed = 0, []
    for section, num_bytes in sections:
        placed.append((section, offset))
        offset += num_bytes
    return PackedFormat(name, unit_columns, offset, tuple(placed), integer)


PACKED = {
    layout.name: layout
    for layout in (
        _layout("F32", 32, ("floats", 2048), integer=False),
        _layout("F16", 32, ("floats", 1024), integer=False),
        _layout("BF16", 32, ("floats", 1024), integer=False),
        _layout("Q4_0", 32, ("nibbles", 256), ("d", 32)),
        _layout("Q4_1", 32, ("nibbles", 256), ("d", 32), ("m", 32)),
        _layout("Q5_0", 32, ("nibbles", 256), ("high1", 64), ("d", 32)),
        _layout("Q5_1", 32, ("nibbles", 256), ("high1", 64), ("d", 32), ("m", 32)),
        _layout("Q8_0", 32, ("bytes8", 512), ("d", 32)),
        _layout("Q2_K", 256, ("pairs", 1024), ("scales", 256), ("d", 32), ("m", 32)),
        _layout("Q3_K", 256, ("pairs", 1024), ("high1", 512), ("scales", 192), ("d", 32)),
        _layout("Q4_K", 256, ("nibbles", 2048), ("scales", 192), ("d", 32), ("m", 32)),
        _layout("Q5_K", 256, ("nibbles", 2048), ("high1", 512), ("scales", 192), ("d", 32), ("m", 32)),
        _layout("Q6_K", 256, ("nibbles", 2048), ("pairs", 1024), ("scales", 256), ("d", 32)),
    )
}


def groups(rows: int) -> int:
    """Groups of 16 rows, the last one padded."""
    return -(-rows // ROWS)


def packed_bytes(layout: PackedFormat, rows: int, columns: int) -> int:
    """Bytes of a packed matrix."""
    return groups(rows) * (columns // layout.unit_columns) * layout.unit_bytes


def quantised_row_bytes(columns: int) -> int:
    """Bytes of one row of quantised activations."""
    return columns + columns // BLOCK_COLUMNS * RECORD_BYTES
