"""The clients that people use, as they are, against a real server: openai, llm, LangChain; and Schemathesis."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel, Field, TypeAdapter

from outpace.serve import chat, responses

from .serving import LONG, Running, new_decoder, running

openai = pytest.importorskip("openai")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "tell", "description": "x", "parameters": PERSON}}
KEY = "sk-test"


class Person(BaseModel):
    """Somebody."""

    name: str = Field(max_length=5)
    age: int = Field(le=99, ge=0)


class Couple(BaseModel):
    """Two who belong together."""

    one: Person
    other: Person


class Chain(BaseModel):
    """Who follows whom."""

    person: Person
    then: list[Chain] = Field(max_length=0)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(new_decoder(), max_texts=8, max_queue=64, api_keys=(KEY,)) as found:
        found.http.headers["authorization"] = f"Bearer {KEY}"
        yield found


def hello(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, **fields}


class TestOpenAI:
    @pytest.fixture
    def client(self, server: Running) -> Iterator[Any]:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY) as found:
            yield found

    def test_chat_and_usage(self, client: Any, server: Running) -> None:
        answer = client.chat.completions.create(**hello(max_completion_tokens=12))
        assert answer.choices[0].message.content == server.text()
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (13, 12)
        assert answer.usage.prompt_tokens_details.cached_tokens is not None

    def test_a_stream_with_usage(self, client: Any, server: Running) -> None:
        stream = client.chat.completions.create(
            **hello(max_tokens=12, stream=True, stream_options={"include_usage": True})
        )
        *chunks, last = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == server.text()
        assert last.choices == []
        assert last.usage.total_tokens == 25

    def test_our_own_fields(self, client: Any, server: Running) -> None:
        answer = client.chat.completions.create(**hello(max_tokens=12), extra_body={"speculative": False})
        assert answer.choices[0].message.content == server.text()
        assert answer.model_extra["outpace"]["method"] == "autoregressive"

    def test_tools_streamed_and_not(self, client: Any) -> None:
        fields = hello(tools=[TOOL], tool_choice="required", max_tokens=150)
        (call,) = client.chat.completions.create(**fields).choices[0].message.tool_calls
        assert call.function.name == "tell"
        with client.chat.completions.stream(**fields) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        (again,) = final.choices[0].message.tool_calls
        assert (again.function.name, again.function.arguments) == ("tell", call.function.arguments)

    def test_a_tool_made_of_nested_models(self, client: Any) -> None:
        tools = [openai.pydantic_function_tool(Couple), openai.pydantic_function_tool(Chain)]
        for kind in (Couple, Chain):
            choice = {"type": "function", "function": {"name": kind.__name__}}
            fields = hello(tools=tools, tool_choice=choice, max_tokens=300)
            (call,) = client.chat.completions.parse(**fields).choices[0].message.tool_calls
            assert isinstance(call.function.parsed_arguments, kind)

    def test_a_parsed_answer(self, client: Any) -> None:
        answer = client.chat.completions.parse(**hello(max_tokens=90), response_format=Person)
        assert isinstance(answer.choices[0].message.parsed, Person)

    def test_completions_with_logprobs(self, client: Any) -> None:
        answer = client.completions.create(model="tiny", prompt="abc", max_tokens=5, logprobs=2, temperature=0)
        assert len(answer.choices[0].logprobs.tokens) == 5

    def test_responses(self, client: Any, server: Running) -> None:
        asked: dict[str, Any] = {"model": "tiny", "input": "hello", "max_output_tokens": 12, "temperature": 0}
        assert client.responses.create(**asked).output_text == server.text()
        with client.responses.stream(**asked) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == server.text()
        tool = {"type": "function", "name": "tell", "parameters": PERSON, "strict": True}
        called = client.responses.create(
            model="tiny", input="hello", tools=[tool], tool_choice="required", max_output_tokens=150
        )
        assert called.output[0].name == "tell"
        parsed = client.responses.parse(model="tiny", input="hello", text_format=Person, max_output_tokens=90)
        assert isinstance(parsed.output_parsed, Person)

    def test_models(self, client: Any) -> None:
        assert [card.id for card in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").id == "tiny"

    def test_errors_are_of_the_right_kind(self, client: Any, server: Running) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**hello(), top_p=7)
        assert caught.value.param == "top_p"
        with pytest.raises(openai.NotFoundError) as lost:
            client.chat.completions.create(**{**hello(), "model": "gpt-9"})
        assert lost.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as long:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 3000}])
        assert long.value.code == "context_length_exceeded"
        wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong")
        with wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()

    def test_a_full_queue_is_tried_again(self, client: Any, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        worker = server.service._worker
        assert worker is not None
        submit, refusals = worker.submit, []

        def once(*given: Any) -> Any:
            if not refusals:
                refusals.append(1)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(worker, "queue", -worker.most)  # nobody may come
                    return submit(*given)
            return submit(*given)

        monkeypatch.setattr(worker, "submit", once)
        answer = client.chat.completions.create(**hello(max_tokens=12))
        assert refusals
        assert answer.choices[0].message.content == server.text()

    def test_leaving_a_stream_ends_the_text(self, client: Any, server: Running) -> None:
        stream = client.chat.completions.create(**hello(max_tokens=1500, stream=True))
        next(iter(stream))
        stream.close()
        server.settle()
        assert server.held == 0


FORM = {"type": "json_schema", "name": "person", "schema": PERSON}
FLAT = {"type": "function", "name": "tell", "description": None, "parameters": PERSON, "strict": True}
CALLED = '<tool_call>{"name": "tell", "arguments": {"age": 3}}</tool_call>'
ASKED: list[dict[str, Any]] = [
    {},
    {"logit_bias": {"256": 100}},  # it ends at once
    {"text": {"format": FORM}, "max_output_tokens": 90},
    {"text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low"}, "instructions": "be brief"},
    {"tools": [FLAT], "tool_choice": {"type": "function", "name": "tell"}, "max_output_tokens": 150},
    {"tools": [FLAT], "tool_choice": "required", "max_output_tokens": 30},  # in the midst of its call
]
# What a model writes, and the items that it becomes.
WRITTEN = [
    (f"Let me see.\n{CALLED}\n{CALLED}\n", ["Let me see.\n", "tell", "tell"]),
    (f"\n{CALLED} and {CALLED} so", ["tell", " and ", "tell", " so"]),
    (" \n", [" \n"]),
    ("", [""]),
]


class TestResponses:
    """What `/v1/responses` sends has the types of openai's client, and is the same streamed and not."""

    def both(self, server: Running, **fields: Any) -> tuple[Any, Any]:
        """The response, and the last one of the stream."""
        from openai.types.responses import Response, ResponseStreamEvent

        body = {"input": "hello", "temperature": 0, "max_output_tokens": 12, **fields}
        whole = Response.model_validate(server.http.post("/v1/responses", json=body).json())
        blocks = server.http.post("/v1/responses", json={**body, "stream": True}).text.strip().split("\n\n")
        found = [json.loads(block.partition("data: ")[2]) for block in blocks]
        assert [block.partition("\n")[0] for block in blocks] == [f"event: {event['type']}" for event in found]
        assert [event["sequence_number"] for event in found] == [*range(len(found))]
        told = [TypeAdapter(ResponseStreamEvent).validate_python(event) for event in found]
        assert [event.type for event in told] == [event["type"] for event in found]
        places = [event["output_index"] for event in found if "output_index" in event]
        assert places == sorted(places)  # an item's events end before the next begin
        last = told[-1].response
        assert [event.item for event in told if event.type == "response.output_item.done"] == last.output
        assert len([event for event in told if event.type == "response.output_item.added"]) == len(last.output)
        for place, item in enumerate(last.output):
            deltas = "".join(
                event.delta
                for event in told
                if getattr(event, "output_index", None) == place
                if hasattr(event, "delta")
            )
            assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
        return whole, last

    def told(self, response: Any) -> list[tuple[str, str, str]]:
        return [
            (item.type, item.status, item.arguments if item.type == "function_call" else item.content[0].text)
            for item in response.output
        ]

    @pytest.mark.parametrize("fields", ASKED)
    def test_types(self, server: Running, fields: dict[str, Any]) -> None:
        whole, last = self.both(server, **fields)
        assert self.told(whole) == self.told(last) != []
        assert whole.status == last.status == whole.output[-1].status
        assert (whole.status == "incomplete") == (whole.incomplete_details is not None)
        for found in (whole, last):
            assert found.usage.input_tokens_details.cache_write_tokens == 0
            shown = found.text.format.model_dump(by_alias=True, exclude_none=True)
            assert shown == fields.get("text", {}).get("format", {"type": "text"})
            choice = found.tool_choice
            shown = choice if isinstance(choice, str) else choice.model_dump()
            assert shown == fields.get("tool_choice", "auto")

    @pytest.mark.parametrize(("text", "items"), WRITTEN)
    def test_items(self, server: Running, monkeypatch: pytest.MonkeyPatch, text: str, items: list[str]) -> None:
        class Writes(chat.Choice):
            def take(self, step: Any) -> list[dict[str, Any]]:
                self.left = getattr(self, "left", text)
                size = len(self.left) if step.finish else 3
                now, self.left = self.left[:size], self.left[size:]
                return super().take(replace(step, text=now, finish=step.finish and "stop"))

        monkeypatch.setattr(responses, "Choice", Writes)
        for found in self.both(server, tools=[FLAT]):
            told = [item.name if item.type == "function_call" else item.content[0].text for item in found.output]
            assert told == items
            assert found.status == "completed"
            assert {item.status for item in found.output} == {"completed"}

    def test_an_error_within_a_stream(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        from openai.types.responses import ResponseErrorEvent

        model = server.service.decoder.engine.model
        forward, steps = model.forward, iter(range(1000))

        def fails(*given: Any, **more: Any) -> Any:
            if next(steps) == 12:
                raise RuntimeError("no more")
            return forward(*given, **more)

        body = {"input": "hello", "max_output_tokens": 100, "temperature": 0, "stream": True, "speculative": False}
        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", fails)
            *blocks, last = server.http.post("/v1/responses", json=body).text.strip().split("\n\n")
        name, _, data = last.partition("\n")
        assert name == "event: error"
        error = ResponseErrorEvent.model_validate_json(data.removeprefix("data: "))
        assert (error.code, error.sequence_number) == ("internal_error", len(blocks))
        assert "no more" not in error.message

    def test_leaving_a_stream_ends_the_text(self, server: Running) -> None:
        body = {"input": "hello", "max_output_tokens": 1500, "stream": True}
        with server.http.stream("POST", "/v1/responses", json=body) as answer:
            next(answer.iter_bytes())
        server.settle()
        assert server.held == 0


def test_llm(server: Running, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    llm = pytest.importorskip("llm")
    from llm.default_plugins.openai_models import Chat

    model = Chat("mine", model_name="tiny", api_base=f"{server.url}/v1")
    model.key = KEY
    options = {"temperature": 0, "max_tokens": 12}
    whole = model.prompt("hello", stream=False, key=KEY, **options)
    assert whole.text() == server.text()
    pieces = model.prompt("hello", stream=True, key=KEY, **options)
    assert "".join(pieces) == server.text()
    assert pieces.usage().output == 12
    able = Chat("able", model_name="tiny", api_base=f"{server.url}/v1", supports_schema=True, supports_tools=True)
    person = able.prompt("who?", schema=PERSON, stream=False, key=KEY, temperature=0, max_tokens=90)
    assert set(json.loads(person.text())) == {"name", "age"}
    told = able.prompt("who?", tools=[llm.Tool(name="tell", input_schema=PERSON)], stream=False, key=KEY, **options)
    assert told.tool_calls() == []  # the model is told of it, and calls nothing by itself here

    class Forced(Chat):  # type: ignore[misc]
        def build_kwargs(self, prompt: Any, stream: bool) -> dict[str, Any]:
            return {**super().build_kwargs(prompt, stream), "tool_choice": "required"}

    forced = Forced("forced", model_name="tiny", api_base=f"{server.url}/v1", supports_tools=True)
    for stream in (False, True):
        tools = [llm.Tool(name="tell", input_schema=PERSON)]
        told = forced.prompt("who?", tools=tools, stream=stream, key=KEY, temperature=0, max_tokens=150)
        (call,) = told.tool_calls()
        assert (call.name, set(call.arguments)) == ("tell", {"name", "age"})
    with pytest.raises(openai.AuthenticationError):
        able.prompt("hello", stream=False, key="wrong", **options).text()
    chat = model.conversation()
    chat.prompt("hello", stream=False, key=KEY, **options).text()
    assert chat.prompt("and?", stream=False, key=KEY, **options).text()


@pytest.mark.filterwarnings("default")
def test_langchain(server: Running) -> None:
    pytest.importorskip("langchain_openai")
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": KEY, "model": "tiny", "temperature": 0}
    model = ChatOpenAI(**options, max_tokens=12, stream_usage=True)
    assert model.invoke("hello").content == server.text()
    chunks = list(model.stream("hello"))
    assert "".join(str(chunk.content) for chunk in chunks) == server.text()
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == 12
    turns = [SystemMessage("be brief"), HumanMessage("hello"), AIMessage("hi"), HumanMessage("and?")]
    assert model.invoke(turns).usage_metadata["input_tokens"] > 13
    longer = ChatOpenAI(**options, max_tokens=150)
    found = longer.with_structured_output(Person, method="json_schema").invoke("who?")
    assert isinstance(found, Person)
    called = longer.bind_tools([TOOL], tool_choice="tell").invoke("who?")
    assert called.tool_calls[0]["name"] == "tell"
    assert set(called.tool_calls[0]["args"]) == {"name", "age"}
    with pytest.raises(openai.BadRequestError, match="Shorten"):
        longer.invoke("x" * 3000)


LIMITS = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}


def fuzz(server: Running, cases: int, seed: int = 0) -> int:
    """Send up to so many requests made from the OpenAPI schema, good and bad ones; how many were answered."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis.errors import Unsatisfiable

    headers = {"Authorization": f"Bearer {KEY}"}
    schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
    schema.config.update(base_url=server.url, request_timeout=LONG)
    operations = [found.ok() for found in schema.get_all_operations()]
    count = 0
    for operation in operations:
        for mode in schemathesis.GenerationMode:
            try:
                strategy = operation.as_strategy(generation_mode=mode)

                @seeded(seed)
                @settings(
                    max_examples=cases // (2 * len(operations)),
                    database=None,
                    suppress_health_check=[*HealthCheck],
                    phases=[Phase.generate],
                )
                @given(strategy)
                def ask(case: Any) -> None:
                    nonlocal count
                    if isinstance(case.body, dict):  # short answers, that many may be asked for
                        for name in LIMITS.get(case.path, ()):
                            case.body[name] = min(3, case.body[name]) if isinstance(case.body.get(name), int) else 3
                    answer = case.call(headers=headers)
                    count += 1
                    assert answer.status_code < 500, (answer.status_code, answer.text, case.body)
                    if answer.status_code >= 400 and answer.status_code not in (405,):
                        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

                ask()
            except (schemathesis.errors.SchemathesisError, Unsatisfiable):  # noqa: PERF203
                continue  # there is nothing bad to send where nothing is asked
    server.settle()
    assert server.held == 0
    return count


@pytest.mark.filterwarnings("default")
def test_no_request_is_too_strange(server: Running) -> None:
    assert fuzz(server, 26) > 10


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("part", range(20))  # parts, since the whole takes a while
def test_ten_thousand_strange_requests(server: Running, part: int) -> None:
    assert fuzz(server, 1_000, part) >= 500
