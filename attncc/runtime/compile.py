"""Cross-compilation: a generated Triton file to the code of one target, with no GPU, and what the code takes."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attncc.codegen.ladder import stage_names
from attncc.codegen.signature import Argument, arguments
from attncc.codegen.triton import kernel_names
from attncc.errors import EnvironmentFault, PlanError
from attncc.ir import AttentionSpec, KernelPlan
from attncc.planner.hopper import register_cap
from attncc.targets import Target, target

ALIGNED = 16  # bytes and elements: what Triton's launcher tests addresses and strides for
GROUP_WARPS = 4  # that a launch asks for, where a kernel shares the others out
INSTRUCTIONS = {  # name: how it starts in PTX or in AMD's assembly
    "wgmma": r"wgmma\.mma_async", "tcgen05": r"tcgen05\.mma", "mma": r"\bmma\.sync", "mfma": r"v_mfma",
    "setmaxnreg": r"setmaxnreg", "async_copy": r"cp\.async\.(?:ca|cg|bulk)", "exp2": r"ex2\.approx|v_exp_f32",
}  # fmt: skip


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes of a target; counts of instructions are of the code's text, not of what runs."""

    kernel: str
    target: str
    aligned: bool  # compiled for tensors whose addresses and strides are multiples of 16
    registers: int  # of a thread, accumulation registers included
    spills: int  # bytes of local memory of a thread
    shared_bytes: int  # of a block
    predicted_shared_bytes: int
    instructions: Mapping[str, int]  # keys of INSTRUCTIONS, only those that occur
    triton: str  # the version that compiled it
    parts: tuple[Resources, ...] = ()  # of a file of several kernels each; the rest is of the one that takes most


def compile_kernel(source: Path, spec: AttentionSpec, plan: KernelPlan, aligned: bool = True) -> Resources:
    """Compile the forward kernel in the generated file `source` for `plan.target` and measure it: of several, the one
    that takes most shared memory.

    `aligned` chooses the kernel for 16-byte-aligned tensors, else the one for any strides. PlanError where Triton
    refuses.
    """
    found = compile_kernels(source, spec, plan, aligned)
    return max(found, key=lambda kernel: (kernel.shared_bytes, kernel.spills, kernel.registers))


def compile_kernels(source: Path, spec: AttentionSpec, plan: KernelPlan, aligned: bool = True) -> tuple[Resources, ...]:
    """One for each kernel of the forward pass, in their order."""
    made = compiled(source, spec, plan, aligned)
    return tuple(measure(kernel, name, plan, aligned) for name, kernel in made.items())


def forward_names(spec: AttentionSpec, plan: KernelPlan, aligned: bool) -> tuple[str, ...]:
    """Of the kernels of the forward pass in a generated file, tables aside."""
    standard = plan.algorithm == "standard"
    names = stage_names(spec).values() if standard else [kernel_names(spec)[0].fresh(f"{spec.name}_forward")]
    return tuple(name + ("" if aligned else "_any_stride") for name in names)


def compiled(
    source: Path, spec: AttentionSpec, plan: KernelPlan, aligned: bool, compile: Callable[..., Any] = triton.compile
) -> dict[str, Any]:
    """Triton's CompiledKernel of each forward kernel in the generated file `source`. PlanError where it refuses."""
    module, every = load_module(source), arguments(spec, plan, kernel_names(spec)[1])
    made = {}
    for name in forward_names(spec, plan, aligned):
        kernel = getattr(module, name)
        own = [a for a in every if a.name in kernel.arg_names]  # one of several takes what it reads and writes
        made[name] = cross_compile(kernel, own, plan, aligned, compile)
    return made


def load_module(source: Path) -> ModuleType:
    """Run a generated file as a module of its own, known to nobody else."""
    found = importlib.util.spec_from_file_location(source.stem, source)
    if found is None or found.loader is None:
        raise EnvironmentFault(f"{source} is no Python file")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def cross_compile(
    kernel: Any, args: Sequence[Argument], plan: KernelPlan, aligned: bool = True,
    compile: Callable[..., Any] = triton.compile,
) -> Any:  # fmt: skip
    """Triton's CompiledKernel of `kernel` (a JITFunction) for `plan.target`; nothing is loaded or launched."""
    signature, constants, divisible = specialization(args, plan, aligned)
    source, options = _source(kernel, signature, constants, hints(kernel.arg_names, divisible), plan)
    try:
        return compile(source, target=GPUTarget(*target(plan.target).gpu_target), options=options)
    except Exception as fault:
        where = f"tile {plan.tile_q} x {plan.tile_k}, {plan.stages} stages, {plan.warps} warps on {plan.target}"
        why = (str(fault).strip() or type(fault).__name__).splitlines()[-1]
        raise PlanError(f"Triton {triton.__version__} does not compile {kernel.__name__} ({where}): {why}") from fault


def _source(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, int | None], attributes: Any, plan: KernelPlan
) -> tuple[Any, dict[str, int]]:
    """What Triton compiles, and its options. A Gluon kernel names its warp groups, registers and buffers itself."""
    if plan.algorithm == "fa3":
        from triton.experimental.gluon._runtime import GluonASTSource

        ordered = {name: signature[name] for name in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        cap = register_cap(plan)
        options = {"num_warps": GROUP_WARPS, **({"maxnreg": cap} if cap else {})}
        return GluonASTSource(kernel, ordered, places, attributes), options
    options = {"num_warps": plan.warps, "num_stages": plan.stages}
    if plan.max_registers:
        options["maxnreg"] = plan.max_registers
    return ASTSource(kernel, signature, constants, attributes), options


def specialization(
    args: Sequence[Argument], plan: KernelPlan, aligned: bool
) -> tuple[dict[str, str], dict[str, int | None], frozenset[str]]:
    """What a launch would make of the arguments: types by name, values of constants, names of multiples of 16.

    Aligned: last strides are 1, which Triton bakes in, and all addresses and other strides of the call are multiples.
    What the launcher allocates is aligned in any case, and parameters are taken to be contiguous.
    """
    tiles = {"TILE_Q": plan.tile_q, "TILE_K": plan.tile_k}
    known = [a for a in args if a.kind == "constexpr"]
    constants: dict[str, int | None] = {a.name: tiles.get(a.name, a.value == "True") for a in known}
    constants |= {a.name: 1 for a in args if a.kind == "last_stride" and (aligned or a.owner == "parameter")}
    constants |= {a.name: None for a in args if a.kind == "descriptor" and not aligned}
    signature = {a.name: "constexpr" if a.name in constants else a.type for a in args}
    if not aligned:
        signature |= {a.name: "i32" for a in args if a.kind == "last_stride" and a.name not in constants}  # undeclared
    divisible = {a.name for a in args if a.owner in ("output", "tables") and a.kind == "pointer"}
    if aligned:
        divisible |= {a.name for a in args if a.owner == "call" and a.kind in ("pointer", "stride")}
    return signature, constants, frozenset(divisible)


def hints(arg_names: Sequence[str], divisible: Collection[str]) -> dict[tuple[int], list[list[object]]]:
    """Triton's attributes of the arguments, by their place in the kernel, which groups them for the reader."""
    return {(i,): [["tt.divisibility", ALIGNED]] for i, name in enumerate(arg_names) if name in divisible}


def measure(compiled: Any, name: str, plan: KernelPlan, aligned: bool) -> Resources:
    """Read registers, spills, shared memory and instructions off a CompiledKernel."""
    hardware: Target = target(plan.target)
    text = compiled.asm["amdgcn" if hardware.backend == "hip" else "ptx"]
    registers, spills = _amd_usage(text) if hardware.backend == "hip" else _nvidia_usage(compiled.asm["cubin"])
    counts = {kind: len(re.findall(pattern, text)) for kind, pattern in INSTRUCTIONS.items()}
    return Resources(
        kernel=name, target=plan.target, aligned=aligned, registers=registers, spills=spills,
        shared_bytes=compiled.metadata.shared, predicted_shared_bytes=plan.shared_bytes,
        instructions={kind: n for kind, n in counts.items() if n}, triton=triton.__version__,
    )  # fmt: skip


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread, from cuobjdump, which comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as fault:
            raise EnvironmentFault(f"cannot read a kernel's resources with {tool.name}: {fault}") from fault
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout + done.stderr)}
    if "REG" not in usage:
        raise EnvironmentFault(f"{tool.name} names no registers: {done.stdout[:200]}")
    return usage["REG"], usage.get("STACK", 0) + usage.get("LOCAL", 0)


def _amd_usage(assembly: str) -> tuple[int, int]:
    """Vector registers (accumulation registers among them) and bytes of private memory of a lane, from the metadata."""
    found = dict(re.findall(r"^\s*\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", assembly, re.MULTILINE))
    return int(found["vgpr_count"]), int(found["private_segment_fixed_size"])
