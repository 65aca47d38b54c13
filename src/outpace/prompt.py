"""Prompts: a string, token ids or a chat, checked and encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from operator import index
from typing import Any, SupportsIndex, TypeAlias

from .errors import InputError, ModelError

Prompt: TypeAlias = "str | Sequence[int] | Sequence[Mapping[str, Any]]"
"""A string, token ids, or a chat: a list of messages with `role` and `content`. A list of prompts is a batch."""


PARTS = (".text", "['text']", '["text"]')  # in a template that takes a message's parts; others take strings
ROLES = ("system", "developer", "user", "assistant", "tool")


def encode(prompt: Prompt, tokenizer: Any, name: str, raw: bool = False, add_special_tokens: bool = True) -> list[int]:
    """The prompt's token ids, through the chat template unless `raw`. `name` is the model's, for errors."""
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()  # a tensor or an array of token ids
    if not isinstance(prompt, str):
        items: list[Any] = [None]
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            items = list(prompt)
        if {*map(type, items)} == {int}:  # faster than checking each
            return items
        ids = [index(item) for item in items if isinstance(item, SupportsIndex) and not isinstance(item, bool)]
        if len(ids) == len(items):
            return ids
        if not all(isinstance(item, Mapping) for item in items):
            raise InputError(
                f"the prompt is {prompt!r:.60}: it must be a string, a list of token ids, a list of chat messages, "
                "or a list of such prompts."
            )
    if tokenizer is None:
        raise InputError("a prompt as text needs a tokenizer. Give token ids, or pass a tokenizer to Decoder.")
    if isinstance(prompt, str):
        check_text("the prompt", prompt)
        if raw:
            options = {} if add_special_tokens else {"add_special_tokens": False}
            return list(tokenizer(prompt, **options)["input_ids"])
        if not prompt.strip():
            raise InputError("the prompt is empty. Give at least one word.")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return _apply_template(messages, tokenizer, name)


def _apply_template(messages: Sequence[Any], tokenizer: Any, name: str) -> list[int]:
    check_messages(messages)
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise ModelError(
            f"the tokenizer of {name} has no chat template. Pass raw=True (--raw) to use the prompt as "
            "it is, or set tokenizer.chat_template."
        )
    for number, message in enumerate(messages):
        role = message["role"]  # a template may take others, but hardly one that is a slip of the keyboard
        near = get_close_matches(role, ROLES, n=1, cutoff=0.7)
        if role not in ROLES and near and role not in str(template):
            raise InputError(f"message {number} has the role {role!r}. Did you mean {near[0]!r}?")
    if not any(mark in str(template) for mark in PARTS):
        messages = [{**message, "content": _joined(message.get("content"))} for message in messages]
    try:
        found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return list(found)
    except Exception as error:  # templates may raise anything
        roles = ", ".join(str(message["role"]) for message in messages)
        raise InputError(
            f"the chat template of {name} rejects these messages ({roles}): {str(error).rstrip('.')}. "
            "Change their roles or their order, or pass raw=True (--raw) with your own prompt."
        ) from error


def _joined(content: Any) -> Any:
    """The text of a message's parts."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content


def check_text(what: str, text: str) -> None:
    """Raise InputError for a string that no tokenizer accepts.

    >>> check_text("the prompt", "caf\\udce9")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    outpace.errors.InputError: the prompt has a lone surrogate, '\\udce9', at character 3: bytes that are not ...
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{what} has a lone surrogate, {text[error.start]!a}, at character {error.start}: bytes that are not "
            "valid text. Decode them with errors='replace'."
        ) from None


def check_messages(messages: Sequence[Any]) -> None:
    """Raise InputError unless these are valid chat messages."""
    for number, message in enumerate(messages):
        if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
            raise InputError(f"message {number} is {message!r:.80}: it must be a dict with a role and a content.")
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise InputError(
                f"message {number} ({message['role']}) has the content {content!r:.60}, which must be a string."
            )
        parts = content if isinstance(content, list) else [{"text": content or ""}]
        for part in parts:
            if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
                raise InputError(
                    f"message {number} ({message['role']}) has the part {part!r:.60}: only text parts are supported, "
                    'like {"type": "text", "text": "…"}.'
                )
            check_text(f"message {number}", part["text"])


def is_batch(prompt: Any) -> bool:
    """Whether this is a list of prompts: of strings, of lists of token ids, or of chats.

    >>> is_batch("a"), is_batch([1, 2]), is_batch([{"role": "user", "content": "a"}])
    (False, False, False)
    >>> is_batch(["a", "b"]), is_batch([[1, 2], "b"]), is_batch([[{"role": "user", "content": "a"}]])
    (True, True, True)
    """
    if hasattr(prompt, "tolist"):
        if getattr(prompt, "ndim", 1) > 1:
            raise InputError(
                f"the prompt is an array of {prompt.ndim} dimensions, which may have padding. Give a list of prompts "
                "without padding."
            )
        return False
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence):
        return False
    return len(prompt) > 0 and all(
        (isinstance(item, str | Sequence) and not isinstance(item, bytes)) or getattr(item, "ndim", 0) == 1
        for item in prompt
    )
