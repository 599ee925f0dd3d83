"""Compiles kernels to object files, in a process of its own, so that nobody else has to import Numba.

    python -m headrace.kernels.build FOLDER LEVEL KERNEL...          (with --counting for the build that counts bytes)

Each kernel becomes FOLDER/NAME.o, sealed (see `library.seal`) and written atomically, and a line on standard output when
it is there.
The environment names the CPU to compile for, see `library.compile_environment`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.kernels.files import write_atomically
from headrace.kernels.library import entry_name, seal


def kernel_function(name: str) -> Callable[[int, int, int], None]:
    """The Python function of a kernel: 'matmul:Q4_1', 'attention:3' (heads in a group), 'rows', ..."""
    from headrace.kernels import attention, choose, embed, flat, matmul, pages, probes, rope, rows, sample, team
    from headrace.kernels.page_formats import FORMAT_NAMES

    plain: dict[str, Callable[[int, int, int], None]] = {
        "rows": rows.compute,
        "rows.commit": rows.commit,
        "rope": rope.compute,
        "rope.commit": rope.commit,
        "attention.commit": attention.commit,
        "merge": attention.merge,
        "merge.commit": attention.commit_merge,
        "matmul.commit": matmul.commit,
        "embed.commit": embed.commit,
        "find": choose.find,
        "find.commit": choose.commit_find,
        "choose": choose.choose,
        "choose.commit": choose.commit_choose,
        "choose.draw": sample.draw,
        "choose.draw_flat": flat.draw_flat,
        "team.run_step": team.run_step,
        "team.work": team.work,
        "probes.read": probes.read,
        "probes.nothing": probes.nothing,
        "probes.ticks": probes.read_ticks,
    }
    if name in plain:
        return plain[name]
    kind, _, packed = name.partition(":")
    if kind == "attention":
        return attention.attend_function(int(packed))
    if kind == "narrow":
        return pages.narrow_function(FORMAT_NAMES.index(packed))
    makers = {"matmul": matmul.compute_function, "embed": embed.compute_function}
    return makers[kind](packed)


def compile_kernel(name: str) -> bytes:
    """The object file of a kernel, whose entry is called as `entry_name(name)` says."""
    import llvmlite.binding as llvm
    from numba import njit, types

    options = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    dispatcher: Any = njit(types.void(types.int64, types.int64, types.int64), **options)(kernel_function(name))
    (compiled,) = dispatcher.overloads.values()
    symbol = compiled.fndesc.llvm_func_name
    library = compiled.library
    module = llvm.parse_assembly(str(library._final_module))
    for function in module.functions:
        if not function.is_declaration and function.name != symbol:
            function.linkage = "internal"  # kernels are linked together, and some have functions of the same name
    module.get_function(symbol).name = entry_name(name)
    return bytes(library._codegen._tm.emit_object(module))


def main(arguments: list[str]) -> None:
    """Compiles the named kernels, one after the other."""
    from headrace.kernels.level import use_level

    counting = "--counting" in arguments
    folder, level, *names = [argument for argument in arguments if argument != "--counting"]
    use_level(level, counting=counting)
    if counting:
        import llvmlite.binding as llvm

        llvm.add_symbol("headrace_count", 1)  # Numba links what it compiles; nothing is called here
    for name in names:
        write_atomically(Path(folder) / f"{entry_name(name)}.o", seal(compile_kernel(name)))
        print(name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
