"""Tools and environments in the trainer: TRL's interface and loss, and what others wrote counts nowhere."""

import copy
import math
import random

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl import GRPOConfig, GRPOTrainer

from qerl.errors import QeRLError
from qerl.rollout.portable.engine import PortableEngine
from qerl.settings.config import QeRLConfig
from qerl.trainer.batch import GROUP_KEY
from qerl.trainer.grpo import QeRLTrainer
from tests.support.agents import SayingEngine, call, multiply, tool_tokenizer
from tests.support.models import EOS, make_tiny_model, make_tiny_tokenizer, move_adapter
from tests.support.trainer import GROUP, logged, settings

DATA = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"{i + 2} times what?"}], "answer": i} for i in range(2)]
)
TINY = {"max_position_embeddings": 4096, "num_hidden_layers": 1}


def make_policy():
    torch.manual_seed(1)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    return move_adapter(get_peft_model(make_tiny_model("llama", **TINY), adapter))


def say(track, so_far):
    """Every other sample calls the tool, one of them twice; what they write differs by sample."""
    row = (track.prompt[-20] + track.prompt_number) % 5
    if track.sample % 2 == 0:
        return f"I guess {row}" + "!" * track.sample
    if so_far.count("tool_response") < 2 * track.sample - 1:
        return "Hm. " + call("multiply", a=track.prompt_number + 2, b=track.sample)
    return f"So it is {row}."


def written_reward(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


def make_args(folder, ours=True, **changes):
    values = settings(folder, max_completion_length=300, per_device_train_batch_size=2 * GROUP) | changes
    if ours:
        return QeRLConfig(**values)
    del values["noise"]
    return GRPOConfig(**values, bf16=False)


@pytest.fixture
def make_trainer(tmp_path):
    def make(rewards=(written_reward,), script=say, data=DATA, tokenizer=None, tools=(multiply,), **changes):
        given = {
            name: changes.pop(name) for name in ("environment_factory", "rollout_func") if name in changes
        }
        tokenizer = tokenizer or tool_tokenizer()
        return QeRLTrainer(
            make_policy(),
            list(rewards),
            make_args(tmp_path, **changes),
            data,
            engine=SayingEngine(tokenizer, script),
            processing_class=tokenizer,
            tools=list(tools),
            **given,
        )

    return make


def rows_of(data=DATA):
    return [dict(row) for row in data for _ in range(GROUP)]


def sampled(trainer, data=DATA):
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions(rows_of(data))


# The same as TRL


class SayingClient:
    """TRL's vLLM client that says what the engine says, turn by turn."""

    def __init__(self, engine):
        self.engine, self.rows = engine, {}

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler):
        decode = self.engine.tokenizer.decode
        ids, logprobs = [], []
        for index, prompt in enumerate(prompts):
            if num_generations > 1:
                track = Row(index // num_generations, index % num_generations, prompt)
                so_far = ""
            else:
                track, so_far = self.find(prompt)
            text = self.engine.say(track, so_far)
            self.rows[(*prompt, *self.engine.tokenizer(text + EOS)["input_ids"])] = track
            ids.append(self.engine.tokenizer(text + EOS)["input_ids"][: 300 if so_far == "" else None])
            logprobs.append([[-4.0 - (token % 7) / 8] for token in ids[-1]])
        assert decode
        return prompts, ids, logprobs, None

    def find(self, prompt):
        """The row whose tokens so far begin this prompt."""
        begun = max((row for row in self.rows if list(row) == prompt[: len(row)]), key=len)
        track = self.rows[begun]
        return track, self.engine.tokenizer.decode(prompt[len(track.prompt) :])


class Row:
    def __init__(self, prompt_number, sample, prompt):
        self.prompt_number, self.sample, self.prompt = prompt_number, sample, prompt


def trl_reference(ours, folder, tools=(multiply,), **changes):
    """TRL's own trainer on a copy of the model, whose client says the same."""
    model = copy.deepcopy(ours.model)
    model.base_model.model.__dict__.pop("forward", None)  # the fused head is added anew to the copy
    if "ref" in model.peft_config:
        model.delete_adapter("ref")
    args = make_args(folder, ours=False, **changes)
    args.epsilon_high = ours.args.epsilon_high
    trainer = GRPOTrainer(
        model, [written_reward], args, DATA, processing_class=tool_tokenizer(), tools=list(tools)
    )
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
    trainer.vllm_generation = SayingClient(ours.engine)
    return trainer


def gradients(model):
    return {n.replace("default.", ""): p.grad for n, p in model.named_parameters() if p.grad is not None}


OPTIONS = {
    "grpo": {"loss_type": "grpo", "vllm_importance_sampling_mode": "token_truncate"},
    "masked sequences": {"loss_type": "dapo", "vllm_importance_sampling_mode": "sequence_mask"},
    "sequence ratio": {"loss_type": "bnpo", "vllm_importance_sampling_mode": "sequence_truncate"},
    "KL": {"loss_type": "dr_grpo", "beta": 0.1, "vllm_importance_sampling_mode": "token_mask"},
    "entropy": {"loss_type": "grpo", "entropy_coef": 0.1, "vllm_importance_sampling_mode": "token_truncate"},
    "quantile": {
        "loss_type": "dapo", "top_entropy_quantile": 0.3, "vllm_importance_sampling_mode": "token_truncate"
    },
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_and_gradients_of_several_turns_equal_trl(make_trainer, tmp_path, options):
    ours = make_trainer(**options)
    reference = trl_reference(ours, tmp_path, **options)
    losses, batches = [], []
    for trainer in (reference, ours):
        batches.append(sampled(trainer))
        loss = trainer.compute_loss(trainer.model, dict(batches[-1]))
        loss.backward()
        losses.append(loss.item())
    for name in (
        "prompt_ids",
        "completion_ids",
        "tool_mask",
        "sampling_per_token_logps",
        "num_items_in_batch",
    ):
        torch.testing.assert_close(batches[0][name].float(), batches[1][name].float(), msg=name)
    mask = batches[1]["completion_mask"]
    assert (mask.bool() & (batches[1]["tool_mask"] == 0)).any(), "a tool has written"
    assert losses[1] == pytest.approx(losses[0], rel=1e-5, abs=1e-7)
    expected, actual = gradients(reference.model), gradients(ours.model)
    assert expected.keys() == actual.keys()
    for name, grad in expected.items():
        error = (actual[name] - grad).norm() / grad.norm()
        assert error < 1e-5, f"{name}: relative error {error:.1e}"
    for name in ("tools/call_frequency", "tools/failure_frequency", "completions/mean_length", "kl"):
        theirs, found = (trainer._metrics["train"].get(name) for trainer in (reference, ours))
        assert found == pytest.approx(theirs), name


# TRL's interface


def test_a_calculator_trains_as_with_trl(make_trainer):
    trainer = make_trainer(max_steps=2)
    trainer.train()
    rows = logged(trainer)
    assert len(rows) == 2 and all(row["tools/call_frequency"] == 0.75 for row in rows)
    assert all(row["tools/failure_frequency"] == 0 for row in rows)
    assert all(row["rollout/turns"] == 1.75 for row in rows), "1, 2, 1 and 3, of which the third is cut off"
    assert all(row["loss"] != 0 for row in rows)


class Guessing:
    """TRL's kind of game: reset says what to do, a method is the move, and the environment scores."""

    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, **row):
        self.secret, self.tries = row["answer"] + 1, 0
        return " Guess my number."

    def guess(self, number: int) -> str:
        """Guess the secret number.

        Args:
            number: The guess.

        Returns:
            Whether it is the number.
        """
        self.tries += 1
        self.won = number == self.secret
        return "yes" if self.won else "no"

    def get_reward(self) -> float:
        return 1.0 / self.tries if self.tries and self.won else 0.0


def guessing(track, so_far):
    """Sample s guesses s, s + 1, ... until it is told yes."""
    tries = so_far.count("<tool_response>")
    if so_far.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n") and "\nyes\n" in so_far:
        return "Won."
    return call("guess", number=track.sample + tries)


def test_a_game_trains_and_scores_itself(make_trainer):
    Guessing.made = 0
    trainer = make_trainer(
        rewards=(), script=guessing, tools=(), environment_factory=Guessing, max_completion_length=600,
        max_steps=1,
    )  # fmt: skip
    trainer.train()
    assert trainer.reward_func_names == ["Guessing"]
    assert Guessing.made == 2 * GROUP, "one for each sample, made once"
    rows = logged(trainer)
    assert all(row["rewards/Guessing/mean"] > 0.2 and row["rewards/Guessing/failed"] == 0 for row in rows)
    assert "Guess my number." in trainer._logs["prompt"][0][-1]["content"]


class Riddle:
    """The game without tools."""

    def __init__(self, hint="No."):
        self.hint = hint

    def reset(self, **row):
        self.secret, self.won = row.get("answer", 1), False
        return " Say a number."

    def respond(self, text):
        self.won = text == str(self.secret)
        return None if self.won else self.hint

    def get_reward(self):
        return float(self.won)


def riddle(track, so_far):
    return str(track.sample + so_far.count("No."))


def test_an_environment_of_texts_needs_no_tools(make_trainer):
    trainer = make_trainer(
        rewards=(), script=riddle, tools=(), tokenizer=make_tiny_tokenizer(), environment_factory=Riddle,
        max_steps=1, max_tool_calling_iterations=2,
    )  # fmt: skip
    batch = sampled(trainer)
    assert trainer.reward_func_names == ["Riddle"]
    rewards = list(trainer._logs["rewards"]["Riddle"])
    assert rewards[:GROUP] == [1.0, 0.0, 0.0, 0.0], "the answer to the first row is 0"
    assert rewards[-GROUP:] == [1.0, 1.0, 0.0, 0.0], "of the last one 1, said at once or in the second turn"
    text = "".join(trainer._logs["completion"][-4][i]["content"] for i in range(3))
    assert text == "0No.1"
    assert (batch["tool_mask"] == 0).any()
    trainer.train()


def test_several_environments_are_chosen_by_a_column(make_trainer):
    data = DATA.add_column("environment", ["game", "quiz"])

    class Other(Riddle):
        async def get_reward(self):
            return 0.5

    trainer = make_trainer(
        rewards=(), script=riddle, tools=(), tokenizer=make_tiny_tokenizer(), data=data,
        environment_factory={"game": Riddle, "quiz": Other},
    )  # fmt: skip
    sampled(trainer, data)
    assert trainer.reward_func_names == ["Riddle", "Other"], "the order is that of every process"
    scored = list(trainer._logs["rewards"]["Other"])
    assert all(math.isnan(reward) for reward in scored[:GROUP]) and scored[GROUP:] == [0.5] * GROUP
    assert [type(each).__name__ for each in trainer.environments[::GROUP]] == ["Riddle", "Other"]


def test_weights_of_rewards_are_kept_as_they_were_given(make_trainer):
    trainer = make_trainer(
        script=riddle, tools=(), tokenizer=make_tiny_tokenizer(), environment_factory=Riddle,
        reward_weights=[0.5],
    )  # fmt: skip
    assert trainer.args.reward_weights == [0.5] and trainer.reward_weights.tolist() == [0.5, 1.0]


def test_an_environment_may_have_the_data(make_trainer):
    """Each sample has a problem of its own; they share no prompt, and the loss is computed all the same."""
    draw = random.Random(0)

    class Own(Riddle):
        def reset(self, **row):
            self.secret, self.won = draw.randint(0, 9), False
            return f"Which is the number after {self.secret - 1}?"

    script = lambda track, so_far: str(track.prompt_number % 10)  # noqa: E731
    options = {
        "rewards": (written_reward,), "script": script, "tools": (), "data": None, "environment_factory": Own,
        "tokenizer": make_tiny_tokenizer(), "max_steps": 2, "max_tool_calling_iterations": 1,
    }  # fmt: skip
    trainer = make_trainer(**options)
    batch = sampled(trainer, trainer.train_dataset)
    prompts = batch["prompt_ids"].tolist()
    shared = batch[GROUP_KEY].tolist()
    assert len(set(shared)) > 2, "two groups of four"
    assert all((prompts[i] == prompts[i - 1]) or (shared[i] != shared[i - 1]) for i in range(1, len(prompts)))
    trainer.train()
    with pytest.raises(QeRLError, match="nothing says how long the run is; set max_steps"):
        make_trainer(**options | {"max_steps": -1})


def own_rollout(prompts, trainer):
    """Two calls of the engine with a text of others between them."""
    ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    drawn = [[7 + (i * j) % 80 for j in range(1, 5)] for i in range(len(ids))]
    return {
        "prompt_ids": ids,
        "completion_ids": [[*tokens[:2], 50, 51, 52, *tokens[2:]] for tokens in drawn],
        "logprobs": [[-4.5, -5.0, 0.0, 0.0, 0.0, -4.0, -4.2] for _ in drawn],
        "env_mask": [[1, 1, 0, 0, 0, 1, 1] for _ in drawn],
        "seen": list(range(len(ids))),
    }


@pytest.mark.parametrize("mode", ["sequence_mask", "sequence_truncate", "token_truncate"])
def test_a_rollout_function_trains_as_with_trl(make_trainer, tmp_path, mode):
    data = Dataset.from_dict({"prompt": ["one", "two"]})
    seen = []

    def reward(completion_ids, seen=seen, **columns):
        seen.append(columns.get("written_tokens"))
        return written_reward(completion_ids)

    options = {"vllm_importance_sampling_mode": mode, "loss_type": "grpo"}
    ours = make_trainer(rewards=(reward,), tools=(), data=data, rollout_func=own_rollout, **options)
    model = copy.deepcopy(ours.model)
    model.base_model.model.__dict__.pop("forward", None)
    args = make_args(tmp_path, ours=False, **options)
    args.epsilon_high = ours.args.epsilon_high
    theirs = GRPOTrainer(
        model, [written_reward], args, data, processing_class=tool_tokenizer(), rollout_func=own_rollout
    )
    theirs.use_vllm, theirs.vllm_mode, theirs._last_loaded_step = True, "server", 0
    for trainer in (theirs, ours):
        trainer.compute_loss(trainer.model, sampled(trainer, data)).backward()
    expected, actual = gradients(theirs.model), gradients(ours.model)
    assert any(grad.norm() > 0 for grad in expected.values())
    for name, grad in expected.items():
        assert (actual[name] - grad).norm() <= 1e-5 * grad.norm(), name


# What others wrote counts nowhere


def test_rewards_and_the_length_penalty_count_what_the_policy_wrote(make_trainer):
    lengths = []

    def reward(completion_ids, written_tokens, **_):
        lengths.append((written_tokens, [len(ids) for ids in completion_ids]))
        return written_reward(completion_ids)

    trainer = make_trainer(rewards=(reward,), overlong_buffer=0.9)
    batch = sampled(trainer)
    ((written, whole),) = lengths
    mask = batch["completion_mask"] * batch["tool_mask"]
    assert written == mask.sum(dim=1).tolist() and sum(written) < sum(whole)
    found = trainer._logs["rewards"]["soft_overlong_punishment_reward"]
    most, buffer = 300, 270
    assert list(found) == pytest.approx([min(0.0, (most - buffer - n) / buffer) for n in written])
    assert any(penalty < 0 for penalty in found)


def test_tokens_of_others_change_no_loss_gradient_or_metric(make_trainer):
    """Their log-probabilities and entropies under either policy may be anything."""
    results = []
    for noise in (0.0, 3.0):
        trainer = make_trainer(vllm_importance_sampling_mode="sequence_truncate", beta=0.1, entropy_coef=0.1)
        batch = sampled(trainer)
        others = (batch["tool_mask"] == 0) & batch["completion_mask"].bool()
        assert others.any()
        for name in ("sampling_per_token_logps", "sampling_entropies", "ref_per_token_logps"):
            batch[name] = batch[name] + noise * others
        trainer._mismatch = type(trainer._mismatch).none(torch.device("cpu"))
        trainer._metrics["train"].clear()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        metrics = trainer._mismatch.metrics(trainer.accelerator) | {
            name: values[-1] for name, values in trainer._metrics["train"].items() if values
        }
        results.append((loss.item(), gradients(trainer.model), metrics))
    (loss, grads, metrics), (other_loss, other_grads, other_metrics) = results
    assert loss == other_loss and metrics == pytest.approx(other_metrics, nan_ok=True)
    assert all(torch.equal(grads[name], other_grads[name]) for name in grads)
    assert metrics["sampling/ratio/mean"] > 0 and "clip_ratio/region_mean" in metrics and "kl" in metrics


def test_the_rollout_log_knows_the_tokens_of_each_turn(make_trainer):
    trainer = make_trainer()
    batch = sampled(trainer)
    written = (batch["completion_mask"] * batch["tool_mask"]).bool()
    assert (batch["sampling_entropies"][written] == 4.0).all()
    assert (batch["sampling_entropies"][~written] == 0.0).all()
    assert trainer._metrics["train"]["rollout/entropy"] == [4.0]


# Noise, dynamic sampling, resume


def test_a_trajectory_has_one_noise(make_trainer):
    trainer = make_trainer(noise=True, noise_stages=2, noise_share=0.5)
    trainer.state.max_steps, trainer.state.global_step = 4, 2
    sampled(trainer)
    noisy, clean = trainer.engine.calls
    assert len(noisy[1]) == 2 and not clean[1], "two norms in the only layer"
    assert noisy[0].seed != clean[0].seed
    assert trainer._metrics["train"]["noise/norms"] == [2.0], "logged once, not once for each turn"


def test_dynamic_sampling_draws_groups_with_environments_of_their_own(make_trainer):
    def dead_at_first(completion_ids, environments, **_):
        assert all(each.tries for each in environments), "these are the ones that were played in"
        return [float(i % 2) if (i // GROUP) % 2 == 0 else 0.0 for i in range(len(completion_ids))]

    trainer = make_trainer(
        rewards=(dead_at_first,), script=guessing, tools=(), environment_factory=Guessing,
        max_completion_length=600, dynamic_sampling_rounds=2, signal="reward",
    )  # fmt: skip
    trainer._signal = type(trainer._signal)(
        **{**vars(trainer._signal), "weights_F": torch.tensor([1.0, 0.0])}
    )
    batch = sampled(trainer)
    assert len(trainer.engine.calls) == 2
    assert (batch["advantages"].view(-1, GROUP) != 0).any(dim=1).all()
    mask = batch["completion_mask"] * batch["tool_mask"]
    assert batch["num_items_in_batch"] == mask.sum()
    prompts, shared = batch["prompt_ids"].tolist(), batch[GROUP_KEY].tolist()
    assert shared == [0] * GROUP + [1] * GROUP
    assert all(prompts[i] == prompts[i - i % GROUP] for i in range(2 * GROUP))


def test_a_resume_with_an_environment_is_bit_exact(tmp_path):
    """On the real engine, several turns each: four steps, and two with two more after them."""

    class Echo:
        def reset(self, **row):
            self.heard = 0

        def respond(self, text):
            self.heard += len(text)
            return f"{self.heard}"

    def trained(folder, steps, resume=None):
        tokenizer = make_tiny_tokenizer()
        policy = make_policy()
        policy.eval()
        args = make_args(
            tmp_path / folder, max_steps=steps, save_strategy="steps", save_steps=2, max_completion_length=60,
            max_tool_calling_iterations=3, learning_rate=1e-2, noise=True, noise_stages=2,
            lr_scheduler_type="constant", temperature=3.0,
        )  # fmt: skip
        trainer = QeRLTrainer(
            policy, [written_reward], args, DATA, processing_class=tokenizer, environment_factory=Echo,
            engine=PortableEngine(policy, tokenizer.pad_token_id),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = trained("whole", 4)
    assert any(row["rollout/turns"] > 1 for row in logged(whole))
    resumed = trained("whole", 4, resume=str(tmp_path / "whole" / "checkpoint-2"))
    for (name, weight), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(weight, other), name


# What is refused


def no_docstring(a: int):
    return a


class Silent:
    def reset(self, **row):
        return None

    def respond(self, text):
        return None


class Rude(Silent):
    def reset(self, **row):
        raise KeyError("board")


class Numbered(Silent):
    def reset(self, **row):
        return 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tools": [no_docstring]}, "The tool no_docstring cannot be shown to the model"),
        ({"tokenizer": make_tiny_tokenizer()}, "The chat template of the tokenizer has no tools"),
        ({"environment_factory": Riddle}, r"respond\(text\) has no tools, and there are tools beside it"),
        ({"environment_factory": 3}, "environment_factory is not callable"),
        ({"environment_factory": {}}, "environment_factory is not callable"),
        ({"environment_factory": {"a": Guessing}, "data": None}, "Several environments need a train_dataset"),
        ({"rollout_func": own_rollout}, "rollout_func samples by itself"),
        ({"tools": (), "tool_timeout": 3.0}, "tool_timeout is set.*there are neither tools nor environments"),
        ({"environment": "calculator"}, "hand the class to the trainer as environment_factory"),
        ({"rewards": ()}, r"reward_funcs is missing; pass .* an environment with get_reward\(\)"),
        ({"data": Dataset.from_dict({"prompt": ["text"] * 4})}, "need prompts of messages"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(make_trainer, given, said):
    with pytest.raises(QeRLError, match=said):
        make_trainer(**given)


@pytest.mark.parametrize(
    ("environment", "data", "said"),
    [
        (Silent, None, "reset of the environment Silent returned no observation"),
        (Rude, DATA, "The environment Rude could not begin an episode: reset raised KeyError: 'board'"),
        (Numbered, DATA, "reset of the environment Numbered returned a int"),
    ],
)
def test_an_environment_that_cannot_begin_is_said(make_trainer, environment, data, said):
    trainer = make_trainer(
        script=riddle, tools=(), tokenizer=make_tiny_tokenizer(), data=data, environment_factory=environment,
    )  # fmt: skip
    with pytest.raises(QeRLError, match=said):
        sampled(trainer, trainer.train_dataset)


def test_an_environment_in_which_a_call_hangs_is_not_used_again(make_trainer):
    class Stuck(Riddle):
        def respond(self, text):
            if text == "1":
                while True:
                    pass
            return

    trainer = make_trainer(
        rewards=(), script=riddle, tools=(), tokenizer=make_tiny_tokenizer(), environment_factory=Stuck,
        tool_timeout=0.2,
    )  # fmt: skip
    sampled(trainer)
    first = list(trainer.environments)
    sampled(trainer)
    again = [a is b for a, b in zip(first, trainer.environments, strict=True)]
    assert again == [True, False, True, True] * 2
