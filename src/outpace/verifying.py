"""Verification: walk down the draft tree with the target's own choices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .draft import Draft, Scores, Verdict
from .picking import Picker


def verify(
    draft: Draft,
    scores: Scores,
    picker: Picker,
    text: Sequence[int],
    finished: Callable[[int], bool],
) -> Verdict:
    """The target chooses a token after row 0; if a child has that token, it is accepted, and so on from there.

    `text` are the committed tokens, row 0's last. `finished` is called with each choice and returns whether the
    sequence ends with it; nothing after an end is considered.

    Every token of the verdict is the target's own choice, so a draft only affects how many come at once.
    """
    rows, tokens = [0], list[int]()
    prefix = list(text)
    row: int | None = 0
    while row is not None:
        proposals = [(draft.tokens[child], draft.proposal(child)) for child in draft.children[row]]
        token = picker.choose_after(row, scores, prefix, proposals)
        tokens.append(token)
        prefix.append(token)
        row = None if finished(token) else draft.child(row, token)
        if row is not None:
            rows.append(row)
    return Verdict(tuple(rows), tuple(tokens))
