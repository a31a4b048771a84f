"""One training at a time writes into a run folder; a trainer made in Python says so, and goes on."""

import pytest
from filelock import FileLock
from transformers import TrainerCallback

from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.resume.claim import claimed
from tests.support.arguments import ROWS, first_letter, run_settings


@pytest.fixture
def make(tiny_model, tiny_tokenizer, tmp_path):
    def make(callbacks=(), folder="run"):
        args = run_settings(tmp_path / folder, max_steps=1, save_strategy="no")
        return QeRLTrainer(
            tiny_model("llama"), first_letter, args, ROWS, processing_class=tiny_tokenizer,
            callbacks=[*callbacks],
        )  # fmt: skip

    return make


def said(caplog):
    return [text for text in caplog.messages if "Another training writes to" in text]


@pytest.mark.slow
def test_a_trainer_whose_folder_another_one_writes_to_says_so(make, tmp_path, caplog):
    class Second(TrainerCallback):
        def on_step_end(self, *_, **__):
            for folder in ("other", "run"):
                second = make(folder=folder)
                second.train()
                assert second.state.global_step == 1
                assert len(said(caplog)) == (folder == "run")

    first = make([Second()])
    first.train()
    assert first.state.global_step == 1 and f"{tmp_path / 'run'} at present" in said(caplog)[0]
    caplog.clear()
    make().train()
    assert not said(caplog)


def test_a_trainer_has_its_folder_while_it_trains(make, tmp_path):
    class Asks(TrainerCallback):
        found = True

        def on_step_end(self, *_, **__):
            with claimed(tmp_path / "run", 0) as alone:
                Asks.found = alone

    make([Asks()]).train()
    assert not Asks.found
    with claimed(tmp_path / "run", 0) as alone, claimed(tmp_path / "run", 1) as second_process:
        assert alone and second_process


def test_a_folder_that_cannot_be_locked_is_said(tmp_path, caplog, monkeypatch):
    def refuse(self, **_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    with claimed(tmp_path, 0) as alone:
        assert alone
    assert f"{tmp_path} cannot be locked ([Errno 13] Permission denied)" in caplog.text
