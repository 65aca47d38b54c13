"""AdaDecode (arXiv 2506.03700): speedups by task, the ablation, the threshold γ, and the rejection rate.

A speedup "by the cost model" counts the layers and exits that were run, at the costs measured here or at those of
Llama-3.1-8B on a large GPU, where more rows cost nothing and evaluating an exit costs 2.5 of 32 layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..bench.entries import Entry, Ours, Run, Task
from ..decoder import Decoder
from ..heads.exits import ORIGINAL
from ..methods import AdaDecode, Method, SelfSpeculative, Swift, UnverifiedAdaDecode
from ..methods.base import Drafter
from ..methods.leaving import LONGEST, Costs, costs_of
from ..picking import Picker
from ..picture import climbs_of
from ..pool import Sequence
from ..runtime.plain import Engine
from .findings import Claim, Findings, Plot, Table, at_most, everywhere, falling, number, percent
from .lab import KINDS, Found, Lab, known_by, same_text
from .rouge import in_order

PAPER = "AdaDecode (arXiv 2506.03700)"
ON_TASKS = {"summary": (1.14, 1.37, 1.38), "code": (1.51, 1.69, 1.73), "math": (1.48, 1.57, 1.60)}  # 8B, 13B, 34B
PROBE_8B, LAYERS_8B = 2.49, 32  # Llama-3.1-8B: the cost of an exit in layers, and the number of layers
GAMMAS = (0.4, 0.5, 0.6, 0.75, 0.85, 0.9)
FULL, OURS, LOSSY, UNTRAINED = "as published, mixed exits", "ours, calibrated", "no verification", "original head"
SWIFT, SWIFT_TENTH = "swift", "swift, a tenth skipped"
TREE, TREE_LOOKUP = "ours, a tree", "ours, a tree with lookup"
LARGE, DOMAIN = "full-parameter heads", "trained on"
MODELLED, CLOCKED = "by the cost model, 8B", "by the clock"
ABLATION = {  # consistency and speedup in the paper; except in the first row, its exits are trained on one domain
    FULL: (0.998, 1.29),
    LOSSY: (0.652, 1.64),
    UNTRAINED: (0.995, 0.84),
    LARGE: (0.997, 1.49),
}
FIXED, ON_DOMAIN = (0.996, 1.37), (0.996, 1.51)


def reproduce(lab: Lab, heads: Mapping[str, Any] | None = None) -> Findings:
    """All tables. `heads` by name: `exits` instead of the installed ones; `full`: exits with output matrices of their
    own; any other name is the domain that exits were trained on, like `math` or `code`.
    """
    lab.parts = 2
    given = dict(heads or {})
    exits = given.pop("exits", None)
    every: Any = lab.decoder.prepare(AdaDecode(heads=exits, control="calibrated"))
    layers = lab.decoder.model.layers
    three = three_of(every.exits, layers)
    variants = _variants(exits, three, given)
    tasks = lab.tasks(*ON_TASKS)
    others: dict[str, Method | str] = {
        "self-speculative": SelfSpeculative(),
        "lookahead": "lookahead",
        **_trees(exits, given),
    }
    if layers > 2:
        others |= {SWIFT: Swift(), SWIFT_TENTH: Swift(skip=0.1)}
    entries = lab.ours(others) + [Stairs(lab.decoder, method, label) for label, method in variants.items()]
    found = lab.measure("adadecode", entries, tasks, each=2 * lab.scale.each)
    sweep, plot = _sweep(lab, exits, three, tasks)
    sizes = {label: _size(lab.decoder.prepare(method)) for label, method in variants.items()}
    tables = [_main(found, others), _ablation(found, sizes, three, layers), sweep]
    return Findings(PAPER, lab.about(), tables, [plot])


def three_of(exits: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """The exits that are nearest to a quarter, a half and three quarters of the layers, as in the paper.

    >>> three_of((3, 7, 11, 15, 18, 22, 26), 30)
    (7, 15, 22)
    """
    places = (layers / 4, layers / 2, 3 * layers / 4)
    return tuple(sorted({min(exits, key=lambda exit_: (abs(exit_ - place), exit_)) for place in places}))


def _variants(exits: Any, three: tuple[int, ...], given: Mapping[str, Any]) -> dict[str, Method]:
    fixed: Any = {"control": "fixed"}
    found: dict[str, Method] = {
        FULL: AdaDecode(heads=exits, exits=three, **fixed),
        OURS: AdaDecode(heads=exits, control="calibrated"),
        LOSSY: UnverifiedAdaDecode(heads=exits, exits=three, **fixed),
    }
    found |= {_fixed(layer): AdaDecode(heads=exits, exits=(layer,), **fixed) for layer in three}
    found[UNTRAINED] = AdaDecode(heads=ORIGINAL, exits=three, **fixed)
    for name, heads in given.items():
        label = LARGE if name == "full" else f"{DOMAIN} {name}"
        found[label] = AdaDecode(heads=heads, exits=three, **fixed)
        if name != "full":
            found[f"{label}, calibrated"] = AdaDecode(heads=heads, control="calibrated")
    return found


def _trees(exits: Any, given: Mapping[str, Any]) -> dict[str, Method | str]:
    """One exit that drafts a tree, alone and with lookups in the text."""
    alone: Any = {"control": "tree", "lookup": 0.0, "recycled": 0}
    found: dict[str, Method | str] = {TREE: AdaDecode(heads=exits, **alone)}
    for name, heads in given.items():
        if name != "full":
            found[f"{DOMAIN} {name}, a tree"] = AdaDecode(heads=heads, **alone)
    return {**found, TREE_LOOKUP: AdaDecode(heads=exits, control="tree")}


def _fixed(layer: int) -> str:
    return f"one exit, layer {layer}"


class Stairs(Ours):
    """A method with early exits. Its runs count layers, exit evaluations and draft tokens, and what they cost."""

    def __init__(self, decoder: Decoder, method: Method, label: str) -> None:
        method = decoder.prepare(method)
        super().__init__(decoder, method, label, known_by(method))
        self._engine = decoder.engine
        self._watched = _Watched(self._method)
        self._method = self._watched

    def run(self, task: Task) -> Run:
        self._watched.asked[0] = 0
        run = super().run(replace(task, record=True))
        assert run.lane is not None
        method: Any = self._watched.inner
        layers = self._engine.model.layers
        steps = [step["draft"] for step in run.lane]
        count: dict[str, float] = {
            "asked": self._watched.asked[0],
            "layers": sum(stop - start for step in steps for _, start, stop in climbs_of(step["sources"], layers)),
            "guessed": sum(len(step["sources"]) - 1 for step in steps),
            "right": sum(len(step["rows"]) - 1 for step in steps),
            # A draft token counts if all before it were accepted. Those after the end of the sequence do not count.
            "wrong": sum(len(step["rows"]) < len(step["sources"]) for step in steps[:-1]),
        }
        here = costs_of(self._engine, method.exits, method.heads.heads.settings.frequent)
        for name, costs in (("cost", here), ("cost_8b", costs_at_8b(method.exits, layers))):
            spent = sum(_price(step["sources"], method.exits, costs) for step in steps)
            count[name] = (spent + count["asked"] * costs.probe) / costs.whole  # in tokens of plain decoding
        return replace(run, lane=None, counts=count)


def costs_at_8b(exits: tuple[int, ...], layers: int) -> Costs:
    """The costs of Llama-3.1-8B on a large GPU, in units of this model's layers."""
    probe = PROBE_8B * layers / LAYERS_8B
    return Costs(tuple(map(float, exits)), layers + probe, probe, (1.0,) * (LONGEST + 2))


def _price(sources: list[str], exits: tuple[int, ...], costs: Costs) -> float:
    """The cost of a step in layers, without evaluating exits."""
    costs = replace(costs, begin=0.0)  # stops are counted with the exits
    left = [exits.index(int(source.removeprefix("exit "))) for source in sources[1:]]
    return costs.whole + sum(costs.leaving(exit_, rows) for rows, exit_ in enumerate(left, 1))


@dataclass(frozen=True)
class _Watched(Method):
    """A method that counts how often its exits are evaluated."""

    inner: Method
    asked: list[int] = field(default_factory=lambda: [0])

    name = "watched"
    about = "counts how often exits are evaluated"

    def start(self, engine: Engine, sequence: Sequence, picker: Picker) -> Drafter:
        drafter = self.inner.start(engine, sequence, picker)
        control: Any = getattr(drafter, "control", None)
        if control is not None:
            decide = control.leaves

            def leaves(exit_: int, confidence: float) -> bool:
                self.asked[0] += 1
                return bool(decide(exit_, confidence))

            control.leaves = leaves  # of this sequence's own control
        return drafter


def _sum(found: Found, label: str, name: str) -> float:
    return float(sum(run["counts"][name] for run in found.of(label)))


def _tokens(found: Found, label: str) -> int:
    return sum(len(run["token_ids"]) for run in found.of(label))


def modelled(found: Found, label: str, cost: str = "cost_8b") -> float:
    """The speedup over plain decoding by the cost model."""
    return _tokens(found, label) / _sum(found, label, cost)


def rejected(found: Found, label: str) -> float | None:
    """The rejection rate, of the draft tokens that count."""
    right, wrong = _sum(found, label, "right"), _sum(found, label, "wrong")
    return wrong / (right + wrong) if right + wrong else None


def consistency(found: Found, label: str) -> float:
    """The similarity to plain decoding's output: common tokens in the same order."""
    plain = {(run["task"], run["prompt"], run["turn"]): run["token_ids"] for run in found.of(found.labels[0])}
    shares = [in_order(run["token_ids"], plain[run["task"], run["prompt"], run["turn"]]) for run in found.of(label)]
    return sum(shares) / len(shares)


def _main(found: Found, others: Mapping[str, Any]) -> Table:
    labels = [label for label in found.labels[1:] if label in (FULL, OURS, *others) or label.startswith(DOMAIN)]
    rows = []
    for task in [*found.tasks, ""]:
        paper = next((values for kind, values in ON_TASKS.items() if task in KINDS[kind]), None)
        figures = [f"{number(found.steps(label, task))}, {number(found.speed(label, task), '×')}" for label in labels]
        rows.append([task or "all", *figures, " / ".join(f"{value:.2f}×" for value in paper) if paper else ""])
    controls = (FULL, OURS, TREE)
    best = {task: max(found.speed(label, task) or 0.0 for label in controls) for task in found.tasks}
    by_kind = {kind: found.speed_on(FULL, kind) for kind in ("code", "math", "summary")}
    swift = found.best([SWIFT, SWIFT_TENTH], found.speed) or SWIFT
    claims = [
        same_text(found),
        everywhere("faster than plain decoding on every task by the clock, with the best control", best, 1.0),
        falling("code gains more than summaries, by the clock", {k: by_kind[k] for k in ("code", "summary")}),
        falling("math gains more than summaries, by the clock", {k: by_kind[k] for k in ("math", "summary")}),
        falling("faster than self-speculation, by the clock", {n: found.speed(n) for n in (OURS, "self-speculative")}),
        falling("faster than SWIFT, by the clock", {n: found.speed(n) for n in (OURS, swift)}),
    ]
    note = (
        "In each cell: tokens per full pass, and the measured speedup over plain decoding. SWIFT skips 45 % of the "
        "layers, as in its own paper; the AdaDecode paper has it at 1.08×, 1.33×, 1.08× (13B; summaries, code, math). "
        "Here it skips whole layers, and searches for them while decoding. A tree: one exit drafts several tokens for "
        "the next position, and all rows run the whole model; with lookup, on a GPU, recycled tokens are drafted too."
    )
    columns = ["task", *labels, "speed in the paper: 8B / 13B / 34B"]
    return Table("Speed by task (the paper's main table)", columns, rows, claims, note)


def _size(method: Any) -> tuple[str, str]:
    """How many exits a method has, and their parameters in millions."""
    every = sum(weight.numel() for weight in method.heads.heads.parameters())
    if method.heads.name == ORIGINAL:
        every = 0
    return str(len(method.exits)), f"{every * len(method.exits) / len(method.heads.heads.layers) / 1e6:.1f}"


def _ablation(found: Found, sizes: Mapping[str, tuple[str, str]], three: tuple[int, ...], layers: int) -> Table:
    labels = list(sizes)
    fixed = found.best([_fixed(layer) for layer in three], found.speed)
    rows = []
    for label in labels:
        paper = FIXED if label == fixed else ABLATION.get(label)
        if label.startswith(DOMAIN) and label.removeprefix(f"{DOMAIN} ") in KINDS:
            paper = ON_DOMAIN
        same = sum(run["equal"] for run in found.of(label))
        rows.append(
            [
                label,
                *sizes[label],
                f"{same} of {len(found.of(label))}",
                number(consistency(found, label), digits=3),
                number(found.steps(label)),
                percent(_climbed(found, label, layers)),
                number(_sum(found, label, "asked") / _tokens(found, label)),
                percent(rejected(found, label)) if label != LOSSY else "",
                number(modelled(found, label, "cost"), "×"),
                number(modelled(found, label), "×"),
                number(found.speed(label), "×"),
                number(found.figure("tokens_per_second", label), digits=0),
                number(paper[0], digits=3) if paper else "",
                number(paper[1], "×") if paper else "",
            ]
        )
    claims = _orders(found, labels, fixed)
    claims.append(falling("ours is faster than the published (ours)", {n: found.speed(n) for n in (OURS, FULL)}))
    alike = {label: consistency(found, label) for label in (FULL, LOSSY)}
    claims.append(falling("inconsistent without verification", alike))
    return Table("Ablation", COLUMNS, rows, claims + _domains(found, labels), NOTE)


COLUMNS = (
    "variant",
    "exits",
    "their parameters, millions",
    "same text",
    "consistency",
    "tokens per full pass",
    "layers run per token",
    "exits evaluated per token",
    "rejected",
    "speed by the cost model, here",
    MODELLED,
    "speed by the clock",
    "tokens/s",
    "consistency, paper",
    "speed, paper",
)
NOTE = (
    "Consistency: the longest common subsequence with plain decoding's output. Layers run: plain decoding is 100 %. "
    "As published: three exits, γ = 0.75, at most 5 draft tokens. Calibrated: all exits, no threshold, and plain "
    "decoding where it predicts a speedup below 1.05. "
    "The published variant's exits are trained on all domains, as for the paper's 1.29×; those trained on one domain "
    "are shown beside the paper's 1.51×, and judged on that domain only. "
    "Claims are judged by measured time, as in the paper."
)


def _climbed(found: Found, label: str, layers: int) -> float:
    """The share of the layers that is run, per token."""
    return _sum(found, label, "layers") / _tokens(found, label) / layers


def _orders(found: Found, labels: list[str], one: str | None) -> list[Claim]:
    """The paper's ranking, by measured speed; `one` is the best single exit."""
    speed = found.speed
    order = {FULL: speed(FULL), one or "one exit": speed(one) if one else None, UNTRAINED: speed(UNTRAINED)}
    claims = [
        falling("full > one exit > original head", order),
        falling("faster without verification", {LOSSY: speed(LOSSY), FULL: speed(FULL)}),
    ]
    if LARGE in labels:
        light = {"light + 5 %": 1.05 * (speed(FULL) or 0.0), LARGE: speed(LARGE)}
        claims.append(falling("full-parameter heads gain less than 5 %", light))
    return claims


def _domains(found: Found, labels: list[str]) -> list[Claim]:
    """Exits trained on one domain, compared on that domain with those trained on all."""
    claims = []
    for label in labels:
        domain = label.removeprefix(f"{DOMAIN} ")
        if label.startswith(DOMAIN) and domain in KINDS:
            speeds = {name: found.speed_on(name, domain) for name in (label, FULL)}
            claims.append(falling(f"on {domain}, exits trained on it are faster than mixed ones", speeds))
    return claims


def _sweep(lab: Lab, exits: Any, three: tuple[int, ...], tasks: list[str]) -> tuple[Table, Plot]:
    entries: list[Entry] = lab.ours({})
    labels = {gamma: f"γ = {gamma:g}" for gamma in GAMMAS}
    for gamma, label in labels.items():
        method = AdaDecode(heads=exits, exits=three, control="fixed", gamma=gamma)
        entries.append(Stairs(lab.decoder, method, label))
    found = lab.measure("adadecode-gamma", entries, tasks)
    rows, speeds = [], []
    for gamma, label in labels.items():
        speeds.append(modelled(found, label))
        figures = [number(found.steps(label)), percent(rejected(found, label)), number(speeds[-1], "×")]
        rows.append([f"{gamma:g}", *figures, number(found.speed(label), "×")])
    clocked = [found.speed(label) or 0.0 for label in labels.values()]
    claims = [
        same_text(found),
        at_most("speed by the clock varies by at most 10 % with γ", 100 * (1 - min(clocked) / max(clocked)), 10, " %"),
        at_most("at γ = 0.85 at most 6 % are rejected", _hundred(rejected(found, labels[0.85])), 6, " %"),
    ]
    columns = ["γ", "tokens per full pass", "rejected", "speed by the cost model, 8B", "speed by the clock"]
    lines = {
        MODELLED: list(zip(GAMMAS, speeds, strict=True)),
        CLOCKED: list(zip(GAMMAS, clocked, strict=True)),
    }
    plot = Plot("gamma", "γ", "speed, plain decoding = 1", lines)
    return Table("The threshold γ, and rejected draft tokens", columns, rows, claims), plot


def _hundred(share: float | None) -> float | None:
    return None if share is None else 100 * share
