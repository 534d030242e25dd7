"""The road from a spec's text to a kernel file, one function a stage; an import costs when its stage is reached."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncc.errors import AttnError, Diagnostic, Span, SpecError
from attncc.ir.plan import Shape
from attncc.passes import BACKWARD as BACKWARD
from attncc.passes import FORWARD as FORWARD
from attncc.passes import TANGENT as TANGENT
from attncc.passes import backward as backward
from attncc.passes import compiled as compiled
from attncc.passes import every_backward as every_backward
from attncc.passes import refuse_kept as refuse_kept
from attncc.passes import render as render
from attncc.passes import repeatable as repeatable
from attncc.passes import tangent as tangent
from attncc.passes import walked as walked
from attncc.runtime.cache import Cache, Entry
from attncc.runtime.keys import KernelKey, RequestKey, Toolchain, plain, toolchain

if TYPE_CHECKING:
    from attncc.frontend import Parsed
    from attncc.ir import AttentionSpec, Visits
    from attncc.planner import Choice
    from attncc.targets import Target

SIZES = tuple(f.name for f in fields(Shape) if f.name != "dtype")
DTYPES = ("bf16", "f16", "f32", "f64")
RESULT, RESOURCES = "result.json", "resources.json"

Number = int | float | bool
Stage = Callable[[str], None]
Tuned = Mapping[str, Mapping[str, Any]]  # by pass: choices of a plan that were measured, in plain form


def silent(text: str) -> None:
    """The stage callback of who does not want to hear about it."""


class RequestError(AttnError):
    """Sizes, values or a target that do not go together, or with the spec."""

    exit_code = 2


@dataclass(frozen=True)
class Request:
    """What a user asks for: some of SIZES, scalar parameters by name; dtype None is the spec's own."""

    text: str
    filename: str = "<spec>"
    target: str = "cpu"
    sizes: tuple[tuple[str, int], ...] = ()
    dtype: str | None = None
    values: tuple[tuple[str, Number], ...] = ()
    layout: str | None = None  # dense | ragged; None is the spec's own
    passes: tuple[str, ...] = (FORWARD,)  # what files are for: forward, backward, tangent
    algorithm: str | None = None  # None leaves it to the spec, and where it pins none to the planner


@dataclass(frozen=True)
class Planned:
    """A spec with its constants baked in, and every choice made for it."""

    parsed: Parsed
    spec: AttentionSpec
    consts: Mapping[str, int]
    values: Mapping[str, Number]  # of run-time scalars: given, else the default
    shape: Shape
    target: Target
    visits: Visits
    choice: Choice
    tuned: Tuned = field(default_factory=dict)


@dataclass(frozen=True)
class Kernel:
    """A generated file and what it compiled to: `aligned` for pointers and strides of 16 bytes, `general` for any."""

    file: str
    target: str
    direction: str
    source: bytes
    predicted_shared_bytes: int | None
    aligned: Mapping[str, Any] | None
    general: Mapping[str, Any] | None
    cached: bool


@dataclass(frozen=True)
class Built:
    """What `build` made of one spec for one target."""

    name: str
    kernels: tuple[Kernel, ...]
    warnings: tuple[Diagnostic, ...]


def build(request: Request, cache: Cache, stage: Stage = silent, tools: Toolchain | None = None) -> Built:
    """Text to kernels, compiled for the target and listed. Warm, it reads the cache and nothing else.

    Raises SpecError, PlanError, RequestError, EnvironmentFault.
    """
    tools = tools or toolchain()
    key = request_key(request, tools)
    known = cache.get(key)
    built = _built(known, cache) if known else None
    if built is not None:
        return built
    stage("planning")
    planned = plan(request)
    plans = every_pass(planned, request.passes)
    entries = [kernel(one, cache, tools, stage=stage) for one in plans]
    lines = [{"digest": e.digest, "target": planned.target.name, "pass": one.choice.plan.direction}
             for e, one in zip(entries, plans, strict=True)]  # fmt: skip
    found = warnings(planned)
    listing = {"name": planned.spec.name, "kernels": lines, "warnings": [asdict(d) for d in found]}
    cache.get_or_build(key, partial(_write_json, RESULT, listing))
    return Built(planned.spec.name, tuple(map(_listed, entries, lines)), found)


def every_pass(planned: Planned, passes: tuple[str, ...]) -> list[Planned]:
    """The plans of every file for these passes. SpecError for one that is not built for this spec and target."""
    made: list[Planned] = []
    for name in passes:
        try:
            made += {FORWARD: every_kernel, BACKWARD: every_backward, TANGENT: lambda p: [tangent(p)]}[name](planned)
        except NotImplementedError as why:
            fault = Diagnostic("N109", str(why), planned.parsed.spans.get("attention"), "ask for the other passes")
            raise SpecError((fault,), planned.parsed.text, planned.parsed.filename) from None
    return made


def warnings(planned: Planned) -> tuple[Diagnostic, ...]:
    """What the text gives reason to warn of, and what the proofs about its mask do."""
    from attncc import analysis

    return (*planned.parsed.warnings, *analysis.prove(planned.spec).warnings)


def plan(request: Request) -> Planned:
    """Text to plan: parse, bake constants in, refuse what is not built, find the tiles to visit, choose."""
    from attncc import frontend

    parsed = frontend.parse(request.text, request.filename)
    parsed = parsed if request.algorithm is None else frontend.pinned(parsed, request.algorithm)
    refuse(parsed)
    parsed = laid_out(parsed, request.layout)
    frontend.refuse_unbuilt(parsed)  # in this layout
    consts, values = split_values(parsed.spec, dict(request.values))
    shape = shape_of(dict(request.sizes), request.dtype, parsed.spec.precision.inputs)
    refuse_values(frontend.bind(parsed, consts), values, shape)
    return plan_parsed(parsed, consts, values, shape, request.target)


def laid_out(parsed: Parsed, layout: str | None) -> Parsed:
    """A spec in the layout that is asked for, or its own. Raises SpecError for a tensor that has no packed form."""
    from attncc import frontend
    from attncc.ir import Layout

    if layout == "ragged" or (layout is None and parsed.spec.ragged):
        return frontend.packed(parsed)
    if layout is None:
        return parsed
    return replace(parsed, spec=replace(parsed.spec, layout=Layout(rows=parsed.spec.layout.rows)))


def refuse(parsed: Parsed) -> None:
    """Raise SpecError for what is not built yet, and for parameters marked `grad` that cannot have a gradient."""
    from attncc import analysis, frontend

    frontend.refuse_unbuilt(parsed)
    found = analysis.ungradable(parsed.spec)
    if found:
        where = parsed.spans
        faults = (Diagnostic("E606", why, where.get(f"param:{p.name}"), "leave grad out") for p, why in found)
        raise SpecError(tuple(faults), parsed.text, parsed.filename)


def plan_parsed(
    parsed: Parsed, consts: Mapping[str, int], values: Mapping[str, Number], shape: Shape, target_name: str,
    int_bits: int = 32, tuned: Tuned | None = None,
) -> Planned:  # fmt: skip
    """The second half of `plan`, for one shape class; `int_bits` is the width of positions and int parameters.

    What was measured (`tuned`) stands in for what the model chooses, where it is legal still.
    """
    from attncc import analysis, frontend, planner
    from attncc.codegen.tables import tables_of

    spec, goal = frontend.bind(parsed, consts), target(target_name)
    visits = analysis.kernel_visits(spec, forward=True) if goal.is_gpu else analysis.visits(spec, "q", tables=True)
    frontend.refuse_beyond(parsed, analysis.constants(visits))
    choice = planner.choose(spec, shape, goal, visits)
    made = tables_of(walked(spec, choice.plan, visits), draws=True).made
    choice = replace(choice, plan=replace(choice.plan, int_bits=int_bits, tables=made))
    planned = Planned(parsed, spec, consts, values, shape, goal, visits, choice)
    return _with_tuned(planned, tuned) if tuned and goal.is_gpu else planned


def _with_tuned(planned: Planned, tuned: Tuned) -> Planned:
    from attncc import planner

    model = planned.choice.plan
    plan = planner.with_choices(model, tuned[FORWARD], planned.target) if FORWARD in tuned else model
    made = replace(planned, choice=replace(planned.choice, plan=plan or model), tuned=tuned)
    shares_bits = plan is not None and plan.loads == "descriptor" and plan.algorithm != "fa3"
    if plan is None or (shares_bits and _any_stride(made) is None):
        return replace(planned, tuned={n: choices for n, choices in tuned.items() if n != FORWARD})
    return made


def every_kernel(planned: Planned) -> tuple[Planned, ...]:
    """The plan, and where its kernel cannot take any strides, the plan of the file that can."""
    other = general(planned)
    return (planned,) if other is planned else (planned, other)


def general(planned: Planned) -> Planned:
    """The plan of the file that takes any strides, which may be the same."""
    if planned.choice.plan.loads != "descriptor" or planned.choice.plan.scales:  # those come as they were quantised
        return planned
    other = _any_stride(planned)
    assert other is not None  # a tuned plan without one is not taken
    return replace(planned, choice=other)


def _any_stride(planned: Planned) -> Choice | None:
    """The plan beside one that loads by descriptor; None where a tuned one can have none."""
    from attncc import planner

    chosen = planned.choice.plan
    other = planner.choose(planned.spec, planned.shape, planned.target, planned.visits, any_stride=True)
    plan = planner.beside(other.plan, chosen, planned.target) if FORWARD in planned.tuned else other.plan
    return None if plan is None else replace(other, plan=replace(plan, int_bits=chosen.int_bits, tables=chosen.tables))


def kernel(
    planned: Planned, cache: Cache, tools: Toolchain | None = None, *, resources: bool = True, stage: Stage = silent
) -> Entry:
    """The cache's entry with the generated file of a plan, built on a miss.

    `resources` compiles it for the target too, so that the file says what it takes; a GPU need not be there.
    """
    resources = resources and planned.target.is_gpu
    key = kernel_key(planned, tools or toolchain(), resources)
    return cache.get_or_build(key, partial(_write_kernel, planned, resources, stage))


def kernel_key(planned: Planned, tools: Toolchain, resources: bool) -> KernelKey:
    """What `kernel` keeps a plan's file under; `resources` as it is after all, for a GPU."""
    from attncc import frontend

    flags = tools.flags if resources else (*tools.flags, ("resources", "no"))
    return KernelKey(
        spec=frontend.canonical(planned.spec), consts=tuple(sorted(planned.consts.items())),
        direction=planned.choice.plan.direction, plan=plain(planned.choice.plan), target=plain(planned.target),
        toolchain=replace(tools, flags=flags),
    )  # fmt: skip


def request_key(request: Request, tools: Toolchain) -> RequestKey:
    return RequestKey(
        spec=request.text, target=request.target, sizes=tuple(sorted(request.sizes)), dtype=request.dtype,
        values=tuple(sorted(request.values)), layout=request.layout, toolchain=tools, passes=request.passes,
        algorithm=request.algorithm,
    )  # fmt: skip


def target(name: str) -> Target:
    """A target by name. Raises RequestError that lists the known ones."""
    from attncc import targets

    try:
        return targets.target(name)
    except (KeyError, ValueError) as fault:
        raise RequestError(str(fault.args[0] if fault.args else fault)) from None


def shape_of(sizes: Mapping[str, int], dtype: str | None = None, inputs: str | None = None) -> Shape:
    """The sizes of a call with the defaults filled in: kv_heads is heads, head_dim_v is head_dim.

    `inputs` is the type that the spec asks for, `dtype` the caller's. Raises RequestError where they do not agree.
    """
    unknown = sorted(set(sizes) - set(SIZES))
    if unknown:
        raise RequestError(f"no size is called {unknown[0]!r}: there are {', '.join(SIZES)}")
    for name, size in sizes.items():
        if not 1 <= size < 2**31:
            raise RequestError(f"{name} is {size}: sizes are from 1 to 2147483647")
    if dtype and inputs and dtype != inputs:
        raise RequestError(f"the spec takes inputs of {inputs}, and --dtype asks for {dtype}")
    full = replace(Shape(), **sizes, dtype=dtype or inputs or Shape().dtype)
    full = replace(full, kv_heads=sizes.get("kv_heads", full.heads), head_dim_v=sizes.get("head_dim_v", full.head_dim))
    if full.heads % full.kv_heads:
        raise RequestError(f"heads={full.heads} is not a multiple of kv_heads={full.kv_heads}")
    return full


def split_values(spec: AttentionSpec, given: Mapping[str, Number]) -> tuple[dict[str, int], dict[str, Number]]:
    """Constants to bake in, and values of run-time scalars and free axes; defaults fill in. Raises RequestError."""
    kinds = {p.name: p.type for p in (*spec.consts, *spec.scalars)} | dict.fromkeys(spec.free_axes, "int")
    for name, value in given.items():
        if name not in kinds:
            raise RequestError(_no_such(spec, name, sorted(kinds)))
        if isinstance(value, bool) or (kinds[name] == "int" and isinstance(value, float)):
            raise RequestError(f"{name} is of type {kinds[name]} in {spec.name}, and {value!r} is not")
    consts = {p.name: given.get(p.name, p.default) for p in spec.consts}
    missing = [name for name, value in consts.items() if value is None]
    if missing:
        named, several = ", ".join(missing), "s" if len(missing) > 1 else ""
        asked = " ".join(f"--set {name}=..." for name in missing)
        raise RequestError(f"{spec.name} needs a value for its constant{several} {named}: {asked}")
    values = {p.name: given.get(p.name, p.default) for p in spec.scalars}
    values |= {name: given[name] for name in spec.free_axes if name in given}
    return (
        {name: int(value) for name, value in consts.items() if value is not None},
        {name: value for name, value in values.items() if value is not None},
    )


def refuse_values(spec: AttentionSpec, values: Mapping[str, Number], shape: Shape) -> None:
    """Raise RequestError for a run-time divisor below 1 and an int beyond 64 bits, as a call raises ValueError."""
    from attncc import analysis

    for name in sorted(analysis.divisors(spec) & values.keys()):
        if values[name] < 1:
            raise RequestError(f"{name} divides, so that it must be at least 1, and is {values[name]}")
    lengths = {"b_len": shape.batch, "h_len": shape.heads, "q_len": shape.q_len, "k_len": shape.k_len}
    fault = analysis.wide_int(analysis.computed_ints(spec), {**lengths, **values})
    fault = fault or analysis.low_divisor(analysis.computed_divisors(spec), values)
    if fault:
        raise RequestError(fault)


def _no_such(spec: AttentionSpec, name: str, known: list[str]) -> str:
    import difflib

    if any(p.name == name for p in spec.tensors):
        return f"{name} is a tensor of {spec.name}: it has no single value"
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}" if known else "it has none"
    return f"{spec.name} has no scalar parameter {name!r}: {hint}"


def _write_kernel(planned: Planned, resources: bool, stage: Stage, folder: Path) -> None:
    from attncc.codegen.launch import file_name

    chosen = planned.choice.plan
    path = folder / file_name(planned.spec.name, chosen)
    stage(f"writing {path.name}")
    path.write_text(render(planned), encoding="utf-8")
    facts: dict[str, Any] = {"predicted_shared_bytes": None, "aligned": None, "general": None}
    if resources:
        stage(f"compiling {path.name}")
        aligned = compiled(planned, path)
        tma_alone = chosen.loads == "descriptor" and (chosen.direction == FORWARD or chosen.algorithm == "fa3")
        general = None if tma_alone else compiled(planned, path, False)
        path.write_text(render(planned, aligned), encoding="utf-8")
        facts |= {"aligned": plain(aligned), "general": plain(general), "predicted_shared_bytes": chosen.shared_bytes}
    _write_json(RESOURCES, facts, folder)


def _write_json(name: str, content: Any, folder: Path) -> None:
    (folder / name).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _built(known: Entry, cache: Cache) -> Built | None:
    """The listing of a request with its kernels; None where one of them is no longer there."""
    listing = json.loads(known.text(RESULT))
    entries = [cache.load("kernel", line["digest"]) for line in listing["kernels"]]
    kernels = tuple(_listed(entry, line) for entry, line in zip(entries, listing["kernels"], strict=True) if entry)
    if len(kernels) != len(entries):
        return None
    return Built(listing["name"], kernels, tuple(_diagnostic(d) for d in listing["warnings"]))


def _listed(entry: Entry, line: Mapping[str, str]) -> Kernel:
    file = next(name for name in entry.files if name.endswith(".py"))
    facts = json.loads(entry.text(RESOURCES))
    return Kernel(
        file=file, target=line["target"], direction=line["pass"], source=entry.files[file],
        predicted_shared_bytes=facts["predicted_shared_bytes"], aligned=facts["aligned"], general=facts["general"],
        cached=not entry.fresh,
    )  # fmt: skip


def _diagnostic(facts: Mapping[str, Any]) -> Diagnostic:
    span = facts["span"]
    return Diagnostic(**{**facts, "span": Span(**span) if span else None})
