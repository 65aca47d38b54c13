"""The staircase of a sequence as an SVG file: a column for each row, its layers from the bottom up, shaded by pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from .draft import MODEL, Step
from .errors import InputError
from .files import write_whole
from .methods.staircase import Climb, Heights

DRAWN = ("adadecode", "adadecode-unverified", "autoregressive", "self-speculative")  # methods that can be drawn
SHADES = ("#08519c", "#3182bd", "#6baed6", "#9ecae1", "#c6dbef")  # of the first pass of a step, the second, …
LOST = "#d9d9d9"  # rows after a rejected draft token
COLUMN, LAYER, LEFT, TOP, WORDS = 16, 6, 44, 34, 90  # sizes, in pixels


def check_picture(path: Path | None, method: str, control: object = None) -> None:
    """Raise InputError if nothing could be drawn, before anything is generated."""
    if path is None:
        return
    if path.suffix != ".svg":
        raise InputError(f"--picture {path}: the file must end in .svg.")
    if not path.parent.is_dir():
        raise InputError(f"--picture {path} could not be written: there is no folder {path.parent}.")
    if method not in DRAWN:
        raise InputError(f"--picture does not support {method}. Use it with {', '.join(DRAWN)}.")
    if control == "tree":
        raise InputError(f"--picture: {method} defers no layers with control='tree'. Use another control.")


def climbs_of(sources: Sequence[str], layers: int) -> list[Climb]:
    """The climbs of a draft, in order: they follow from the layers where its tokens exited."""
    heights = Heights()
    found: list[Climb] = []
    for source in (*sources[1:], MODEL):
        heights.push()
        found += heights.climb(layers if source == MODEL else int(source.removeprefix("exit ")))
    return found


def staircase(steps: Sequence[Step], layers: int, word: Callable[[int], str]) -> str:
    """The whole picture. `word` gives a token's text."""
    parts: list[str] = []
    column = 0
    for step in steps:
        left = LEFT + column * COLUMN
        parts += _blocks(step, layers, left)
        for row in range(len(step.draft)):
            parts.append(_label(step, row, layers, left + row * COLUMN, word))
        column += len(step.draft)
        x = LEFT + column * COLUMN
        parts.append(f'<path d="M{x - 1} {TOP}v{layers * LAYER}" stroke="#000" stroke-width=".5"/>')
    width, height = LEFT + column * COLUMN + 10, TOP + layers * LAYER + WORDS
    ticks = [
        f'<text x="{LEFT - 6}" y="{_level(layer, layers) + 3}" text-anchor="end">{layer}</text>'
        for layer in sorted({0, layers // 4, layers // 2, 3 * layers // 4, layers})
    ]
    title = "layers by token; the darker, the earlier in its step they ran; grey: after a rejected token; red: rejected"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"'
    return "\n".join(
        [
            f'{head} font-size="9">',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            f'<text x="{LEFT}" y="16" font-size="11">{title}</text>',
            *ticks,
            *parts,
            "</svg>\n",
        ]
    )


def _blocks(step: Step, layers: int, left: int) -> list[str]:
    found = []
    climbs = climbs_of(step.draft.sources, layers)
    for turn, (first, start, stop) in enumerate(climbs):
        last = max(climb.first for climb in climbs[: turn + 1])  # the last row so far
        for row in range(first, last + 1):
            colour = SHADES[min(turn, len(SHADES) - 1)] if row < len(step.tokens) else LOST
            place = f'x="{left + row * COLUMN}" y="{_level(stop, layers)}"'
            size = f'width="{COLUMN - 2}" height="{(stop - start) * LAYER - 1}"'
            found.append(f'<rect {place} {size} fill="{colour}"/>')
    return found


def _label(step: Step, row: int, layers: int, x: int, word: Callable[[int], str]) -> str:
    """The label under a column: the target's token or, if the row was rejected, the draft token."""
    kept = row < len(step.tokens)
    guess = step.draft.tokens[row + 1] if row + 1 < len(step.draft) else None
    token = step.tokens[row] if kept else guess
    text = "" if token is None else escape(repr(word(token))[1:-1])
    wrong = kept and guess is not None and guess != token
    colour = "#c00" if wrong else "#000" if kept else "#999"
    middle, y = x + COLUMN // 2 - 3, TOP + layers * LAYER + 6
    return f'<text transform="translate({middle} {y}) rotate(60)" fill="{colour}">{text}</text>'


def _level(layer: int, layers: int) -> int:
    return TOP + (layers - layer) * LAYER


def save_staircase(path: Path, steps: Sequence[Step], layers: int, word: Callable[[int], str]) -> None:
    """Write the picture to a file."""
    write_whole(path, staircase(steps, layers, word))
