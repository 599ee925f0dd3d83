"""Plans of tiny models: shapes, matrices and operations, with no weights loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.model.architectures import read_config
from headrace.model.config import ModelConfig
from headrace.model.graph import Operation, build_graph
from headrace.model.matrices import Matrices, plan_matrices
from headrace.weights.gguf import GgufFile
from tiny.models import Tensor, TinySpec, write_model

Edit = Callable[[dict[str, Tensor]], None]


@dataclass(frozen=True)
class Plan:
    """What a step is built from."""

    config: ModelConfig
    matrices: Matrices
    graph: tuple[Operation, ...]


@pytest.fixture
def make_plan(tmp_path: Path) -> Callable[..., Plan]:
    """The plan of a specification, read from the file that it is written to."""

    def make(spec: TinySpec, edit: Edit | None = None) -> Plan:
        path = write_model(tmp_path / "tiny.gguf", spec, edit)
        with GgufFile.open(path) as gguf:
            config = read_config(gguf)
            matrices = plan_matrices(gguf, config)
        return Plan(config, matrices, build_graph(config, matrices))

    return make
