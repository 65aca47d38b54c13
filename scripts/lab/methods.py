"""The methods that commands measure, by label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outpace import (
    AdaDecode,
    Amphista,
    Auto,
    Autoregressive,
    Block,
    DraftModel,
    Hydra,
    Jacobi,
    Lookahead,
    Medusa,
    Method,
    PromptLookup,
    SelfSpeculative,
)
from outpace.methods.auto import FLOOR, MEMORY, NODES
from outpace.methods.headed import PLACES, REACH, Ready
from outpace.models.hf import HFModel
from outpace.sources.base import Plan, Source
from outpace.sources.history import History
from outpace.sources.recycle import Recycle
from outpace.sources.window import Settings, Window
from outpace.step.chances import Chances

from .models import Setup, first_layers

PLAIN = "plain"
HEADED: dict[str, Any] = {"medusa": Medusa, "hydra": Hydra, "amphista": Amphista, "block": Block}


def named(methods: dict[str, Method], only: Sequence[str] | None) -> dict[str, Method]:
    """Plain decoding, and the methods that `only` names by their labels, or by how several labels start; or all."""
    starts = tuple(word for word in only or () if word not in methods)
    chosen = {
        label: method
        for label, method in methods.items()
        if not only or label in only or (starts and label.startswith(starts))
    }
    return {PLAIN: Autoregressive(), **chosen}


def best_heads(setup: Setup) -> Ready | bool:
    """Those that `auto` prefers on a GPU."""
    return setup.heads.get("block") or setup.heads.get("amphista") or False


def usual(setup: Setup, times: int) -> dict[str, Method]:
    """Every method with the settings that suit a GPU, heads with and without lookup, and `auto`."""
    found: dict[str, Method] = {
        "jacobi (16)": Jacobi(),
        "prompt-lookup (8 rows)": PromptLookup(rows=8, priced=False),
        "prompt-lookup (32 rows)": PromptLookup(rows=32, priced=False),
        "prompt-lookup (64 rows)": PromptLookup(priced=False),
        "prompt-lookup, priced": PromptLookup(rows=128),
        "lookahead (4, 3, 4)": Lookahead(window=4, ngram=3, guesses=4),
        "lookahead (7, 4, 7)": Lookahead(window=7, ngram=4, guesses=7),
        "lookahead (15, 5, 15)": Lookahead(),
        "self-speculative": SelfSpeculative(exit=setup.decoder.model.layers * 2 // 3, length=3),
    }
    if "exits" in setup.heads:
        exits = setup.heads["exits"]
        found["adadecode"] = AdaDecode(heads=exits)
        found["adadecode, calibrated"] = AdaDecode(heads=exits, control="calibrated")
        for layer in exits.heads.settings.layers[:5]:
            tree = AdaDecode(heads=exits, control="tree", exits=(layer,), lookup=0.0, recycled=0)
            found[f"adadecode, a tree of exit {layer} alone"] = tree
        for gamma in (0.5, 0.75, 0.9):
            found[f"adadecode (γ {gamma})"] = AdaDecode(heads=exits, control="fixed", gamma=gamma)
    for kind, make in HEADED.items():
        if kind in setup.heads:
            heads = setup.heads[kind]
            for rows in (16, 32, 64):
                found[f"{kind} ({rows} rows)"] = make(heads=heads, rows=rows, lookup=0.0, priced=False)
                found[f"{kind} with lookup ({rows} rows)"] = make(heads=heads, rows=rows, priced=False)
            found[f"{kind} with lookup, recycled"] = make(heads=heads, rows=64, recycled=8, priced=False)
            found[f"{kind} with lookup, priced"] = make(heads=heads, rows=64)
    # `auto` finds neither shipped heads for a widened model, nor those of --heads.
    given = times > 1 or not all(ready.shipped for ready in setup.heads.values())
    found["auto"] = Auto(heads=best_heads(setup)) if given else Auto()
    if "amphista" in setup.heads:
        found["auto with amphista"] = Auto(heads=setup.heads["amphista"])
    found["auto without heads"] = Auto(heads=False)
    return found


def published(heads: dict[str, Ready]) -> dict[str, Method]:
    """The papers' own methods, and ours without one improvement each."""
    found: dict[str, Method] = {
        "jacobi": Jacobi(),
        "prompt-lookup, a chain": PromptLookup(tree=False),
        "prompt-lookup, 16 rows": PromptLookup(rows=16),
        "prompt-lookup": PromptLookup(),
        "lookahead as published, no prompt pool": Lookahead(published=True, prompt_pool=False),
        "lookahead as published": Lookahead(published=True),
        "lookahead": Lookahead(),
        "lookahead, no prompt pool": Lookahead(prompt_pool=False),
        "lookahead, keys of one token": Lookahead(longest_key=1),
        "lookahead, reach 0": Lookahead(reach=0),
        "lookahead, no recycling": Lookahead(recycle=False),
    }
    for kind, make in HEADED.items():
        if kind in heads:
            ready: dict[str, Any] = {"heads": heads[kind]}
            found |= {  # heads as published draft alone
                kind: make(**ready, lookup=0.0),
                f"{kind}, measured tree": make(**ready, lookup=0.0, tree="measured"),
                f"{kind}, not coupled": make(**ready, lookup=0.0, coupled=False),
                f"{kind}, 16 rows": make(**ready, lookup=0.0, rows=16),
                f"{kind} with lookup": make(**ready),
                f"{kind} with lookup, 16 rows": make(**ready, rows=16),
                f"{kind} with lookup, recycled": make(**ready, recycled=8),
            }
            if kind == "block":
                del found["block, measured tree"], found["block, not coupled"]
    return found


def lossless(setup: Setup, small: bool = False) -> dict[str, Method]:
    """Every kind of method, for comparing outputs; with smaller trees for more runs."""
    found: dict[str, Method] = {
        "jacobi": Jacobi(window=4 if small else 16),
        "prompt-lookup": PromptLookup(rows=8 if small else 64, gate=0.4 if small else 0.0, priced=False),
        "lookahead": Lookahead(window=5, ngram=4, guesses=5) if small else Lookahead(),
        "draft-model": DraftModel(model=HFModel(first_layers(setup.model, 3)), length=4),
        "auto": Auto(heads=best_heads(setup)),
        "self-speculative": SelfSpeculative(exit=setup.decoder.model.layers * 2 // 3, length=3),
    }
    for kind, make in HEADED.items():
        if kind in setup.heads:
            found[kind] = make(heads=setup.heads[kind], rows=16 if small else 64, priced=False)
    if "exits" in setup.heads:
        found["adadecode"] = AdaDecode(heads=setup.heads["exits"], control="fixed", gamma=0.4)
    return found


@dataclass(frozen=True)
class Parts(Method):
    """Some of the sources that need no training, in one tree of a fixed number of rows."""

    name = "parts"

    history: int = 16  # the longest match; 0: none
    ranks: int = 8  # tokens that are recycled; 0: none
    runners: int = 7
    carried: bool = True  # from sequence to sequence
    window: int = 0  # lookahead's columns; 0: none
    rows: int = 64

    def plan(self, engine: Any) -> Plan:
        def sources(lanes: int, device: torch.device) -> list[Source]:
            found: list[Source] = []
            if self.window:
                found.append(
                    Window(Settings(self.window, 4, 7, 3, recycle=True, published=False, read=False), lanes, device)
                )
            if self.history:
                found.append(History(self.history, REACH, PLACES, "lookup", device, FLOOR))
            if self.ranks:
                paths = NODES - PLACES * REACH - 2 * self.runners
                found.append(Recycle(self.ranks, paths, lanes, device, MEMORY, self.runners, self.carried))
            return found

        return Plan(sources, self.rows, learned=Chances)

    def start(self, *_: Any) -> Any:
        raise NotImplementedError("these sources need a GPU")


class Largest(Auto):
    """`auto` with the most rows in every step, whatever they cost. It learns acceptance anew."""

    def plan(self, engine: Any) -> Plan:
        return replace(super().plan(engine), sizes=(), learned=Chances)


def ablations(setup: Setup) -> dict[str, Method]:
    """`auto` with and without heads, and trees without some of its sources."""
    found: dict[str, Method] = {}
    for kind in ("block", "amphista"):
        if kind in setup.heads:
            heads = setup.heads[kind]
            found[f"auto with {kind}"] = Largest(heads=heads)
            found[f"{kind} with lookup, recycled"] = HEADED[kind](heads=heads, recycled=8, priced=False)
    return found | {
        "lookahead (7, 4, 7)": Lookahead(window=7, ngram=4, guesses=7),
        "the same, its window not recycled": Lookahead(window=7, ngram=4, guesses=7, recycle=False),
        "auto without heads": Largest(heads=False),
        "history, recycling, runners-up": Parts(),
        "the same, nothing carried": Parts(carried=False),
        "the same, matches of 4 at most": Parts(history=4),
        "the same, no history": Parts(history=0),
        "the same, no recycling": Parts(ranks=0),
        "the same, best token alone recycled": Parts(ranks=2, runners=0),
        "the same, no runners-up": Parts(runners=0),
        "the same with lookahead's window of 7": Parts(window=7),
        "the same with a window of 3": Parts(window=3),
        "the same, 32 rows": Parts(rows=32),
        "the same, 128 rows": Parts(rows=128),
    }
