"""The text of a completion is what the policy wrote."""

from qerl.rewards.text import completion_text


def test_text_is_itself():
    assert completion_text("4") == "4"


def test_the_thinking_that_was_moved_out_of_a_message_stands_between_its_tags():
    assert (
        completion_text([{"role": "assistant", "content": "4", "thinking": "2 + 2"}])
        == "<think>2 + 2</think>4"
    )
    assert (
        completion_text([{"role": "assistant", "reasoning_content": "2", "content": None}])
        == "<think>2</think>"
    )


def test_of_several_turns_only_those_of_the_policy_count():
    turns = [("assistant", "71 * 68 ="), ("user", "4828"), ("tool", "4828"), ("assistant", "#### 4828")]
    messages = [{"role": role, "content": text} for role, text in turns]
    assert completion_text(messages) == "71 * 68 =\n#### 4828"
