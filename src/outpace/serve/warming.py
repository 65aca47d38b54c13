"""Before the first request: make all that a first use would wait for."""

from __future__ import annotations

from ..batch import Request, Writing
from ..decoder import Decoder
from ..methods.base import Method
from ..picking import Sampling
from ..text import Ending

SAMPLINGS = (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9))
TOKENS = 2  # of the text that is written


def warm(decoder: Decoder, method: Method, most: int) -> None:
    """Make every size of step that a method may take, for up to so many texts at once, and write a little."""
    engine = decoder.engine
    with engine.turns:
        program = engine.program_for(method, SAMPLINGS[0])
        if program is not None:
            program.make_all(SAMPLINGS, most)
    with Writing(most) as writing:
        prompt = [number % decoder.model.vocabulary for number in range(min(16, decoder.model.context - TOKENS))]
        writing.add(Request(engine, method, prompt, SAMPLINGS[0], Ending(TOKENS, ()), TOKENS))
        while writing:
            with engine.turns:
                events = writing.step()
            for _, item in events:
                if isinstance(item, Exception):
                    raise item
