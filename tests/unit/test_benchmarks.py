"""The benchmarks' command line."""

from benchmarks.__main__ import main


def test_benchmarks_say_what_they_need(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["rollout", "--shape", "7b"]) == 2
    assert "CUDA GPU" in capsys.readouterr().err
