"""Prometheus metrics under vLLM's names, and the speculation statistics of a response."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily

from ..draft import MODEL, Step
from ..result import Result
from .worker import Job, Worker

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
DEEPEST = 32  # draft positions that are counted separately
_HISTOGRAMS = {
    "time_to_first_token_seconds": _SECONDS,
    "request_time_per_output_token_seconds": _SECONDS,
    "e2e_request_latency_seconds": _SECONDS,
    "request_queue_time_seconds": _SECONDS,
    "request_inference_time_seconds": _SECONDS,
    "request_prefill_time_seconds": _SECONDS,
    "request_decode_time_seconds": _SECONDS,
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "iteration_tokens_total": _TOKENS,
}
_COUNTERS = (
    "prompt_tokens",
    "generation_tokens",
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class _PerToken:
    """A histogram with several observations at a time: a Histogram takes as long for a token as reading its step."""

    def __init__(self, name: str, bounds: Sequence[float], labels: dict[str, str]) -> None:
        self._name, self._bounds, self._labels = name, bounds, labels
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int) -> None:
        """A value, this many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """For the registry."""
        found = HistogramMetricFamily(self._name, self._name[5:].replace("_", " "), labels=[*self._labels])
        bounds = [str(float(bound)) for bound in self._bounds] + ["+Inf"]
        buckets = [*zip(bounds, accumulate(self._counts), strict=True)]
        found.add_metric([*self._labels.values()], buckets, self._sum)
        yield found


class Metrics:
    """Metrics of a worker, for Prometheus."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._aside = 0
        names = tuple(self._labels)
        self._histograms = {
            name: Histogram(f"vllm:{name}", name.replace("_", " "), names, buckets=buckets, registry=self.registry)
            for name, buckets in _HISTOGRAMS.items()
        }
        self._counters = {
            name: Counter(f"vllm:{name}", name.replace("_", " "), names, registry=self.registry) for name in _COUNTERS
        }
        self._gauges = {
            name: Gauge(f"vllm:{name}", name.replace("_", " "), names, registry=self.registry) for name in _GAUGES
        }
        self._between = _PerToken("vllm:inter_token_latency_seconds", _SECONDS, self._labels)
        self.registry.register(self._between)
        by_reason, by_place = (*names, "finished_reason"), (*names, "position")
        self._success = Counter("vllm:request_success", "sequences that ended", by_reason, registry=self.registry)
        self._by_place = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "accepted draft tokens", by_place, registry=self.registry
        )
        # Looking up labels takes longer than counting, so it is done once.
        self._counts = {name: counter.labels(**self._labels) for name, counter in self._counters.items()}
        self._observed = {name: histogram.labels(**self._labels) for name, histogram in self._histograms.items()}
        self._at = [self._by_place.labels(**self._labels, position=str(place)) for place in range(DEEPEST)]
        self._ended = {
            reason: self._success.labels(**self._labels, finished_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }

    def follow(self, worker: Worker) -> None:
        """Read the gauges from this worker."""
        pool = worker.decoder.engine.pool
        readings = {
            "num_requests_running": lambda: worker.running,
            "num_requests_waiting": lambda: worker.waiting,
            "kv_cache_usage_perc": lambda: pool.held / (pool.limit or pool.capacity),  # kept prefixes are free
        }
        for name, read in readings.items():
            self._gauges[name].labels(**self._labels).set_function(read)

    def set_aside(self, times: int) -> None:
        """The total number of preemptions for lack of KV slots so far."""
        if times > self._aside:
            self._count("num_preemptions", times - self._aside)
            self._aside = times

    def text(self) -> bytes:
        """All metrics, as `/metrics` shows them."""
        return generate_latest(self.registry)

    def _count(self, name: str, number: float) -> None:
        self._counts[name].inc(number)

    def _observe(self, name: str, number: float) -> None:
        self._observed[name].observe(max(0.0, number))

    def stepped(self, tokens: int, jobs: Sequence[tuple[Job, Step]], now: float) -> None:
        """A step has yielded this many tokens."""
        self._observe("iteration_tokens_total", tokens)
        self._count("generation_tokens", tokens)
        drafts, offered, right = 0, 0, list[int]()  # of all sequences
        for job, step in jobs:
            if not job.first:
                job.first = now
                self._observe("time_to_first_token_seconds", now - job.arrived)
                self._count("prompt_tokens", job.result.prompt_tokens)
                self._count("prefix_cache_queries", job.result.prompt_tokens)
                self._count("prefix_cache_hits", step.reused)
            elif step.tokens:
                self._between.observe(max(0.0, now - job.last) / len(step.tokens), len(step.tokens))
            job.last = now
            if step.draft.candidates > 1:
                drafts += 1
                offered += step.draft.candidates - 1
                right.append(len(step.sources) - step.sources.count(MODEL))
        if drafts:
            self._count("spec_decode_num_drafts", drafts)
            self._count("spec_decode_num_draft_tokens", offered)
            self._count("spec_decode_num_accepted_tokens", sum(right))
            for place in range(min(max(right), DEEPEST)):
                self._at[place].inc(sum(accepted > place for accepted in right))

    def ended(self, job: Job, reason: str, now: float) -> None:
        """A sequence has ended."""
        self._ended[reason].inc()
        self._observe("e2e_request_latency_seconds", now - job.arrived)
        self._observe("request_prompt_tokens", job.result.prompt_tokens)
        self._observe("request_generation_tokens", job.result.new_tokens)
        if job.begun:
            self._observe("request_queue_time_seconds", job.begun - job.arrived)
            self._observe("request_inference_time_seconds", now - job.begun)
        if job.first:
            self._observe("request_prefill_time_seconds", job.first - (job.begun or job.arrived))
            self._observe("request_decode_time_seconds", now - job.first)
            if job.result.new_tokens > 1:
                spent = (now - job.first) / (job.result.new_tokens - 1)
                self._observe("request_time_per_output_token_seconds", spent)


def acceptance(results: Sequence[Result]) -> dict[str, Any]:
    """vLLM's speculation statistics of a response."""
    per_step = [tokens for result in results for tokens in result.accepted_per_step]
    offered = sum(sum(result.offered.values()) for result in results)
    accepted = sum(len(result.sources) - result.sources.count(MODEL) for result in results)
    longest = max(per_step, default=1)
    return {
        "mean_acceptance_length": sum(per_step) / len(per_step) if per_step else 0.0,
        "draft_acceptance_rate": accepted / offered if offered else 0.0,
        "acceptance_histogram": [per_step.count(tokens) for tokens in range(1, longest + 1)],
        "num_spec_steps": len(per_step),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": offered,
        "num_spec_tokens": longest - 1,
    }


def timings(jobs: Sequence[Job]) -> dict[str, Any]:
    """llama.cpp's timings of a response."""
    results = [job.result for job in jobs]
    start = min(job.arrived for job in jobs)
    first = min((job.first for job in jobs if job.first), default=start)
    last = max(job.last for job in jobs)
    prompt, predicted = results[0].prompt_tokens, sum(result.new_tokens for result in results)
    reading, writing = max(first - start, 1e-9), max(last - first, 1e-9)
    reused = results[0].reused
    return {
        "cache_n": reused,
        "prompt_n": prompt - reused,
        "prompt_ms": 1000 * reading,
        "prompt_per_second": (prompt - reused) / reading,
        "predicted_n": predicted,
        "predicted_ms": 1000 * writing,
        "predicted_per_second": predicted / writing,
        "draft_n": sum(sum(result.offered.values()) for result in results),
        "draft_n_accepted": sum(len(result.sources) - result.sources.count(MODEL) for result in results),
    }
