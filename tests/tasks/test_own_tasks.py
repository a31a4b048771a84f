"""Tasks of the user's own, classes in a Python file; what they lack is one sentence."""

import pytest

from qerl.errors import QeRLError
from qerl.tasks import get_task
from qerl.tasks.formats import get_format

HEAD = """
from datasets import Dataset
from qerl.tasks import Task, get_format
"""
SOUND = """
class Doubles(Task):
    def __init__(self, largest=4):
        super().__init__("doubles", get_format("boxed"))
        self.largest = largest

    def train(self):
        return Dataset.from_list([self.row(i) for i in range(self.largest)])

    def test(self):
        return self.train()

    def row(self, i):
        return {"prompt": self.prompt(f"What is {i} doubled?"), "answer": str(2 * i)}

    def same(self, answer, reference):
        return answer == reference
"""


@pytest.fixture
def task(tmp_path):
    def make(code, name="Doubles", **options):
        (tmp_path / "mine.py").write_text(HEAD + code)
        return get_task(f"{tmp_path}/mine.py:{name}", **options)

    return make


def test_a_class_in_a_file_is_a_task_whose_options_are_its_arguments(task):
    doubles = task(SOUND, largest=6)
    assert len(doubles.train()) == 6 and doubles.name == "doubles"
    accuracy = doubles.rewards[0]
    right = accuracy(prompts=[None] * 2, completions=[r"\boxed{4}", r"\boxed{4.0}"], answer=["4", "4"])
    assert right == [1.0, 0.0], "its own comparison"
    assert task(SOUND, answer_format="tags").format is get_format("tags")
    with pytest.raises(
        QeRLError, match=r"no option 'larges' \(did you mean 'largest'\?\); its options are: largest, "
    ):
        task(SOUND, larges=3)


def test_a_part_of_a_mixture_may_be_one(task, tmp_path):
    task(SOUND)
    mixed = get_task("mixture", mine={"task": f"{tmp_path}/mine.py:Doubles", "task_options": {"largest": 2}})
    assert mixed.train()["task"] == ["mine", "mine"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("class Doubles(Task)", "class Doubles"), "is no task; let Doubles inherit from qerl.tasks.Task"),
        (("class Doubles(Task)", "class Other(Task)"), "has no class 'Doubles'; it has: Other"),
        (("def test(", "def tset("), "lacks the method test, which give"),
        (('super().__init__("doubles", get_format("boxed"))', "pass"), "has to call super"),
        (("self.largest = largest", "self.largest = int('many')"), r"in __init__ \(ValueError: invalid"),
        (("def __init__(self, largest=4)", "def __init__(self, largest)"), r"in __init__ \(TypeError: "),
        (("range(self.largest)", "self.largest"), r"fails in train \(TypeError: "),
        (("range(self.largest)", "exit(0)"), r"fails in train \(SystemExit: 0"),
        (("Dataset.from_list(", "list("), "have to give a datasets.Dataset, not a list"),
        (('"answer":', '"solution":'), "its rows have no column answer, but prompt, solution"),
        (("self.prompt(f", "(f"), "the prompt of row 0 is not a list of chat messages"),
        (("str(2 * i)", "2 * i"), "the answer of row 0 is 0, which has to be text"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_sentence(task, change, message):
    assert change[0] in SOUND
    with pytest.raises(QeRLError, match=message) as error:
        task(SOUND.replace(*change)).train()
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(QeRLError, match=r"The task file .*none\.py does not exist"):
        get_task(f"{tmp_path}/none.py:Task")
    with pytest.raises(QeRLError, match=r"PATH\.py:Class for a class of your own"):
        get_task("mine.py")
