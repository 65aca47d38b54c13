"""Amphista (arXiv 2406.13170): accuracies of heads, tokens per step by task and temperature, ablations.

Medusa, Hydra and Amphista draft with one shared tree, as in the paper. Its figures are those of Vicuna-33B on
MT-Bench.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from ..methods import Amphista, Hydra, Medusa, Method
from ..methods.headed import Headed
from ..training.data import HELD_OUT, read_answers
from ..training.trainer import Plan, Trainer
from .findings import Claim, Findings, Plot, Table, everywhere, falling, number
from .lab import ByRule, Found, Lab, same_text

PAPER = "Amphista (arXiv 2406.13170)"
TO_PLAIN, TO_MEDUSA = 2.75, 1.40
TEMPERATURES = (0.0, 0.7)
KINDS: dict[str, type[Headed]] = {kind.name: kind for kind in (Medusa, Hydra, Amphista)}
LOOKUP, GROWN, ALONE = "amphista with lookup", "amphista, trees by confidence", "amphista, not coupled"
TYPICAL = "amphista, typical acceptance (LOSSY)"
TRAINING = "on held-out answers of the training kind, stored with the heads"


def reproduce(lab: Lab, heads: Mapping[str, Any] | None = None, answers: Path | None = None, rows: int = 0) -> Findings:
    """All tables. `heads` by name: `medusa`, `hydra` and `amphista` instead of the installed ones; any other name is a
    variant of Amphista. With a folder of `answers` from `outpace train`, heads are also evaluated on its held-out ones.
    `rows` is the size of a draft; 0: 64, on a CPU 8.
    """
    lab.parts = len(TEMPERATURES)
    given = dict(heads or {})
    same: Any = {"rows": rows or (8 if lab.cpu else 64), "lookup": 0.0, "priced": False}
    ready: dict[str, Any] = {
        name: lab.decoder.prepare(kind(heads=given.pop(name, None), **same)) for name, kind in KINDS.items()
    }
    variants: dict[str, Any] = {
        name: lab.decoder.prepare(Amphista(heads=folder, **same)) for name, folder in given.items()
    }
    tree = shared_tree(ready["amphista"], same["rows"])
    tried: dict[str, Method | str] = {
        **{name: replace(method, tree=tree) for name, method in ready.items()},
        GROWN: ready["amphista"],
        LOOKUP: replace(ready["amphista"], lookup=0.5),
        ALONE: replace(ready["amphista"], coupled=False),
        **{f"amphista, {name}": replace(method, tree=tree) for name, method in variants.items()},
    }
    tables, plots = list[Table](), list[Plot]()
    if all(method.heads.about.accuracies for method in ready.values()):
        table, plot = _accuracies({**ready, **variants}, TRAINING)
        tables.append(table)
        plots.append(plot)
    if answers is not None:
        tables.append(_judged(lab, {**ready, **variants}, answers))
    for temperature in TEMPERATURES:
        # Coupling and the acceptance rules concern sampling only.
        used = {label: method for label, method in tried.items() if temperature or label != ALONE}
        lossy = [ByRule(lab.decoder, replace(ready["amphista"], tree=tree), TYPICAL, "typical")] if temperature else []
        part = f"amphista-{temperature:g}"
        found = lab.measure(part, [*lab.ours(used), *lossy], lab.tasks(), temperature=temperature)
        tables.append(_by_task(found, temperature, same["rows"]))
    return Findings(PAPER, lab.about(), tables, plots)


def shared_tree(method: Any, rows: int) -> list[list[int]]:
    """The tree that all kinds of heads draft with: the one stored with these heads, cut to `rows` rows, root included.

    Its paths are in the order of their value, so the first ones form the best smaller tree.
    """
    if not method.heads.about.tree:
        raise InputError("these Amphista heads have no tree. Train them with `outpace train`, which measures one.")
    return [list(path) for path in method.heads.about.tree[: rows - 1]]


def _accuracies(methods: Mapping[str, Any], where: str) -> tuple[Table, Plot]:
    return _table({name: method.heads.about.accuracies for name, method in methods.items()}, where)


def _judged(lab: Lab, methods: Mapping[str, Any], answers: Path) -> Table:
    """Accuracies on held-out answers."""
    if lab.model is None:
        raise InputError("evaluating answers needs the transformers model. Pass it to the lab.")
    folders = [answers / name for name in HELD_OUT if (answers / name).is_dir()] or [answers]
    texts = [text for folder in folders for text in read_answers(folder)]
    adapted: Any = lab.decoder.model
    # A trainer needs heads in float32; the methods draft with their own copies.
    parts = {name: method.heads.heads.copied(adapted.device, torch.float32) for name, method in methods.items()}
    trainer = Trainer(lab.model, adapted.norm, adapted.ends(), parts, Plan(updates=1))
    found = trainer.accuracies(texts)
    return _table({name: ranks.tolist() for name, ranks in found.items()}, f"on {len(texts)} held-out answers")[0]


NOTE = (
    "Top-1 (top-5) accuracy, greedy, on the target's own answers to prompts like those that the heads were trained on; "
    "on other prompts it is lower. Hydra's heads are given the true tokens before each prediction, not draft tokens."
)


def _table(accuracies: Mapping[str, Sequence[Sequence[float]]], where: str) -> tuple[Table, Plot]:
    most = max(map(len, accuracies.values()))
    rows = []
    for name, heads in accuracies.items():
        cells = [f"{ranks[0]:.3f} ({sum(ranks[:5]):.3f})" for ranks in heads]
        rows.append([name, *cells, *[""] * (most - len(cells))])
    ratios = {
        f"head {place}": ours[0] / theirs[0]
        for place, (ours, theirs) in enumerate(zip(accuracies["amphista"], accuracies["medusa"], strict=False), 1)
        if theirs[0]
    }
    rows.append(["amphista / medusa", *(number(ratio) for ratio in ratios.values())])
    values = list(ratios.values())
    half = len(values) // 2
    gains = {"the last two": _mean(values[half:]), "the first two": _mean(values[:half])}
    both = zip(accuracies["amphista"], accuracies["medusa"], strict=False)
    more = [ours[0] - theirs[0] for ours, theirs in both]
    rows.append(["amphista − medusa", *(f"{value:.3f}" for value in more)])
    points = {"the last two": _mean(more[half:]), "the first two": _mean(more[:half])}
    claims = [
        everywhere("every head of Amphista is right more often than Medusa's", ratios, 1.0),
        falling("it gains most at the last two heads, by ratio", gains),
        falling("and by difference", points),
    ]
    title = f"Accuracy of heads (the paper's Figure 1), {where}"
    table = Table(title, ["heads", *(f"{place}" for place in range(1, most + 1))], rows, claims, NOTE)
    lines = {
        name: [(float(place), ranks[0]) for place, ranks in enumerate(heads, 1)] for name, heads in accuracies.items()
    }
    return table, Plot("heads", "head", "top-1 accuracy, on held-out text", lines)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _by_task(found: Found, temperature: float, rows: int) -> Table:
    labels = found.labels[1:]
    lines = [
        [
            label,
            *(number(found.steps(label, task)) for task in found.tasks),
            number(found.steps(label)),
            number(found.speed(label), "×"),
            number(_ratio(found.steps(label), found.steps("medusa"))),
            number(_ratio(found.speed(label), found.speed("medusa")), "×"),
        ]
        for label in labels
    ]
    lines.append(["paper, amphista", *[""] * (len(found.tasks) + 1), f"{TO_PLAIN}×", "", f"{TO_MEDUSA:.2f}×"])
    speeds = {label: found.speed(label) for label in labels}
    ratio = _ratio(speeds["amphista"], speeds["medusa"]) or 0.0
    best = speeds["amphista"] or 0.0
    claims = [
        same_text(found),
        falling("Amphista > Hydra > Medusa, by the clock", {n: speeds[n] for n in reversed(KINDS)}),
        everywhere("Amphista is faster than Medusa on every task, by the clock", _gains(found), 1.0),
        Claim(f"Amphista is {TO_MEDUSA:.2f} times as fast as Medusa", ratio >= TO_MEDUSA, f"{ratio:.2f}"),
        Claim(f"and {TO_PLAIN:.2f} times as fast as plain decoding", best >= TO_PLAIN, f"{best:.2f}"),
        falling("trees grown by confidence are faster (ours)", {n: speeds[n] for n in (GROWN, "amphista")}),
        falling("with prompt lookup it is faster (ours)", {n: speeds[n] for n in (LOOKUP, GROWN)}),
    ]
    if ALONE in speeds:
        claims.append(falling("sharing the target's noise is faster (ours)", {n: speeds[n] for n in (GROWN, ALONE)}))
    for label in labels[len(KINDS) :]:
        if label not in (LOOKUP, ALONE, GROWN, TYPICAL):
            name = label.removeprefix("amphista, ")
            claims.append(falling(f"the whole Amphista beats “{name}”", {n: speeds[n] for n in ("amphista", label)}))
    columns = ["tokens/step", *found.tasks, "all", "speed", "tokens: medusa = 1", "speed: medusa = 1"]
    how = f"temperature {temperature:g}" if temperature else "greedy"
    note = (
        f"Drafts have at most {rows} rows. Medusa, Hydra and Amphista share one tree, as in the paper; the other lines "
        "are ours. Speeds are measured, relative to plain decoding. The paper's: greedy, MT-Bench, Vicuna-33B."
    )
    return Table(f"Tokens per step, {how}", columns, lines, claims, note)


def _gains(found: Found) -> dict[str, float | None]:
    return {task: _ratio(found.speed("amphista", task), found.speed("medusa", task)) for task in found.tasks}


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None
