"""Embedding rows out of every packed format: exactly the twin's, on every level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.kernels import reference, reference_packed
from headrace.kernels.fields import embed as fields_of_embed
from headrace.kernels.packed import PACKED
from headrace.kernels.reference_packed import Fields
from headrace.kernels.tables import TOKEN_ID, TOKEN_WORDS

KERNELS = [*(f"embed:{name}" for name in PACKED), "embed.commit"]
VOCABULARY, COLUMNS = 40, 512
IDS = [39, 0, 17, 17, 31, 32]


def test_embed_equals_twin(kernels: Any, packed_name: str, make_fields: Callable[[str, int, int], Fields]) -> None:
    fields = make_fields(packed_name, VOCABULARY, COLUMNS)
    table = kernels.zeros((len(IDS), TOKEN_WORDS), np.int64)
    table[:, TOKEN_ID // 8] = IDS
    weights = kernels.array(reference_packed.pack_fields(packed_name, fields))
    for scale, repeat in [(1.0, False), (25.298221, True)]:
        out = kernels.zeros((len(IDS), COLUMNS + 16))
        kernels.run(
            f"embed:{packed_name}",
            "embed.commit",
            fields_of_embed,
            len(IDS),
            repeat=repeat,
            weights=weights,
            units=COLUMNS // PACKED[packed_name].unit_columns,
            columns=COLUMNS,
            token_table=table,
            tokens=len(IDS),
            scale=scale,
            output=out,
            output_stride=out.strides[0],
        )
        np.testing.assert_array_equal(out[:, :COLUMNS], reference.embed(packed_name, fields, IDS, scale))
        assert not out[:, COLUMNS:].any()
