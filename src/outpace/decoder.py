"""Text in, text out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property, partial
from os import PathLike
from threading import RLock
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .batch import MOST, Event, Request, Writing
from .draft import Step
from .errors import BatchError, InputError, OutpaceError, OutpaceWarning
from .grammar import Constraint, Grammar, words_of
from .loop import Extras, Hint, decode
from .methods import DEFAULT, Method, make
from .models.adapter import Model
from .models.adapters import Watch, base_of
from .models.defaults import Defaults
from .models.hf import HFModel
from .models.loading import load as load_model
from .models.loading import usual_weights
from .options import BatchOptions, Options, check_settings, settled
from .picking import Sampling
from .prompt import Prompt, encode, is_batch
from .result import Result
from .runtime import calibrate
from .runtime.choose import engine_for
from .runtime.costs import load as load_costs
from .runtime.graphs import MEMORY
from .runtime.plain import Engine
from .sources.prediction import Prediction
from .text import Ending, TextStream

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")

DEFAULT_MODEL = "smollm2-135m"


class Decoder:
    """A model and a tokenizer, ready to decode. It takes the model as it is now; a PeftModel with its adapters.

    The KV cache of the last sequence is kept, so that a chat's next turn prefills only what is new; `forget` frees it.
    Changed weights, and switched or rescaled adapters, are noticed, except for writes through `.data`: call `forget`
    after those.

    Threads may share a Decoder: they take turns step by step, and outputs do not depend on each other. A stream left
    open blocks nobody. Only code that runs within a step (a logits processor) must not call the same Decoder.

    With the runtimes "graphs" and "compiled", and in exact mode, the model's q/k/v and gate/up weights become views of
    fused matrices: same values, other storage. `decoder.model.unfuse()` undoes this.

    Examples:
        >>> import outpace
        >>> decoder = outpace.load("smollm2-135m", method="lookahead")  # doctest: +SKIP
        >>> decoder.generate("Why is the sky blue?").text  # doctest: +SKIP
    """

    _grows = True  # whether a sequence may reuse the last one's KV cache

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        method: str | Method | None = None,
        *,
        runtime: str = "auto",
        exact: bool | None = None,
        memory: float = MEMORY,
        **settings: object,
    ) -> None:
        if not (hasattr(model, "config") or hasattr(model, "vocabulary")):
            raise InputError(
                f"{type(model).__name__} is not a model: give a loaded transformers model, or give a name, a folder or "
                "a GGUF file to outpace.load."
            )
        check_tokenizer(tokenizer)
        self._given = model = base_of(model)
        self._runtime = partial(engine_for, runtime=runtime, exact=exact, memory=memory)
        self._watch = Watch(model) if hasattr(model, "config") else None
        self._changing = RLock()
        self._engine: Engine | None = self._new_engine()
        self.tokenizer = tokenizer
        self.ends = _end_tokens(model, tokenizer)
        self.method = self.prepare(method or DEFAULT, **settings)

    def __repr__(self) -> str:
        runs = f"runtime={self.engine.name!r}, mode={self.engine.mode!r}, device={str(self.model.device)!r}"
        return f"<Decoder of {self.model.name!r}, method={self.method.name!r}, {runs}>"

    @property
    def engine(self) -> Engine:
        """Runs the forward passes. It is created for the model as it is, and again if that changes much."""
        with self._changing:
            if self._engine is None:
                self._engine = self._new_engine()
            return self._engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._engine = engine

    def _new_engine(self) -> Engine:
        self._adapters = None if self._watch is None else self._watch.adapters()
        self._stamp = 0
        engine = self._runtime(self._given if self._watch is None else HFModel(self._given))
        engine.costs = load_costs(calibrate.folder(), calibrate.about(engine))
        if engine.why_fast:
            warnings.warn(
                f"{engine.model.name} runs in fast mode, where rounding can decide a near-tie differently: "
                f"{engine.why_fast}. To choose fast mode, use exact=False (--fast).",
                OutpaceWarning,
                stacklevel=3,
            )
        return engine

    def _follow(self) -> Engine:
        """The engine, a new one if adapters were switched, or if C++ code cannot compute the model as it is now.

        Drops cached KV if weights have changed.
        """
        if self._watch is None:
            return self.engine
        with self._changing:
            outdated = self._engine is not None and getattr(self._engine.model, "outdated", False)
            if outdated or self._watch.adapters() != self._adapters:
                if not self._grows:
                    what = "model was changed" if outdated else "model's adapters were switched"
                    raise InputError(f"the {what}. Create a new Decoder on all ranks.")
                self._engine = None  # frees its memory first
            engine, stamp = self.engine, self._watch.stamp()
            changed, self._stamp = stamp != self._stamp, stamp
        if changed:
            with engine.turns:
                engine.pool.forget_all()
        return engine

    @property
    def ends(self) -> list[int]:
        """The end-of-sequence tokens. They can be set; a single one too."""
        return self._ends

    @ends.setter
    def ends(self, ends: int | Iterable[int]) -> None:
        self._ends = [ends] if isinstance(ends, int) else [*ends]
        self._defaults = Defaults(self._given, self._ends, self.model.device)
        self.__dict__.pop("words", None)

    def forget(self) -> None:
        """Free the KV cache of the last sequence, which is kept for the next turn of a chat."""
        with self.engine.turns:
            self.engine.pool.forget_all()

    @property
    def _cpu(self) -> bool:
        return self.model.device.type == "cpu"

    @property
    def model(self) -> Model:
        """The model as the loop sees it."""
        return self.engine.model

    def prepare(self, method: str | Method, **settings: object) -> Method:
        """A method that is checked against this model and ready for `generate(method=...)`.

        By name, a method begins with settings that suit the device; given ready, it keeps its own.
        """
        if isinstance(method, str):
            method = make(method, cpu=self._cpu, costs=self.engine.costs, **settings)
        elif not isinstance(method, Method):
            raise InputError(f"method={method!r} must be a name or a method like outpace.Lookahead().")
        elif settings:
            raise InputError(
                f"the settings {sorted(settings)} belong in the constructor: {type(method).__name__}(...)."
            )
        with self.engine.turns:  # some try the model
            return method.prepare(self.model)

    @overload
    def generate(self, prompt: Any, *, n: int, **options: Unpack[BatchOptions]) -> list[Result]: ...

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result: ...  # type: ignore[overload-overlap]

    @overload
    def generate(self, prompt: Sequence[Prompt], **options: Unpack[BatchOptions]) -> list[Result]: ...

    def generate(self, prompt: Any, *, n: int | None = None, **options: Any) -> Result | list[Result]:
        """Generate the whole answer. For the options see `outpace.Options`, or `stream`.

        A list of prompts is decoded as a batch and returns a list of results. With `n`, each prompt has `n` results in
        a row, with the seeds seed, seed + 1, and so on. If some sequences fail, the others are finished, and then a
        BatchError is raised that has all results.
        """
        options = settled(options)
        if n is not None or is_batch(prompt):
            return self._generate_batch(prompt, n, options)
        tokens = self.encode(prompt, options.pop("raw", False))
        options["method"] = method = self.prepare(options.get("method") or self.method)
        result = self.begin(tokens, method)
        for _ in result.follow(self.stream(tokens, **options)):
            pass
        return result

    def _generate_batch(self, prompt: Any, n: int | None, options: dict[str, Any]) -> list[Result]:
        with closing(self._batch_of(prompt, n, options)) as batch:
            results = [self.begin(request.prompt, request.method) for request in batch.requests]
            start = perf_counter()
            for number, item in batch:
                result = results[number]
                result.seconds = perf_counter() - start
                if isinstance(item, Step):
                    result.take(item)
                else:
                    result.error, result.finish_reason = item, "error"
        failed = [number for number, result in enumerate(results) if result.error]
        if failed:
            first = results[failed[0]].error
            more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            raise BatchError(f"sequence {failed[0]} of the batch failed{more}: {first}", results) from first
        return results

    def begin(self, tokens: Sequence[int], method: Method | None = None) -> Result:
        """An empty result, to `follow` a stream with."""
        used = method or self.method
        return Result(used.name, used.lossless, len(tokens))

    @overload
    def stream(self, prompt: Any, *, n: int, **options: Unpack[BatchOptions]) -> Batch: ...

    @overload
    def stream(  # type: ignore[overload-overlap]
        self, prompt: Prompt, **options: Unpack[Options]
    ) -> Iterator[Step]: ...

    @overload
    def stream(self, prompt: Sequence[Prompt], **options: Unpack[BatchOptions]) -> Batch: ...

    def stream(self, prompt: Any, *, n: int | None = None, **options: Any) -> Iterator[Step] | Batch:
        """Generate step by step: each Step has the new tokens, their sources and the new text.

        Options (see also `outpace.Options`):

        - `max_new_tokens` (128)
        - `temperature`, `top_k`, `top_p`, `min_p`, `repetition_penalty`, `presence_penalty`, `frequency_penalty`,
          `logit_bias`, `seed`; or all of them, and logits processors, as `sampling=outpace.Sampling(...)`. Else greedy
        - `stop`: strings that end the output; they are not part of it
        - `raw`: use a string as it is, without the chat template
        - `method`: override the decoder's method; `prepare` one that loads a model
        - `logprobs`: the log probability of each token, and of this many alternatives
        - `grammar`: an outpace.Grammar that the answer must match
        - `prediction`: an expected answer to draft from; it affects speed only (with the default rule)
        - `salt`: sequences share KV cache only with others of the same salt

        `logprobs` and `grammar` need the host in every step, which is slower on a GPU.

        The model's `generation_config` is applied as in transformers' greedy decoding (penalties, suppressed and
        forced tokens, a minimum length, ...). Fields of a Sampling take precedence. Its temperature, top-k and top-p
        are not used: without a Sampling, decoding is greedy.

        A list of prompts returns a Batch: iterate over it for (index of the prompt, Step). `method`, `sampling` and
        `max_new_tokens` may then be lists, with a value for each prompt. `n` requests several outputs for each.
        """
        options = settled(options)
        if n is not None or is_batch(prompt):
            return self._batch_of(prompt, n, options)
        request, text = self.request(prompt, **options)
        return self._stream(request, text)

    def batch(self, most: int = MOST) -> Batch:
        """An empty batch: `add` requests. At most `most` are decoded at the same time; others wait."""
        return Batch(self, most)

    def request(self, prompt: Prompt, **options: Unpack[Options]) -> tuple[Request, TextStream | None]:
        """The request for one prompt with its options, and the stream that detokenizes its output."""
        return self._request(prompt, **settled(options))

    def _request(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        raw: bool = False,
        method: str | Method | None = None,
        logprobs: int | None = None,
        grammar: Grammar | Constraint | None = None,
        prediction: str | Sequence[int] | None = None,
        salt: str = "",
    ) -> tuple[Request, TextStream | None]:
        engine = self._follow()
        tokens = self.encode(prompt, raw)
        limit = self._limit(len(tokens), max_new_tokens)
        if not isinstance(stop, str | Iterable | None):
            raise InputError(f"stop={stop!r} must be a string, or a list of strings.")
        stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if not all(isinstance(item, str) and item for item in stop):
            raise InputError(f"stop={stop!r}: stop strings must be strings, and not empty.")
        if stop and self.tokenizer is None:
            raise InputError("stop strings need a tokenizer. Pass one to Decoder.")
        if not isinstance(sampling, Sampling | None):
            raise InputError(f"sampling={sampling!r} must be an outpace.Sampling.")
        text = None if self.tokenizer is None else TextStream(self.tokenizer, stop)
        used = self.prepare(method or self.method)
        how = self.sampling_for(sampling, tokens, max_new_tokens)
        if logprobs is not None and (not isinstance(logprobs, int) or isinstance(logprobs, bool) or logprobs < 0):
            raise InputError(f"logprobs={logprobs!r} must be 0 or more, a whole number.")
        hints: list[Hint] = []
        if not isinstance(grammar, Grammar | Constraint | None):
            raise InputError(f"grammar={grammar!r:.60} must be an outpace.Grammar, like outpace.Grammar.regex(…).")
        if grammar is not None:
            constraint = self.constraint(grammar, len(tokens)) if isinstance(grammar, Grammar) else grammar
            constraint.take()
            how = replace(how, processors=(*how.processors, constraint))
            hints.append(constraint)
        if prediction is not None and not hasattr(prediction, "__len__"):
            raise InputError(f"prediction={prediction!r:.60} must be a string or a list of token ids.")
        if prediction is not None and len(prediction):
            hints.append(Prediction(self.encode(prediction, raw=True, add_special_tokens=False), len(tokens)))
        extras = Extras(logprobs, tuple(hints), salt)
        return Request(engine, used, tokens, how, Ending(limit, self.ends, text), limit, extras), text

    def constraint(self, grammar: Grammar, prompt_length: int) -> Constraint:
        """A grammar compiled for one sequence, which is slow for large ones; `request` accepts the result."""
        return Constraint(grammar, self.words, self.ends, prompt_length)

    @cached_property
    def words(self) -> Any:
        """The tokenizer's vocabulary, in the form that grammars need."""
        if self.tokenizer is None:
            raise InputError("a grammar needs a tokenizer. Pass one to Decoder.")
        if not self.ends:
            raise InputError("a grammar needs an end-of-sequence token, and this model has none. Set decoder.ends.")
        return words_of(self.tokenizer, self.model.vocabulary, self.ends)

    def sampling_for(self, sampling: Sampling | None, tokens: Sequence[int], max_new_tokens: int) -> Sampling:
        """The Sampling for a prompt, merged with the model's `generation_config`."""
        return self._defaults.apply(sampling, tokens, max_new_tokens)

    def _stream(self, request: Request, text: TextStream | None) -> Iterator[Step]:
        with closing(decode(*request, grows=self._grows)) as steps:
            for step in steps:
                yield with_text(step, text)

    def _batch_of(self, prompts: Any, n: int | None, options: dict[str, Any]) -> Batch:
        prompts = prompts if is_batch(prompts) else [prompts]
        n = 1 if n is None else n
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise InputError(f"n={n!r} must be 1 or more, a whole number.")
        given = {name: _for_each(name, options.pop(name, None), len(prompts)) for name in _EACH}
        ready = {name: self.prepare(name) for name in {item for item in given["method"] if isinstance(item, str)}}
        given["method"] = [ready[item] if isinstance(item, str) else item for item in given["method"]]
        batch = self.batch()
        for number, prompt in enumerate(prompts):
            own = {name: values[number] for name, values in given.items() if values[number] is not None}
            sampling = own.get("sampling")
            if n > 1 and not (isinstance(sampling, Sampling) and sampling.temperature):
                raise InputError(f"n={n}: without sampling all outputs are the same. Set a temperature.")
            for sample in range(n):
                if sample and isinstance(sampling, Sampling):
                    own["sampling"] = replace(sampling, seed=sampling.seed + sample)
                try:
                    batch.add(prompt, **own, **options)
                except OutpaceError as error:
                    error.args = (f"prompt {number}: {error}",)
                    raise
        return batch

    def encode(self, prompt: Prompt, raw: bool = False, add_special_tokens: bool = True) -> list[int]:
        """The prompt's token ids, through the chat template unless `raw`.

        Without special tokens, such as the one that begins a text, a raw string is encoded as within an answer.
        """
        tokens = encode(prompt, self.tokenizer, self.model.name, raw, add_special_tokens)
        if not tokens:
            raise InputError("the prompt is empty. Give at least one token.")
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < self.model.vocabulary:
                raise InputError(
                    f"the prompt has token id {token}; the model's ids are 0 to {self.model.vocabulary - 1}."
                )
        return tokens

    def _limit(self, prompt_length: int, max_new_tokens: int) -> int:
        if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
            raise InputError(f"max_new_tokens={max_new_tokens!r} must be 1 or more, a whole number.")
        left = self.model.context - prompt_length
        if left < 1:
            raise InputError(
                f"the prompt has {prompt_length} tokens, and {self.model.name} has a context of {self.model.context}. "
                "Shorten the prompt."
            )
        return min(max_new_tokens, left)


class Batch:
    """Requests decoded together, numbered from 0: iterate over it for (number, Step).

    If a sequence fails, its error comes instead of a Step, and the others go on. `add` and `cancel` work at any time,
    between two steps too. Leaving the loop ends all sequences.
    """

    def __init__(self, decoder: Decoder, most: int = MOST) -> None:
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise InputError(f"most={most!r} must be 1 or more, a whole number.")
        self.requests: list[Request] = []
        self._decoder, self._engine = decoder, decoder.engine
        self._texts: list[TextStream | None] = []
        self._writing = Writing(most)
        self._cancelled: set[int] = set()

    def add(self, prompt: Prompt, **options: Unpack[Options]) -> int:
        """Add a request, with the options of `Decoder.stream` for one prompt. Returns its number."""
        request, text = self._decoder.request(prompt, **options)
        if not self.requests:
            self._engine = request.engine
        if request.engine is not self._engine:
            raise InputError("the model or its adapters were changed since this batch began. Start another batch.")
        with self._engine.turns:
            self.requests.append(request)
            self._texts.append(text)
            return self._writing.add(request)

    def cancel(self, number: int) -> None:
        """End a sequence now. No effect on one that has ended."""
        if not 0 <= number < len(self.requests):
            raise InputError(f"there is no request {number} to cancel; this batch has {len(self.requests)}.")
        with self._engine.turns:
            self._cancelled.add(number)
            self._writing.cancel(number)

    def __iter__(self) -> Iterator[Event]:
        """Decode until all sequences have ended."""
        with closing(self):
            while self._writing:
                with self._engine.turns:
                    events = self._writing.step()
                for number, item in events:
                    if number not in self._cancelled:
                        yield number, with_text(item, self._texts[number]) if isinstance(item, Step) else item

    def close(self) -> None:
        """End all sequences."""
        self._writing.close()


_EACH = ("method", "sampling", "max_new_tokens")  # options that may differ from prompt to prompt


def _for_each(name: str, given: T | Sequence[T], count: int) -> Sequence[T]:
    """The values of an option for each prompt, from one for all or a list."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise InputError(f"{name} has {len(given)} values for {count} prompts. Give one for all, or one for each.")
    return given


def with_text(step: Step, text: TextStream | None) -> Step:
    """The step with its new text."""
    if text is None:
        return step
    if step.finish is not None:
        text.finish()
    return step.saying(text.take())


def load(
    model: Any = DEFAULT_MODEL,
    tokenizer: Any = None,
    *,
    method: str | Method | None = None,
    dtype: str | None = None,
    device: str | None = None,
    weights: str | None = None,
    runtime: str = "auto",
    exact: bool | None = None,
    memory: float = MEMORY,
    **settings: object,
) -> Decoder:
    """A Decoder for a model by name (embedded, folder, GGUF file, hub id), or for a loaded model and tokenizer.

    `weights`, on a CPU: "packed" computes with the quantized blocks of a GGUF file (the default for such files and for
    embedded models), "q8" and "q4" quantize any model at load, "float32" does not. A quantized model is a different
    model; all methods give its output. "narrow", the default for other models, keeps in 16 bits the matrices that these
    hold exactly: the same model.

    The default method is `auto`. `runtime` is how forward passes run: "plain", "compiled", "native" (CPU), "graphs"
    (CUDA), or "auto".
    `exact` (CUDA, or a CPU in float32) makes logits identical, bit for bit, with every method and in every batch; it is
    on by default where it costs next to nothing (16-bit weights on an H100 or later, packed weights, the native
    runtime), and False turns it off on CUDA. `decoder.engine.mode` says which mode runs.
    `memory` is the share of a GPU's free memory for the KV cache.
    """
    check_settings(method, settings)
    check_tokenizer(tokenizer)
    if isinstance(model, str | PathLike):
        loaded = load_model(str(model), dtype, device, weights or usual_weights(str(model), dtype, device, runtime))
        model, tokenizer = loaded.model, tokenizer or loaded.tokenizer
    elif dtype is not None or device is not None or weights is not None:
        raise InputError(
            "dtype, device and weights are for models loaded by name; use model.to(...) on a loaded model."
        )
    return Decoder(model, tokenizer, method, runtime=runtime, exact=exact, memory=memory, **settings)


def check_tokenizer(tokenizer: Any) -> None:
    """Raise InputError for what is no tokenizer, such as the name of a method in its place."""
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise InputError(f"tokenizer={tokenizer!r:.60} is not a tokenizer. Pass a method by name: method=….")


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The end-of-sequence ids: those of transformers' `generate`, or else the tokenizer's."""
    for holder in (getattr(model, "generation_config", None), getattr(model, "config", None), tokenizer):
        ends = getattr(holder, "eos_token_id", None)
        if ends is not None:
            return [ends] if isinstance(ends, int) else list(ends)
    return []
