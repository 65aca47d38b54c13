"""Request bodies: every field with its range.

Unknown fields are ignored, as OpenAI's clients expect, except those of other servers that would change the text.

Bodies are checked on the event loop, so nothing here takes long whatever a body of 4 MiB holds: lists and dicts have a
limit, and the first error in a list ends its check.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from .faults import Fault

Text = Annotated[str, Field(max_length=2**22)]
Name = Annotated[str, Field(max_length=256)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(fail_fast=True, min_length=1, max_length=2**20)]
StopText = Annotated[str, Field(min_length=1, max_length=256)]
Schema = dict[str, Any]
PARTS = 4096  # of all messages of a request, with their tool calls


def _whole(value: Any) -> Any:
    """Some clients write 8 as 8.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]

# Fields that are not supported, of OpenAI's and vLLM's, and their values that have no effect.
NO_SUCH: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "prompt_embeds": (None,),
    "suffix": (None, ""),
    "echo": (None, False),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "stop_token_ids": (None, []),
    "include_stop_str_in_output": (None, False),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "truncate_prompt_tokens": (None,),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "grammar": (None, ""),
}


def _few(data: Any) -> Any:
    if isinstance(data, dict) and len(data) > 1024:
        raise PydanticCustomError("too_long", "must have at most 1024 items")
    return data


class Fields(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _is_given(cls, data: Any) -> Any:
        """A field that is null is as if it was left out: in OpenAI's clients most are optional."""
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class Body(Fields):
    """A request."""

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        """Reject lone surrogates: JSON can contain them, but they can be neither tokenized nor sent back."""
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise PydanticCustomError("text", "must be text: it has a lone surrogate") from error
        except RecursionError as error:
            raise PydanticCustomError("nested", "is nested too deeply") from error
        except (TypeError, ValueError):
            pass  # not from JSON; the fields' own checks report it
        return data

    @model_validator(mode="before")
    @classmethod
    def _has_few_parts(cls, data: Any) -> Any:
        for name in ("messages", "input"):
            items = data.get(name) if isinstance(data, dict) else None
            parts = [
                value
                for item in (items if isinstance(items, list) else ())
                for value in (item.values() if isinstance(item, dict) else ())
                if isinstance(value, list)
            ]
            if sum(map(len, parts)) > PARTS:
                raise Fault(f"{name} may have at most {PARTS} parts and tool calls in all. Join some.", param=name)
        return data


class Part(Fields):
    """A part of a message."""

    type: Name
    text: Text | None = None
    refusal: Text | None = None


Parts = Annotated[list[Part], Field(fail_fast=True, max_length=PARTS)]


class Called(Fields):
    """The function of a tool call."""

    name: Name
    arguments: Text = ""


class Call(Fields):
    """A tool call by the model, in an earlier message."""

    id: Name = ""
    type: Name = "function"
    function: Called


class Message(Fields):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Parts | None = None
    name: Name | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True, max_length=128)] | None = None
    tool_call_id: Name | None = None
    refusal: Text | None = None  # of the model, instead of content

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None:
            self.content = self.refusal
        if self.content is None and (self.role != "assistant" or self.tool_calls is None):
            raise Fault(f"a message of the {self.role} has no content.", param="messages")
        return self


class Function(Fields):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: Schema | None = None


class Tool(Fields):
    """A tool."""

    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    """A function by its name."""

    name: Name


class ToolChoice(Fields):
    """The function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Fields):
    """A schema with its name."""

    name: Name = "answer"
    schema_: Annotated[Schema, Field(alias="schema")]


class ResponseFormat(Fields):
    """The format that the response must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Prediction(Fields):
    """The expected response, to draft from."""

    type: Literal["content"] = "content"
    content: Text | Parts


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool = False


class TemplateSettings(Fields):
    """Settings passed to the chat template."""

    model_config = ConfigDict(extra="forbid")

    enable_thinking: bool | None = None


class Asked(Body):
    """Fields of all kinds of requests."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = {}  # unsupported ones beside NO_SUCH

    model: Name | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_few)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    method: Name | None = None
    speculative: bool = True
    trace: bool = False

    @model_validator(mode="before")
    @classmethod
    def _is_supported(cls, data: Any) -> Any:
        for name, idle in {**NO_SUCH, **cls.refused}.items():
            if isinstance(data, dict) and name in data and not any(data[name] == value for value in idle):
                raise Fault(f"{name} is not supported. Leave it out.", param=name, code="unsupported_parameter")
        return data


class Sampled(Asked):
    """Fields of chats and completions."""

    n: Annotated[Whole, Field(ge=1, le=128)] | None = None
    stop: StopText | Annotated[list[StopText], Field(fail_fast=True, max_length=16)] | None = None
    max_tokens: Annotated[Whole, Field(ge=1, lt=2**31)] | None = None
    stream_options: StreamOptions | None = None


class ChatRequest(Sampled):
    """`/v1/chat/completions`."""

    refused = {
        "functions": (None, []),
        "function_call": (None, "none"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "web_search_options": (None,),
        "add_generation_prompt": (None, True),
        "continue_final_message": (None, False),
    }

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[Whole, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: Annotated[TemplateSettings, BeforeValidator(_few)] | None = None


Several = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=128)]
SeveralTokens = Annotated[list[Tokens], Field(fail_fast=True, min_length=1, max_length=128)]


class CompletionRequest(Sampled):
    """`/v1/completions`."""

    refused = {
        "max_completion_tokens": (None,),
        "response_format": (None, {"type": "text"}),
        "tools": (None, []),
        "prediction": (None,),
    }

    prompt: Text | Tokens | Several | SeveralTokens
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None


class TokenizeRequest(Body):
    """`/tokenize`: a prompt or messages."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=4096)] | None = None


class DetokenizeRequest(Body):
    """`/detokenize`."""

    model: Name | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True, max_length=2**20)]


class InputItem(Fields):
    """An item of `/v1/responses`: a message, a tool call, or its result."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text | Parts | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: Text | None = None
    output: Text | Parts | None = None


class FlatTool(Fields):
    """A tool of `/v1/responses`."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: Text | None = None
    parameters: Schema | None = None


class FlatChoice(Fields):
    """The function that must be called, in `/v1/responses`."""

    type: Literal["function"]
    name: Name


class TextFormat(Fields):
    """The format of the text, in `/v1/responses`."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name = "answer"
    schema_: Annotated[Schema | None, Field(alias="schema")] = None


class TextSettings(Fields):
    """Settings of the text, in `/v1/responses`."""

    format: TextFormat | None = None


class ResponsesRequest(Asked):
    """`/v1/responses`, without state."""

    refused = {
        "previous_response_id": (None,),
        "conversation": (None,),
        "background": (None, False),
        "prompt": (None,),
        "truncation": (None, "disabled"),
        "include": (None, []),
        "max_tool_calls": (None,),
        "max_tokens": (None,),
        "max_completion_tokens": (None,),
        "n": (None, 1),
        "stop": (None, []),
        "logprobs": (None, False),
        "top_logprobs": (None, 0),
        "response_format": (None,),
        "prediction": (None,),
        "trace": (None, False),
    }

    input: Text | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=4096)]
    instructions: Text | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1, lt=2**31)] | None = None
    text: TextSettings | None = None
    tools: Annotated[list[FlatTool], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
