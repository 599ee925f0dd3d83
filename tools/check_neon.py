"""Compiles kernels for 64-bit Arm on a machine of any kind, and says which instructions they are made of.

    python tools/check_neon.py [KERNEL...]                          a line per kernel: bytes, sdot, fmla, instructions
    python tools/check_neon.py --through SCRIPT [ARGUMENT...]       runs a compiling program, such as kernels/build.py,
                                                                    as if it were on an Arm machine

Numba compiles for the machine it runs on. Two things are put in its way: the name of that machine, and the making of a
callable function out of what was compiled. The rest of the way to an object file is the one a real Arm machine takes.
`tests/kernels` runs such objects through the kernels' own tests when `aarch64-linux-gnu-gcc` and `qemu-aarch64` are there
(Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user).
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections import Counter
from typing import Any

TRIPLE = "aarch64-unknown-linux-gnu"
CPU = "neoverse-n1"  # the oldest widespread core with the dot product
FEATURES = "+neon,+dotprod,+fullfp16"
COUNTED = ("sdot", "fmla")
FORMATS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
KERNELS = (
    *(f"matmul:{name}" for name in FORMATS),
    *("matmul.commit", "embed:Q4_1", "embed:Q6_K", "embed.commit", "rows", "rows.commit", "rope", "rope.commit"),
    *(
        "attention:1",
        "attention:3",
        "attention:4",
        "attention.commit",
        "merge",
        "merge.commit",
        "find",
        "find.commit",
        "choose",
        "choose.commit",
    ),
    *("team.run_step", "team.work", "probes.read", "probes.ticks"),
)
_LINKABLE = {"cpu": CPU, "features": FEATURES, "reloc": "pic", "codemodel": "default", "jit": False}
_INSTRUCTION = re.compile(r"^\t([a-z][a-z0-9.]*)", re.MULTILINE)


def pretend_arm() -> None:
    """Makes this process compile for Arm from now on; nothing that it compiles can be called."""
    os.environ.update(NUMBA_CPU_NAME=CPU, NUMBA_CPU_FEATURES=FEATURES, NUMBA_LOOP_VECTORIZE="0", NUMBA_SLP_VECTORIZE="0")
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.get_process_triple = lambda: TRIPLE
    make = llvm.Target.create_target_machine
    # position-independent, so that an ordinary linker can make a shared library of it
    llvm.Target.create_target_machine = lambda target, **options: make(target, **{**options, **_LINKABLE})
    from numba.core import cpu

    def not_callable(_context: Any, library: Any, *_details: Any) -> Any:
        library._ensure_finalized()
        return [].append  # what Numba keeps must be a built-in function, another one each time

    cpu.CPUContext.get_executable = not_callable


def instructions(name: str) -> tuple[int, Counter[str]]:
    """Bytes of a kernel's object, and how often each instruction is in it."""
    import llvmlite.binding as llvm

    from headrace.kernels.build import compile_kernel

    texts = []
    emit_object = llvm.TargetMachine.emit_object

    def emit_both(machine: Any, module: Any) -> Any:
        texts.append(machine.emit_assembly(module))
        return emit_object(machine, module)

    llvm.TargetMachine.emit_object = emit_both
    try:
        num_bytes = len(compile_kernel(name))
    finally:
        llvm.TargetMachine.emit_object = emit_object
    return num_bytes, Counter(_INSTRUCTION.findall(texts[-1]))


def main(arguments: list[str]) -> None:
    """See the module's docstring."""
    pretend_arm()
    if arguments[:1] == ["--through"]:
        sys.argv = arguments[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    from headrace.kernels.level import use_level

    use_level("neon")
    print(f"{'kernel':20} {'bytes':>7} {'sdot':>6} {'fmla':>6} {'all':>6}")
    for name in arguments or KERNELS:
        num_bytes, counts = instructions(name)
        print(f"{name:20} {num_bytes:7} {counts['sdot']:6} {counts['fmla']:6} {counts.total():6}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
