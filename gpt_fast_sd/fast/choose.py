"""Which body stands in for which function of the core: for a model, its cache and this machine.

Each is used only where it serves, and only while what it stands for reads as it did when it was written (marks.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..bodies import Bodies, Body
from ..steps import Backend, Runner, Step
from .compile import CompiledStep, Options
from .cpu import stand_ins as cpp
from .cpu.attention_cpp import cpu_attention_fits
from .cpu.fused_layers import FusedLayers, fuses
from .cpu.generated import GeneratedLinear, as_written, prepare_for_inductor
from .cpu.instruction_sets import chosen
from .cpu.linear import kernels_are_built
from .cpu.packing import PackedFeedForward, is_packed, pack_linears
from .cpu.round import available as round_builds
from .cpu.sampling import LEAST_VOCABULARY
from .cpu.sampling import available as distributions_build
from .devices import traits_of
from .linear_planes import PlanesLinear, UpperByFloat8, UpperLinear
from .marks import STANDS_FOR, edited, name_of, original
from .ops.choice import triton_serves
from .triton import stand_ins as triton


@dataclass(frozen=True)
class FastBackend(Backend):
    """Runs steps compiled, and bodies in the places of the core's functions."""

    device: torch.device
    options: Options | None  # Inductor's; None: steps run eagerly, with bodies that are built already
    stand_ins: bool = True  # False: the core as it is written
    told: set[tuple[str, str]] = field(default_factory=set)  # what was said to have been edited

    @property
    def compiles(self) -> bool:  # type: ignore[override]
        """Whether steps are compiled."""
        return self.options is not None

    @property
    def chunks(self) -> tuple[int, ...]:
        """Prompt tokens of a prefill step."""
        return traits_of(self.device).chunks

    def step(self, fn: Callable[..., Any]) -> Step:
        """A step that runs this function."""
        return Step(fn) if self.options is None else CompiledStep(fn, self.options)

    def sampling_step(self, fn: Callable[..., Any]) -> Step:
        """A step that judges or chooses."""
        return self.step(fn) if traits_of(self.device).compiles_sampling else Step(fn)

    def uses_kernels(self, runner: Runner) -> bool:
        """Whether steps use our kernels: those that run eagerly on a CPU only if these are built already."""
        if not self.stand_ins:
            return False
        if self.compiles or self.device.type != "cpu":
            return self.compiles or triton_serves(self.device)
        config, dtype = runner.model.config, runner.model.embedding.weight.dtype
        return kernels_are_built(config.head_dim, dtype, config.vocab_size, runner.cache.format)

    def pack(self, runner: Runner, *, few_rows: bool = False) -> None:
        """Lay out a model's weights, in place, as the CPU's products read them if steps use these.

        Without bodies its modules become those that the core has.
        """
        if not self.stand_ins:
            as_written(runner.model)
        if self.device.type == "cpu" and self.uses_kernels(runner):
            pack_linears(runner.model, few_rows=few_rows)
            if self.compiles:
                prepare_for_inductor(runner.model)
            self._announce({"feed-forward layers": edited(PackedFeedForward)}, "C++")

    def bodies(self, runner: Runner) -> Bodies:
        """What runs in the places of the core's functions, after the weights were laid out."""
        found = self._bodies(runner)
        kinds = {type(module) for module in runner.model.modules()}
        if kinds & {PlanesLinear, UpperLinear, UpperByFloat8}:
            who = "Triton, planes" if triton_serves(self.device) else "bf16 weights, joined from planes in each call"
            who = "torch's float8, the upper plane" if UpperByFloat8 in kinds else who
            found = replace(found, names=(*found.names, ("products", who)))
        return found

    def _bodies(self, runner: Runner) -> Bodies:
        """All of them but products in planes.

        Triton's attention reads nothing past a row's last entry, so a cache that it alone reads is not cleared: zeroing
        the rest of a slot of 131,072 tokens, 17 GB of an 8 B model, takes as long as a short prompt.
        """
        cache = runner.cache
        if self.stand_ins and triton_serves(self.device):
            bodies = self._put_in(Bodies(), self._triton())
            # one reader that loads such entries is enough, whoever comes after it
            cache.clears = bool(cache.clears) or ("attention", "Triton") not in bodies.names
            return bodies
        cache.clears = True
        if not self.stand_ins:
            return Bodies()
        if self.device.type != "cpu":
            return Bodies()
        bodies = self._put_in(Bodies(), {"top-k and top-p": ({"probabilities": triton.probabilities}, "NumPy's sort")})
        if not self.uses_kernels(runner):
            return bodies
        products: tuple[tuple[str, str], ...] = ()
        if is_packed(runner.model):
            products = (("products", "C++, packed weights"),)
        elif self.compiles and any(type(m) is GeneratedLinear for m in runner.model.modules()):
            products = (("products", "Inductor, of modules written for it"),)
        bodies = self._put_in(bodies, self._cpp(runner))
        return replace(bodies, names=(*bodies.names, *products))

    def _triton(self) -> dict[str, tuple[dict[str, Body], str]]:
        attention = {name: getattr(triton, name) for name in ("dense", "dense_of_slots", "listed")}
        names = "top_pages", "guided_select", "page_bounds", "quest_pages"
        selection = {name: getattr(triton, name) for name in names}
        return {
            "attention": (attention, "Triton"),
            "selection": (selection, "Triton"),
            "top-k and top-p": ({"probabilities": triton.probabilities}, "Triton"),
        }

    def _cpp(self, runner: Runner) -> dict[str, tuple[dict[str, Body], str]]:
        """The parts of the work that C++ does: each with its bodies, and who that is."""
        model, form, parts = runner.model, runner.cache.format, dict[str, tuple[dict[str, Body], str]]()
        who, asked = f"C++, {chosen().name}", model.embedding.weight.dtype if form.scaled else form.dtype
        if cpu_attention_fits(model.config.head_dim, asked, form):
            parts["attention"] = {"dense": cpp.dense, "listed": cpp.listed}, who
        if runner.group.size == 1 and fuses(model, runner.cache):
            layers = FusedLayers(model)
            parts["layers"] = {"hidden": layers, "logits": layers.logits}, "C++, one call"
        if not traits_of(self.device).compiles_sampling or not self.compiles:
            if round_builds():
                names = ["draw", "uniform", "judge_sampled", "commit", *(["verify_greedy"] * (runner.group.size == 1))]
                parts["acceptance"] = {name: getattr(cpp, name) for name in names}, who
            if model.config.vocab_size >= LEAST_VOCABULARY and distributions_build():
                parts["top-k and top-p"] = {"probabilities": cpp.probabilities}, who
        return parts

    def _put_in(self, bodies: Bodies, parts: dict[str, tuple[dict[str, Body], str]]) -> Bodies:
        """The table with the bodies of these parts, except those whose originals were edited."""
        for part, (found, who) in parts.items():
            changed = {name: edited(FusedLayers if part == "layers" else body) for name, body in found.items()}
            self._announce({part: sorted({name for names in changed.values() for name in names})}, who)
            kept = {} if any(changed.values()) else found
            own = {name: body for name, body in kept.items() if name in Bodies.__dataclass_fields__}
            others = {original(STANDS_FOR[name_of(kept[name])][0]): kept[name] for name in kept.keys() - own.keys()}
            others_done = (named for named in bodies.names if named[0] != part)
            names = (*others_done, (part, who)) if kept else bodies.names
            bodies = replace(bodies, **own, others={**bodies.others, **others}, names=names)
        return bodies

    def _announce(self, edits: dict[str, list[str]], who: str) -> None:
        """Say once in a line of each function that was edited which part of the work runs as the core is written."""
        for part, names in edits.items():
            for name in names:
                if (name, part) not in self.told:
                    self.told.add((name, part))
                    where = name.replace(":", ".").removeprefix("gpt_fast_sd.")
                    said = f"{where} was edited: {part} as the core is written, without the body in {who}"
                    warnings.warn(said, stacklevel=2)
