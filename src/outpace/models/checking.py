"""Checks at load. Architectures differ in ways that no attribute shows, and a wrong mask or a misread module would
change the output. A model that fails is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from ..draft import Draft, Tree, chain
from ..errors import UnsupportedModel
from ..pool import Pool
from .attention import without_cudnn
from .mirror import Control, FarCache, Mirror, with_gates
from .traits import ELSEWHERE, Traits

if TYPE_CHECKING:
    from .hf import HFModel

ROUNDING = 1e-3  # relative differences of logits below this count as rounding
SAME = 1e-5  # the same within one forward pass, in float32
FARTHEST = 2**16  # the longest sequence for which masks are compared


class Checks:
    """Compare `target` with itself and with `original`, the model it mirrors. Raises UnsupportedModel."""

    def __init__(self, target: HFModel, original: PreTrainedModel, traits: Traits) -> None:
        self._target = target
        self._original = original
        self._traits = traits
        self._kind = type(original).__name__
        self._rough = target.quantized or torch.finfo(target.dtype).bits == 16  # whether rounding shows in logits

    def paths(self) -> None:
        """A small tree must have the same logits as its paths computed alone."""
        text, left, right, other = (
            [token % self._traits.vocabulary for token in tokens]
            for tokens in ((11, 23, 5, 17), (31, 8), (2, 47), (71, 26))
        )
        together = self._together(text, left, right)
        if self._traits.branches:
            apart = torch.stack([self._logits(text, chain(text[-1], path, "check"))[-1] for path in (left, right)])
        else:
            apart = self._logits([*text, *left], chain(left[-1], (), "check"), chunk=2)[[-1]]
        error = disagreement(together, apart)
        if error < ROUNDING:
            return
        # In 16 bits, rounding depends on the number of rows. But changing masked tokens must change nothing.
        slight, limit, most = (0.03, 0.05, 0.15) if self._rough else (ROUNDING, ROUNDING, 0.01)
        seen = disagreement(together[:1], self._together(text, left, other)[:1])
        if error >= limit:  # one path, token by token, shows the effect of rounding
            alone = self._logits([*text, *left], chain(left[-1], (), "check"), chunk=1)[[-1]]
            limit = min(4 * disagreement(apart[:1], alone), most)
        if not (error < limit and seen < slight):  # also if one is NaN
            raise UnsupportedModel(
                f"{self._kind} gives other logits for several tokens at once than one by one "
                f"(relative difference {error:.2g}; {seen:.2g} by tokens that are masked), so Outpace cannot "
                f"keep its output unchanged. {ELSEWHERE}"
            )

    def masks(self) -> None:
        """The decoder's own masks must be ours at the end of a long sequence: a short one would not show windows.

        No layer runs.
        """
        masks: dict[int, Any] = {}
        probe = Mirror("eager").of(self._original)
        control = Control(self._traits.layers)
        control.seen = masks
        with_gates(probe, self._traits.layer_types, control)
        last = min(self._traits.context, FARTHEST) - 1
        ones = torch.ones(1, last + 1, dtype=torch.long, device=self._target.device)
        arguments: dict[str, Any] = {
            "input_ids": ones[:, :1],
            "attention_mask": ones,
            "past_key_values": FarCache(last),
        }
        if self._traits.takes_positions:
            arguments["position_ids"] = ones[:, :1] * last
        try:
            with torch.inference_mode():
                probe(**arguments, use_cache=True)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # it needs layers that run; the other checks decide
            return
        places = torch.arange(last + 1, device=self._target.device)
        for layer, kind in enumerate(self._traits.layer_types):
            mask = masks.get(layer)
            if not isinstance(mask, torch.Tensor) or mask.shape != (1, 1, 1, last + 1):
                continue
            sees = mask[0, 0, 0] if mask.dtype == torch.bool else mask[0, 0, 0] > torch.finfo(mask.dtype).min / 2
            ours = self._traits.inside(kind, torch.tensor(last, device=self._target.device), places)
            if not torch.equal(sees, ours):
                raise UnsupportedModel(
                    f"layer {layer} of {self._kind} attends to {int(sees.sum())} of {last + 1} tokens; by its "
                    f"configuration it would be {int(ours.sum())}. {ELSEWHERE}"
                )

    @torch.inference_mode()
    def logits(self) -> None:
        """The original must have the logits of its mirror, and they must not depend on later tokens."""
        text, other = (
            [token % self._traits.vocabulary for token in tokens]
            for tokens in ((11, 23, 5, 17, 31, 8), (11, 23, 5, 2, 47, 71))
        )
        tokens = torch.tensor([text, other], device=self._target.device)
        twin = Mirror(self._traits.dense_attention).of(self._original)
        arguments: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        if self._traits.takes_positions:  # as in transformers' `generate`
            arguments["position_ids"] = torch.arange(len(text), device=self._target.device).expand_as(tokens)
        with self._foreign(), without_cudnn():
            expected, changed = twin(**arguments, use_cache=False).logits
        limit = 0.3 if self._rough else ROUNDING
        seen = disagreement(expected[:3], changed[:3])
        if not seen < (limit if self._rough else SAME):
            raise UnsupportedModel(
                f"in {self._kind} tokens see those that follow (relative difference {seen:.2g}), as in an encoder. "
                f"If it was trained as a decoder, load it with is_decoder=True. {ELSEWHERE}"
            )
        found = self._logits(text[:1], chain(text[0], text[1:], "check"))
        error = disagreement(found, expected)
        if not error < limit:
            raise UnsupportedModel(
                f"{self._kind} computes other logits than Outpace with its layers (relative difference "
                f"{error:.2g}), so its output would change. {ELSEWHERE}"
            )

    def _together(self, text: list[int], left: list[int], right: list[int]) -> torch.Tensor:
        """The logits after `left` and after `right`, as two branches; without branches, after `left` alone."""
        if not self._traits.branches:
            return self._logits(text, chain(text[-1], [*left, *right], "check"))[[len(left)]]
        tree = Tree(text[-1])
        ends = [tree.insert(path, "check")[-1] for path in (left, right)]
        return self._logits(text, tree.draft())[ends]

    def _logits(self, text: list[int], draft: Draft, chunk: int | None = None) -> torch.Tensor:
        pool = Pool(self._target.device, capacity=16)
        with self._foreign(), pool.sequence(text) as sequence:
            while chunk and (behind := len(text) - 1 - len(sequence.slots)):
                count = min(chunk, behind)
                self._target.forward(pool, pool.place_text(sequence, count), logits=0)
            return self._target.forward(pool, pool.place(sequence, draft), logits=len(draft)).logits

    @contextmanager
    def _foreign(self) -> Iterator[None]:
        """A context in which any error of the model becomes UnsupportedModel."""
        try:
            yield
        except (torch.OutOfMemoryError, UnsupportedModel):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            raise UnsupportedModel(f"{self._kind} cannot be run row by row ({reason}). {ELSEWHERE}") from error


def disagreement(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The distance of two sets of logits, relative to their spread."""
    found, expected = found.float(), expected.float()
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    return float((found - expected).norm() / spread)
