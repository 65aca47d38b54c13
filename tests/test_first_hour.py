"""What a stranger meets on the command line: pipes, files of prompts, mistakes, full disks, a doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from outpace import InputError, ModelError, OutpaceWarning, Result, cli
from outpace.board import numbers
from outpace.chart import _Lines
from outpace.cli import options
from outpace.cli.prompts import read_entries
from outpace.files import write_whole
from outpace.heads.storing import read_config
from outpace.methods import METHODS
from outpace.models import loading
from outpace.runtime.choose import RUNTIMES
from outpace.training.data import read_prompts

from .test_cli import assert_refused, folder, outpace

assert folder  # a fixture


def ask(folder: Path, *arguments: object, stdin: Any = None) -> Any:
    chosen = ("--model", folder, "--device", "cpu", "--method", "lookahead", "--max-new-tokens", 6)
    return outpace("generate", *arguments, *chosen, stdin=stdin)


def lines_of(result: Any) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_a_pipe_is_read_without_a_dash(folder: Path) -> None:
    assert ask(folder, stdin="hello").stdout == ask(folder, "hello").stdout
    assert_refused(ask(folder, stdin=""), "there is no prompt", "pipe one in")


def test_system_prompt(folder: Path) -> None:
    found = json.loads(ask(folder, "hello", "--system", "Be brief.", "--json").stdout)
    assert found["prompt_tokens"] == len("[Be brief.][hello]")
    assert_refused(ask(folder, "hello", "--system", "a", "--raw"), "--system", "--raw")


def test_all_turns_are_answered_and_other_fields_come_along(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    entries = [
        {"id": "a", "turns": ["hi", "and?"], "category": "x"},
        {"id": "b", "prompt": "hello"},
        {"id": "c", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                                 {"role": "user", "content": "c"}]},
    ]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, entries)))
    found = {(line["id"], line.get("turn")): line for line in lines_of(ask(folder, "--prompts", file))}
    assert set(found) == {("a", 1), ("a", 2), ("b", None), ("c", None)}
    assert found["a", 2]["category"] == "x"
    assert found["a", 2]["prompt"] == "and?"
    answer = found["a", 1]["text"]
    assert found["a", 2]["prompt_tokens"] == len(f"[hi][{answer}][and?]".encode())
    assert found["c", None]["prompt_tokens"] == len("[a][b][c]")
    assert found["b", None]["number"] == 1
    with_system = lines_of(ask(folder, "--prompts", file, "--system", "S"))
    assert {line["prompt_tokens"] for line in with_system if line["id"] == "b"} == {len("[S][hello]")}


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("[1]", "not a JSON object"),
        ("Why?", "ends in .txt"),
        ('{"text": "a"}', "has no prompt"),
        ('{"turns": []}', "has no prompt"),
        ('{"messages": [{"role": "user"}]}', "role and content"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "must be 'user'"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(folder: Path, tmp_path: Path, line: str, word: str) -> None:
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "fine"}}\n{line}\n')
    assert_refused(ask(folder, "--prompts", tmp_path / "p.jsonl"), "line 2", word)


@pytest.mark.parametrize("read", [lambda path: read_entries(path, "", False)[0].turns[0], lambda p: read_prompts(p)[0]])
def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path, read: Any) -> None:
    for name, line in (("p.jsonl", '{"prompt": "fine"}'), ("p.txt", "fine")):
        (tmp_path / name).write_text(f"{line}\r\n", encoding="utf-8-sig")
        assert read(tmp_path / name) == "fine"


def test_the_line_below_the_output_says_what_is_lossy(folder: Path) -> None:
    assert "lossy" not in ask(folder, "hello", "--temperature", 0.8).stderr
    assert "; lossy" in ask(folder, "hello", "--temperature", 0.8, "--rule", "typical").stderr


def test_the_line_below_the_output_says_where_lookahead_was_lookup() -> None:
    run = Result("lookahead", True, 4, seconds_to_first_token=0.1)
    run.offered = {"history": 3}
    assert run.remark
    assert numbers(run, apart=True).endswith(f"; {run.remark}")


def test_turns_need_the_template(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"turns": ["a", "b"]}')
    assert_refused(ask(folder, "--prompts", tmp_path / "p.jsonl", "--raw"), "line 1", "--raw")


BAD = [
    ("--temperature", "-1", "temperature=-1.0 is out of range"),
    ("--top-p", "2", "top_p=2.0 is out of range"),
    ("--method", "lookahaed", "Did you mean 'lookahead'"),
    ("--model", "smolm2-135m", "Did you mean 'smollm2-135m'"),
    ("--runtime", "graph", "Did you mean 'graphs'"),
    ("--dtype", "float23", "Did you mean 'float32'"),
    ("--max-new-tokens", "0", "max_new_tokens=0"),
    ("--prompts", "none.jsonl", "prompts cannot be read from none.jsonl: No such file or directory."),
    ("--model", "models/none.gguf", "unknown model 'models/none.gguf': there is no such folder or file"),
    ("--system", "", "the prompt is empty. Give at least one word."),
    ("--json-schema", "none.json", "--json-schema none.json could not be read: No such file or directory."),
    ("--trace", ".", "--trace . is a folder. Name a file."),
]


def test_mistakes_are_refused_before_torch_is_imported() -> None:
    code = (
        "import sys, json\n"
        "from typer.testing import CliRunner\n"
        "from outpace import cli\n"
        f"for option, value, word in json.loads({json.dumps(json.dumps(BAD))}):\n"
        "    prompt = [] if option == '--prompts' else [' '] if option == '--system' else ['hello']\n"
        "    result = CliRunner().invoke(cli.app, ['generate', *prompt, option, value])\n"
        "    assert result.exit_code == 2 and word in result.stderr, (option, result.output)\n"
        "    assert not {'torch', 'transformers'} & {*sys.modules}, option\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_known_without_torch_is_what_there_is() -> None:
    assert {*options.method_names()} == {*METHODS}
    assert (*RUNTIMES,) == options.RUNTIMES
    assert options.DTYPES.split("|") == [*loading.DTYPES, loading.FASTEST]


def test_warnings_are_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(*_: object, **__: object) -> None:
        warnings.warn("so much\nframe #0: and more", OutpaceWarning, stacklevel=1)
        raise InputError("enough")

    monkeypatch.setattr(cli.writing, "load_decoder", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = ask(folder, "hello")
    assert result.stderr == "outpace: warning: so much\noutpace: enough\n"


def test_a_slow_dtype_is_warned_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "lacks_bfloat16", lambda: True)
    with pytest.warns(OutpaceWarning, match="no bfloat16 instructions.*dtype='float32'"):
        assert loading.load(str(folder), "bfloat16", "cpu").model.dtype == torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loading.load(str(folder), "float32", "cpu")


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    link.symlink_to(real)
    write_whole(link, "new")
    assert (link.is_symlink(), real.read_text()) == (True, "new")
    write_whole(Path(os.devnull), "nothing")
    assert not Path(os.devnull).is_file()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        write_whole(pipe, "through")
        assert reader.communicate()[0] == b"through"
    assert pipe.is_fifo()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device")
def test_a_full_disk_is_an_error_and_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    with pytest.raises(InputError, match="/dev/full could not be written: No space left"):
        write_whole(Path("/dev/full"), "text")
    assert Path("/dev/full").is_char_device()

    def no_space(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", no_space)
    with pytest.raises(InputError, match="No space left on device"):
        write_whole(tmp_path / "file", "text")
    assert [*tmp_path.iterdir()] == []
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "outpace", "models", "--json"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 2
    assert result.stderr == "outpace: standard output could not be written: No space left on device.\n"


def test_doctor() -> None:
    found = json.loads(outpace("doctor", "--json").stdout)
    assert found["torch"] == torch.__version__ or found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["runtime"] in RUNTIMES
    result = outpace("doctor")
    assert result.exit_code == 0
    assert all(f"{name}: " in result.stdout for name in found if name != "advice")
    assert all(f"- {line}\n" in result.stdout for line in found["advice"])


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter([0.0, 10.0, 31.0, 40.0, 62.0])
    show = _Lines("training", lambda: next(times))
    for share, text in ((0.1, "a"), (0.2, "b"), (0.3, "c"), (0.4, None)):
        show(share, text) if text else show(share)
    assert capsys.readouterr().err == "20% b\n40% training\n"


def test_completion_is_offered() -> None:
    assert "--install-completion" in outpace("--help").stdout


@pytest.mark.parametrize("methods", ["", "auto,,lookahead"])
def test_a_method_without_a_name_is_not_the_default(folder: Path, methods: str) -> None:
    assert_refused(outpace("race", "hello", "--model", folder, "--methods", methods), "unknown method ''")
    assert_refused(outpace("bench", "--model", folder, "--methods", methods), "unknown method ''")


def test_the_folder_of_a_training_is_not_that_of_its_heads(tmp_path: Path) -> None:
    for kind in ("medusa", "block"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"{tmp_path} has no heads.*{tmp_path}/block or {tmp_path}/medusa"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match=r"Give one that `outpace train` wrote"):
        read_config(tmp_path / "none")


def test_processes_that_write_one_file_do_not_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one comes between writing and renaming."""
    file, replace = tmp_path / "file", Path.replace

    def late(half: Path, place: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        write_whole(file, "second")
        return replace(half, place)

    monkeypatch.setattr(Path, "replace", late)
    write_whole(file, "first")
    assert file.read_text() == "first"
    assert [*tmp_path.iterdir()] == [file]


def test_a_prompt_that_is_too_long_ends_no_other(folder: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "abc"}, {"prompt": "a" * 5000}, {"turns": ["ab", "a" * 5000, "c"]}]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = ask(folder, "--prompts", tmp_path / "prompts.jsonl")
    assert result.exit_code == 2
    found = [json.loads(line) for line in result.stdout.splitlines()]
    failed = {(line["number"], line.get("turn")) for line in found if "Shorten the prompt" in line.get("error", "")}
    assert failed == {(1, None), (2, 2)}
    assert {(line["number"], line.get("turn")) for line in found} - failed == {(0, None), (2, 1)}
    assert "2 of 5 answers failed" in result.stderr
