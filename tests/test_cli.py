"""The command line: what goes to which stream, what a mistake says, and the exit codes."""

from __future__ import annotations

import inspect
import json
import math
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from outpace import Batch, Decoder, InvalidLogits, ModelError, Sampling, board, cli, decoder, load, race
from outpace.bench import calibration
from outpace.bench.prompts import PROMPTS
from outpace.draft import Step
from outpace.methods import ON_CPU, make
from outpace.models import bundled
from outpace.runtime import calibrate
from outpace.training import run as training_run
from outpace.training.data import read_answers
from outpace.training.trainer import Trainer

KEYS = [
    *("text", "token_ids", "prompt_tokens", "new_tokens", "steps", "tokens_per_step", "seconds"),
    *(
        "seconds_to_first_token",
        "tokens_per_second",
        "method",
        "finish_reason",
        "accepted_per_step",
        "rows",
        "offered",
        "accepted",
    ),
    *("times_plain", "remark", "seconds_by_part", "lossless"),
]
CONTEXT = 96
END = "<end>"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama whose tokens are bytes."""
    place = tmp_path_factory.mktemp("tiny")
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), END]
    bytewise = Tokenizer(token_models.BPE({word: number for number, word in enumerate(words)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token=END)
    tokenizer.chat_template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    tokenizer.save_pretrained(place)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.5,  # large, so that the text is not one token over and over
    )
    LlamaForCausalLM(config).save_pretrained(place)
    return place


@pytest.fixture
def no_template(folder: Path, tmp_path: Path) -> Path:
    """The same model with a tokenizer that has no chat template."""
    copy = tmp_path / "plain"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").unlink()
    return copy


def outpace(*arguments: object, stdin: str | bytes | None = None) -> Result:
    """Run the command. An exception that is a bug comes through."""
    return CliRunner().invoke(cli.app, [str(item) for item in arguments], input=stdin, catch_exceptions=False)


def generate(folder: Path, *arguments: object, prompt: str = "hello", **options: Any) -> Result:
    chosen = ("--model", folder, "--device", "cpu", "--method", "lookahead")
    return outpace("generate", prompt, *chosen, *arguments, **options)


def assert_refused(result: Result, *words: str) -> None:
    """One line on standard error that has all the words, nothing on standard output, exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("outpace: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


class TestGenerate:
    def test_json_has_exactly_the_promised_keys_and_is_all_of_standard_output(self, folder: Path) -> None:
        result = generate(folder, "--max-new-tokens", 12, "--json")
        assert result.exit_code == 0
        assert result.stderr == ""
        assert result.stdout.count("\n") == 1
        answer = json.loads(result.stdout)
        assert list(answer) == KEYS
        assert answer["method"] == "lookahead"
        assert answer["lossless"] is True
        assert answer["new_tokens"] == len(answer["token_ids"]) == sum(answer["accepted_per_step"]) <= 12
        assert answer["steps"] == len(answer["accepted_per_step"])
        assert answer["tokens_per_step"] == answer["new_tokens"] / answer["steps"]
        assert answer["rows"] == answer["steps"] + sum(answer["offered"].values())
        assert answer["prompt_tokens"] == len("[hello]")
        assert answer["finish_reason"] in ("stop", "length")

    def test_without_a_method_it_is_auto(self, folder: Path) -> None:
        result = outpace("generate", "hello", "--model", folder, "--device", "cpu", "--json", "--max-new-tokens", 3)
        assert json.loads(result.stdout)["method"] == "auto"

    def test_streams_the_text_and_sums_up_on_standard_error(self, folder: Path) -> None:
        text = json.loads(generate(folder, "--max-new-tokens", 12, "--json").stdout)["text"]
        result = generate(folder, "--max-new-tokens", 12)
        assert result.stdout == text + "\n"
        assert result.stderr.startswith("lookahead: 12 tokens, ")
        for word in ("steps", "tokens per step", "tokens/s"):
            assert word in result.stderr
        assert result.stderr.count("\n") == 1

    def test_prompt_from_standard_input(self, folder: Path) -> None:
        direct = generate(folder, "--max-new-tokens", 8, prompt="grüße")
        piped = generate(folder, "--max-new-tokens", 8, prompt="-", stdin="grüße")
        assert piped.stdout == direct.stdout

    def test_same_seed_same_text_with_every_method(self, folder: Path) -> None:
        options = ("--temperature", 0.9, "--top-k", 40, "--top-p", 0.95, "--min-p", 0.01, "--seed", 7)
        penalties = ("--repetition-penalty", 1.1, "--presence-penalty", 0.1, "--frequency-penalty", 0.1)
        texts = {
            generate(folder, *options, *penalties, "--max-new-tokens", 20, "--method", method).stdout
            for method in ("autoregressive", "jacobi", "lookahead")
        }
        assert len(texts) == 1

    def test_stop_text_ends_the_answer(self, folder: Path) -> None:
        whole = generate(folder, "--max-new-tokens", 30).stdout[:-1]
        stop = next(letter for letter in whole[3:] if letter not in whole[:3])
        assert generate(folder, "--max-new-tokens", 30, "--stop", stop).stdout == whole[: whole.index(stop)] + "\n"

    def test_prompts_of_a_file(self, folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "prompts.txt"
        file.write_text("hello\n\ngood morning\nhello there\n")
        options = ("--model", folder, "--device", "cpu", "--max-new-tokens", 8)
        result = outpace("generate", "--prompts", file, *options)
        assert result.exit_code == 0
        lines = sorted(map(json.loads, result.stdout.splitlines()), key=lambda line: line["number"])
        assert [line["prompt"] for line in lines] == ["hello", "good morning", "hello there"]
        for line in lines:
            alone = json.loads(outpace("generate", line["prompt"], *options, "--json").stdout)
            assert (line["text"], line["token_ids"]) == (alone["text"], alone["token_ids"])
        assert_refused(outpace("generate", "hello", "--prompts", file, *options), "PROMPT")
        assert_refused(outpace("generate", *options), "there is no prompt")
        assert_refused(outpace("generate", "--prompts", tmp_path / "none.txt", *options), "none.txt")

    def test_a_text_that_fails_has_an_error_in_its_line(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go_on = Batch.__iter__

        def spoilt(self: Batch) -> Iterator[tuple[int, Any]]:
            yield 1, InvalidLogits("no token is left")
            self.cancel(1)
            yield from go_on(self)

        monkeypatch.setattr(Batch, "__iter__", spoilt)
        (tmp_path / "prompts.txt").write_text("hello\ngood morning\n")
        options = ("--model", folder, "--device", "cpu", "--max-new-tokens", 8)
        result = outpace("generate", "--prompts", tmp_path / "prompts.txt", *options)
        assert result.exit_code == 2
        assert result.stderr == "outpace: 1 of 2 answers failed; their lines have an error.\n"
        failed, written = map(json.loads, result.stdout.splitlines())
        assert (failed["number"], failed["finish_reason"], failed["error"]) == (1, "error", "no token is left")
        assert (written["number"], "error" in written) == (0, False)

    def test_settings_are_read_by_type(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []

        def note(model: str, *rest: object, usual: bool) -> Decoder:
            assert usual
            seen.append(load(model, device="cpu"))
            return seen[0]

        monkeypatch.setattr(cli.writing, "load_decoder", note)
        settings = ("window=3", "lookahead.ngram=4", "prompt_pool=false", "published=True")
        result = generate(folder, "--max-new-tokens", 2, *(word for item in settings for word in ("--set", item)))
        assert result.exit_code == 0
        wanted = {"window": 3, "ngram": 4, "prompt_pool": False, "published": True}
        assert seen[0].method == make("lookahead", cpu=True, **wanted)

    def test_defaults_are_those_of_the_library(self) -> None:
        defaults = {name: parameter.default for name, parameter in inspect.signature(cli.generate).parameters.items()}
        given = {name: value for name, value in vars(Sampling()).items() if name in defaults}
        assert {name: defaults[name] for name in given} == given
        assert len(given) == 9  # all but logit_bias and processors
        assert defaults["model"] == decoder.DEFAULT_MODEL

    def test_interrupt_in_the_middle_of_a_text(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = Decoder.stream

        def interrupted(self: Decoder, *args: Any, **options: Any) -> Iterator[Step]:
            yield from islice(stream(self, *args, **options), 8)
            raise KeyboardInterrupt

        monkeypatch.setattr(Decoder, "stream", interrupted)
        result = generate(folder)
        assert result.exit_code == 130
        assert result.stdout
        assert result.stderr == "\noutpace: interrupted\n"
        assert generate(folder, "--json").stdout == ""

    def test_a_bug_keeps_its_traceback(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object, **__: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(Decoder, "stream", broken)
        with pytest.raises(ZeroDivisionError):
            generate(folder)


class TestRefusals:
    @pytest.fixture
    def unloaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """These mistakes must be found before the model is loaded."""
        monkeypatch.setattr(cli.writing, "load_decoder", lambda *_, **__: pytest.fail("the model was loaded"))

    @pytest.mark.usefixtures("unloaded")
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--method", "lookahed"), ("unknown method 'lookahed'", "Did you mean 'lookahead'?")),
            (("--set", "windw=3"), ("unknown setting of lookahead 'windw'", "Did you mean 'window'?")),
            (("--set", "window=0"), ("lookahead: window=0", "1 to 256")),
            (("--set", "window=many"), ("lookahead: window='many'", "whole number")),
            (("--set", "window=1.5"), ("lookahead: window='1.5'", "whole number")),
            (("--set", "prompt_pool=yes"), ("lookahead: prompt_pool='yes'", "true or false")),
            (("--set", "window=3", "--set", "lookahead.window=5"), ("--set lookahead.window=5", "before, as window=3")),
            (("--set", "window"), ("--set window", "NAME=VALUE")),
            (("--set", "=3"), ("--set =3", "NAME=VALUE")),
            (("--method", "draft-model"), ("draft-model: no model given", "--set model=")),
            (("--temperature", "-1"), ("temperature=-1.0",)),
            (("--top-p", "0"), ("top_p=0.0",)),
            (("--rule", "papers"), ("rule='papers'", "'keyed', 'rejection' or 'typical'")),
        ],
    )
    def test_before_the_model_is_loaded(self, folder: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
        assert_refused(generate(folder, *arguments, "--json"), *words)

    @pytest.mark.usefixtures("unloaded")
    def test_prompt_that_is_no_text(self, folder: Path) -> None:
        assert_refused(generate(folder, prompt="-", stdin=b"\xff\xfe"), "the prompt is not UTF-8 text")
        assert_refused(generate(folder, prompt="\udcff"), "the prompt is not UTF-8 text")

    @pytest.mark.parametrize("tokens", [0, -3])
    def test_no_tokens_to_write(self, folder: Path, tokens: int) -> None:
        assert_refused(generate(folder, "--max-new-tokens", tokens), f"max_new_tokens={tokens} must be 1 or more")

    def test_empty_prompt(self, folder: Path) -> None:
        assert_refused(generate(folder, prompt=""), "the prompt is empty")
        assert_refused(generate(folder, prompt="-", stdin=" \n"), "the prompt is empty")
        assert_refused(generate(folder, "--raw", prompt=""), "the prompt is empty")

    def test_empty_stop(self, folder: Path) -> None:
        assert_refused(generate(folder, "--stop", ""), "not empty")

    def test_prompt_longer_than_the_context(self, folder: Path) -> None:
        assert_refused(generate(folder, prompt="x" * CONTEXT), f"{CONTEXT + 2} tokens", f"context of {CONTEXT}")

    def test_folder_without_weights(self, folder: Path, tmp_path: Path) -> None:
        shutil.copy(folder / "config.json", tmp_path)
        assert_refused(generate(tmp_path), str(tmp_path), "has no weights")

    def test_unknown_model_dtype_device(self, folder: Path) -> None:
        assert_refused(generate(Path("smollm2-135")), "'smollm2-135'", "Did you mean 'smollm2-135m'?")
        assert_refused(generate(folder, "--dtype", "float23"), "unknown dtype 'float23'", "'float32'")
        assert_refused(generate(folder, "--device", "abacus"), "device 'abacus'", "Use 'cpu'")

    def test_tokenizer_without_chat_template(self, no_template: Path) -> None:
        assert_refused(generate(no_template, "--max-new-tokens", 2), "no chat template", "--raw")
        assert generate(no_template, "--max-new-tokens", 2, "--raw").exit_code == 0
        assert_refused(outpace("chat", "--model", no_template, stdin="hi"), "no chat template", "generate --raw")


class TestRace:
    def run(self, folder: Path, *arguments: object) -> Result:
        return outpace("race", "hello hello", "--model", folder, "--device", "cpu", "--max-new-tokens", 24, *arguments)

    def test_identical(self, folder: Path) -> None:
        result = self.run(folder)
        assert result.exit_code == 0
        assert result.stdout.endswith("identical: 5 methods generated the same 24 tokens\n")
        for method in ("autoregressive", "jacobi", "prompt-lookup", "lookahead", "auto"):
            assert f"{method}: " in result.stdout  # its settings
        assert all(column in result.stdout for column in ("rows/step", "tokens/step", "estimate"))
        assert "autoregressive: no settings; nothing drafted\n" in result.stdout
        assert f"{folder.name}: float32, runtime plain\n" in result.stdout
        assert "; accepted: " in result.stdout
        line = next(line for line in result.stdout.splitlines() if line.startswith(" auto "))
        assert line.split()[-2].endswith("×")  # it knows what its steps cost
        assert result.stdout.count(" identical") == 5
        assert "differs" not in result.stdout
        assert "\x1b" not in result.stdout
        assert result.stderr == ""

    def test_text_is_printed_once_without_a_terminal(self, folder: Path) -> None:
        text = json.loads(self.run(folder, "--json").stdout)["runs"][0]["text"]
        assert self.run(folder).stdout.startswith(text + "\n")

    def test_different(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A method that would change the third token is found out."""
        follow = decoder.Result.follow

        def spoilt(self: decoder.Result, stream: Iterator[Step]) -> Iterator[Step]:
            yield from follow(self, stream)
            if self.method == "jacobi":
                self.token_ids[2] += 1

        monkeypatch.setattr(decoder.Result, "follow", spoilt)
        result = self.run(folder)
        assert result.exit_code == 1
        assert "differs at token 3" in result.stdout
        assert result.stdout.endswith("different from autoregressive: jacobi at token 3\n")
        answer = self.run(folder, "--json")
        assert answer.exit_code == 1
        assert json.loads(answer.stdout)["identical"] is False

    def test_json(self, folder: Path) -> None:
        result = self.run(folder, "--json", "--methods", "autoregressive, lookahead", "--temperature", 0.8)
        assert result.exit_code == 0
        assert result.stderr == ""
        answer = json.loads(result.stdout)
        assert list(answer) == ["model", "prompt", "identical", "verdict", "runs"]
        first, second = answer["runs"]
        assert (first["method"], second["method"]) == ("autoregressive", "lookahead")
        assert first["token_ids"] == second["token_ids"]
        assert first["steps"] == first["new_tokens"] == 24
        assert first["speed"] == 1
        assert second["differs_at"] is None

    def test_transformers_runs_too(self, folder: Path, tmp_path: Path) -> None:
        methods = ("--methods", "autoregressive,auto", "--transformers")
        result = self.run(folder, *methods, "--page", tmp_path / "race.html")
        assert result.stdout.endswith("identical: 3 methods generated the same 24 tokens\n")
        assert "transformers generate" in (tmp_path / "race.html").read_text()
        first, _, last = json.loads(self.run(folder, *methods, "--json").stdout)["runs"]
        assert (last["method"], last["steps"], last["text"]) == ("transformers generate", 24, first["text"])
        assert_refused(self.run(folder, *methods, "--temperature", 0.8), "--temperature 0")

    def test_settings_over_the_small_ones_for_a_cpu(self, folder: Path) -> None:
        answer = json.loads(self.run(folder, "--json", "--set", "lookahead.window=3").stdout)
        settings = {run["method"]: run["settings"] for run in answer["runs"]}
        assert settings["lookahead"]["window"] == 3
        assert settings["lookahead"]["ngram"] == ON_CPU["lookahead"]["ngram"]
        assert settings["jacobi"] == ON_CPU["jacobi"]

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--methods", "autoregressive,jacoby"), ("unknown method 'jacoby'", "'jacobi'")),
            (("--set", "window=5"), ("--set window=5", "METHOD.NAME=VALUE")),
            (("--set", "lookahed.window=5"), ("unknown method in this race 'lookahed'", "'lookahead'")),
            (("--set", "lookahead.windw=5"), ("unknown setting of lookahead 'windw'", "'window'")),
            (("--set", "lookahead.window=x"), ("lookahead: window='x'",)),
            (("--top-p", "2"), ("top_p=2.0",)),
        ],
    )
    def test_refused_before_the_model_is_loaded(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: tuple[str, ...]
    ) -> None:
        monkeypatch.setattr(cli.racing, "load_both", lambda *_: pytest.fail("the model was loaded"))
        assert_refused(self.run(folder, *arguments), *words)

    def test_no_tokens_to_write(self, folder: Path) -> None:
        assert_refused(self.run(folder, "--max-new-tokens", 0), "max_new_tokens=0 must be 1 or more")

    @pytest.mark.parametrize(("width", "height"), [(140, 40), (80, 24), (40, 5)])
    def test_board_on_a_terminal(self, folder: Path, width: int, height: int) -> None:
        """Every frame fits the screen, the last picture has the whole text, and the clock is the methods' own."""
        tiny = load(str(folder), method="autoregressive", device="cpu")
        methods = [make(name) for name in ("autoregressive", "jacobi", "prompt-lookup", "lookahead")]
        with open(folder / "screen", "w", encoding="utf-8") as screen:
            console = Console(file=screen, force_terminal=True, width=width, height=height, color_system="truecolor")
            drawn = board.Board(console, methods, tiny.tokenizer)
            with drawn:
                outcome = race.run(tiny, methods, "hello", Sampling(), 24, on_step=drawn.show)
                fits = len(console.render_lines(drawn)) <= max(height, 18 if width < 120 else 10)
            with console.capture() as capture:
                board.print_race(console, drawn, methods, outcome, "a model")
            outcome.runs[1].seconds /= 1000
            with console.capture() as busy:
                board.print_race(console, drawn, methods, outcome, "a model")
        assert fits
        shown = ("autoregressive", "lookahead", "■ model", "identical", "1.0 rows per step")
        assert all(name in capture.get() for name in shown)
        assert "busy" in busy.get()


class TestModels:
    def test_lists_the_embedded_model(self) -> None:
        result = outpace("models")
        assert result.exit_code == 0
        for word in ("smollm2-135m", "Apache-2.0", str(bundled.cache_folder() / "smollm2-135m"), "hub id"):
            assert word in result.stdout

    def test_json_and_states(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(bundled, "cache_folder", lambda: tmp_path)

        def state() -> str:
            (entry,) = json.loads(outpace("models", "--json").stdout)["models"]
            assert list(entry) == ["name", "state", "folder", "licence", "description"]
            return str(entry["state"])

        assert state() == "downloaded at first use"
        (tmp_path / "smollm2-135m").mkdir()
        assert state() == "broken: delete the folder"
        monkeypatch.setattr(bundled, "is_ready", lambda name: True)
        assert state() == "ready"


class TestHelp:
    def test_names_every_command(self) -> None:
        result = outpace("--help")
        assert result.exit_code == 0
        for command in ("generate", "race", "models"):
            assert command in result.stdout

    def test_comes_without_the_imports_that_take_seconds(self) -> None:
        code = "import sys; import outpace.cli; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    def test_unknown_option_is_a_usage_error(self) -> None:
        result = outpace("generate", "hi", "--colour")
        assert result.exit_code == 2
        assert result.stdout == ""


class TestCalibrate:
    def test_measures_keeps_and_draws(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calibrate, "ROWS", (1, 2))
        monkeypatch.setattr(calibration, "TOKENS", 6)
        monkeypatch.setattr(calibration, "LONG", 20)
        monkeypatch.setattr(calibration, "STEADY", math.inf)
        result = outpace("calibrate", "--model", folder, "--device", "cpu", "--json")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert Path(found["file"]).is_file()
        assert found["about"]["runtime"] == "plain"
        look = found["auto"]
        assert look["total"]["rows"] >= look["total"]["steps"] > 0
        assert look["total"]["times_plain"] > 0
        assert sum(look["texts"].values()) > len(PROMPTS)
        assert {*look["texts"], *look["speeds"]} <= {"prompt-lookup and recycling", "prompt-lookup"}
        assert set(look["chances"]) == {"lookup", "store", "recycled", "runner-up"}
        assert look["steps"] == []  # the host drafts
        assert load(str(folder), device="cpu").engine.costs is not None
        shown = outpace("calibrate", "--model", folder, "--device", "cpu")
        assert "one row = 1" in shown.stdout
        assert "prompt-lookup: as many rows as pay" in shown.stdout
        assert "sequences started so" in shown.stdout
        assert shown.stdout.endswith(" the speed of plain decoding\n")

    def test_the_figures_of_a_busy_machine_are_not_saved(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calibrate, "ROWS", (1, 2))
        monkeypatch.setattr(calibration, "TOKENS", 6)
        monkeypatch.setattr(calibration, "LONG", 20)
        monkeypatch.setattr(calibration, "STEADY", -1.0)
        result = outpace("calibrate", "--model", folder, "--device", "cpu", "--json")
        assert result.exit_code == 2
        assert "not saved: other work disturbed the measurement" in result.stderr
        assert json.loads(result.stdout)["file"] is None
        assert load(str(folder), device="cpu").engine.costs is None
        saved = outpace("calibrate", "--model", folder, "--device", "cpu", "--json", "--force")
        assert Path(json.loads(saved.stdout)["file"]).is_file()

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--plot", "curve.doc"), "must end in .png or .svg"),
            (("--runtime", "graphs"), "runtime='graphs' cannot be used"),
            (("--runtime", "grahps"), "Did you mean 'graphs'"),
        ],
    )
    def test_mistakes(self, folder: Path, options: tuple[str, ...], words: str) -> None:
        result = outpace("calibrate", "--model", folder, "--device", "cpu", *options)
        assert result.exit_code == 2
        assert words in result.stderr


@pytest.fixture(scope="session")
def heads(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of two kinds for the tiny model, trained for two updates."""
    place = tmp_path_factory.mktemp("heads")
    (place / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": "abc"[: 1 + n % 3]}) for n in range(6)))
    result = train(folder, place / "out", "--set", "amphista.stages=1")
    assert result.exit_code == 0, result.stderr
    assert "amphista   4" in result.stdout
    return place / "out"


def train(folder: Path, out: Path, *options: object, kinds: tuple[str, ...] = ("medusa", "amphista")) -> Result:
    size = ("--updates", 2, "--tokens", 64, "--held-out", 2, "--batch", 3, "--new-tokens", 12)
    files = ("--model", folder, "--prompts", out.parent / "prompts.jsonl", "--out", out)
    return outpace("train", *kinds, *files, *size, *options)


def test_a_model_without_a_chat_template_is_trained_on_prompts_as_they_are(no_template: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"hello {number}"}) for number in range(6)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    result = train(no_template, tmp_path / "heads", "--more", 2, kinds=("medusa",))
    assert result.exit_code == 0, result.output
    assert f"--method medusa --set heads={tmp_path / 'heads' / 'medusa'}\n" in result.stderr
    texts = read_answers(tmp_path / "heads" / "answers" / "held-out")
    assert {text.prompt for text in texts} == {len("hello 0")}  # no brackets


def test_however_short_the_time_for_answers_there_is_a_batch_to_train_on(no_template: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"hello {number}"}) for number in range(6)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    result = train(no_template, tmp_path / "heads", "--answer-minutes", 1e-9, "--batch", 1, kinds=("medusa",))
    assert result.exit_code == 0, result.output
    assert len([*(tmp_path / "heads" / "answers" / "round-1").glob("answers-*")]) == 1


@pytest.mark.parametrize("kind", ["medusa", "amphista"])
def test_trained_heads_draft(folder: Path, heads: Path, kind: str) -> None:
    plain = generate(folder, "--method", "autoregressive", "--json", "--max-new-tokens", 20)
    found = generate(folder, "--method", kind, "--set", f"heads={heads / kind}", "--json", "--max-new-tokens", 20)
    assert json.loads(found.stdout)["token_ids"] == json.loads(plain.stdout)["token_ids"]
    assert json.loads((heads / kind / "config.json").read_text())["training"]["updates"] == 2
    assert not (heads / "checkpoint.pt").exists()


def test_trained_exits_draft(folder: Path, heads: Path) -> None:
    result = train(folder, heads, "--set", "exits.layers=1", "--set", "exits.frequent=200", kinds=("exits",))
    assert result.exit_code == 0, result.stderr
    plain = generate(folder, "--method", "autoregressive", "--json", "--max-new-tokens", 20)
    ours = (
        "--method",
        "adadecode",
        "--set",
        f"heads={heads / 'exits'}",
        "--set",
        "control=fixed",
        "--set",
        "gamma=0.1",
    )
    found = generate(folder, *ours, "--json", "--max-new-tokens", 20)
    assert json.loads(found.stdout)["token_ids"] == json.loads(plain.stdout)["token_ids"]
    assert len(json.loads((heads / "exits" / "config.json").read_text())["calibration"]) == 1
    assert_refused(generate(folder, *ours[:-1], "gamma=2"), "gamma=2.0 is out of range")
    assert_refused(
        train(folder, heads, "--force", "--set", "exits.layers=2", kinds=("exits",)), "an exit after layer 2"
    )


def test_a_picture_of_the_stairs(folder: Path, tmp_path: Path) -> None:
    options = ("--method", "self-speculative", "--max-new-tokens", 8)
    assert generate(folder, *options, "--picture", tmp_path / "stairs.svg").exit_code == 0
    assert (tmp_path / "stairs.svg").read_text().startswith("<svg")
    assert_refused(generate(folder, *options, "--picture", tmp_path / "stairs.png"), "must end in .svg")
    assert_refused(generate(folder, "--picture", "a.svg"), "--picture does not support lookahead")
    tree = ("--method", "adadecode", "--set", "control=tree", "--picture", tmp_path / "stairs.svg")
    assert_refused(generate(folder, *tree), "defers no layers with control='tree'")
    assert_refused(generate(folder, *options, "--picture", tmp_path / "no" / "a.svg"), "could not be written")


def test_a_second_training_uses_the_answers_again(folder: Path, heads: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in (heads / "answers").rglob("*.safetensors")}
    result = train(folder, heads, "--json", kinds=("hydra",))
    assert len(json.loads(result.stdout)["accuracies"]["hydra"]) == 4
    assert before == {file: file.stat().st_mtime_ns for file in (heads / "answers").rglob("*.safetensors")}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--force", "--set", "amphista.stages=3"), ("stages=3", "0, 1 or 2")),
        (("--force", "--set", "amphista.stage=1"), ("unknown setting", "Did you mean 'stages'")),
        (("--set", "amphista.positions=maybe"), ("positions='maybe'", "true or false")),
        (("meduza",), ("unknown kind of heads 'meduza'", "Did you mean 'medusa'")),
        (("--set", "hydra.count=2"), ("unknown kind of heads to train 'hydra'",)),
        (("--set", "count=2"), ("KIND.NAME=VALUE",)),
        (("--minutes", 1), ("give one of the two",)),
        (("--force", "--held-out", 6), ("too few",)),
        (("--force", "--new-tokens", 13), ("answers of another model", "--answers")),
        ((), ("has finished heads", "--force")),
        (("--resume",), ("there is no", "checkpoint.pt", "Leave out --resume")),
        (("--prompts", "/nowhere.jsonl"), ("/nowhere.jsonl",)),
    ],
)
def test_bad_trainings_are_refused(
    folder: Path, heads: Path, options: tuple[object, ...], words: tuple[str, ...]
) -> None:
    assert_refused(train(folder, heads, *options), *words)


def test_a_stopped_training_is_not_begun_anew_by_mistake(folder: Path, heads: Path) -> None:
    (heads / "checkpoint.pt").write_bytes(b"")
    try:
        assert_refused(train(folder, heads), "--resume", "delete it")
    finally:
        (heads / "checkpoint.pt").unlink()


def test_ctrl_c_keeps_the_answers(folder: Path, heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_run, "answers", lambda *_: signal.raise_signal(signal.SIGINT))
    result = train(folder, heads.parent / "new", "--updates", 1)
    assert result.exit_code == 130
    assert "finished answers are in" in result.stderr


def test_ctrl_c_keeps_what_was_learnt(folder: Path, heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update that runs is finished, and --resume comes to the weights of a training that was not stopped."""
    kinds = ("hydra",)
    whole = train(folder, heads, "--updates", 3, "--force", kinds=kinds)
    assert whole.exit_code == 0
    expected = load_file(heads / "hydra" / "heads-1-of-1.safetensors")
    update = Trainer._update

    def interrupted(self: Trainer, batch: Any) -> None:
        update(self, batch)
        if self.progress.update == 0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Trainer, "_update", interrupted)
    result = train(folder, heads, "--updates", 3, "--force", kinds=kinds)
    assert (result.exit_code, (heads / "checkpoint.pt").exists()) == (130, True)
    assert "continue with --resume" in result.stderr
    assert train(folder, heads, "--updates", 3, "--resume", kinds=kinds).exit_code == 0
    found = load_file(heads / "hydra" / "heads-1-of-1.safetensors")
    assert all(found[name].equal(weight) for name, weight in expected.items())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_training_goes_on_from_trained_heads(folder: Path, heads: Path) -> None:
    kinds, out = ("hydra",), heads.parent / "further"
    assert train(folder, heads, "--updates", 2, "--force", kinds=kinds).exit_code == 0
    options = ("--updates", 1, "--start", heads, "--rate", 1e-12, "--vector-rate", 1e-12)
    further = train(folder, out, *options, kinds=kinds)
    assert further.exit_code == 0, further.stderr
    before, after = (load_file(place / "hydra" / "heads-1-of-1.safetensors") for place in (heads, out))
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert json.loads((out / "hydra" / "config.json").read_text())["training"]["after"]["updates"] == 2
    other = ("--start", heads, "--set", "hydra.count=3", "--force")
    assert_refused(train(folder, out, *other, kinds=kinds), "hydra.count=3", "--start")
    assert_refused(train(folder, out, "--start", out / "none", "--force", kinds=kinds), "no config.json")


def test_without_prompts_our_own_are_trained_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def answers(decoder: Any, model: Any, prompts: Any, folder: Any, how: Any, *_: Any) -> Any:
        seen.append((list(prompts), how.held_out))
        raise InvalidLogits("enough")

    monkeypatch.setattr(training_run, "answers", answers)
    outpace("train", "medusa", "--model", folder, "--out", tmp_path, "--updates", 1)
    assert seen == [([prompt for task in PROMPTS.values() for prompt in task], 4)]


def test_block_heads_are_trained_judged_and_kept_in_eight_bits(folder: Path, heads: Path, tmp_path: Path) -> None:
    """And `auto` takes such heads, where they are named."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": "abc"[: 1 + n % 3]}) for n in range(6)))
    (tmp_path / "other.jsonl").write_text(json.dumps({"turns": ["hello", "and then"]}))
    options = ("--judge", tmp_path / "other.jsonl", "--bits", 8, "--set", "block.count=3", "--more", 1.0)
    result = train(folder, tmp_path / "out", *options, "--json", kinds=("block",))
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert len(report["accuracies"]["block"]) == len(report["judged"]["block"]) == 3
    assert len(report["confidence"]["block"]) == 10
    tokens, speed = report["speed"]["block"]
    assert 0 < speed < tokens
    config = json.loads((tmp_path / "out" / "block" / "config.json").read_text())
    assert (config["format"], config["settings"]["layers"]) == (2, [1, 2])
    assert config["training"]["curve"]
    one = load(str(folder), method="autoregressive")
    plain = one.generate("hello", max_new_tokens=16).token_ids
    for name in ("block", "auto"):
        method = one.prepare(name, heads=str(tmp_path / "out" / "block"))
        assert one.generate("hello", method=method, max_new_tokens=16).token_ids == plain
    assert_refused(train(folder, tmp_path / "other", "--bits", 4, kinds=("block",)), "bits=4", "8 or 16")


@pytest.mark.parametrize("form", ["vllm", "tgi", "reference"])
def test_exported_heads_have_the_names_that_others_read(folder: Path, heads: Path, tmp_path: Path, form: str) -> None:
    target = tmp_path / form
    options = ("--model", folder, "--heads", heads / "medusa", "--to", form)
    assert outpace("export", "medusa", target, *options).exit_code == 0
    config = json.loads((target / "config.json").read_text())
    file = "model" if form == "vllm" else "medusa_lm_head"
    shapes = {name: list(weight.shape) for name, weight in load_file(target / f"{file}.safetensors").items()}
    words = 257
    if form == "vllm":
        sizes = {"hidden_size": 32, "vocab_size": words, "num_heads": 4, "num_hidden_layers": 1}
        assert config == {"model_type": "medusa", "medusa_fc_bias": True, "original_lm_head": True, **sizes}
        layer, output = "blocks.{}.layers.0", "lm_heads.{}.weight"
    else:
        assert config == {"medusa_num_heads": 4, "medusa_num_layers": 1, "base_model_name_or_path": str(folder)}
        layer, output = "{}.0.linear", "{}.1.weight"
    expected: dict[str, list[int]] = {}
    for head in range(4):
        expected[layer.format(head) + ".weight"] = [32, 32]
        expected[layer.format(head) + ".bias"] = [32]
        if head == 0 or form != "vllm":  # there all heads share one
            expected[output.format(head)] = [words, 32]
    assert shapes == expected
    assert_refused(outpace("export", "medusa", target, *options), "exists")


def test_exported_heads_come_back_the_same(folder: Path, heads: Path, tmp_path: Path) -> None:
    outpace("export", "medusa", tmp_path / "out", "--model", folder, "--heads", heads / "medusa", "--to", "reference")
    one = load(str(folder), method="autoregressive")
    drafts = []
    for source in (heads / "medusa", tmp_path / "out"):
        method = one.prepare("medusa", heads=str(source), rows=20)
        drafts.append([step.draft.tokens for step in one.stream("hello", method=method, max_new_tokens=20)])
    assert drafts[0] == drafts[1]
    assert max(map(len, drafts[0])) == 20
    other = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    torch.save(other, tmp_path / "out" / "medusa_lm_head.pt")  # the older form of public heads
    (tmp_path / "out" / "medusa_lm_head.safetensors").unlink()
    one.prepare("medusa", heads=str(tmp_path / "out"))
    torch.save({**other, "0.1.weight": other["0.1.weight"][:9]}, tmp_path / "out" / "medusa_lm_head.pt")
    with pytest.raises(ModelError, match="vocabulary of 9"):
        one.prepare("medusa", heads=str(tmp_path / "out"))


def test_bad_exports_are_refused(folder: Path, heads: Path, tmp_path: Path) -> None:
    options = ("--model", folder, "--heads", heads / "amphista")
    assert_refused(outpace("export", "amphista", tmp_path / "a", *options, "--to", "vllm"), "for medusa heads only")
    assert_refused(outpace("export", "medusa", tmp_path / "a", *options, "--to", "vlm"), "Did you mean 'vllm'")
    assert_refused(outpace("export", "meduza", tmp_path / "a", *options, "--to", "vllm"), "Did you mean 'medusa'")
