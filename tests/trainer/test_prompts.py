"""Prompts of a data set: what is none is said with its row, parts of text are joined, and the chat template
is tried before the model is loaded."""

import random

import pytest
from datasets import Dataset

from qerl.errors import QeRLError
from qerl.trainer import arguments
from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.prompts import check_room, check_template, short_prompts, sound_prompts
from tests.support.arguments import ones, run_settings
from tests.support.models import CHAT_TEMPLATE, make_tiny_tokenizer

CHAT = [{"role": "user", "content": "two"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
BROKEN = "{% for message in messages %}{{ message"
NO_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{{ message.content }}{% endfor %}"
)


def data(*prompts):
    return Dataset.from_dict({"prompt": list(prompts), "number": list(range(len(prompts)))})


def said_by(content):
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ((CHAT, CHAT, None), "Row 2 of train_dataset has no prompt"),
        (("two", None), "Row 1 of train_dataset has no prompt"),
        ((1, 2), "Row 0 of train_dataset has a prompt that is neither text nor chat messages but 1"),
        ((CHAT, []), r"Row 1 of .* neither text nor chat messages but \[\]"),
        ((["two"],), "neither text nor chat messages"),
        (([{"from": "human", "value": "two"}],), "neither text nor chat messages"),
        ((CHAT, said_by(None)), r"Row 1 of train_dataset has a message without content \(role user\)"),
        (
            (said_by([{"type": "image"}, {"type": "text", "text": "two"}]),),
            r"Row 0 .* a part that is not text \(image\)",
        ),
        ((said_by([{"type": "text"}]),), r"a part that is not text \(\{'type': 'text'\}\)"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_row_without_a_prompt_that_can_be_asked_is_named(prompts, message, stream):
    rows = data(*prompts)
    if stream:
        message = message.replace("Row 0", "A row").replace("Row 1", "A row").replace("Row 2", "A row")
        rows = rows.to_iterable_dataset()
    with pytest.raises(QeRLError, match=message):
        list(sound_prompts(rows, "train_dataset"))


@pytest.mark.parametrize("stream", [False, True])
def test_parts_of_text_are_joined_and_other_columns_stay(stream):
    part = [{"type": "text", "text": "tw"}, {"type": "text", "text": "o"}]
    rows = Dataset.from_dict({"prompt": [said_by(part), said_by(part[:1])]})
    numbered = rows.add_column("number", [5, 6])
    for given, others in ((rows, [{}, {}]), (numbered, [{"number": 5}, {"number": 6}])):
        sound = sound_prompts(given.to_iterable_dataset() if stream else given, "train_dataset")
        expected = [{"prompt": CHAT}, {"prompt": said_by("tw")}]
        assert [*sound] == [row | other for row, other in zip(expected, others, strict=True)]


def test_sound_rows_stay_as_they_are():
    calls = data([*CHAT, {"role": "assistant", "tool_calls": [CALL]}, *CHAT])
    for rows in (data(CHAT, CHAT), data("two"), calls, Dataset.from_dict({"number": [1]}), None):
        assert sound_prompts(rows, "train_dataset") is rows
    sets = {"a": data(CHAT), "b": data(None)}
    with pytest.raises(QeRLError, match="Row 0 of eval_dataset 'b' has no prompt"):
        sound_prompts(sets, "eval_dataset")


@pytest.mark.parametrize(
    ("template", "rows", "message"),
    [
        (BROKEN, data(CHAT), r"cannot render a prompt \(TemplateSyntaxError: .*'\); fix the template"),
        (BROKEN, data(CHAT).to_iterable_dataset(), "TemplateSyntaxError"),
        (BROKEN, {"a": data("two"), "b": data(CHAT)}, "TemplateSyntaxError"),
        (NO_SYSTEM, data(CHAT, [{"role": "system", "content": "a"}, *CHAT]), "TemplateError: no system"),
    ],
)
def test_a_template_that_cannot_render_the_prompts_is_said(template, rows, message):
    tokenizer = make_tiny_tokenizer()
    check_template(rows, tokenizer, None)
    tokenizer.chat_template = template
    with pytest.raises(QeRLError, match=message):
        check_template(rows, tokenizer, None)


def test_a_template_renders_each_sequence_of_roles_once(monkeypatch):
    tokenizer, rendered = make_tiny_tokenizer(), []
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda messages, **_: rendered.append(messages))
    check_template(data(CHAT, said_by("three"), CHAT * 3, CHAT), tokenizer, None)
    assert rendered == [CHAT, CHAT * 3]


@pytest.mark.parametrize("of_training", [True, False])
def test_the_trainer_says_it_before_it_loads_the_model(llama_folder, tmp_path, monkeypatch, of_training):
    monkeypatch.setattr(arguments, "make_policy", None)
    tokenizer = make_tiny_tokenizer()
    args = run_settings(tmp_path, weights="bf16")

    def make(rows):
        train, held_out = (rows, None) if of_training else (data(CHAT), rows)
        QeRLTrainer(str(llama_folder), ones, args, train, held_out, processing_class=tokenizer)

    with pytest.raises(
        QeRLError, match=f"Row 1 of {'train' if of_training else 'eval'}_dataset has no prompt"
    ):
        make(data(CHAT, None))
    tokenizer.chat_template = NO_SYSTEM
    with pytest.raises(QeRLError, match="no system"):
        make(data([{"role": "system", "content": "a"}, *CHAT]))


def test_joined_prompts_are_counted_asked_and_rewarded(llama_folder, tmp_path):
    seen = []

    def watching(prompts, completions, **_):
        seen.extend(prompts)
        return [1.0] * len(prompts)

    args = run_settings(
        tmp_path, weights="bf16", max_steps=1, save_strategy="no", max_prompt_length=64, num_generations=2
    )
    part = {"type": "text", "text": "t"}
    rows = Dataset.from_dict({"prompt": [said_by([part, part]), said_by([part] * 60)]})
    QeRLTrainer(str(llama_folder), watching, args, rows).train()
    assert seen == [said_by("tt")] * 2
    assert len(short_prompts(sound_prompts(rows, ""), 200, None, make_tiny_tokenizer(), "rows")) == 2


def test_prompts_that_leave_no_room_for_a_completion_are_refused(tmp_path):
    """Wherever all tokens are counted and found too many, and nowhere else."""
    tokenizer, args, draw = make_tiny_tokenizer(), run_settings(tmp_path), random.Random()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message['content']", "(message['content'] or '')")

    def text():
        return "".join(draw.choices("ab \u00e9\u4e2d", k=draw.randrange(1, 60)))

    chats = [said_by(text()) for _ in range(5)] + [[*said_by(text()), *said_by(text())] for _ in range(5)]
    chats.append([{"role": "assistant", "content": None, "tool_calls": [CALL]}, *said_by(text())])
    for prompts in (chats, [text() for _ in range(5)]):
        render = tokenizer if isinstance(prompts[0], str) else tokenizer.apply_chat_template
        options = {} if isinstance(prompts[0], str) else {"add_generation_prompt": True}
        longest = max(len(render(prompt, **options)["input_ids"]) for prompt in prompts)
        enough = longest + args.max_completion_length
        for positions in (enough, 10 * enough, None):
            check_room(data(*prompts), positions, args, tokenizer, "training prompts")
        with pytest.raises(QeRLError, match=f"One of the prompts of 'a' has {longest} tokens, which with"):
            check_room({"a": data(*prompts)}, enough - 1, args, tokenizer, "prompts")


def test_prompts_that_have_room_by_their_length_are_not_tokenized(tmp_path, monkeypatch):
    tokenizer, args, counted = make_tiny_tokenizer(), run_settings(tmp_path), []
    count = tokenizer.apply_chat_template

    def counting(messages, **options):
        counted.append(messages[0]["content"])
        return count(messages, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counting)
    check_room(data(*[said_by("a" * length) for length in range(20)]), 4096, args, tokenizer, "prompts")
    assert counted == ["message0mark", ""]  # whether the template takes the roles, and how it frames them


@pytest.mark.parametrize("in_hand", [False, True])
def test_more_tokens_than_positions_are_found_before_the_model_is_loaded(
    llama_folder, tiny_model, tmp_path, monkeypatch, in_hand
):
    monkeypatch.setattr(arguments, "make_policy", None)
    model = tiny_model("llama") if in_hand else str(llama_folder)  # of 512 positions

    def make(**fields):
        args = run_settings(tmp_path, weights="bf16", tuning="full" if in_hand else "lora", **fields)
        rows = data(CHAT, said_by("a" * 40))
        return QeRLTrainer(model, ones, args, rows, processing_class=make_tiny_tokenizer())

    with pytest.raises(QeRLError, match="max_completion_length is 512 and the model has 512 positions"):
        make(max_completion_length=512)
    with pytest.raises(QeRLError, match=r"exceed the 512 positions .* set max_prompt_length: 42, which"):
        make(max_completion_length=470)
    monkeypatch.undo()
    assert len(make(max_completion_length=470, max_prompt_length=42).train_dataset) == 1
