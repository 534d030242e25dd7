"""The generated files that serve an attention's calls: found by what a call is, else planned and built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attncc import pipeline
from attncc.ir import Schedule, Shape
from attncc.runtime import headstart, specs, winners
from attncc.runtime.cache import Cache, Entry
from attncc.runtime.device import INTERPRETED_AS, INTERPRETER
from attncc.runtime.keys import CallKey, Toolchain, key_digest, plain, toolchain
from attncc.runtime.loader import lasting, load_module

if TYPE_CHECKING:
    from attncc.frontend import Parsed
    from attncc.runtime.specs import Reading

ROUTE = "route.json"
Place = tuple[str, "winners.Device | None"]  # a target, and the device whose winners hold


@dataclass(frozen=True)
class Route:
    """What serves a class of calls: the algorithm, and the file by its digest."""

    algorithm: str
    file: str


class Kernels:
    """Files of one spec, as modules; each is loaded once. `tuned` takes the place of what was kept for a device."""

    def __init__(
        self, parsed: Parsed, consts: Mapping[str, int], text: str, tuned: pipeline.Tuned | None,
        planned: pipeline.Planned | None = None,
    ) -> None:  # fmt: skip
        self.parsed, self.consts, self.text, self.tuned = parsed, consts, text, tuned
        self._given = planned
        self._plans: dict[tuple[Any, ...], pipeline.Planned] = {}
        self._routes: dict[tuple[Any, ...], Route] = {}
        self._modules: dict[tuple[str, str], ModuleType] = {}
        self._unkept: Parsed | None = None  # what was read, and is kept with the first kernel

    @cached_property
    def cache(self) -> Cache:
        return Cache()

    @cached_property
    def tools(self) -> Toolchain:
        return toolchain()

    def begin(self, reading: Reading) -> None:
        """Go on with the cache that a text was looked for in."""
        if reading.cache is not None and reading.tools is not None:
            self.cache, self.tools = reading.cache, reading.tools
        self._unkept = reading.parsed if reading.fresh else None

    def having(self, tuned: pipeline.Tuned, planned: pipeline.Planned) -> Kernels:
        """The same with these choices, of which `planned` is the plan for any shape; loads nothing twice."""
        made = Kernels(self.parsed, self.consts, self.text, tuned, planned)
        made.cache, made.tools = self.cache, self.tools
        return made

    def forget(self) -> None:
        """Look winners up again."""
        self._plans.clear()
        self._routes.clear()

    def planned(self, place: Place, shape: Shape, int_bits: int) -> pipeline.Planned:
        """The forward pass of a bucket of shapes, and the choices for the others."""
        if self._given is not None and self._given.choice.plan.int_bits == int_bits:
            return self._given
        key = place, shape, int_bits
        if key not in self._plans:
            interpreted, tuned = place[0] == INTERPRETER, self._tuned(place, shape)
            goal, parsed = (INTERPRETED_AS, self._triton()) if interpreted else (place[0], self.parsed)
            self._plans[key] = pipeline.plan_parsed(parsed, self.consts, {}, shape, goal, int_bits, tuned)
        return self._plans[key]

    def _triton(self) -> Parsed:
        """The spec for Triton's interpreter, which knows no Gluon: fa2 there in place of fa3."""
        spec = self.parsed.spec
        if spec.schedule(INTERPRETED_AS).asked not in (None, "fa3"):
            return self.parsed
        pinned = (*spec.schedules, Schedule(INTERPRETED_AS, algorithm="fa2"))
        return replace(self.parsed, spec=replace(spec, schedules=pinned))

    def _tuned(self, place: Place, shape: Shape) -> pipeline.Tuned:
        if self.tuned is not None or place[1] is None:
            return self.tuned or {}
        return winners.find(self.cache, self.text, place[1], shape)

    def route(self, place: Place, shape: Shape, int_bits: int, aligned: bool = True) -> Route:
        """By the cache, else by a plan, for tensors that TMA takes (`aligned`) or for any: the second kernel is planned
        when a call needs it. TypeError, PlanError, … as planning raises them."""
        key = place, shape, int_bits, aligned
        if self._unkept is not None:
            specs.keep(self.cache, self.tools, self._unkept)
            self._unkept = None
        if key not in self._routes:
            if self._given is not None:
                self._routes[key] = self._planned_route(*key)
            else:
                asked = CallKey(
                    spec=self.text, consts=tuple(sorted(self.consts.items())), target=place[0], shape=plain(shape),
                    int_bits=int_bits, tuned=plain(self._tuned(place, shape)), aligned=aligned, toolchain=self.tools,
                )  # fmt: skip
                entry = self.cache.get_or_build(asked, partial(self._write_route, *key))
                self._routes[key] = Route(**json.loads(entry.text(ROUTE)))
        return self._routes[key]

    def _planned_route(self, place: Place, shape: Shape, int_bits: int, aligned: bool) -> Route:
        if place[1] is not None:  # on a GPU that is here
            headstart.begin()
        with lasting():
            wanted = self._wanted(place, shape, int_bits, aligned)
        return Route(wanted.choice.plan.algorithm, key_digest(pipeline.kernel_key(wanted, self.tools, False)))

    def _wanted(self, place: Place, shape: Shape, int_bits: int, aligned: bool) -> pipeline.Planned:
        planned = self.planned(place, shape, int_bits)
        return planned if aligned else pipeline.general(planned)

    def _write_route(self, place: Place, shape: Shape, int_bits: int, aligned: bool, folder: Path) -> None:
        content = plain(self._planned_route(place, shape, int_bits, aligned))
        (folder / ROUTE).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    def forward(self, place: Place, shape: Shape, int_bits: int, aligned: bool) -> ModuleType:
        """The file for a call's tensors: `aligned` are those that TMA takes."""
        entry = self.cache.load("kernel", self.route(place, shape, int_bits, aligned).file)
        if entry is None:
            entry = self._file(self._wanted(place, shape, int_bits, aligned))
        return self._module(place[0], entry)

    def other(self, place: Place, planned: pipeline.Planned) -> ModuleType:
        """The file of another pass."""
        return self._module(place[0], self._file(planned))

    def _file(self, planned: pipeline.Planned) -> Entry:
        with lasting():
            return pipeline.kernel(planned, self.cache, self.tools, resources=False)

    def _module(self, target: str, entry: Entry) -> ModuleType:
        known = (target, entry.digest)
        if known not in self._modules:
            file = next(name for name in entry.files if name.endswith(".py"))
            source, name = entry.files[file], f"attncc_generated_{entry.digest[:16]}_{target}"
            self._modules[known] = module = load_module(entry.path / file, source, name)
            if entry.key["target"]["backend"] and target != INTERPRETER:
                from attncc.runtime.binaries import Binaries, own_kernels
                from attncc.runtime.launch import Launcher

                Binaries(self.cache, sha256(source).hexdigest()).attach(module)
                for kernel in own_kernels(module):
                    if Launcher.takes(entry.key["target"]["backend"]):
                        Launcher(kernel).attach()
        headstart.wait()  # the launch asks the driver
        return self._modules[known]
