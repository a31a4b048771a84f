"""The words of `qerl serve`, and what it says before a model is loaded."""

import argparse
import socket
import stat
import sys

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra serve")
pytest.importorskip("google.protobuf", reason="needs the extra serve")

import qerl_serve.command as command
from qerl.cli import main
from qerl.errors import QeRLError
from qerl_serve.owners import Keys, Owner
from tests.support.families import MIXTURE, tiny
from tests.support.models import make_tiny_tokenizer
from tests.support.wire import BASE, KEY, FakeBackend, RunningServer


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch):
    monkeypatch.delenv("QERL_API_KEY", raising=False)


def said(capsys: pytest.CaptureFixture, *words: str) -> str:
    """What a mistake on the command line is told."""
    assert main(["serve", *words]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_mistakes_are_told_before_the_model_is_loaded(capsys, tmp_path):
    folder = ["--output_dir", str(tmp_path)]
    assert "MODEL is missing" in said(capsys, *folder)
    for key in ("secret", "a-secret-of-twenty-characters", "tml-", "tml-of-15-chars"):
        words = ["--port", "0", "--api_key", key, *folder]
        assert "begins with tml-" in said(capsys, "some/model", *words)
    for name in ("tinker://x", "", "a b", "/models/x"):
        assert "as in Qwen/Qwen3-8B" in said(
            capsys, "some/model", "--port", "0", "--served_name", name, *folder
        )
    for adapters in (["nowhere"], ["x=nowhere"]):
        assert "There is no nowhere/adapter_config.json" in said(
            capsys, "some/model", "--port", "0", "--adapter", *adapters, *folder
        )
    assert "no effect without noise" in said(capsys, "some/model", "--noise_stages", "4", *folder)
    assert "no effect without a teacher" in said(capsys, "some/model", "--teacher_weights", "bf16", *folder)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "choose another --port" in said(capsys, "some/model", "--port", port, *folder)
    assert "No `qerl serve` answers" in said(capsys, "--status", "--port", port, *folder)


def test_a_server_keeps_its_key_and_says_what_to_export(monkeypatch, capsys, tmp_path):
    ran = []
    monkeypatch.setattr(command, "_open", lambda args, noise: FakeBackend(tmp_path))
    monkeypatch.setattr(
        "qerl_serve.server.Server.run", lambda self, listening: ran.append(listening.getsockname())
    )
    texts = []
    for _ in range(2):
        assert main(["serve", BASE, "--port", "0", "--output_dir", str(tmp_path)]) == 0
        texts.append(capsys.readouterr().out)
    file = tmp_path / "api_key"
    key = file.read_text()
    assert key.startswith("tml-") and stat.S_IMODE(file.stat().st_mode) == 0o600
    for text, (host, port) in zip(texts, ran, strict=True):
        assert host == "127.0.0.1"
        assert f"export TINKER_BASE_URL=http://127.0.0.1:{port} TINKER_API_KEY=$(cat {file})\n" in text
        assert key not in text  # which a log would keep
        assert f"base_model='{BASE}'" in text


@pytest.mark.parametrize(
    ("word", "variable", "terminal", "shown"),
    [
        (KEY, "", False, "TINKER_API_KEY='the KEY of --api_key'\n"),
        (None, KEY, False, "TINKER_API_KEY=$QERL_API_KEY\n"),
        (None, KEY, True, f"TINKER_API_KEY={KEY}\n"),
    ],
)
def test_a_key_is_shown_to_a_terminal_alone(monkeypatch, capsys, tmp_path, word, variable, terminal, shown):
    monkeypatch.setattr(command, "_open", lambda args, noise: FakeBackend(tmp_path))
    monkeypatch.setattr("qerl_serve.server.Server.run", lambda self, listening: None)
    monkeypatch.setenv("QERL_API_KEY", variable)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes no terminal of what is none
    words = ["--api_key", word] if word else []
    assert main(["serve", BASE, "--port", "0", "--output_dir", str(tmp_path), *words]) == 0
    assert shown in capsys.readouterr().out


def test_a_mixture_is_not_trained(tmp_path, capsys):
    model = tmp_path / "mixture"
    tiny(MIXTURE).save_pretrained(model)
    make_tiny_tokenizer().save_pretrained(model)
    told = said(capsys, str(model), "--port", "0", "--output_dir", str(tmp_path / "out"))
    assert "is a mixture of experts, which clients cannot train; serve a dense model" in told


def test_the_words_reach_the_server(monkeypatch, tmp_path, capsys):
    opened, served = [], []

    def open_backend(options):
        opened.append(options)
        return FakeBackend(tmp_path)

    monkeypatch.setattr("qerl_serve.open.open_backend", open_backend)
    monkeypatch.setattr(
        "qerl_serve.server.Server.run",
        lambda self, listening: served.append((self.clients.limits, self.keys)),
    )
    words = ["--resident", "5", "--max_models", "6", "--max_rank", "7", "--held_gb", "0.5"]
    words += ["--pause_after", "3", "--served_name", "Qwen/Qwen3-8B", "--enable_prefix_caching", "false"]
    words += ["--adapter", "mine=a/b", "--adapter", "c", "--kv_cache_dtype", "fp8"]
    keys = tmp_path / "keys.yaml"
    keys.write_text("alice: {key: tml-of-alice-0123456789, share: 0.5}\n")
    keys.chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    words += ["--keys", "~/keys.yaml"]
    words += ["--teacher", "some/teacher", "--teacher", "another", "--teacher_weights", "mxfp4"]
    assert main(["serve", BASE, "--port", "0", "--output_dir", str(tmp_path), *words]) == 0
    assert f"Serving {BASE} with the teachers some/teacher, another at http" in capsys.readouterr().out
    (options,), ((limits, known),) = opened, served
    assert known.owner(b"tml-of-alice-0123456789") == Owner("alice", 0.5)
    assert (options.resident, options.max_models, options.max_rank) == (5, 6, 7)
    assert options.kv_cache_dtype == "fp8"
    assert (options.served_name, options.adapters) == ("Qwen/Qwen3-8B", ("mine=a/b", "c"))
    assert (options.teachers, options.teacher_weights) == (("some/teacher", "another"), "mxfp4")
    assert (limits.held, limits.max_models, limits.max_rank) == (500_000_000, 6, 7)
    assert limits.pause_s == 3.0 and not options.enable_prefix_caching


def test_the_environment_has_a_key_that_no_process_list_shows(monkeypatch, capsys, tmp_path):
    args = argparse.Namespace(api_key=None, output_dir=tmp_path)
    monkeypatch.setenv("QERL_API_KEY", "tml-of-the-environment")
    assert command._own_key(args) == command._known_key(args) == "tml-of-the-environment"
    assert not [*tmp_path.iterdir()]
    args.api_key = KEY
    assert command._own_key(args) == command._known_key(args) == KEY
    monkeypatch.setenv("QERL_API_KEY", "secret")
    assert "QERL_API_KEY is not a valid key: a key begins with tml-" in said(
        capsys, "some/model", "--port", "0", "--output_dir", str(tmp_path)
    )
    monkeypatch.setenv("QERL_API_KEY", "")
    args.api_key = None
    assert command._own_key(args) == (tmp_path / "api_key").read_text()


@pytest.mark.parametrize("text", ["", "  \n", "tml-", "tml-short", "another-file-with-other-words"])
def test_a_key_file_that_holds_no_key_is_refused(capsys, tmp_path, text: str):
    (tmp_path / "api_key").write_text(text)
    assert "does not hold a valid key" in said(
        capsys, "some/model", "--port", "0", "--output_dir", str(tmp_path)
    )


def test_of_two_first_starts_one_key_stays(monkeypatch, tmp_path):
    args, file = argparse.Namespace(api_key=None, output_dir=tmp_path), tmp_path / "api_key"
    other, key = KEY + "x" * 30, command.secrets.token_urlsafe

    def slowly(length: int) -> str:
        file.write_text(other)  # the other server is first
        return key(length)

    monkeypatch.setattr(command.secrets, "token_urlsafe", slowly)
    assert command._own_key(args) == other == file.read_text()
    assert [*tmp_path.iterdir()] == [file]


def test_an_empty_key_lets_nobody_in():
    with pytest.raises(QeRLError, match="key is empty"):
        Keys("", {})


def test_an_open_address_is_warned_of():
    assert "connections are not encrypted" in command.greeting("m", "0.0.0.0", 1, "tml-x", None)
    assert "encrypted" not in command.greeting("m", "127.0.0.1", 1, "tml-x", None)
    assert "http://[::1]:1" in command.greeting("m", "::1", 1, "tml-x", None)


def test_the_status_of_a_server_that_runs(capsys, tmp_path):
    with RunningServer(FakeBackend(tmp_path)) as running:
        port = running.url.rpartition(":")[2]
        assert main(["serve", "--status", "--port", port, "--api_key", KEY]) == 0
        out = capsys.readouterr().out
        assert BASE in out and "No client is connected." in out and "Waiting: nothing." in out
        assert "Updates" not in out
        for tokens, every, text in (
            ({}, 0.0, "as many tokens as there are at a time, no layer recomputed"),
            ({"update_tokens_per_forward": 4096.0}, 1.0, "at most 4096 tokens at a time, every layer"),
        ):
            running.server.worker.gauges = {"update_every_n_layers": every} | tokens
            assert main(["serve", "--status", "--port", port, "--api_key", KEY]) == 0
            assert f"Updates: {text}" in " ".join(capsys.readouterr().out.split())
        assert "refused the request (401)" in said(capsys, "--status", "--port", port, "--api_key", "tml-x")


def test_the_text_of_a_client_is_shown_and_does_nothing(capsys, tmp_path):
    with RunningServer(FakeBackend(tmp_path)) as running:
        for version in ("[/x][red]", "\x1b]0;owned\x07"):
            running.server.clients.create_session(version)
        assert main(["serve", "--status", "--port", running.url.rpartition(":")[2], "--api_key", KEY]) == 0
    out = capsys.readouterr().out
    assert "[/x][red]" in out and "owned" in out
    assert "\x1b]" not in out and "\x07" not in out
