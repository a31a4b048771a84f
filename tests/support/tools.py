"""What tests of the trainer with tools share: a policy, scripts of what it says, and games."""

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl import GRPOConfig

from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from tests.support.agents import SayingEngine, call, multiply, tool_tokenizer
from tests.support.models import make_tiny_model, move_adapter
from tests.support.trainer import GROUP, rollout_of, settings

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


def make_trainer(
    folder,
    rewards=(written_reward,),
    script=say,
    data=DATA,
    tokenizer=None,
    tools=(multiply,),
    environment_factory=None,
    rollout_func=None,
    **changes,
):
    """A trainer whose engine says what a script says, on a tiny policy."""
    tokenizer = tokenizer or tool_tokenizer()
    return QeRLTrainer(
        make_policy(),
        list(rewards),
        make_args(folder, **changes),
        data,
        engine=SayingEngine(tokenizer, script),
        processing_class=tokenizer,
        tools=list(tools),
        environment_factory=environment_factory,
        rollout_func=rollout_func,
    )


def rows_of(data=DATA):
    return [dict(row) for row in data for _ in range(GROUP)]


def sampled(trainer, data=DATA):
    """The microbatches of a rollout."""
    return rollout_of(trainer, rows_of(data))


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
