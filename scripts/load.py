"""Load tests of a real server: closed loops of clients over loopback, in a separate process (clients.py).

    python scripts/load.py table  --model DIR --data FILE --times 8   1, 4, 16, 64 clients; as in lab, on CUDA
    python scripts/load.py table  --clients 1 4                       the embedded model, unwidened
    python scripts/load.py memory                                     8 clients for 10 minutes: memory, slots
    python scripts/load.py turns                                      first token of a chat's second turn
    python scripts/load.py equal  --model DIR --data FILE --times 8   200 mixed requests: each one's text is that of
                                                                      the same request alone

`table` compares `auto` with plain decoding, and the server with the decoder alone. Each client sends its next request
when its last is answered. Every command prints which targets are met, and exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outpace import Decoder, Sampling, load
from outpace.bench.data import own_questions, read_questions
from outpace.serve.running import Server, listen
from outpace.serve.settings import Settings
from outpace.serve.warming import warm

CONSOLE = Console(width=120)
LENGTH = 1000  # the most tokens of a sequence, so that graphs of one context length serve all
LEAD = 0.3  # the share of a loop that is not counted: all clients start at once, which is not typical
Record = list[Any]  # start, first byte, end, prompt tokens, new tokens, error; number and texts, if asked for


class Clients:
    """The other process."""

    def __init__(self, port: int) -> None:
        self._port = port
        command = [sys.executable, str(Path(__file__).with_name("clients.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, bodies: list[dict[str, Any]], clients: int, key: str, **how: Any) -> list[Record]:
        """Their records, in the order in which they ended. Sequences with different keys share no KV cache."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"port": self._port, "key": key, "clients": clients, "bodies": bodies, **how}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        found: list[Record] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        with self._process:  # closes its pipes, and waits for it
            self._process.kill()


@contextmanager
def serving(decoder: Decoder, **settings: Any) -> Iterator[tuple[Server, Clients]]:
    """A server in a thread, and its clients in a process."""
    with listen("127.0.0.1", 0, False) as place:
        server = Server(decoder, Settings(name="model", **settings))
        thread = Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
        thread.start()
        while server.service.state == "loading" or not server.started:
            time.sleep(0.02)
        if server.service.error is not None:
            raise server.service.error
        clients = Clients(place.getsockname()[1])
        try:
            yield server, clients
        finally:
            clients.close()
            server.handle_exit(15, None)
            thread.join()


def decoder_of(arguments: argparse.Namespace) -> Decoder:
    if arguments.times == 1:
        return load(arguments.model)
    from lab.methods import usual
    from lab.models import set_up

    setup = set_up(arguments, exact=None)  # the mode that users get
    setup.decoder.method = setup.decoder.prepare(usual(setup, arguments.times)["auto"])
    return setup.decoder


def questions_of(decoder: Decoder, arguments: argparse.Namespace) -> list[str]:
    """Prompts of all tasks in turn, except long ones."""
    questions = read_questions(arguments.data) if arguments.data else own_questions()
    texts = [question.turns[0] for question in sorted(questions, key=lambda question: question.number)]
    return [text for text in texts if len(decoder.encode(text)) + arguments.tokens < LENGTH]


def body_of(text: str, tokens: int, plain: bool) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculative": not plain,
    }


def speed(records: list[Record], start: float, stop: float) -> float:
    """Tokens/s between two times, as if a sequence's tokens came evenly from its first to its last."""
    tokens = 0.0
    for _, first, last, _, written, wrong in records:
        if wrong is None:
            inside = max(0.0, min(stop, last) - max(start, first))
            tokens += written * inside / max(last - first, 1e-9)
    return tokens / (stop - start)


def table(decoder: Decoder, arguments: argparse.Namespace) -> bool:
    questions = questions_of(decoder, arguments)
    begin = time.perf_counter()
    most = max(arguments.clients)
    longest = min(LENGTH, decoder.model.context)
    methods = (decoder.method, decoder.prepare("autoregressive"))
    warm(decoder, methods, most, longest, samplings=(Sampling(),))
    print(f"warm in {time.perf_counter() - begin:.1f} s", flush=True)
    options = {"max_texts": most, "max_length": longest, "warm": False}
    with serving(decoder, **options) as (_, clients):
        lines = [side for count in arguments.clients for side in loops(clients, questions, count, arguments)]
        own = own_cost(decoder, clients, questions, arguments)
    return judged(lines, own, arguments)


def loops(clients: Clients, questions: list[str], count: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """`auto`, plain, plain, auto: with the same prompts, and no KV cache in common."""
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for turn, plain in enumerate((False, True, True, False)):
        shift = (turn // 2) * len(questions) // 2
        bodies = [body_of(text, arguments.tokens, plain) for text in questions[shift:] + questions[:shift]]
        start = time.monotonic()
        records = clients.run(bodies, count, f"{count}-{turn}", seconds=arguments.seconds)
        tokens = speed(records, start + LEAD * arguments.seconds, start + arguments.seconds)
        found[plain].append({"tokens_per_second": tokens, "records": records})
    lines = []
    for plain, runs in found.items():
        records = [record for run in runs for record in run["records"]]
        waits = sorted(1000 * (record[1] - record[0]) for record in records if record[5] is None) or [0.0]
        lines.append(
            {
                "clients": count,
                "plain": plain,
                "tokens_per_second": round(statistics.mean(run["tokens_per_second"] for run in runs), 1),
                "each": [round(run["tokens_per_second"], 1) for run in runs],
                "first_token_ms": round(statistics.median(waits), 1),
                "first_token_ms_95": round(waits[int(0.95 * (len(waits) - 1))], 1),
                "requests": len(records),
                "lost": sum(record[5] is not None for record in records),
            }
        )
        print(json.dumps(lines[-1]), flush=True)
    return lines


def own_cost(
    decoder: Decoder, clients: Clients, questions: list[str], arguments: argparse.Namespace
) -> dict[str, float]:
    """Tokens/s of one client, from request to last byte, and of the decoder without a server, prompt by prompt."""
    spent, tokens = {"server": 0.0, "decoder": 0.0}, {"server": 0, "decoder": 0}

    def by_server(text: str) -> None:
        (record,) = clients.run([body_of(text, arguments.tokens, plain=False)], 1, "cost", count=1)
        spent["server"] += record[2] - record[0]
        tokens["server"] += record[4]

    def by_decoder(text: str) -> None:
        start = time.perf_counter()
        result = decoder.generate(text, max_new_tokens=arguments.tokens, salt="decoder")
        spent["decoder"] += time.perf_counter() - start
        tokens["decoder"] += result.new_tokens

    for number, text in enumerate(questions[-arguments.beside :]):
        for write in (by_server, by_decoder) if number % 2 else (by_decoder, by_server):
            write(text)
    speeds = {name: round(tokens[name] / spent[name], 1) for name in spent}
    found = {**speeds, "cost": round(1 - speeds["server"] / speeds["decoder"], 4)}
    print(json.dumps(found), flush=True)
    return found


def judged(lines: list[dict[str, Any]], own: dict[str, float], arguments: argparse.Namespace) -> bool:
    """Print the table and which targets are met; returns whether all are."""
    shown = Table("clients", "auto, tokens/s", "plain", "auto / plain", "first token, ms", "95 %", "plain's", "lost")
    aims: dict[str, bool] = {}
    for fast, plain in zip(lines[::2], lines[1::2], strict=True):
        times = fast["tokens_per_second"] / plain["tokens_per_second"]
        count = fast["clients"]
        shown.add_row(
            *(str(count), str(fast["tokens_per_second"]), str(plain["tokens_per_second"]), f"{times:.2f}"),
            *(str(fast["first_token_ms"]), str(fast["first_token_ms_95"]), str(plain["first_token_ms"])),
            str(fast["lost"] + plain["lost"]),
        )
        least = 2.2 if count == 1 else 1.0
        aims[f"{count} clients: {times:.2f} times plain, at least {least}"] = times >= least
        if count == 16:
            wait = fast["first_token_ms"]
            aims[f"16 clients: first token after {wait} ms, at most 150"] = wait <= 150
    lost = sum(line["lost"] for line in lines)
    aims[f"{lost} requests lost, at most 0"] = lost == 0
    aims[f"the server's own cost at 1 client: {own['cost']:.1%}, at most 3 %"] = own["cost"] <= 0.03
    CONSOLE.print(f"times {arguments.times}, {arguments.tokens} tokens, {arguments.seconds} s a loop", shown)
    return verdict(aims)


def verdict(aims: dict[str, bool]) -> bool:
    for aim, met in aims.items():
        print(f"{'met   ' if met else 'MISSED'} {aim}")
    return all(aims.values())


def mixed(draw: random.Random, texts: list[str]) -> dict[str, Any]:
    """A request with random fields; some clients disconnect in the middle."""
    turns = [{"role": "user", "content": draw.choice(texts)}]
    if draw.random() < 0.3:
        turns += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": draw.choice(texts)}]
    body: dict[str, Any] = {"messages": turns, "max_tokens": draw.randrange(1, 64), "seed": draw.randrange(9)}
    body["temperature"] = draw.choice([0, 0, 0.7, 1.0])
    body["stream"] = draw.random() < 0.7
    options: dict[str, list[Any]] = {
        "method": ["lookahead", "prompt-lookup", "jacobi"],
        "speculative": [False],
        "top_p": [0.9],
        "top_k": [20],
        "presence_penalty": [0.5],
        "logit_bias": [{"70": 3}],
        "stop": [["\n\n"]],
        "n": [2],
        "logprobs": [True],
        "trace": [True],
        "prediction": [{"type": "content", "content": "The sky is blue because"}],
        "response_format": [{"type": "json_object"}],
        "leave": [0.1, 1.0],
    }
    for name, values in options.items():
        if draw.random() < 0.1:
            body[name] = draw.choice(values)
    return body


def memory(decoder: Decoder, arguments: argparse.Namespace) -> bool:
    """Clients with mixed requests: the server's memory over time, and its KV slots at the end."""
    draw = random.Random(1)
    texts = questions_of(decoder, arguments)
    bodies = [mixed(draw, texts) for _ in range(2000)]
    sizes: list[tuple[float, float]] = []
    done: list[list[Record]] = []
    count, seconds = arguments.clients[0], arguments.seconds
    with serving(decoder, max_length=min(LENGTH, decoder.model.context)) as (server, clients):
        start = time.monotonic()
        run = Thread(target=lambda: done.append(clients.run(bodies, count, "memory", seconds=seconds)))
        run.start()
        while run.is_alive():
            sizes.append((time.monotonic() - start, resident()))
            if len(sizes) % 10 == 1:
                print(f"{sizes[-1][0]:5.0f} s  {sizes[-1][1]:8.1f} MiB", flush=True)
            run.join(seconds / 100)
        while server.service.open:
            time.sleep(0.01)
        pool = decoder.engine.pool
        held, kept = pool.held, pool.kept
        pool.forget_all()
        lost = held + pool.used
    (records,) = done
    later = [size for moment, size in sizes if arguments.settled * seconds < moment < seconds]  # under load
    middle = statistics.median(later)
    worst = max(abs(size / middle - 1) for size in later)
    wrong = [record[5] for record in records if record[5] not in (None, "left")]
    left = sum(record[5] == "left" for record in records)
    print(f"{len(records)} requests, {left} left by their clients, {kept} slots of ended texts kept")
    return verdict(
        {
            f"memory {min(later):.1f} to {max(later):.1f} MiB, {worst:.2%} off its median, at most 2 %": worst <= 0.02,
            f"{lost} slots lost, at most 0": lost == 0,
            f"{len(wrong)} requests lost, at most 0 {sorted({*wrong})}": not wrong,
        }
    )


def equal(decoder: Decoder, arguments: argparse.Namespace) -> bool:
    """Mixed requests at random times, some left by their clients: their texts are those of each request alone."""
    draw = random.Random(1)
    room = LENGTH // 2 - 64  # two of them may be turns of one request
    texts = [text for text in questions_of(decoder, arguments) if len(decoder.encode(text)) < room]
    bodies = [mixed(draw, texts) for _ in range(arguments.requests)]
    rush = [{**body, "at": draw.random() * arguments.seconds} for body in bodies]
    quiet = [{name: value for name, value in body.items() if name != "leave"} for body in bodies]
    count = arguments.clients[0]
    with serving(decoder, warm=False, max_length=min(LENGTH, decoder.model.context)) as (server, clients):
        together = clients.run(rush, count, "rush", count=len(rush), texts=True)
        most = max(sum(a[0] <= b[0] < a[2] for a in together) for b in together)
        decoder.engine.pool.forget_all()
        alone = clients.run(quiet, 1, "quiet", count=len(quiet), texts=True)
        while server.service.open:
            time.sleep(0.01)
    expected = {number: texts for *_, number, texts in alone}
    wrong = [record[5] for record in (*together, *alone) if record[5] not in (None, "left")]
    left, differ = 0, []
    for *_, error, number, found in together:
        whole = expected[number]
        if error == "left":
            left += 1
            same = all(full[0].startswith(text[0]) for text, full in zip(found, whole, strict=False))
        else:
            same = error is not None or found == whole  # others are counted as lost
        if not same:
            differ.append(bodies[number])
    for body in differ[:5]:
        print(json.dumps(body))
    print(f"{len(bodies)} requests, at most {most} at a time; {left} left by their clients")
    return verdict(
        {
            f"{len(differ)} of {len(together)} texts differ from the same request's alone, at most 0": not differ,
            f"{len(wrong)} requests lost, at most 0 {sorted({*wrong})}": not wrong,
        }
    )


def resident() -> float:
    """This process's anonymous memory in MiB, without mapped files."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["RssAnon"].split()[0]) / 1024


def turns(decoder: Decoder, arguments: argparse.Namespace) -> bool:
    """The time to the first token of a chat's first turn, of 1,500 tokens, and of its second turn."""
    words = [f"word{number}" for number in range(700)]
    while len(decoder.encode("Remember these words. " + " ".join(words))) > 1500:
        words.pop()
    first = [{"role": "user", "content": "Remember these words. " + " ".join(words)}]
    second = [*first, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Which was the third?"}]
    shares = []
    with serving(decoder) as (_, clients):
        clients.run([body_of("Hello", 8, plain=False)], 1, "first", count=1)
        for turn in range(3):
            waits = []
            for messages in (first, second):
                body = {**body_of("", 8, plain=False), "messages": messages}
                (record,) = clients.run([body], 1, f"turns {turn}", count=1)
                waits.append(1000 * (record[1] - record[0]))
            shares.append(waits[1] / waits[0])
            print(f"{record[3]} tokens: first turn {waits[0]:.0f} ms, second {waits[1]:.0f} ms, {shares[-1]:.1%}")
    share = statistics.median(shares)
    return verdict({f"the second turn's first token after {share:.1%} of the first's time, at most 20 %": share <= 0.2})


USUAL = {"table": ([1, 4, 16, 64], 5.0), "memory": ([8], 600.0), "turns": ([1], 0.0), "equal": ([32], 10.0)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*USUAL], nargs="+", help="one after the other")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", type=Path, help="Spec-Bench's question file")
    parser.add_argument("--gguf", type=Path, nargs="+")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--clients", type=int, nargs="+", help="default: 1 4 16 64; for memory 8, for equal 32")
    parser.add_argument("--seconds", type=float, help="of a loop; default: 5; for memory 600, for equal 10")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--beside", type=int, default=16, help="prompts for the server's own cost")
    parser.add_argument("--requests", type=int, default=200, help="for equal")
    parser.add_argument("--settled", type=float, default=0.2, help="share of the time in which memory may grow")
    arguments = parser.parse_args()
    arguments.heads, arguments.runtime, arguments.threads = [], "auto", torch.get_num_threads()
    begin = time.perf_counter()
    decoder = decoder_of(arguments)
    print(f"loaded in {time.perf_counter() - begin:.1f} s: {decoder.engine.name}", flush=True)
    met = []
    for what in arguments.what:
        clients, seconds = USUAL[what]
        how = {"clients": arguments.clients or clients, "seconds": arguments.seconds or seconds}
        met.append(globals()[what](decoder, argparse.Namespace(**{**vars(arguments), **how})))
    sys.exit(not all(met))


if __name__ == "__main__":
    main()
