"""The cookbook's recipes of on-policy distillation, as they are published, against a server with a teacher.

They run as a user runs them, in a process of their own. Their data sets are at the Hub; in the folder where
these processes run there are folders of the same names, which `datasets` takes in their place.

`make tinker` does not have the cookbook; where it is installed beside the client, these tests run.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker", reason="needs the package tinker, which `make tinker` has")

import tinker
import torch
from tinker import types

from qerl_serve.open import BackendOptions, open_backend
from tests.support.models import make_tiny_model, make_tiny_tokenizer
from tests.support.wire import KEY, RunningServer

pytestmark = pytest.mark.filterwarnings("ignore")  # of what later versions will call otherwise
STUDENT, TEACHER = {"seed": 0}, {"seed": 1, "hidden_size": 96, "max_position_embeddings": 300}
DATA = {
    "zwhe99/DeepMath-103K": lambda n: {"question": f"{n} + {n}?"},
    "allenai/tulu-3-sft-mixture": lambda n: {"messages": [{"role": "user", "content": f"Say {n}."}]},
}


def result(future: Any) -> Any:
    while hasattr(future, "result"):
        future = future.result()
    return future


class Served:
    """A server of two models in fp32, and what its clients sent as advantages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, settings in (("student", STUDENT), ("teacher", TEACHER)):
            make_tiny_model(**settings).save_pretrained(folder / name)
            make_tiny_tokenizer().save_pretrained(folder / name)
        self.backend = open_backend(
            BackendOptions(
                str(folder / "student"),
                folder / "out",
                teachers=(str(folder / "teacher"),),
                weights="bf16",
                teacher_weights="bf16",
            )
        )
        self.data: list[Any] = []
        forward_backward = self.backend.forward_backward

        def spy(model_id: str, data: Any, *rest: Any) -> Any:
            self.data.extend(data)
            return forward_backward(model_id, data, *rest)

        self.backend.forward_backward = spy  # type: ignore[method-assign]

    def running(self) -> RunningServer:
        return RunningServer(self.backend, context=512, max_models=8, max_rank=32)

    def name(self, model: str) -> str:
        return str(self.folder / model)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    return Served(tmp_path)


def run(recipe: str, served: Served, url: str, **settings: Any) -> list[dict[str, Any]]:
    """Run a recipe; gives its metrics, a step each."""
    pytest.importorskip(
        "tinker_cookbook.distillation.train_on_policy", reason="needs the package tinker-cookbook"
    )
    work, log = served.folder / "work", served.folder / "log"
    for name, row in DATA.items():
        (work / name).mkdir(parents=True, exist_ok=True)
        (work / name / "train.jsonl").write_text("".join(json.dumps(row(n)) + "\n" for n in range(8)))
    always = {
        "model_name": served.name("student"), "renderer_name": "qwen3_instruct", "base_url": url,
        "group_size": 2, "lora_rank": 8, "max_tokens": 12, "learning_rate": 1e-2, "max_steps": 2,
        "log_path": log, "eval_every": 0, "save_every": 0,
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in (always | settings).items()]
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(served.folder / "hf")}
    quiet["RES_OPTIONS"] = "timeout:1 attempts:1"  # a name that no server answers is looked up for long
    done = subprocess.run(
        [sys.executable, "-m", f"tinker_cookbook.recipes.distillation.{recipe}", *words],
        cwd=work, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


@torch.no_grad()
def check_advantages(data: list[Any], settings: dict[str, Any]) -> float:
    """Compare advantages with log q - log p by transformers in double, where a token is sampled; gives
    their mean."""
    model = make_tiny_model(**settings).double()
    found = []
    for datum in data:
        targets_T, logprobs_T = (datum.inputs[name] for name in ("target_tokens", "logprobs"))
        rows_TV = model(input_ids=datum.tokens[None], use_cache=False).logits[0].log_softmax(dim=-1)
        expected_T = rows_TV.gather(1, targets_T[:, None].long())[:, 0] - logprobs_T.double()
        sampled_T = logprobs_T != 0
        assert torch.all(datum.inputs["advantages"][~sampled_T] == 0)
        found.append(datum.inputs["advantages"][sampled_T].double())
        torch.testing.assert_close(found[-1], expected_T[sampled_T], atol=1e-4, rtol=0)
    return float(torch.cat(found).mean())


def test_a_client_samples_and_scores_with_a_teacher_and_trains_the_other(served: Served) -> None:
    with served.running() as server:
        service = tinker.ServiceClient(base_url=server.url)
        supported = result(service.get_server_capabilities()).supported_models
        assert [model.model_name for model in supported] == [served.name("student"), served.name("teacher")]
        teacher = result(service.create_sampling_client(base_model=served.name("teacher")))
        prompt = torch.randint(2, 100, (20,)).tolist()
        scored = result(teacher.compute_logprobs(types.ModelInput.from_ints(prompt)))
        model = make_tiny_model(**TEACHER).double()
        rows_TV = model(input_ids=torch.tensor([prompt])).logits[0, :-1].log_softmax(dim=-1)
        expected = rows_TV.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        assert scored[1:] == pytest.approx(expected, abs=1e-4)
        asked = teacher.sample(
            types.ModelInput.from_ints(prompt), 1, types.SamplingParams(max_tokens=3, seed=1),
            include_prompt_logprobs=True, topk_prompt_logprobs=4,
        )  # fmt: skip
        best = result(asked).topk_prompt_logprobs[1:]
        assert [[token for token, _ in each] for each in best] == rows_TV.topk(4).indices.tolist()
        with pytest.raises(tinker.RequestFailedError, match="is a teacher on this server"):
            result(service.create_lora_training_client(base_model=served.name("teacher"), rank=4))
        with pytest.raises(tinker.RequestFailedError, match="has the id 128, and this model has 128 tokens"):
            result(teacher.compute_logprobs(types.ModelInput.from_ints([5, 128])))
        assert result(service.create_lora_training_client(base_model=served.name("student"), rank=4))


def test_the_recipe_distils_from_another_model(served: Served) -> None:
    with served.running() as server:
        steps = run(
            "on_policy_distillation", served, server.url,
            teacher_model=served.name("teacher"), dataset="deepmath", groups_per_batch=3,
        )  # fmt: skip
    assert [step["optim_steps"] for step in steps] == [1, 2] and len(served.data) == 2 * 3 * 2
    for number, step in enumerate(steps):
        mean = check_advantages(served.data[6 * number :][:6], TEACHER)
        assert step["teacher_kl"] == pytest.approx(-mean, abs=1e-4)


def test_the_recipe_of_two_teachers_takes_an_adapter_of_the_base_and_another_model(served: Served) -> None:
    with served.running() as server:
        service = tinker.ServiceClient(base_url=server.url)
        model = result(service.create_lora_training_client(base_model=served.name("student"), rank=4))
        path = result(model.save_weights_for_sampler("fresh")).path
        steps = run(
            "on_policy_multi_teacher", served, server.url,
            deepmath_teacher_model=served.name("student"), deepmath_teacher_checkpoint=path,
            tulu3_teacher_model=served.name("teacher"),
            deepmath_groups_per_batch=2, tulu3_groups_per_batch=2,
        )  # fmt: skip
    assert len(steps) == 2
    own, other = served.data[:4], served.data[4:8]
    assert abs(check_advantages(own, STUDENT)) < 1e-4  # a fresh adapter, which is the student's model
    assert check_advantages(other, TEACHER) < -1
    assert steps[1]["teacher_kl/dataset_0"] > 1e-3  # the student has moved away from it
