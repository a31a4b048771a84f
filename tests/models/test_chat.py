"""What a chat template does with a task's messages, and that TRL renders the same tokens."""

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from qerl.errors import QeRLError
from qerl.models.chat import Chat, fold_system
from qerl.tasks import get_task
from tests.support.models import make_tiny_tokenizer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}{{ m.content }}</s>{% endif %}"
    "{% endfor %}"
)
DROPS_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
LAST_ALONE = "user: {{ messages[-1].content }}\nassistant:"
OPENS_THINKING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")

SYSTEM = {"role": "system", "content": "Use the form."}
ONE_SHOT = [
    SYSTEM,
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2 + 2?"},
]
FOLDED = [{"role": "user", "content": "Use the form.\n\n1 + 1?"}, *ONE_SHOT[2:]]


@pytest.fixture
def with_template(tiny_tokenizer) -> Callable[[str], PreTrainedTokenizerFast]:
    """``with_template(text)``: a copy of the tokenizer with that template; or the name of one of TRL's."""

    def make(template: str) -> PreTrainedTokenizerFast:
        tokenizer = copy.deepcopy(tiny_tokenizer)
        tokenizer.name_or_path = "some/model"
        path = TEMPLATES / f"{template}.jinja"
        tokenizer.chat_template = path.read_text() if len(template) < 40 and path.is_file() else template
        return tokenizer

    return make


@pytest.mark.parametrize("template", ["gemma", MISTRAL, DROPS_SYSTEM])
def test_a_system_message_that_the_template_cannot_write_begins_the_next_user_message(
    template: str, with_template, caplog
) -> None:
    chat = Chat(with_template(template))
    assert [chat.messages(ONE_SHOT) for _ in range(2)] == [FOLDED] * 2
    assert chat.messages(ONE_SHOT[1:]) == ONE_SHOT[1:]
    assert chat.messages([SYSTEM, ONE_SHOT[1]]) == FOLDED[:1]
    assert caplog.text.count("some/model takes no system message") == 1


@pytest.mark.parametrize(
    "template", [CHATML, "qwen2_5", "qwen3", "llama3_2", "deepseek_r1_distill", "gemma3", "phi3", "lfm2"]
)
def test_a_template_that_writes_the_system_message_gets_it(template: str, with_template, caplog) -> None:
    chat = Chat(with_template(template))
    assert chat.messages(ONE_SHOT) == ONE_SHOT
    assert caplog.records == []


def test_several_system_messages_go_to_the_user_messages_that_follow_them() -> None:
    other = {"role": "system", "content": "Be brief."}
    assert fold_system([SYSTEM, other, *ONE_SHOT[1:3], other, ONE_SHOT[3]]) == [
        {"role": "user", "content": "Use the form.\n\nBe brief.\n\n1 + 1?"},
        ONE_SHOT[2],
        {"role": "user", "content": "Be brief.\n\n2 + 2?"},
    ]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for m in messages %}",
            r"some/model cannot render a prompt \(TemplateSyntaxError: Unexpected end",
        ),
        ("{{ messages[9].role.upper() }}", r"some/model cannot render a prompt \(UndefinedError"),
        ("{{ raise_exception('never') }}", r"cannot render a prompt \(TemplateError: never\)"),
        (LAST_ALONE, "leaves out message 1 of a prompt with the roles system, user, assistant, user"),
    ],
)
def test_a_template_that_does_not_work_is_one_sentence(template: str, said: str, with_template) -> None:
    with pytest.raises(QeRLError, match=said):
        Chat(with_template(template)).messages(ONE_SHOT)


def test_roles_that_the_template_refuses_are_found_in_the_data_set(with_template) -> None:
    user = ONE_SHOT[1]
    rows = Dataset.from_list([{"prompt": [user]}, {"prompt": [user, user]}])
    with pytest.raises(QeRLError, match="Conversation roles must alternate"):
        Chat(with_template("gemma")).dataset(rows)


def test_a_tokenizer_without_template_is_one_sentence(with_template) -> None:
    tokenizer = with_template(CHATML)
    tokenizer.chat_template = None
    with pytest.raises(QeRLError, match=r"some/model cannot render a prompt .*chat_template is not set"):
        Chat(tokenizer).ids(ONE_SHOT)


@pytest.mark.parametrize("template", ["gemma", DROPS_SYSTEM, CHATML, "qwen3"])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}])
def test_the_data_set_renders_in_trl_as_it_does_here(template: str, kwargs: dict, with_template) -> None:
    tokenizer = with_template(template)
    chat = Chat(tokenizer, kwargs)
    rows = get_task("arithmetic", train_size=3, test_size=1, examples=2).train()
    folded = chat.dataset(rows)
    assert folded["answer"] == rows["answer"]
    trainer = object.__new__(trl.GRPOTrainer)
    trainer.processing_class, trainer.chat_template_kwargs = tokenizer, kwargs
    trainer.tools = trainer.environment_factories = trainer.chat_template = None
    trainer._is_vlm = False
    rendered, *_ = trainer._tokenize_prompts(list(folded["prompt"]))
    assert rendered == [chat.ids(prompt) for prompt in rows["prompt"]]
    instruction = rows[0]["prompt"][0]["content"]
    assert all(instruction in tokenizer.decode(ids) for ids in rendered)


def test_rows_may_have_prompts_alone(with_template) -> None:
    rows = Dataset.from_list([{"prompt": ONE_SHOT}, {"prompt": ONE_SHOT[1:]}])
    assert list(Chat(with_template("gemma")).dataset(rows)["prompt"]) == [FOLDED, ONE_SHOT[1:]]


def test_arguments_of_the_template_reach_it(with_template) -> None:
    tokenizer = with_template("qwen3")
    thinking, not_thinking = (
        tokenizer.decode(Chat(tokenizer, {"enable_thinking": on}).ids(ONE_SHOT)) for on in (True, False)
    )
    assert not thinking.rstrip().endswith("</think>")
    assert not_thinking.rstrip().endswith("</think>")
    with pytest.raises(QeRLError, match="chat_template_kwargs sets add_generation_prompt, tokenize, which"):
        Chat(tokenizer, {"tokenize": False, "add_generation_prompt": False, "enable_thinking": True})


@pytest.mark.parametrize(
    ("template", "kwargs", "opening"),
    [
        (CHATML, {}, ""),
        (OPENS_THINKING, {}, "<think>"),
        ("deepseek_r1_distill", {}, "<think>"),
        ("qwen3_5_think", {}, "<think>"),
        ("qwen3_5_think", {"enable_thinking": False}, ""),
        ("qwen3", {"enable_thinking": False}, ""),  # an empty thinking that is closed again
        ("gemma", {}, ""),
    ],
)
def test_a_prompt_that_opens_the_thinking_is_found(
    template: str, kwargs: dict, opening: str, with_template
) -> None:
    assert Chat(with_template(template), kwargs).opening == opening


def test_a_completion_is_judged_with_the_thinking_that_the_template_opened(with_template, tmp_path) -> None:
    (tmp_path / "data.jsonl").write_text('{"question": "3 + 4?", "answer": 7}\n')
    task = get_task(f"jsonl:{tmp_path / 'data.jsonl'}", answer_format="tags")
    task.opening = Chat(with_template(OPENS_THINKING)).opening
    accuracy, form = task.rewards
    texts = [
        "3 + 4 = 7\n</think>\n<answer>7</answer>",
        "I guess <answer>7</answer>",  # cut off while it thinks
        "<think>3 + 4</think><answer>7</answer>",
        "</think><answer>7</answer>",  # no thinking at all
        "<think>again</think> and </think><answer>7</answer>",
    ]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    # As TRL parses a response where the tokenizer says how.
    chats.append([{"role": "assistant", "reasoning_content": "3 + 4", "content": "<answer>7</answer>"}])
    columns = {"prompts": [ONE_SHOT] * 6, "completions": chats, "answer": ["7"] * 6}
    assert accuracy(**columns) == [1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert form(**columns) == [0.1, 0.0, 0.1, 0.0, 0.0, 0.1]


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_a_prompt_with_more_than_text_is_refused_by_the_name_of_its_part(kind):
    chat = Chat(make_tiny_tokenizer())
    parts = [{"type": kind, kind: "x"}, {"type": "text", "text": "What is it?"}]
    for render in (chat.messages, chat.ids):
        with pytest.raises(QeRLError, match=rf"a part that is not text \({kind}\); only text is supported"):
            render([{"role": "user", "content": parts}])


MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS_LAST = CHATML.replace(
    "{{ m.content }}", "{{ '<think></think>' if loop.last and m.role == 'assistant' }}{{ m.content }}"
)
TALK = [*ONE_SHOT, {"role": "assistant", "content": "4"}]


def said(tokenizer, messages) -> list[str]:
    """What the assistant writes, the runs of tokens as text."""
    ids, written = Chat(tokenizer).turns(messages)
    marks = "".join("x" if mark else " " for mark in written)
    spans = [match.span() for match in re.finditer("x+", marks)]
    return [tokenizer.decode(ids[start:end]) for start, end in spans]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_what_the_assistant_writes_is_every_turn_of_it_with_its_end(with_template, template):
    assert said(with_template(template), TALK) == ["2<|im_end|>\n", "4<|im_end|>\n"]


def test_tokens_of_a_turn_are_those_that_the_template_marks(with_template):
    marked, found = (Chat(with_template(template)).turns(TALK) for template in (MARKED, CHATML))
    assert marked == found
    only_text = MARKED.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")
    assert said(with_template(only_text), TALK) == ["2", "4"], "the marks decide, not the difference"


def test_turns_of_a_template_that_rewrites_earlier_ones_are_refused(with_template):
    chat = Chat(with_template(THINKS_LAST))  # as Qwen3's
    with pytest.raises(QeRLError, match=r"up to message 3 when the conversation continues.*completion"):
        chat.turns(TALK)
    assert any(chat.turns([*TALK[:2], TALK[2]])[1]), "the last turn is as it will be met"
    unlike = CHATML.replace("assistant\n{% endif %}", "assistant: {% endif %}")
    with pytest.raises(QeRLError, match="up to message 3 when"):
        Chat(with_template(unlike)).turns(TALK)
    with pytest.raises(QeRLError, match="marks no token"):
        Chat(with_template(CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}")).turns(
            TALK
        )
