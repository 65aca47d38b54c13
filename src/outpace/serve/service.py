"""What a server's requests share: the decoder, loaded in the background, and the worker that runs it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from threading import RLock, Thread
from types import TracebackType
from typing import Any, TypeVar

from ..decoder import Decoder
from ..draft import Step
from ..errors import InputError, OutpaceError, UnknownNameError
from ..grammar import Constraint, Grammar
from ..methods import METHODS
from ..methods.base import Method
from ..picking import Sampling
from .faults import Fault, fault_of, not_ready, too_late
from .fields import Asked
from .grammars import Grammars
from .metrics import Metrics
from .pieces import Words
from .settings import Settings, Source
from .warming import Progress, Stopped, warm
from .worker import Job, Mailbox, Order, Worker

log = logging.getLogger("outpace.serve")
T = TypeVar("T")
PLAIN = "autoregressive"
KEPT = 4096  # slots of the prefix cache without CUDA, where a row may attend over all slots with a mask


class Service:
    """What a server's requests share."""

    def __init__(self, source: Source, settings: Settings) -> None:
        self.settings = settings
        self._state, self._ending = "loading", ""  # two, because two threads set them
        self.error: BaseException | None = None  # from loading the model
        self._source = source
        self._decoder: Decoder | None = None
        self._worker: Worker | None = None
        self._metrics: Metrics | None = None
        self._threads = ThreadPoolExecutor(2, "outpace-reads")  # prompts are encoded here
        self._grammars = Grammars()
        self._methods: dict[str, Method | None] = {}  # that requests name; None: it cannot be used
        self._loading = Thread(target=self._load, name="outpace-loads", daemon=True)
        self._turns = RLock()  # a signal's handler may come in the midst of either
        self._begun = False
        self.on_ready: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Load the model, if needed, and start decoding. Has no effect the second time."""
        if not self._begun:
            self._begun = True
            self._loading.start()

    def _load(self) -> None:
        try:
            if not isinstance(self._source, Decoder):
                log.info("loading %s", self.settings.name or "the model")
            decoder = self._source if isinstance(self._source, Decoder) else self._source()
            if len(self.settings.api_keys) > 1 and getattr(decoder.method, "store", False):
                raise InputError(
                    f"{decoder.method.name}'s store would draft for one API key from the texts of another. "
                    "Serve with store=0, or with one key."
                )
            if not decoder.method.lossless:
                raise InputError(f"{decoder.method.name} is lossy, and is not served. Use another method.")
            self._methods[PLAIN] = plain = decoder.prepare(PLAIN)
            if self.settings.warm:
                longest = min(decoder.model.context, self.settings.max_length or decoder.model.context)
                methods = (decoder.method, plain)
                progress = Progress(lambda: bool(self._ending))
                warm(decoder, methods, self.settings.max_texts, longest, progress)
            _share_out(decoder, self.settings)
            metrics = Metrics(self.settings.name or decoder.model.name)
            worker = Worker(decoder, metrics, self.settings.max_texts, self.settings.max_queue)
            metrics.follow(worker)
            with self._turns:
                if self._ending:
                    return
                self._decoder, self._metrics, self._worker = decoder, metrics, worker
                worker.start()
                self._state = "ready"
        except Stopped:
            return
        except BaseException as error:
            self.error, self._state = error, "failed"
            log.error("the model could not be loaded: %s", error)
        self.on_ready()

    @property
    def loads(self) -> bool:
        """Whether the model is still being loaded, which nothing can stop but the end of the process."""
        return self._loading.is_alive()

    async def close(self) -> None:
        """Stop everything but a model's loading. Running sequences end with an error."""
        with self._turns:
            self._ending = "stopped"
        await self.abort()
        self._threads.shutdown()

    def drain(self) -> None:
        """Reject new requests; open ones continue."""
        with self._turns:
            self._ending = "draining"
        if self._worker is not None:
            self._worker.drain()

    async def abort(self) -> None:
        """End all sequences with an error."""
        await self._grammars.close()
        if self._worker is not None:
            await asyncio.to_thread(self._worker.stop)

    @property
    def state(self) -> str:
        """Loading, ready or failed; draining or stopped during shutdown."""
        return self._ending or self._state

    @property
    def open(self) -> int:
        """How many sequences have not ended."""
        return 0 if self._worker is None else self._worker.open

    @property
    def decoder(self) -> Decoder:
        """The decoder; a Fault if it is not loaded yet."""
        if self._decoder is None:
            raise not_ready(self.state)
        return self._decoder

    @cached_property
    def words(self) -> Words:
        """Tokens as text."""
        return Words(self.decoder.tokenizer)

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.settings.name or self.decoder.model.name

    @property
    def metrics(self) -> Metrics:
        """Metrics for Prometheus."""
        if self._metrics is None:
            raise not_ready(self.state)
        return self._metrics

    def check_model(self, model: str | None) -> None:
        """Raise a Fault for other models, and for any while the model is loading or the server is shutting down."""
        if self.state != "ready":
            raise not_ready(self.state)
        if model not in (None, "", self.name):
            message = f"the model {model!r} is not served here; {self.name!r} is."
            raise Fault(message, 404, param="model", code="model_not_found")

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Do slow work in another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def compiled(self, grammar: Grammar, param: str) -> Constraint:
        """A grammar to copy for sequences. A Fault if it cannot be used."""
        deadline = self.settings.deadline
        try:
            return await asyncio.wait_for(self._grammars.compiled(self.decoder, grammar, param), deadline)
        except asyncio.TimeoutError as error:
            raise too_late(deadline) from error

    def check_count(self, n: int, prompts: int = 1) -> None:
        """Raise a Fault if a request asks for too many choices."""
        most = min(self.settings.max_n, self.settings.max_texts + self.settings.max_queue)
        if n * prompts > most:
            message = f"a request may have at most {most} choices, not {n * prompts}."
            raise Fault(message, param="n" if n > 1 else "prompt")

    def ask(self, orders: Sequence[Order]) -> Reply:
        """Submit the sequences of a request."""
        assert self._worker is not None
        return Reply(self._worker, orders, self.settings.deadline)

    async def method_of(self, asked: Asked) -> Method:
        """The method that a request names, or the server's default. A Fault if this model cannot use it."""
        name, decoder = asked.method if asked.speculative else PLAIN, self.decoder
        if name is None:
            return decoder.method
        if name not in METHODS:
            known = [name for name, method in METHODS.items() if method.lossless]
            raise Fault(str(UnknownNameError("method", name, known)), param="method")
        if not METHODS[name].lossless:
            raise Fault(f"{name} is lossy, and is not served. Use another method.", param="method")
        if name not in self._methods:

            def prepared() -> Method | None:
                try:
                    return decoder.prepare(name)
                except OutpaceError as error:
                    log.info("the method %s cannot be used: %s", name, error)  # clients cannot follow its remedy
                    return None

            self._methods.setdefault(name, await self.off_loop(prepared))
        found = self._methods[name]
        if found is None:
            raise Fault(f"{name} cannot be used with this model. Use another method.", param="method")
        return found

    def samplings_of(self, asked: Asked, count: int) -> list[Sampling]:
        """The sampling of each sequence of a request. As in OpenAI's API, the default temperature is 1."""
        bias = {self._token(key): value for key, value in (asked.logit_bias or {}).items()}
        seed = secrets.randbits(62) if asked.seed is None else asked.seed
        return [
            Sampling(
                temperature=1.0 if asked.temperature is None else asked.temperature,
                top_k=max(0, asked.top_k or 0),
                top_p=1.0 if asked.top_p is None else asked.top_p,
                min_p=asked.min_p or 0.0,
                repetition_penalty=asked.repetition_penalty,
                presence_penalty=asked.presence_penalty or 0.0,
                frequency_penalty=asked.frequency_penalty or 0.0,
                logit_bias=bias,
                seed=seed + number,
            )
            for number in range(count)
        ]

    def _token(self, key: str) -> int:
        if key.isascii() and key.isdigit() and len(key) < 12 and int(key) < self.decoder.model.vocabulary:
            return int(key)
        message = f"{key[:20]!r} must be a token id below {self.decoder.model.vocabulary}."
        raise Fault(message, param="logit_bias")

    @property
    def context(self) -> int:
        """The longest sequence, prompt included."""
        return min(self.decoder.model.context, self.settings.max_length or self.decoder.model.context)

    def limit_of(self, prompt: Sequence[int], asked: int, param: str) -> int:
        """The most new tokens after a prompt. A Fault if there is no room."""
        room = self.context - len(prompt)
        if room < 1:
            raise Fault(
                f"the limit is {self.context} tokens here, and the prompt has {len(prompt)}. Shorten the {param}.",
                param=param,
                code="context_length_exceeded",
            )
        return min(asked, room)


def _share_out(decoder: Decoder, settings: Settings) -> None:
    """Set the size of the KV cache and of the prefix cache within it."""
    pool = decoder.engine.pool
    if pool.limit is None:
        pool.limit = max(settings.slots, decoder.model.context, pool.capacity)
    everything = pool.limit if decoder.model.device.type == "cuda" else min(pool.limit, KEPT)
    pool.keeps = everything if settings.keep is None else settings.keep


class Reply:
    """The sequences of one request. Leaving the block cancels unfinished ones."""

    def __init__(self, worker: Worker, orders: Sequence[Order], deadline: float) -> None:
        self._worker, self._orders, self._deadline = worker, orders, deadline
        self._mailbox = Mailbox(asyncio.get_running_loop())
        self.jobs: list[Job] = []

    async def __aenter__(self) -> Reply:
        self.jobs = self._worker.submit(self._orders, self._mailbox, self._deadline)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.cancel(self.jobs)

    async def batches(self) -> AsyncIterator[list[tuple[int, Step]]]:
        """New steps since the last time, by sequence number, until all have ended."""
        left = len(self.jobs)
        while left:
            steps: list[tuple[int, Step]] = []
            for place, item in await self._mailbox.take():
                if isinstance(item, Exception):
                    if steps:
                        yield steps
                    raise fault_of(item)
                steps.append((place, item))
                left -= item.finish is not None
            yield steps

    def usage(self, prompts: int = 1) -> dict[str, Any]:
        """OpenAI's token usage. Sequences are in the order of prompts."""
        results = [job.result for job in self.jobs]
        firsts = results[:: len(results) // prompts]
        read, written = sum(result.prompt_tokens for result in firsts), sum(result.new_tokens for result in results)
        told = sum(result.sources.count("prediction") for result in results)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": sum(result.reused for result in firsts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": told,
                "rejected_prediction_tokens": sum(r.offered.get("prediction", 0) for r in results) - told,
            },
        }
