"""More prompts, derived from given ones and the target's answers: turns, translations, summaries, passages.

Heads trained only on first answers to short prompts predict badly after long texts and in later turns.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

GRAM = 13  # consecutive words that a prompt must not share with a held-out one
LANGUAGES = ("German", "French", "Spanish", "Italian", "Portuguese", "Dutch")
NEXT = (
    "Can you explain that in simpler words?",
    "Please rewrite your answer in half as many words.",
    "Give me three examples.",
    "What would be a counterargument?",
    "Now write the same as a list of bullet points.",
    "Rewrite your response so that a ten-year-old understands it.",
    "Are you sure? Check your answer step by step.",
    "Continue.",
    "What did you leave out?",
    "Turn that into a short poem.",
    "Which part of it matters most, and why?",
    "Write a title for it.",
    "How would an expert put it?",
    "Make it more formal.",
    "Make it sound friendlier.",
    "Add some numbers to it.",
    "What should I do next?",
    "Start every sentence with the same letter.",
    "Summarize our conversation so far.",
    "Translate your answer into {language}.",
)
SUMMARIES = (
    "Summarize: {text}",
    "Summarize the following text in three sentences.\n\n{text}",
    "{text}\n\nWrite a summary of the text above.",
    "What are the main points of this article?\n\n{text}",
    "{text}\n\nTL;DR:",
    "Give a headline and a one-paragraph summary for this:\n{text}",
)
PASSAGES = (
    "{text}\n{question}",
    "Answer the question by the passages below.\n\n{text}\n\nQuestion: {question}",
    "{text}\n\nBased on the text above, answer this: {question}",
    "Context:\n{text}\n\n{question}",
)
THERE = (
    "Translate English to {language}: {sentence}",
    "Translate into {language}: {sentence}",
    "How do you say this in {language}? {sentence}",
)
BACK = (
    "Translate {language} to English: {sentence}",
    "Translate this {language} sentence into English: {sentence}",
    "What does this mean in English? {sentence}",
)

Message: TypeAlias = "dict[str, str]"
Prompt: TypeAlias = "str | list[Message]"
"""As `Decoder.encode` takes it."""


class Exchange(NamedTuple):
    """A prompt and the target's answer."""

    prompt: str
    answer: str


def derive(exchanges: Sequence[Exchange], count: int, seed: int) -> list[Prompt]:
    """This many prompts of all kinds, derived from these exchanges; the same ones for the same seed."""
    rng = random.Random(seed)
    known = [each for each in exchanges if each.answer.strip()]
    if not known:
        return []
    kinds = (_turn, _turn, _translation, _summary, _passages)
    return [kinds[number % len(kinds)](known, rng) for number in range(count)]


def _turn(known: Sequence[Exchange], rng: random.Random) -> Prompt:
    """A conversation with one more turn: about the last answer, or about something else."""
    turns = rng.sample(known, min(len(known), rng.choice((1, 1, 1, 2))))
    talk: list[Message] = []
    for prompt, answer in turns:
        talk += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    asked = rng.choice(NEXT).format(language=rng.choice(LANGUAGES))
    if rng.random() < 0.3:
        asked = rng.choice(known).prompt
    return [*talk, {"role": "user", "content": asked}]


def _translation(known: Sequence[Exchange], rng: random.Random) -> Prompt:
    """A sentence to translate into a language, or a translation to translate back."""
    foreign = [each for each in rng.sample(known, min(len(known), 64)) if each.prompt.startswith(_OPENINGS)]
    if foreign and rng.random() < 0.5:
        prompt, answer = foreign[0]
        language = next((name for name in LANGUAGES if name in prompt[:40]), LANGUAGES[0])
        return rng.choice(BACK).format(language=language, sentence=answer.split("\n")[0][:600])
    sentence = rng.choice(sentences(rng.choice(known).answer))
    return rng.choice(THERE).format(language=rng.choice(LANGUAGES), sentence=sentence)


def _summary(known: Sequence[Exchange], rng: random.Random) -> Prompt:
    text = "\n".join(each.answer for each in rng.sample(known, min(len(known), rng.randint(1, 5))))
    return rng.choice(SUMMARIES).format(text=text)


def _passages(known: Sequence[Exchange], rng: random.Random) -> Prompt:
    """Some answers as passages, and the question that one of them answers."""
    chosen = rng.sample(known, min(len(known), rng.randint(1, 6)))
    question = min((each.prompt for each in chosen), key=len)
    return rng.choice(PASSAGES).format(text="\n".join(each.answer for each in chosen), question=question)


_OPENINGS = tuple(form.split("{")[0] for form in THERE)


def sentences(text: str) -> list[str]:
    """A text's sentences; at least one.

    >>> sentences("It rains. Do you hear it?")
    ['It rains.', 'Do you hear it?']
    """
    return [part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if part] or [text]


def distinct(prompts: Iterable[Prompt], held_out: Iterable[Prompt]) -> list[Prompt]:
    """The prompts that share no GRAM consecutive words with a held-out prompt and do not equal one."""
    taken: set[tuple[str, ...]] = set()
    for prompt in held_out:
        taken.update(_grams(prompt))
    return [prompt for prompt in prompts if taken.isdisjoint(_grams(prompt))]


def _grams(prompt: Prompt) -> set[tuple[str, ...]]:
    text = prompt if isinstance(prompt, str) else " ".join(each["content"] for each in prompt)
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + GRAM]) for start in range(max(1, len(words) - GRAM + 1))}
