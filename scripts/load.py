"""Closed loops of clients against a real server: tokens/s, time to the first token, requests lost; `auto` beside plain.

    python scripts/load.py --model DIR --data FILE --times 8 --clients 1,4,16,64     as in steps.py, on a CUDA GPU
    python scripts/load.py --model smollm2-135m --clients 1,4                        any model as it is

Each client sends its next request when its last is answered. Both sides take turns on every number of clients.
`--turns` measures the second turn of a chat with a long first turn instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

import httpx

from outpace import Decoder, load
from outpace.bench.data import own_questions, read_questions
from outpace.serve.running import Server, listen
from outpace.serve.settings import Settings


def decoder_of(arguments: argparse.Namespace) -> Decoder:
    if arguments.times == 1:
        return load(arguments.model)
    from steps import prepare

    decoder, methods, _ = prepare(arguments)
    decoder.method = methods["auto"]
    return decoder


def prompts_of(arguments: argparse.Namespace) -> list[str]:
    questions = read_questions(arguments.data) if arguments.data else own_questions()
    return [question.turns[0] for question in questions]


def ask(http: httpx.Client, prompt: Any, tokens: int, plain: bool) -> tuple[int, float]:
    """How many tokens came, and seconds to the first."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    body = {"messages": messages, "temperature": 0, "max_tokens": tokens, "stream": True, "speculative": not plain}
    body["stream_options"] = {"include_usage": True}
    start, first, count = time.perf_counter(), 0.0, 0
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            first = first or time.perf_counter() - start
            if line.startswith("data: {"):
                count = ((json.loads(line[6:]).get("usage")) or {}).get("completion_tokens", count)
    return count, first


def loop(
    http: httpx.Client, prompts: list[str], clients: int, arguments: argparse.Namespace, plain: bool
) -> dict[str, Any]:
    """So many clients, each with its share of the prompts, for some seconds."""
    end, firsts, counts, lost = time.perf_counter() + arguments.seconds, list[float](), list[int](), 0

    def client(number: int) -> None:
        nonlocal lost
        turn = number
        while time.perf_counter() < end:
            try:
                count, first = ask(http, prompts[turn % len(prompts)], arguments.tokens, plain)
                counts.append(count)
                firsts.append(first)
            except httpx.HTTPError:
                lost += 1
            turn += clients

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        for done in [threads.submit(client, number) for number in range(clients)]:
            done.result()
    seconds = time.perf_counter() - start
    return {
        "clients": clients,
        "plain": plain,
        "tokens_per_second": round(sum(counts) / seconds, 1),
        "first_token_ms": round(1000 * statistics.median(firsts)),
        "requests": len(counts),
        "lost": lost,
    }


def turns(http: httpx.Client) -> dict[str, Any]:
    """The time to the first token of a chat's first turn, and of its second."""
    messages = [{"role": "user", "content": "Remember these words. " + " ".join(f"word{n}" for n in range(480))}]
    _, first = ask(http, messages, 8, False)
    messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Which was the third?"}]
    _, second = ask(http, messages, 8, False)
    return {
        "first_turn_ms": round(1000 * first),
        "second_turn_ms": round(1000 * second),
        "share": round(second / first, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data")
    parser.add_argument("--gguf")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--clients", default="1,4,16,64")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", action="store_true")
    arguments = parser.parse_args()
    decoder, prompts = decoder_of(arguments), prompts_of(arguments)
    with listen("127.0.0.1", 0, False) as place:
        server = Server(decoder, Settings(name="model"))
        thread = Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{place.getsockname()[1]}"
        start = time.perf_counter()
        while server.service.state == "loading":
            time.sleep(0.1)
        print(json.dumps({"ready_s": round(time.perf_counter() - start, 1)}), flush=True)
        limits = httpx.Limits(max_connections=None)
        with httpx.Client(base_url=url, timeout=600, limits=limits) as http:
            ask(http, prompts[0], arguments.tokens, plain=True)
            if arguments.turns:
                print(json.dumps(turns(http)))
            else:
                for clients in map(int, arguments.clients.split(",")):
                    for plain in (False, True):
                        print(json.dumps(loop(http, prompts, clients, arguments, plain)), flush=True)
        server.handle_exit(15, None)
        thread.join()


if __name__ == "__main__":
    main()
