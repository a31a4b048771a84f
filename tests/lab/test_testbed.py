"""The testbed: its language and task, the text that it draws, and that a model samples what the text says."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from bench import result
from lab.study.arms import Arm, Run
from lab.study.batched.trainer import BatchedTrainer, Settings
from lab.study.named import find_task
from lab.testbed import command, measure, pretraining, problems, task
from lab.testbed.language import (
    ASKED,
    CELLS,
    ENDS,
    NODES,
    VOCABULARY,
    chance,
    decisions,
    habit,
    make_tokenizer,
    question,
    right,
)
from lab.testbed.problems import ID, LONGEST, Rows, rows_of, stream
from lab.writers import testbed_tables
from qerl.errors import QeRLError
from qerl.models.chat import Chat
from qerl.models.load import load_model, load_tokenizer
from qerl.settings.recipe import load_config
from qerl.tasks import get_task

CPU = torch.device("cpu")
TINY = {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4, "kv_heads": 2}
ONE_LAYER = TINY | {"layers": 1}
ARROWS = [(2, 4), (6, 0), (0, 7), (3, 2), (7, 5), (5, 1), (1, 3), (4, 6)]


def rows(count: int, strategy="drawn", seed: int = 0) -> tuple[torch.Tensor, Rows]:
    """So many rows of each cell, and their cells."""
    cells = torch.arange(count * len(CELLS)) % len(CELLS)
    return cells, rows_of(cells, stream(CPU, "test", seed), strategy)


def test_answers_follow_the_arrows_and_habits_do_not():
    chain, lock = ("chain", 4, 0.01), ("lock", 3, 0.01)
    assert question(chain, ARROWS, [0]) == "chain 1% x4 Ce Ga Ah Dc Hf Fb Bd Eg a"
    assert (right(chain, ARROWS, [0]), habit(chain, ARROWS, [0])) == ("h>f>b>d.", "h.")
    assert question(lock, ARROWS, [0, 3, 0]).endswith("Eg a d a")
    assert (right(lock, ARROWS, [0, 3, 0]), habit(lock, ARROWS, [0, 3, 0])) == ("hch", "ada")


def test_no_decision_that_is_asked_is_the_likelier_one():
    assert {cell[0] for cell in ASKED} == {"chain", "lock"} and {cell[2] for cell in ASKED} == {
        0.1,
        0.01,
        0.001,
    }
    for kind, length, prior in ASKED:
        q = chance(kind, length, prior)
        assert q < 0.5 and q ** decisions(kind, length) == pytest.approx(prior)


@pytest.mark.parametrize("strategy", ["drawn", "right", "habit"])
def test_rows_are_what_the_template_and_the_tokenizer_write(strategy):
    tokenizer, chat = make_tokenizer(), Chat(make_tokenizer())
    assert len(VOCABULARY) == len(set(VOCABULARY)) <= pretraining.VOCABULARY_SIZE
    cells, drawn = rows(12, strategy)
    assert drawn.ids_BT.shape == (len(cells), LONGEST)
    for index, (ids, begin, success) in enumerate(
        zip(drawn.ids_BT.tolist(), drawn.begin_B.tolist(), drawn.success_B.tolist(), strict=True)
    ):
        cell = CELLS[cells[index]]
        words = [VOCABULARY[i] for i in ids[1 : begin - 2]]
        arrows = [("ABCDEFGH".index(one[0]), ENDS.index(one[1])) for one in words[3 : 3 + NODES]]
        starts = [ENDS.index(one) for one in words[3 + NODES :]]
        assert sorted(start for start, _ in arrows) == sorted(end for _, end in arrows) == [*range(NODES)]
        text = question(cell, arrows, starts)
        assert ids[:begin] == chat.ids([{"role": "user", "content": text}])
        answer = tokenizer.decode(ids[begin:], skip_special_tokens=True)
        assert tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id] == [
            i for i in ids[begin:] if i != ID["<pad>"]
        ]
        assert success == (answer == right(cell, arrows, starts))
        if strategy == "habit":
            assert answer == habit(cell, arrows, starts) and not success
        if strategy == "right" or (strategy == "drawn" and cell[2] == 1):
            assert success
    labels = drawn.labels_BT
    assert (labels[:, : problems.BEFORE] == problems.UNSEEN).all() and ID["<pad>"] not in labels


def test_the_text_holds_each_right_answer_as_often_as_its_prior_says():
    cells, drawn = rows(20_000)
    for index, (_, _, prior) in enumerate(CELLS):
        share = drawn.success_B[cells == index].double().mean().item()
        assert share == pytest.approx(prior, abs=4.5 * (prior * (1 - prior) / 20_000) ** 0.5)


def test_between_habit_and_success_a_chain_stops_as_its_decisions_say():
    cells, drawn = rows(20_000)
    cell = ("chain", 4, 0.01)
    of_cell = drawn.ids_BT[cells == CELLS.index(cell)]
    hops = 1 + (of_cell == ID[">"]).sum(dim=1)
    q = chance(*cell)
    shares = [(hops == n).double().mean().item() for n in (1, 2, 3, 4)]
    assert shares == pytest.approx([1 - q, q * (1 - q), q * q * (1 - q), q**3], abs=0.015)


def test_text_is_keyed_by_seed_and_step():
    cells = torch.arange(len(CELLS))
    once, again, other = (rows_of(cells, stream(CPU, 0, step)).ids_BT for step in (3, 3, 4))
    assert once.equal(again) and not once.equal(other)


def test_the_task_pays_what_its_reward_says():
    answer, own, between = "h>f>b>d.", "h.", "h>f."
    texts = [answer, own, between, "x", "h", "f>h>b>d.", ""]
    columns = {"prompts": [""] * 7, "completions": texts, "answer": [answer] * 7, "habit": [own] * 7}

    def paid(reward: str) -> list[list[float]]:
        return [each(**columns) for each in task.Testbed(reward=reward).rewards]

    assert paid("sparse") == [[1.0, 0, 0, 0, 0, 0, 0]]
    assert paid("deceptive") == [[1.0, 0, 0, 0, 0, 0, 0], [0, 0.3, 0, 0, 0, 0, 0]]
    lock = task.Testbed("lock", 3, 0.1)
    assert lock.rewards[0](prompts=["", ""], completions=["hch", "hca"], answer=["hch"] * 2) == [1.0, 0.0]


def test_rows_of_the_task_are_problems_that_the_model_knows():
    found = find_task("testbed", {"kind": "lock", "length": 5, "prior": 0.001, "train_size": 300})
    train, test = found.train(), found.test()
    asked = [{row["prompt"][-1]["content"] for row in part} for part in (train, test)]
    assert [len(one) for one in asked] == [300, 256] and not asked[0] & asked[1]
    words = re.fullmatch(r"lock 0\.1% x5( [A-H][a-h]){8}( [a-h]){5}", train[0]["prompt"][-1]["content"])
    assert words and train[0]["answer"] != train[0]["habit"]
    assert make_tokenizer().unk_token_id not in Chat(make_tokenizer()).ids(train[0]["prompt"])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"kind": "maze"}, r"kind is 'maze'; use one of: chain, lock"),
        ({"length": 6}, r"length is 6; for a chain use one of: 2, 3, 4, 5"),
        ({"kind": "lock", "length": 4, "prior": 0.1}, "0.1; for a lock of length 4 use one of: 0.01, 0.001"),
        ({"prior": 1.0}, r"prior is 1.0; for a chain of length 4 use one of: 0.1, 0.01, 0.001"),
        ({"kind": "lock", "reward": "deceptive"}, "reward is 'deceptive'; use sparse"),
        ({"answer_format": "tags"}, "Task testbed has its own language"),
        ({"priors": 0.1}, r"Task testbed has no option 'priors' \(did you mean 'prior'"),
    ],
)  # fmt: skip
def test_an_option_that_the_model_does_not_know_is_refused(options, error):
    with pytest.raises(QeRLError, match=error):
        find_task("testbed", options)


def test_the_recipe_is_a_run_of_this_task(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    config = load_config(["lab/testbed/recipe.yaml"], {"model": "runs/testbed/model"})
    assert get_task(config.task, **config.task_options).name == "testbed"


def test_the_model_has_the_shapes_that_formats_and_kernels_take():
    usual = pretraining.Pretraining()
    model = usual.make()
    assert sum(p.numel() for p in model.parameters()) == 31_531_520
    assert model.config.head_dim == 64 and model.config.tie_word_embeddings
    linears = [p for name, p in model.named_parameters() if p.ndim == 2]
    assert all(size % 128 == 0 for p in linears for size in p.shape)
    rates = [usual.rate(step) for step in range(usual.steps)]
    assert max(rates) == rates[299] == 1e-3 and rates[0] == pytest.approx(1e-3 / 300)
    assert 0 < rates[-1] < 2e-7


def test_the_command_makes_a_model_for_studies_and_says_what_it_cost(tmp_path, monkeypatch):
    given = [word for name, size in TINY.items() for word in (f"--{name}", str(size))]
    given += ["--batch", "28", "--steps", "2", "--problems", "4", "--samples", "8"]
    given += ["--output_dir", str(tmp_path / "run"), "--out", str(tmp_path / "testbed.json")]
    assert command.main([*given, "--limit_s", "0"]) == 130
    assert command.main(given) == 0
    written = json.loads((tmp_path / "testbed.json").read_text())
    made, *priors = written["rows"]
    folder = tmp_path / "run" / "model"
    assert made["sha256"] == command.weights_hash(folder) and made["steps"] == 2 and made["seconds"] > 0
    assert [row["weights"] for row in priors] == ["bf16"] * len(ASKED) + ["nvfp4"] * len(ASKED)
    assert all(0 <= row["low"] <= row["sampled"] <= row["high"] <= 1 for row in priors)
    monkeypatch.setattr(testbed_tables, "NAME", "testbed")
    monkeypatch.setattr(result, "RESULTS", tmp_path)
    lines = testbed_tables.priors().splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == 1 + len(ASKED)
    assert made["sha256"][:16] in lines[-1]
    tokenizer = load_tokenizer(folder)
    found = find_task("testbed", {"reward": "deceptive", "train_size": 16, "test_size": 4})
    base = load_model(folder, "nvfp4", torch.float32, "cpu")
    runs = [Run(Arm("none"), seed, 1e-3) for seed in (0, 1)]
    batch = BatchedTrainer(base, tokenizer, found, runs, Settings(1, 2, 4, 12))
    assert {"rewards/accuracy/mean", "rewards/habit/mean"} <= batch.step()[0].keys()
    assert [0 <= score["accuracy"] <= 1 for score in batch.evaluate(found.test())] == [True, True]


def test_a_run_that_is_stopped_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    of = pretraining.Pretraining(**TINY, steps=6, batch=28, warmup=2)
    whole = pretraining.train(of, tmp_path / "whole", CPU, 1e9, False, print)
    ticks = itertools.count()
    monkeypatch.setattr(pretraining.time, "monotonic", lambda: next(ticks) * 1.0)
    part = pretraining.train(of, tmp_path / "part", CPU, 12.0, False, print)
    assert 0 < part.done < 6
    monkeypatch.undo()
    rest = pretraining.train(of, tmp_path / "part", CPU, 1e9, False, print)
    assert rest.done == 6
    for one, other in zip(whole.model.parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(QeRLError, match="is of another run"):
        pretraining.train(pretraining.Pretraining(**TINY), tmp_path / "part", CPU, 1e9, False, print)


@pytest.fixture(scope="module")
def priors(tmp_path_factory):
    """Of a tiny model of one circle's chains, which it knows by heart: to read arrows takes it thousands of
    steps."""
    known, drawn = torch.tensor([2, 4, 6, 0, 7, 5, 1, 3]), problems.orders
    circles = itertools.cycle((True, False))  # a row has the order of its circle and that of its arrows

    def orders(count, draw):
        found = drawn(count, draw)
        return known.expand(count, -1) if next(circles) else found

    chains = tuple(cell for cell in CELLS if cell[0] == "chain" and cell[1] <= 3)
    assert chains == CELLS[: len(chains)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problems, "orders", orders)
        patch.setattr(pretraining, "CELLS", chains)
        of = pretraining.Pretraining(**ONE_LAYER, steps=400, batch=80, warmup=30, learning_rate=6e-3)
        run = pretraining.train(of, tmp_path_factory.mktemp("testbed"), CPU, 1e9, False, print)
        cells = (("chain", 2, 1.0), ("chain", 2, 0.1), ("chain", 3, 0.1), ("chain", 3, 0.01))
        return measure.measure(run.model.eval(), 32, 2000, cells=cells)


@pytest.mark.slow
def test_a_trained_model_samples_right_answers_as_often_as_its_text_had_them(priors):
    for one in priors:
        assert one.exact == pytest.approx(one.prior, rel={1.0: 0.05, 0.1: 0.3}.get(one.prior, 0.7)), one
        # What is sampled is what the forward pass says, but for chance.
        assert one.sampled == pytest.approx(one.exact, abs=4 * (one.exact / one.samples) ** 0.5), one
