"""Before the first request: make all that a first use would wait for."""

from __future__ import annotations

from ..batch import Request, Writing
from ..decoder import Decoder
from ..methods.base import Method
from ..picking import Sampling
from ..text import Ending

SAMPLINGS = (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_p=0.9))
LENGTHS = (1, 8, 64, 256, 1024)  # tokens of prompts


def warm(decoder: Decoder, method: Method, most: int) -> None:
    """Have a method take steps of every size, as many texts at once as there may be."""
    engine, context = decoder.engine, decoder.model.context
    program = engine.program_for(method, SAMPLINGS[0])
    if program is not None:
        program.make_all(SAMPLINGS, most)
    for length in (length for length in LENGTHS if length + 2 <= context):
        for texts in (1, min(most, 4)):
            with Writing(most) as writing:
                for number in range(texts):
                    prompt = [(number + place) % decoder.model.vocabulary for place in range(length)]
                    writing.add(Request(engine, method, prompt, SAMPLINGS[0], Ending(2, ()), 2))
                while writing:
                    with engine.turns:
                        events = writing.step()
                    for _, item in events:
                        if isinstance(item, Exception):
                            raise item
        if program is None:
            return  # nothing depends on the size of a step
