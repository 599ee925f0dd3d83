"""From a model file to weights in memory: packed once, mapped ever after.

A packed file is named by the content of the model file and the layout's version. A small record per source path
remembers size, time and content hash, so a warm start neither reads nor hashes the model file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import HeadraceError, ModelFileError, StorageError
from headrace.kernels.files import write_atomically
from headrace.kernels.library import KernelLibrary
from headrace.kernels.runtime import Memory
from headrace.model.architectures import read_config
from headrace.model.config import ModelConfig
from headrace.model.matrices import Matrices, Matrix, plan_matrices, raw_rows, row_order
from headrace.text.tokenizer import Tokenizer
from headrace.weights import container
from headrace.weights.container import PackedFile, Section
from headrace.weights.gguf import GgufFile
from headrace.weights.pack import pack_rows
from headrace.weights.progress import Progress

Check = Callable[[ModelConfig, int], None]
"""Is given a model's shape and the bytes of its packed weights, and raises if that cannot be loaded."""

_HASH_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class LoadedWeights:
    """A model's shape, its weights in memory, and the text side of its file."""

    config: ModelConfig
    matrices: Matrices
    packed: PackedFile
    tokenizer: Tokenizer
    template: str | None
    memory: Memory | None = None
    digest: str | None = None
    """SHA-256 of the model file, in hex; None if nobody had to know."""

    def address(self, name: str) -> int:
        """Where a matrix or vector lies."""
        return self.packed.address + self.packed.offset(name)

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices and vectors."""
        return self.matrices.num_bytes


def load_weights(path: Path, packed_dir: Path | None, progress: Progress, check: Check | None = None) -> LoadedWeights:
    """Maps the packed form of a model file, packing it first if need be; without a folder, packs into memory.

    Args:
        path: the GGUF file.
        packed_dir: where packed files lie.
        progress: is told of hashing and packing.
        check: may refuse a model before it is packed.

    Raises:
        ModelFileError: the model file is damaged or not supported.
        StorageError: the packed form cannot be written.
    """
    if packed_dir is None:
        return _pack(path, None, progress, check)
    remembered = _remembered_hash(path, packed_dir)
    if remembered:
        loaded = _reopen(_packed_path(packed_dir, remembered))
        if loaded is not None:
            return dataclasses.replace(loaded, digest=remembered)
    facts = _facts_of(path)
    digest = _hash_file(path, progress)
    target = _packed_path(packed_dir, digest)
    loaded = _reopen(target)
    if loaded is None:
        loaded = _pack(path, target, progress, check)
        if _facts_of(path) != facts:
            target.unlink(missing_ok=True)
            raise ModelFileError(f"{path.name} was changed while it was read: start again when it is complete")
    _remember(path, packed_dir, facts, digest)
    return dataclasses.replace(loaded, digest=digest)


def prepare_kernels(library: KernelLibrary, names: Sequence[str], threads: int, progress: Progress) -> None:
    """Loads kernels, compiling those that are not there yet on `threads` cores.

    Raises:
        KernelError: the compiler failed.
        StorageError: the cache folder cannot be written.
    """
    missing = library.missing(names)
    if not missing:
        library.prepare(names)
        return
    progress.start(f"compiling for {library.level.name}", len(missing), "kernels")
    seen = 0

    def advance(done: int, _total: int) -> None:
        nonlocal seen
        progress.advance(done - seen)
        seen = done

    try:
        library.prepare(names, processes=max(2, threads), progress=advance)
    finally:
        progress.done()


def _packed_path(packed_dir: Path, digest: str) -> Path:
    return packed_dir / f"{digest[:32]}.v{container.LAYOUT_VERSION}.headrace"


def _facts_of(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"path": str(path.resolve()), "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _record_path(path: Path, packed_dir: Path) -> Path:
    return packed_dir / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.source.json"


def _remembered_hash(path: Path, packed_dir: Path) -> str | None:
    """The content hash of a file that has not changed since it was hashed."""
    try:
        record = json.loads(_record_path(path, packed_dir).read_text())
        facts = _facts_of(path)
        digest = record["sha256"]
        return digest if isinstance(digest, str) and all(record[key] == facts[key] for key in facts) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(path: Path, packed_dir: Path, facts: dict[str, Any], digest: str) -> None:
    record = json.dumps({**facts, "sha256": digest}).encode()
    # a folder that cannot be written may still hold the packed weights: then every start hashes the model file
    with contextlib.suppress(OSError):
        write_atomically(_record_path(path, packed_dir), record)


def _hash_file(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    progress.start(f"reading {path.name}", path.stat().st_size)
    try:
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                digest.update(chunk)
                progress.advance(len(chunk))
    finally:
        progress.done()
    return digest.hexdigest()


def _reopen(path: Path) -> LoadedWeights | None:
    """The weights that an earlier start packed; None if they are not there, or damaged so that they must be packed anew."""
    packed = container.open_packed(path)
    if packed is None:
        return None
    try:
        return _from_packed(packed)
    except (KeyError, TypeError, ValueError, HeadraceError):
        return None


def _from_packed(packed: PackedFile) -> LoadedWeights:
    header = packed.header
    matrices = {name: Matrix.from_json(value) for name, value in header["matrices"].items()}
    return LoadedWeights(
        config=ModelConfig.from_json(header["config"]),
        matrices=Matrices(matrices, dict(header["vectors"])),
        packed=packed,
        tokenizer=Tokenizer.from_json(packed.section("tokenizer").tobytes()),
        template=header["template"],
    )


def _pack(path: Path, target: Path | None, progress: Progress, check: Check | None) -> LoadedWeights:
    with GgufFile.open(path) as gguf:
        config = read_config(gguf)
        plan = plan_matrices(gguf, config)
        tokenizer = Tokenizer.from_metadata(gguf.metadata)
        if tokenizer.vocab_size != config.vocabulary:
            raise ModelFileError(
                f"{path.name} has {tokenizer.vocab_size} tokens and embeddings for {config.vocabulary}: the file is damaged"
            )
        if check is not None:
            check(config, plan.num_bytes)
        sections = _sections(gguf, config, plan, tokenizer.to_json(), progress.advance)
        facts = {
            "config": config.to_json(),
            "matrices": {name: matrix.to_json() for name, matrix in plan.matrices.items()},
            "vectors": plan.vectors,
            "template": gguf.get_str("tokenizer.chat_template", None),
        }
        progress.start(f"packing {path.name}", sum(section.num_bytes for section in sections))
        try:
            if target is None:
                memories: list[Memory] = []

                def in_memory(num_bytes: int) -> npt.NDArray[np.uint8]:
                    memories.append(Memory(num_bytes, huge_pages=True))
                    return memories[0].bytes[:num_bytes]

                packed: PackedFile | None = container.build(in_memory, facts, sections)
                assert packed is not None
                return dataclasses.replace(_from_packed(packed), memory=memories[0])
            container.write(target, facts, sections)
        finally:
            progress.done()
    packed = container.open_packed(target)
    if packed is None:
        raise StorageError(
            f"the packed weights {target} cannot be read back: check the disk, or use cache=False", arguments=("cache",)
        )
    return _from_packed(packed)


def _sections(
    gguf: GgufFile, config: ModelConfig, plan: Matrices, tokenizer: bytes, advance: Callable[[int], None]
) -> list[Section]:
    """What to write, biggest readers first: the tokenizer, the vectors, then the matrices in the order of a step."""

    def blob(out: npt.NDArray[np.uint8]) -> None:
        out[:] = np.frombuffer(tokenizer, np.uint8)

    def vector(name: str) -> Callable[[npt.NDArray[np.uint8]], None]:
        def fill(out: npt.NDArray[np.uint8]) -> None:
            values = gguf.tensors[name].dequantise().reshape(-1).astype(np.float32)
            if not np.isfinite(values).all():
                raise ModelFileError(f"{gguf.path.name} has a value in {name!r} that is not finite: fetch or convert it again")
            out[:] = values.view(np.uint8)

        return fill

    def matrix(item: Matrix) -> Callable[[npt.NDArray[np.uint8]], None]:
        def fill(out: npt.NDArray[np.uint8]) -> None:
            tensor_format = gguf.tensors[item.tensors[0]].format
            try:
                pack_rows(tensor_format, raw_rows(gguf, item), item.columns, out, row_order(gguf, item, config))
            except ModelFileError as error:
                raise ModelFileError(f"{gguf.path.name}, tensor {' or '.join(item.tensors)}: {error}") from error
            advance(len(out))

        return fill

    sections = [Section("tokenizer", len(tokenizer), blob)]
    sections += [Section(name, 4 * width, vector(name)) for name, width in plan.vectors.items()]
    sections += [Section(name, item.num_bytes, matrix(item)) for name, item in plan.matrices.items()]
    return sections
