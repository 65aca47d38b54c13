"""A real server in a thread, for tests: on a free port, with a tiny model whose tokens are bytes."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from outpace import Decoder
from outpace.serve.running import Server, listen
from outpace.serve.settings import Settings

from .models import build

END = "<end>"
TEMPLATE = "{% for message in messages %}[{{ message.role }}: {{ message.content }}]{% endfor %}"
SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": 256,
}


@functools.cache
def bytewise() -> Any:
    """A tokenizer whose tokens are bytes."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END]
    found = Tokenizer(token_models.BPE({word: number for number, word in enumerate(words)}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=found, eos_token=END)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def new_decoder(context: int = 2048, **options: Any) -> Decoder:
    """A decoder of its own."""
    model = build("Llama", {**SIZES, "max_position_embeddings": context}, 0, torch.float32)
    with torch.no_grad():  # the text does not end by chance
        model.get_output_embeddings().weight[256] = 0
    model.generation_config.eos_token_id = 256
    return Decoder(model, bytewise(), **options)


LONG = 300.0  # seconds, after which something is broken, however busy this machine is


def wait_until(comes: Callable[[], object]) -> None:
    """Wait for something that comes."""
    end = time.monotonic() + LONG
    while not comes():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


class Running:
    """A server that runs."""

    def __init__(self, server: Server, url: str) -> None:
        self.server, self.url = server, url
        self.service = server.service
        self.http = httpx.Client(base_url=url, timeout=LONG)

    @property
    def held(self) -> int:
        """Slots that texts have."""
        return self.service.decoder.engine.pool.held

    def chat(self, content: str = "hello", **fields: Any) -> httpx.Response:
        """Ask for a greedy answer of a few tokens, unless the fields say otherwise."""
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 12, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def text(self, content: str = "hello", **fields: Any) -> str:
        """The answer's text."""
        answer = self.chat(content, **fields)
        assert answer.status_code == 200, answer.text
        found: str = answer.json()["choices"][0]["message"]["content"]
        return found

    def settle(self) -> None:
        """Wait until no text is open."""
        wait_until(lambda: self.service.open == 0)

    @contextmanager
    def paused(self, when: Callable[[], bool] = lambda: True) -> Iterator[Event]:
        """While `when` is true no step goes on, until the event is set or this ends."""
        model = self.service.decoder.model
        forward, go_on = model.forward, Event()

        def waiting(*given: Any, **more: Any) -> Any:
            wait_until(lambda: go_on.is_set() or not when())
            return forward(*given, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "forward", waiting)
            try:
                yield go_on
            finally:
                go_on.set()


@contextmanager
def running(
    source: Any, wait: bool = True, drain: float = 5.0, port: int = 0, unread: int | None = None, **settings: Any
) -> Iterator[Running]:
    """Start a server, and end it. unread: about how many bytes a connection takes that nobody reads."""
    with listen("127.0.0.1", port, True) as place:
        if unread is not None:
            place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, unread)
        server = Server(source, Settings(**{"name": "tiny", **settings}), drain)
        # The address is read first: a server that cannot load its model closes the socket at once.
        found = Running(server, f"http://127.0.0.1:{place.getsockname()[1]}")
        thread = Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
        thread.start()
        try:
            while wait and server.service.state == "loading":
                time.sleep(0.01)
            while thread.is_alive() and not server.started:
                time.sleep(0.01)
            yield found
        finally:
            found.http.close()
            server.handle_exit(15, None)
            thread.join(LONG)
            assert not thread.is_alive()
