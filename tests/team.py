"""Run by `accelerate launch` in test_training: answers and a short training, done by several processes together."""

from __future__ import annotations

import random
import sys
from hashlib import sha256
from pathlib import Path

from outpace.models.hf import HFModel
from outpace.training.data import read_answers, write_answers
from outpace.training.run import Texts, make_heads, train
from outpace.training.team import Team
from outpace.training.trainer import Plan

from .models import VOCABULARY, tiny


def main(out: Path) -> None:
    """Each process leaves a file of its own: how many they were, and what its exits came to."""
    team = Team()
    model, rng = tiny("Llama"), random.Random(0)
    prompts = [rng.choices(range(VOCABULARY), k=4) for _ in range(24)]
    write_answers(model, prompts, out / "answers", [], batch=4, new_tokens=12, team=team)
    texts = read_answers(out / "answers")
    adapted = HFModel(model)
    heads = make_heads(model, adapted.ends(), "exits", {})
    train(model, adapted, {"exits": heads}, Texts(texts, texts, []), Plan(updates=4, tokens=96), out, team=team)
    weights = b"".join(weight.detach().numpy().tobytes() for weight in heads.parameters())
    (out / f"process-{team.number}.txt").write_text(f"{team.count} {len(texts)} {sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
