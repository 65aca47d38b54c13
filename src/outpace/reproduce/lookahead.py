"""Lookahead Decoding (arXiv 2402.02057): speedups by task, sampling, settings of N, W and G, scaling.

The paper's figures are those of LLaMA-2-7B-Chat on one A100.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean

from ..bench.data import Question
from ..methods import Lookahead, Method, PromptLookup
from .findings import Claim, Findings, Plot, Table, at_most, everywhere, falling, number
from .lab import KINDS, PLAIN, ByRule, Found, Lab, same_text
from .rouge import Rouge, mean, rouge
from .scaling import Fit, Point, fit, price, share, straight

PAPER = "Lookahead Decoding (arXiv 2402.02057)"
ON_TASKS = {"chat": 1.64, "math": 1.89, "code": 2.25}  # MT-Bench, GSM8K, HumanEval
ON_DATA = {"mbpp": 1.87, "infilling": 1.55}  # tasks of a kind that have a figure of their own
ON_DEVICES = {1: (1.64, 2.25), 8: (2.05, 3.87)}  # MT-Bench, HumanEval
DEVICES = (1, 2, 4, 8)
LONG, BRIEF = "as asked", "in one sentence"  # summaries like CNN/DailyMail's, and like XSum's
ON_SUMMARIES: dict[str, dict[float, tuple[float, float | None]]] = {  # by temperature: speedup, tokens per step
    LONG: {0.0: (1.57, None), 1.0: (1.46, 1.64)},
    BRIEF: {0.0: (1.60, None), 1.0: (1.50, 1.67)},
}
BATCHES = {3: (1, 2, 4, 8, 15), 5: (1, 2, 4, 8, 15)}  # N: the values of W = G that the scaling law is fitted to
MOST_ON_CPU = 40  # the most rows of window and n-grams, (W + G)(N - 1), on a CPU, where they cost time


def published(ngram: int, window: int, guesses: int, prompt_pool: bool = False) -> Lookahead:
    """The paper's algorithm, with settings in the paper's order."""
    return Lookahead(published=True, ngram=ngram, window=window, guesses=guesses, prompt_pool=prompt_pool)


def wide(lab: Lab) -> int:
    """W and G of the large setting, with N = 5: the paper's for 7B, and less on a CPU, where rows cost time."""
    return 5 if lab.cpu else 15


def large(lab: Lab) -> Lookahead:
    """Our algorithm with that setting."""
    return Lookahead(ngram=5, window=wide(lab), guesses=wide(lab))


def _shape(method: Method | str) -> str:
    return f"({method.ngram}, {method.window}, {method.guesses})" if isinstance(method, Lookahead) else ""


SIZED, OURS, THEIRS = "lookahead", "lookahead, large", "as published, large"
PAPERS_RULE = "lookahead, large, by Algorithm 4"


def reproduce(lab: Lab) -> Findings:
    """Everything in the paper that one device can show."""
    lab.parts = 2 + 2 * len(ON_SUMMARIES)
    tasks, sampling = _tasks(lab), _sampling(lab)
    settings, law, devices, plot = _settings(lab)
    return Findings(PAPER, lab.about(), [tasks, sampling, settings, law, devices], [plot])


def _tasks(lab: Lab) -> Table:
    methods: dict[str, Method | str] = {
        SIZED: SIZED,
        OURS: large(lab),
        THEIRS: published(5, wide(lab), wide(lab), prompt_pool=True),
        "prompt-lookup": "prompt-lookup",
    }
    entries = [*lab.ours(methods), *lab.theirs()]
    found = lab.measure("lookahead-tasks", entries, lab.tasks())
    rows = []
    for task in [*found.tasks, ""]:
        paper = ON_DATA.get(task) or next((value for kind, value in ON_TASKS.items() if task in KINDS[kind]), None)
        figures = [f"{number(found.steps(label, task))}, {number(found.speed(label, task), '×')}" for label in methods]
        beside = number(found.figure("speed_to_transformers", SIZED, task), "×")
        rows.append([task or "all", *figures, beside, number(paper, "×") if paper else ""])
    best = {task: max(found.speed(label, task) or 0.0 for label in (SIZED, OURS)) for task in found.tasks}
    gains = {kind: found.speed_on(OURS, kind) for kind in ("code", "math", "chat")}
    claims = [
        same_text(found),
        everywhere("faster than plain decoding on every task, with the better of both sizes", best, 1.0),
        falling("code gains more than chat, by the clock", {kind: gains[kind] for kind in ("code", "chat")}),
        falling("and math more than chat", {kind: gains[kind] for kind in ("math", "chat")}),
        falling("ours has more tokens per step than the published (ours)", {n: found.steps(n) for n in (OURS, THEIRS)}),
    ]
    note = (
        "In each cell: tokens per step, and the measured speedup over plain decoding. "
        f"Large is (5, {wide(lab)}, {wide(lab)}); `lookahead` is sized for this device."
    )
    columns = ["task", *methods, f"{SIZED}: transformers' generate = 1", "speed in the paper, 7B"]
    return Table("Speed by task (the paper's Figure 5)", columns, rows, claims, note)


def _sampling(lab: Lab) -> Table:
    tasks = lab.tasks("summary")
    asked = {LONG: lab.questions, BRIEF: [_in_one_sentence(question) for question in lab.questions]}
    same = lab.ours({SIZED: SIZED, OURS: large(lab)})
    rows, kept = [], []
    tokens: dict[float, list[float]] = {}
    speeds: dict[str, float | None] = {}
    changes: list[float] = []  # of ROUGE with the references, against plain decoding
    for how, temperature in product(asked, (0.0, 1.0)):
        published = [ByRule(lab.decoder, large(lab), PAPERS_RULE, "rejection")] if temperature else []
        entries = [*same, *published, *lab.theirs()]
        part = f"lookahead-sampling-{temperature:g}" + (f" {how}".replace(" ", "-") if how != LONG else "")
        found = lab.measure(part, entries, tasks, temperature=temperature, questions=asked[how])
        kept.append(same_text(found))
        references = {(question.task, question.number): question.references for question in asked[how]}
        texts = {label: _texts(lab, found, label) for label in found.labels}
        plain: Rouge | None = None
        for label in found.labels:
            pairs = [(text, texts[PLAIN][place]) for place, text in texts[label].items()]
            given = [
                (text, references[task, prompt][turn])
                for (task, prompt, turn), text in texts[label].items()
                if turn < len(references[task, prompt])
            ]
            own, other = (mean([rouge(*pair) for pair in group]) for group in (pairs, given))
            plain = other if label == PLAIN else plain
            if other and plain and label in (*found.lossless, PAPERS_RULE):
                changes += [abs(mine - theirs) for mine, theirs in zip(other, plain, strict=True)]
            speed, steps = ON_SUMMARIES[how][temperature]
            paper = [number(speed, "×"), number(steps)] if label == OURS else ["", ""]
            figures = [number(found.speed(label), "×"), number(found.steps(label))]
            rows.append([how, f"{temperature:g}", label, *figures, _three(own), _three(other), *paper])
        tokens.setdefault(temperature, []).append(found.steps(OURS) or 0.0)
        fastest = max(found.speed(label) or 0.0 for label in (SIZED, OURS))
        speeds[f"{how}, temperature {temperature:g}"] = fastest
    unchanged = "ROUGE to the references changes by at most a point, greedy and sampled"
    greedy, sampled = (fmean(tokens[temperature]) for temperature in (0.0, 1.0))
    claims = [
        *kept,
        at_most(unchanged, 100 * max(changes) if changes else None, 1.0, " points"),
        everywhere("faster than plain decoding at both temperatures, with the better of both sizes", speeds, 1.0),
        falling("greedy has more tokens per step than temperature 1", {"greedy": greedy, "sampled": sampled}),
    ]
    columns = ["summary", "temperature", "method", "speed", "tokens/step"]
    columns += ["ROUGE-1/2/L to plain's text", "to the references", "speed, paper", "tokens/step, paper"]
    note = (
        f"Tasks: {', '.join(tasks)}. Large is (5, {wide(lab)}, {wide(lab)}). The paper's columns are CNN/DailyMail's "
        f"and, for summaries {BRIEF}, XSum's: ours are of the same articles, and have no references of that kind. "
        "transformers and the paper's Algorithm 4 sample with their own random numbers: other texts of the same "
        "distribution."
    )
    return Table("Sampling (the paper's Table 2)", columns, rows, claims, note)


def _in_one_sentence(question: Question) -> Question:
    turns = tuple(f"{turn}\n\nSummarize it in one sentence." for turn in question.turns)
    return replace(question, turns=turns, references=())


def _texts(lab: Lab, found: Found, label: str) -> dict[tuple[str, int, int], str]:
    tokenizer = lab.decoder.tokenizer
    return {
        (run["task"], run["prompt"], run["turn"]): tokenizer.decode(run["token_ids"], skip_special_tokens=True)
        for run in found.of(label)
    }


def _three(scores: Rouge | None) -> str:
    return "–" if scores is None else " / ".join(f"{100 * score:.1f}" for score in scores)


LOOKUP, TREE, ONE_COLUMN, ONE_GUESS, EVEN, POOLED = (
    "prompt lookup, one chain",
    "prompt lookup, our tree",
    "one column",
    "one guess",
    "as many of both",
    "and the prompt as reference",
)
# Speedup and tokens per step in the paper, whose settings are (5, 1, 30), (5, 30, 1), (5, 15, 15).
TABLE_3: dict[str, tuple[float | None, float | None]] = {
    LOOKUP: (1.44, 1.55),
    TREE: (None, None),
    ONE_COLUMN: (1.04, None),
    ONE_GUESS: (1.61, None),
    EVEN: (1.78, 1.96),
    POOLED: (1.88, 2.05),
}


def _settings(lab: Lab) -> tuple[Table, Table, Table, Plot]:
    """Table 3, and on the same runs the scaling law and the speed on several devices."""
    width = wide(lab)
    grid = [(n, b) for n, sizes in BATCHES.items() for b in sizes if not lab.cpu or 2 * b * (n - 1) <= MOST_ON_CPU]
    law_methods: dict[str, Method | str] = {f"({n}, {b}, {b})": published(n, b, b) for n, b in grid}
    methods: dict[str, Method | str] = {
        LOOKUP: PromptLookup(priced=False, tree=False),
        TREE: PromptLookup(priced=False),
        ONE_COLUMN: published(5, 1, 2 * width),
        ONE_GUESS: published(5, 2 * width, 1),
        EVEN: published(5, width, width),
        POOLED: published(5, width, width, prompt_pool=True),
    }
    entries = lab.ours({**methods, **law_methods})
    found = lab.measure("lookahead-settings", entries, lab.tasks("chat"), each=2 * lab.scale.each)
    rows = [
        [
            label,
            _shape(methods[label]),
            number(_rows(found, label), digits=0),
            number(found.steps(label)),
            number(found.speed(label), "×"),
            number(tokens),
            number(speed, "×"),
        ]
        for label, (speed, tokens) in TABLE_3.items()
    ]
    steps, speeds = ({label: figure(label) for label in TABLE_3} for figure in (found.steps, found.speed))
    wide_, more = "window and guesses must both be wide, by the clock", (EVEN, ONE_GUESS, ONE_COLUMN)
    claims = [
        same_text(found),
        falling(wide_, {n: speeds[n] for n in more}),
        falling("the prompt as reference helps, by the clock", {n: speeds[n] for n in (POOLED, EVEN)}),
        falling("and in tokens per step", {n: steps[n] for n in (POOLED, EVEN)}),
        falling("faster than prompt lookup, by the clock", {n: speeds[n] for n in (POOLED, LOOKUP)}),
        falling("and more tokens per step", {n: steps[n] for n in (POOLED, LOOKUP)}),
    ]
    columns = ["", "(N, W, G)", "rows/step", "tokens/step", "speed", "tokens/step, paper", "speed, paper"]
    note = (
        f"Lookahead as published. Tasks: {', '.join(found.tasks)}. The paper's are MT-Bench's, with (5, 1, 30), "
        "(5, 30, 1) and (5, 15, 15)."
    )
    table = Table("Settings of N, W and G (the paper's Table 3)", columns, rows, claims, note)
    points = [Point(n, b, _rows(found, f"({n}, {b}, {b})"), found.steps(f"({n}, {b}, {b})") or 1.0) for n, b in grid]
    law = fit(points)
    scaling, plot = _law(points, law)
    return table, scaling, _devices(found, [*methods, *law_methods], width, law), plot


def _rows(found: Found, label: str) -> float:
    runs = found.of(label)
    return float(sum(run["rows"] for run in runs) / sum(run["steps"] for run in runs))


def _devices(found: Found, labels: Sequence[str], width: int, law: Fit) -> Table:
    """Lookahead Parallelism, predicted from tokens per step and step times measured on one device."""
    known: dict[int, list[float]] = {1: [1.0]}  # by rows, the time of a step relative to plain decoding's
    for label in labels:
        steps, speed = found.steps(label), found.speed(label)
        if steps and speed:
            known.setdefault(round(_rows(found, label)), []).append(steps / speed)
    prices = [(count, fmean(times)) for count, times in known.items()]
    measured, alone = found.steps(POOLED) or 1.0, law.tokens(5, width)
    drafted = _rows(found, POOLED) / share(5, width, width, 1)  # drafts are not always full
    rows = []
    for devices in DEVICES:
        cells = [str(devices)]
        for size in (width, width * devices):
            most = max(1, round(drafted * share(5, size, size, devices)))
            tokens = measured * law.tokens(5, size) / alone
            cells += [str(most), number(tokens), number(tokens / price(prices, most), "×")]
        paper = ON_DEVICES.get(devices)
        rows.append([*cells, " / ".join(f"{value:.2f}×" for value in paper) if paper else ""])
    columns = ["devices"]
    for what in (f"W = G = {width}", f"W = G = {width} per device"):
        columns += [f"{what}: rows per device", "tokens/step", "speed, predicted"]
    note = (
        f"*Predicted, not measured*: tokens and rows per step are those of (5, {width}, {width}) with the prompt as "
        "reference; for wider windows tokens are scaled by Eq. 7. Rows are those of the device with the most. A step "
        "takes as long as one of that many rows takes here, interpolated, without communication. "
        "The paper's are MT-Bench's and HumanEval's on A100s."
    )
    claim = Claim("several devices are faster than one", None, "predicted")
    title = "Devices (the paper's Figures 6 and 7)"
    return Table(title, [*columns, "speed, paper"], rows, [claim], note)


def _law(points: Sequence[Point], law: Fit) -> tuple[Table, Plot]:
    longest = max(point.ngram for point in points)
    of_longest = [point for point in points if point.ngram == longest]
    slope, explained = straight(of_longest)
    rows = [
        [str(p.ngram), str(p.batch), number(p.rows, digits=0), number(p.tokens), number(law.tokens(p.ngram, p.batch))]
        for p in points
    ]
    tops = {f"N = {n}": max(p.tokens for p in points if p.ngram == n) for n in sorted({p.ngram for p in points})[::-1]}
    claims = [
        Claim(
            f"tokens per step grow linearly with the logarithm of rows, N = {longest}",
            slope > 0 and explained >= 0.9,
            f"{slope:.2f} for each doubling, R² {explained:.2f}",
        ),
        Claim("Eq. 7 describes all settings", law.error <= 0.1, f"RMS error {law.error:.3f} tokens per step"),
        falling("longer n-grams reach further", tops),
    ]
    note = f"Eq. 5 and 7 fitted: α = {law.alpha:.3f}, f = {law.scarcity:.2f}; 0.425, 3.1 give the paper's (5, 15, 15)."
    columns = ["N", "W = G", "rows/step", "tokens/step", "by Eq. 7"]
    table = Table("The scaling law (the paper's Figure 4)", columns, rows, claims, note)
    lines = {}
    for ngram in sorted({point.ngram for point in points}):
        mine = [point for point in points if point.ngram == ngram]
        lines[f"N = {ngram}, measured"] = [(point.rows, point.tokens) for point in mine]
        lines[f"N = {ngram}, Eq. 7"] = [(point.rows, law.tokens(ngram, point.batch)) for point in mine]
    return table, Plot("scaling", "rows/step", "tokens/step", lines, logarithmic=True)
