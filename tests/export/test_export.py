"""`qerl export` as a user types it: what is written, what its card says, what is refused, what is pushed."""

import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from qerl import add_lora
from qerl.cli import main
from qerl.eval.policy import choices_of
from qerl.export import hub
from qerl.models.decide import Source
from qerl.models.load import load_model, load_tokenizer
from tests.support.models import make_tiny_model, make_tiny_tokenizer, move_adapter

CONVERTER = """
import json, pathlib, sys
model, out = sys.argv[1], pathlib.Path(sys.argv[sys.argv.index("--outfile") + 1])
files = sorted(path.name for path in pathlib.Path(model).iterdir())
out.write_text(json.dumps({"words": sys.argv[2:], "files": files}))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder as training leaves it, with a base beside it that has a licence."""
    folder = tmp_path_factory.mktemp("export")
    base, run = folder / "base", folder / "run"
    make_tiny_model("llama").bfloat16().save_pretrained(base)
    make_tiny_tokenizer().save_pretrained(base)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    torch.manual_seed(0)
    policy = move_adapter(add_lora(load_model(base, "nvfp4", torch.float32, "cpu"), 4, 8, 0.0))
    policy.save_pretrained(run)
    settings = {
        "model": str(base), "weights": "nvfp4", "rounding": "mse", "output_dir": str(run),
        "task": "arithmetic", "task_options": {"level": "wp1", "examples": 0, "test_size": 4},
        "max_completion_length": 8,
    }  # fmt: skip
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    (run / "policy.json").write_text(json.dumps({"dtype": "float32", "base": str(base)}))
    return run


@pytest.fixture
def converter(tmp_path):
    """A stand-in for llama.cpp's script, which writes what it was called with."""
    script = tmp_path / "llama.cpp" / "convert_hf_to_gguf.py"
    script.parent.mkdir()
    script.write_text(CONVERTER)
    return script


@pytest.fixture
def api(monkeypatch):
    """A stand-in for the Hub, which keeps what it is asked."""
    asked = SimpleNamespace(tokens=[], made=[], pushed=[], deleted=[], error=None, nobody=None)

    class Api:
        def __init__(self, token=None):
            asked.tokens.append(token)

        def create_repo(self, repo_id, *, private, exist_ok):
            asked.made.append((repo_id, private, exist_ok))

        def whoami(self):
            if asked.nobody:
                raise asked.nobody
            return {"name": "me"}

        def upload_folder(self, *, repo_id, folder_path, commit_message, ignore_patterns, delete_patterns):
            if asked.error:
                raise asked.error
            kept = {path.name for path in Path(folder_path).iterdir()} - set(ignore_patterns)
            asked.pushed.append((repo_id, kept))
            asked.deleted += delete_patterns
            return f"https://huggingface.co/{repo_id}"

    monkeypatch.setattr(hub, "HfApi", Api)
    return asked


def front_matter(folder):
    return ModelCard.load(folder / "README.md").data.to_dict()


def test_a_merged_model_is_scored_as_the_run_was(run, tmp_path, capsys):
    out, scores = tmp_path / "out", tmp_path / "scores"
    assert main(["export", str(run), str(out)]) == 0
    printed = capsys.readouterr().out
    assert "into the base rounded to nvfp4 (mse) and dequantised, on which it was trained" in printed
    assert f"Score it with: qerl eval {out}\n" in printed
    assert main(["eval", str(out), "--out", str(scores)]) == 0
    source = json.loads((scores / "result.json").read_text())["source"]
    assert source["weights"] == "bf16", "rounded to four bits again, it would be another model"
    card = front_matter(out)
    assert card["license"] == "apache-2.0" and card["library_name"] == "transformers"
    assert "base_model" not in card, "a local path is no name of the Hub"
    text = (out / "README.md").read_text()
    assert str(run.parent) not in text and str(tmp_path) not in text and 'model="path/to/out"' in text


def test_another_format_than_the_run_had_is_said(run, tmp_path):
    assert main(["export", str(run), str(tmp_path / "out"), "--rounding", "rtn"]) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "to nvfp4 (rtn) and dequantised, while it was trained on nvfp4 (mse)" in text


def test_merged_into_the_16_bit_weights_where_these_are_asked_for(run, tmp_path, capsys):
    assert main(["export", str(run), str(tmp_path / "out"), "--weights", "bf16"]) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "merged into the 16-bit weights of the base, while it was trained on nvfp4 (mse)" in text


def test_an_adapter_names_its_base_on_the_hub_and_loads_with_peft(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", str(run), str(out), "--format", "adapter", "--base_model", "some/base"]) == 0
    card = front_matter(out)
    assert card["base_model"] == "some/base" and card["library_name"] == "peft"
    assert "base_model:adapter:some/base" in card["tags"] and card["base_model_relation"] == "adapter"
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "some/base"
    ids, base = torch.arange(3, 23)[None], run.parent / "base"
    with torch.no_grad():
        first, second = (
            PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)(ids).logits
            for folder in (run, out)
        )
    assert torch.equal(first, second)
    assert main(["eval", str(base), "--adapter", str(out), "--limit", "2"]) == 0
    assert "weights nvfp4" in capsys.readouterr().out


def test_gguf_is_made_of_the_merged_model_by_the_converter(run, converter, tmp_path, capsys):
    out = tmp_path / "mine"
    words = ["export", str(run), str(out), "--format", "gguf", "--outtype", "q8_0", "--base_model", "a/b"]
    assert main([*words, "--converter", str(converter.parent)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "config.yaml", "mine-q8_0.gguf"]
    called = json.loads((out / "mine-q8_0.gguf").read_text())
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(called["files"])
    words = called["words"]
    assert words[words.index("--outtype") + 1] == "q8_0"
    assert words[words.index("--model-name") + 1] == "mine-q8_0"
    assert "The sums are in float16" in (out / "README.md").read_text(), "no bfloat16 in between"
    assert front_matter(out)["base_model_relation"] == "quantized"
    assert choices_of(Source(str(out / "mine-q8_0.gguf"))).of_run["weights"] == "bf16"


def test_a_converter_on_the_path_is_found(run, converter, tmp_path, monkeypatch):
    converter.chmod(0o755)
    monkeypatch.setenv("PATH", str(converter.parent))
    assert main(["export", str(run), str(tmp_path / "out"), "--format", "gguf"]) == 0
    assert (tmp_path / "out" / "out-bf16.gguf").is_file()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("raise ValueError('this model is not known')", "did not convert the merged model (ValueError: this"),
        ("import no_such_thing", "install the package that has the Python module no_such_thing."),
        ("", "(exit status 0)"),
    ],
)
def test_a_converter_that_fails_is_one_sentence_and_leaves_nothing(
    run, converter, tmp_path, script, said, capsys
):
    converter.write_text(script)
    out = tmp_path / "out"
    words = ["export", str(run), str(out), "--format", "gguf", "--converter", str(converter)]
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama.cpp"]


def test_a_run_that_tuned_all_weights_is_written_in_16_bits(run, api, tmp_path, capsys):
    whole = tmp_path / "whole"
    make_tiny_model("llama").save_pretrained(whole)
    make_tiny_tokenizer().save_pretrained(whole)
    (whole / "config.yaml").write_text(
        yaml.safe_dump({"tuning": "full", "model": "a/b", "task": "arithmetic"})
    )
    of_run = {".env", "metrics.jsonl", "trainer_state.json", "checkpoint.json", "policy.json"}
    for name in of_run:
        (whole / name).write_text("{}")
    assert main(["export", str(whole), str(tmp_path / "out"), "--push_to_hub"]) == 0
    assert not {path.name for path in (tmp_path / "out").iterdir()} & of_run
    ((_, pushed),) = api.pushed
    assert {"model.safetensors", "tokenizer.json", "README.md"} <= pushed and "config.yaml" not in pushed
    assert "from --weights" not in capsys.readouterr().out, "nobody gave it"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    for name, tensor in make_tiny_model("llama").state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor.bfloat16()), name
    assert front_matter(tmp_path / "out")["base_model"] == "a/b"
    load_tokenizer(tmp_path / "out")


def test_pushed_by_the_names_of_trl(run, api, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["export", str(run), str(out), "--format", "adapter", "--base_model", "some/base"]
    hub_words = ["--hub_model_id", "me/mine", "--hub_private_repo", "--hub_token", "secret"]
    assert main([*words, "--push_to_hub", *hub_words]) == 0
    assert api.made == [("me/mine", True, True)] and set(api.tokens) == {"secret"}
    assert api.pushed == [("me/mine", {"README.md", "adapter_config.json", "adapter_model.safetensors"})]
    assert 'from_pretrained(model, "me/mine")' in (out / "README.md").read_text()
    assert "https://huggingface.co/me/mine" in capsys.readouterr().out
    assert not [path for path in out.iterdir() if "secret" in path.read_bytes().decode(errors="ignore")]


def test_a_repository_has_the_name_of_the_folder_and_the_token_of_the_environment(run, api, tmp_path):
    words = ["export", str(run), str(tmp_path / "mine"), "--format", "adapter", "--base_model", "some/base"]
    assert main([*words, "--push_to_hub", "true"]) == 0
    assert api.made == [("me/mine", None, True)] and set(api.tokens) == {None}
    assert api.pushed[0][0] == "me/mine"


def test_a_push_that_fails_leaves_what_was_written(run, api, tmp_path, capsys):
    api.error = OSError("no route to host")
    out = tmp_path / "two words"
    words = ["export", str(run), str(out), "--format", "adapter", "--base_model", "some/base"]
    assert main([*words, "--push_to_hub", "--hub_model_id", "me/out", "--hub_private_repo"]) == 2
    said = capsys.readouterr().err
    assert "was written and not pushed (no route to host)" in said
    again = shlex.split(said.split("`")[1])
    assert again[:5] == ["hf", "upload", "me/out", str(out), "--private"]
    assert again[5:9] == ["--exclude", "config.yaml", "--exclude", "policy.json"]
    assert "adapter_config.json" in again[again.index("--delete") :]
    assert (out / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["RUN", "RUN"], "exists and is not overwritten"),
        (["EMPTY", "OUT"], "holds neither an adapter nor a model"),
        (["NOWHERE", "OUT"], "There is no"),
        (["BASE", "OUT"], "is a model without the config.yaml of a run"),
        (["PEFT", "OUT"], "the format of the weights under the adapter is unknown; set --weights (bf16"),
        (["RUN", "out.gguf"], "remove .gguf from its name, and pass --format gguf"),
        (["RUN", "FILE/out"], "which is a file; choose another folder."),
        (["RUN", "OUT", "--weights", "nf4"], "Cannot merge an adapter into nf4 weights; pass --weights bf16"),
        (["RUN", "OUT", "--weights", "bf16", "--rounding", "rtn"], "--rounding rtn has no effect on"),
        (["RUN", "OUT", "--base_model", "/tmp/x"], "not a Hub id; give the base's id as owner/name."),
        (
            ["RUN", "OUT", "--format", "adapter", "--push_to_hub"],
            "so others could not load the adapter; set",
        ),
        (["BASE", "OUT", "--format", "adapter"], "holds a whole model and no adapter"),
        (["BASE", "OUT", "--model", "a/b"], "is a whole model without a base"),
        (["BASE", "OUT", "--weights", "nvfp4"], "--weights is nvfp4, but"),
        (["RUN", "OUT", "--format", "adapter", "--dtype", "float16"], "--dtype has no effect on --format"),
        (["RUN", "OUT", "--outtype", "f16"], "--outtype has no effect on --format merged; remove it."),
        (["RUN", "OUT", "--format", "gguf", "--converter", "EMPTY"], "there is no convert_hf_to_gguf.py"),
        (["RUN", "OUT", "--format", "gguf"], "clone https://github.com/ggml-org/llama.cpp"),
        (["RUN", "OUT", "--base_model", "EMPTY"], "not a Hub id; give the base's id as owner/name"),
        (["RUN", "OUT", "--hub_model_id", "me/x"], "have no effect without --push_to_hub; add it"),
        (["RUN", "OUT", "--model", "OTHER"], "whose norms or embeddings are not those of"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence(run, api, tmp_path, monkeypatch, words, said, capsys):
    monkeypatch.setenv("PATH", "")
    other = tmp_path / "other"
    make_tiny_model("llama", seed=5).save_pretrained(other)
    (tmp_path / "empty").mkdir()
    places = {"RUN": run, "OUT": tmp_path / "out", "BASE": run.parent / "base", "EMPTY": tmp_path / "empty"}
    places |= {"OTHER": other, "PEFT": tmp_path / "peft", "NOWHERE": tmp_path / "nowhere"}
    shutil.copytree(run, tmp_path / "peft", ignore=shutil.ignore_patterns("config.yaml"))
    (tmp_path / "file").write_text("")
    places["FILE/out"] = tmp_path / "file" / "out"
    assert main(["export", *(str(places.get(word, word)) for word in words)]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists() and not api.made


def test_an_adapter_with_more_than_pairs_of_matrices_is_refused(run, api, tmp_path, capsys):
    model = AutoModelForCausalLM.from_pretrained(run.parent / "base")
    policy = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"]))
    policy.save_pretrained(tmp_path / "more")
    words = ["export", str(tmp_path / "more"), str(tmp_path / "out"), "--weights", "bf16", "--push_to_hub"]
    assert main(words) == 2
    assert "beside its LoRA matrices" in capsys.readouterr().err
    assert not api.made, "no empty repository is left"


def test_who_pushes_is_known_before_the_work(run, api, tmp_path, capsys):
    api.nobody = OSError("token not found")
    words = ["export", str(run), str(tmp_path / "out"), "--push_to_hub", "--hub_model_id", "me/x"]
    assert main(words) == 2
    assert "account to push with could not be determined (token not found)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["merged", "gguf"])
def test_weights_of_an_earlier_push_do_not_win(run, api, converter, tmp_path, format):
    """PEFT's config beside a merged model would be followed, and so would model.safetensors beside an index;
    GGUF files lie beside others."""
    words = ["export", str(run), str(tmp_path / "out"), "--push_to_hub", "--format", format]
    assert main([*words, *(["--converter", str(converter)] if format == "gguf" else [])]) == 0
    stale = {"adapter_config.json", "model.safetensors", "model.safetensors.index.json", "config.json"}
    assert set(api.deleted) >= stale if format == "merged" else not api.deleted


def test_a_base_that_is_no_longer_there_is_no_name_of_the_hub(run, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    gone = str(tmp_path / "gone" / "base")
    for name in ("adapter_config.json", "policy.json", "config.yaml"):
        path = moved / name
        path.write_text(path.read_text().replace(str(run.parent / "base"), gone))
    assert main(["export", str(moved), str(tmp_path / "out"), "--format", "adapter"]) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "base_model" not in front_matter(tmp_path / "out") and str(tmp_path) not in text
    assert "huggingface.co//" not in text and 'from_pretrained("path/to/base")' in text


def test_the_card_of_another_trainers_adapter_does_not_say_that_it_was_trained_here(run, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(run.parent / "base")
    policy = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    policy.save_pretrained(tmp_path / "peft")
    assert main(["export", str(tmp_path / "peft"), str(tmp_path / "out"), "--weights", "bf16"]) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "exported with QeRL." in text and "trained with QeRL" not in text


def test_gguf_in_32_bits_is_made_of_sums_in_32_bits(run, converter, tmp_path):
    words = ["export", str(run), str(tmp_path / "out"), "--format", "gguf", "--outtype", "f32"]
    assert main([*words, "--converter", str(converter)]) == 0
    assert "The sums are in float32" in (tmp_path / "out" / "README.md").read_text()


def test_a_folder_that_is_named_like_a_file_is_a_folder(run, tmp_path, capsys):
    """As one that was written before such names were refused."""
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    (tmp_path / "out").rename(tmp_path / "x.gguf")
    assert main(["eval", str(tmp_path / "x.gguf"), "--limit", "1"]) == 0
    assert "weights bf16" in capsys.readouterr().out


def test_the_last_line_names_a_task_of_ones_own_again(run, tmp_path, capsys):
    mine = tmp_path / "mine"
    shutil.copytree(run, mine)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["task"] = "mine.py:Mine"
    (mine / "config.yaml").write_text(yaml.safe_dump(settings))
    assert main(["export", str(mine), str(tmp_path / "out")]) == 0
    assert f"qerl eval {tmp_path / 'out'} --task mine.py:Mine\n" in capsys.readouterr().out
