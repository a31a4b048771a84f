"""What a server saves: plain PEFT folders from which training goes on with the same bits."""

import contextlib
import errno
import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import SafetensorError

from qerl.errors import QeRLError
from qerl.eval.policy import choices_of
from qerl.lora.adapter import load_adapter
from qerl.models.decide import Source
from qerl.models.load import load_model
from qerl_serve.types import AdamParams, Notes, WeightsInfo
from tests.support.serve import DATA, lora, request, sampled, small_model, tiny_backend, weights
from tests.support.wrappers import make_wrapper, text_logits

ADAM = AdamParams(learning_rate=1e-2, weight_decay=0.01)


def train(backend, model_id, steps=2):
    losses = []
    for _ in range(steps):
        output = backend.forward_backward(model_id, DATA, "cross_entropy", {}, False)
        losses.append((output.metrics["loss:sum"], backend.optim_step(model_id, ADAM)))
    return losses


@pytest.fixture
def saved(tmp_path):
    """A backend with a model "s:train:0" of rank 4 that took two steps and was saved in both ways."""
    backend = tiny_backend(tmp_path)
    backend.create_model("s:train:0", lora(rank=4, seed=7))
    train(backend, "s:train:0")
    return backend, backend.save_state("s:train:0", "000002"), backend.save_for_sampler("s:train:0", "000002")


def test_training_goes_on_with_the_same_bits_on_another_server(saved, tmp_path):
    backend, state, _ = saved
    assert state == "tinker://s:train:0/weights/000002"
    whole = train(backend, "s:train:0")
    backend.close()
    other = tiny_backend(tmp_path)  # on the same folder, with nothing in memory
    other.load_state("t:train:0", state, with_optimizer=True)
    assert train(other, "t:train:0") == whole
    for name, matrix in weights(backend, "s:train:0").items():
        assert torch.equal(weights(other, "t:train:0")[name], matrix)
    other.load_state("s:train:1", state, with_optimizer=False)
    anew = train(other, "s:train:1")
    assert anew[0][0] == whole[0][0] and anew[1][0] != whole[1][0]  # the same weights, other moments
    other.load_state("s:train:1", state, with_optimizer=True)  # over a model that there is
    assert train(other, "s:train:1") == whole


def test_a_saved_sampler_is_the_model_as_it_was(saved, tmp_path):
    backend, _, path = saved
    live = backend.save_for_sampler("s:train:0", None)
    expected = sampled(backend, [request(live)])
    train(backend, "s:train:0")
    key = backend.sampler(path)
    assert sampled(backend, [request(key)]) == expected
    backend.close()
    again = tiny_backend(tmp_path)
    assert sampled(again, [request(again.sampler(path))]) == expected
    backend.delete_checkpoint(path)
    assert backend.save_for_sampler("s:train:0", "000002") == path
    newer = backend.sampler(path)
    assert newer != key
    assert sampled(backend, [request(newer)]) != expected
    backend.delete_checkpoint(path)
    assert sampled(backend, [request(key)]) == expected  # those that were given go on


def test_others_read_what_was_saved(saved):
    backend, state, path = saved
    prompt = [5, 9, 77, 31]
    scored = sampled(backend, [request(backend.sampler(path), prompt, prompt_logprobs=True)])[0]
    folder = next(c.folder for c in backend.checkpoints() if c.path == state)
    for read in (PeftModel.from_pretrained, load_adapter):
        with torch.no_grad():
            logits_TV = read(small_model(), folder)(input_ids=torch.tensor([prompt])).logits[0]
        found = logits_TV.log_softmax(-1)[range(3), prompt[1:]]
        assert scored.prompt_logprobs[1:] == pytest.approx(found.tolist(), abs=1e-5)
    assert choices_of(Source("tiny", folder)).of_run["dtype"] == "float32"


def test_what_is_saved_is_listed_described_and_deleted(saved, tmp_path):
    backend, state, path = saved
    assert [checkpoint.path for checkpoint in backend.checkpoints()] == [state, path]
    assert all(checkpoint.bytes > 10_000 for checkpoint in backend.checkpoints())
    info = WeightsInfo("tiny", 4, train_attn=True, train_mlp=True, train_unembed=False)
    assert (
        backend.weights_info(state) == backend.weights_info(path) == backend.model_info("s:train:0") == info
    )
    backend.delete_checkpoint(state)
    assert [checkpoint.path for checkpoint in backend.checkpoints()] == [path]
    with pytest.raises(QeRLError, match="Nothing is saved"):
        backend.weights_info(state)


def test_a_server_that_dies_while_it_saves_leaves_what_there_was(saved, tmp_path, monkeypatch):
    backend, state, _ = saved
    before = weights(backend, "s:train:0")
    train(backend, "s:train:0")

    def dies(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("qerl_serve.checkpoints.publish", dies)
    with pytest.raises(KeyboardInterrupt):
        backend.save_state("s:train:0", "000002", overwrite=True)
    monkeypatch.undo()
    backend.close()
    other = tiny_backend(tmp_path)
    other.load_state("t:train:0", state, with_optimizer=True)
    for name, matrix in weights(other, "t:train:0").items():
        assert torch.equal(matrix, before[name])
    other.save_state("t:train:0", "000002")
    assert len(other.checkpoints()) == 3


def test_what_has_a_name_is_replaced_only_if_that_is_asked_for(saved):
    backend, state, path = saved
    folder = next(checkpoint.folder for checkpoint in backend.checkpoints() if checkpoint.path == state)
    before = (folder / "optimizer.safetensors").read_bytes()
    train(backend, "s:train:0")
    with pytest.raises(QeRLError, match=r"saved already.*overwrite=True"):
        backend.save_state("s:train:0", "000002")
    with pytest.raises(QeRLError, match=r"sampler_weights/000002 is saved already; choose another name"):
        backend.save_for_sampler("s:train:0", "000002")
    assert (folder / "optimizer.safetensors").read_bytes() == before
    assert backend.save_state("s:train:0", "000002", overwrite=True) == state
    assert (folder / "optimizer.safetensors").read_bytes() != before
    assert {checkpoint.path for checkpoint in backend.checkpoints()} == {state, path}
    assert not (folder.parents[2] / ".replaced").exists()


def test_weights_for_other_programs_have_names_of_their_own(saved):
    backend, state, path = saved
    external = backend.save_external("s:train:0", "000002")
    assert external == path.replace("sampler_weights", "external_weights")
    one, other = backend.checkpoint(external), backend.checkpoint(path)
    adapters = [(each.folder / "adapter_model.safetensors").read_bytes() for each in (one, other)]
    assert adapters[0] == adapters[1] and one.folder != other.folder
    with pytest.raises(QeRLError, match=r"external_weights/000002 is saved already; choose another name"):
        backend.save_external("s:train:0", "000002")
    backend.delete_checkpoint(path)
    assert backend.checkpoint(external).path == external
    assert {checkpoint.path for checkpoint in backend.checkpoints()} == {state, external}


@pytest.mark.parametrize("killed_at", range(2, 8))
def test_a_server_that_is_killed_while_it_replaces_leaves_the_former_or_the_new(
    saved, tmp_path, monkeypatch, killed_at
):
    """Killed before each of the steps that move or delete something: nothing runs after that."""
    backend, state, _ = saved
    former = weights(backend, "s:train:0")
    train(backend, "s:train:0")
    new = weights(backend, "s:train:0")
    done, dead = [], []

    class Killed(BaseException):
        pass

    def step(what):
        def run(*args, **kwargs):
            if dead or len(done) == killed_at:
                dead.append(what)
                raise Killed
            done.append(what)
            return what(*args, **kwargs)

        return run

    for owner, name in ((Path, "rename"), (Path, "unlink"), (Path, "rmdir"), (shutil, "rmtree")):
        monkeypatch.setattr(owner, name, step(getattr(owner, name)))
    with contextlib.suppress(Killed):
        backend.save_state("s:train:0", "000002", overwrite=True)
    monkeypatch.undo()
    assert dead or killed_at >= len(done)
    backend.close()
    other = tiny_backend(tmp_path)
    other.load_state("t:train:0", state, with_optimizer=True)
    found = weights(other, "t:train:0")
    assert any(all(torch.equal(found[name], one[name]) for name in found) for one in (former, new))
    assert len(other.checkpoints()) == 2 and not (tmp_path / ".replaced").exists()


def test_a_folder_belongs_to_one_server_until_that_one_ends(saved, tmp_path):
    backend, _, _ = saved
    part = tmp_path / ".unfinished" / "part"
    part.mkdir(parents=True)  # as while it saves
    with pytest.raises(QeRLError, match=r"Another server uses the folder.*--output_dir"):
        tiny_backend(tmp_path)
    assert part.is_dir()
    worker = threading.Thread(target=backend.close)  # not the thread that opened it
    worker.start()
    worker.join()
    assert len(tiny_backend(tmp_path).checkpoints()) == 2


def test_no_path_leads_out_of_the_folder(saved):
    backend, _, _ = saved
    for path in (
        "tinker://../weights/x", "tinker://a/weights/..", "tinker://a/weights/.hidden", "tinker://a/other/x",
        "tinker://a/weights/x/y", "tinker://a/weights/", "tinker:///etc/weights/x", "tinker://a/weights/x\n",
        "tinker://a b/weights/x", "tinker://ä/weights/x", "/etc/passwd", "tinker://a/weights/" + "x" * 129,
    ):  # fmt: skip
        for ask in (backend.weights_info, backend.delete_checkpoint, backend.sampler):
            with pytest.raises(QeRLError):
                ask(path)
        with pytest.raises(QeRLError, match=r"not the path of a checkpoint|it must be 1 to 128"):
            backend.load_state("n", path, with_optimizer=True)


def test_names_are_those_that_the_wire_takes(saved):
    backend, _, _ = saved
    path = backend.save_state("s:train:0", "-last")
    assert backend.weights_info(path).lora_rank == 4
    with pytest.raises(QeRLError, match=r"letters, digits and _ - \."):
        backend.save_state("s:train:0", "a:b")


def test_a_damaged_checkpoint_is_listed_replaced_and_deleted(saved, tmp_path, caplog):
    backend, state, path = saved
    damaged = backend.checkpoint(path).folder / "adapter_model.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(b"short")
    assert [checkpoint.path for checkpoint in backend.checkpoints()] == [state, path]
    assert "adapter_model.safetensors has 5 bytes" in caplog.text
    for ask in (backend.weights_info, backend.checkpoint, backend.sampler):
        with pytest.raises(QeRLError, match=rf"^{path} is damaged.*can be deleted, or replaced") as refused:
            ask(path)
        assert str(tmp_path) not in str(refused.value)
    assert backend.save_for_sampler("s:train:0", "000002") == path
    assert damaged.read_bytes() == whole
    damaged.write_bytes(b"short")
    backend.delete_checkpoint(path)
    assert [checkpoint.path for checkpoint in backend.checkpoints()] == [state]


FULL = {
    "qerl_serve.checkpoints.save_file": SafetensorError("I/O error: No space left on device (os error 28)"),
    "pathlib.Path.write_text": OSError(errno.ENOSPC, "No space left on device", "/path/of/the/server"),
}
"""What fills up, and how it says so."""


@pytest.mark.parametrize("writes", FULL)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_is_said_and_holds_nothing_half_written(saved, tmp_path, monkeypatch, writes, overwrite):
    backend, state, _ = saved

    def fails(*args, **options):
        raise FULL[writes]

    with monkeypatch.context() as patch:
        patch.setattr(writes, fails)
        with pytest.raises(QeRLError, match=r"was not saved.*disk is full; delete checkpoints") as refused:
            backend.save_state("s:train:0", "000002" if overwrite else "next", overwrite)
    assert "/path/of/the/server" not in str(refused.value)
    assert not (tmp_path / ".unfinished").exists() and not (tmp_path / ".replaced").exists()
    backend.load_state("t:train:0", state, with_optimizer=True)
    assert train(backend, "s:train:0") == train(backend, "t:train:0")
    backend.save_state("s:train:0", "next")


def test_notes_and_expiry_outlive_the_server(saved, tmp_path):
    backend, state, path = saved
    run, own = {"renderer_name": "qwen3"}, {"step": "3"}
    kept = backend.save_state("s:train:0", "kept", notes=Notes(run, own, 4e9))
    backend.expire_checkpoint(path, 1.0)
    backend.expire_checkpoint(state, 1.0)
    backend.expire_checkpoint(state, None)
    backend.close()
    other = tiny_backend(tmp_path)
    assert other.checkpoint(kept).notes == Notes(run, own, 4e9)
    assert other.checkpoint(path).notes == Notes(expires=1.0)
    other.delete_expired()
    assert {checkpoint.path for checkpoint in other.checkpoints()} == {state, kept}
    assert other.checkpoint(state).notes == Notes()
    with pytest.raises(QeRLError, match="Nothing is saved"):
        other.expire_checkpoint(path, None)


def test_a_link_does_not_lead_out_of_the_folder_either(saved, tmp_path):
    backend, state, _ = saved
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(tmp_path / "s:train:0", tmp_path.parent / f"{tmp_path.name}-out")
    (tmp_path / "linked").symlink_to(tmp_path.parent / f"{tmp_path.name}-out")
    with pytest.raises(QeRLError, match="leads out"):
        backend.weights_info(state.replace("s:train:0", "linked"))
    shutil.copytree(tmp_path / "s:train:0", tmp_path / "of nobody")
    assert {checkpoint.path.split("/")[2] for checkpoint in backend.checkpoints()} == {"s:train:0"}
    with pytest.raises(QeRLError, match="not the path of a checkpoint"):
        backend.save_state("s:train:0", "../x")


DAMAGE = (
    (lambda f: (f / "adapter_model.safetensors").write_bytes(b"short"), "damaged"),
    (lambda f: (f / "optimizer.safetensors").unlink(), "damaged"),
    (lambda f: change(f / "policy.json", fingerprint="o"), "trained on"),
    (lambda f: change(f / "state.json", rank="x"), "not saved by this server"),
    (lambda f: change(f / "state.json", rank=64), "1 to 16"),
    (lambda f: change(f / "state.json", rank=8), "saved weights have the shape"),
    (lambda f: change(f / "state.json", mlp=False), "saved weights have the shape"),
)


def test_damaged_and_foreign_weights_end_in_a_sentence(saved, tmp_path):
    backend, state, _ = saved
    folder, whole = backend.checkpoints()[0].folder, tmp_path / "whole"
    shutil.copytree(folder, whole)
    for damage, sentence in DAMAGE:
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        damage(folder)
        with pytest.raises(QeRLError, match=sentence):
            backend.load_state("n", state, with_optimizer=True)
        assert "n" not in backend._adapters


def test_a_load_that_fails_leaves_a_model_and_its_gradients_as_they_were(saved):
    backend, state, _ = saved
    change(backend.checkpoints()[0].folder / "state.json", rank=8)
    for name in ("loads", "does not"):
        backend.create_model(name, lora(rank=8, seed=1))
        backend.forward_backward(name, DATA, "cross_entropy", {}, False)
    with pytest.raises(QeRLError, match="saved weights have the shape"):
        backend.load_state("loads", state, with_optimizer=True)
    assert backend.optim_step("loads", ADAM) == backend.optim_step("does not", ADAM)
    for name, matrix in weights(backend, "does not").items():
        assert torch.equal(weights(backend, "loads")[name], matrix)


def test_weights_of_another_base_are_described_as_what_they_are(saved):
    backend, state, path = saved
    folders = {checkpoint.path: checkpoint.folder for checkpoint in backend.checkpoints()}
    change(folders[state] / "policy.json", base="other", fingerprint="o")
    change(folders[path] / "policy.json", base="/models/tiny")
    assert backend.weights_info(state).base_model == "other"
    assert backend.weights_info(path).base_model == "tiny"  # by the name it has now


def test_an_optimizer_or_a_shape_that_is_not_there_is_not_made_up(saved):
    backend, state, path = saved
    with pytest.raises(QeRLError, match="without an optimizer"):
        backend.load_state("n", path, with_optimizer=True)
    backend.load_state("n", path, with_optimizer=False)
    backend.create_model("m", lora(rank=8))
    with pytest.raises(QeRLError, match="rank 4 on attention and MLPs"):
        backend.load_state("m", state, with_optimizer=True)
    with pytest.raises(QeRLError, match="no model 'other'"):
        backend.sampler("other")


def change(file, **values):
    """Change a JSON file and its size in the manifest, by which damage is told."""
    content = json.loads(file.read_text()) | values
    text = json.dumps(content)
    manifest = file.parent / "checkpoint.json"
    listed = json.loads(manifest.read_text())
    listed["files"][file.name] = len(text)
    manifest.write_text(json.dumps(listed))
    file.write_text(text)


def test_what_is_saved_of_a_text_decoder_fits_the_model_for_images(tmp_path):
    wrapper = make_wrapper("Gemma3")
    wrapper.save_pretrained(tmp_path / "base")
    backend = tiny_backend(tmp_path, load_model(tmp_path / "base", "bf16", torch.float32, "cpu"))
    backend.create_model("s:train:0", lora(rank=4, seed=7))
    train(backend, "s:train:0")
    folder = backend._store.folder(backend.save_state("s:train:0", "000002"))
    ids = torch.tensor([[5, 9, 77, 31]])
    again = load_adapter(load_model(tmp_path / "base", "bf16", torch.float32, "cpu"), folder)
    wanted = text_logits(again, ids)
    assert not torch.equal(wanted, text_logits(wrapper, ids))
    theirs = PeftModel.from_pretrained(wrapper, folder)
    torch.testing.assert_close(text_logits(theirs, ids), wanted, rtol=0, atol=1e-5)
