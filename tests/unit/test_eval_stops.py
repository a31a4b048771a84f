"""Where completions of an evaluation end: at what the user or the run says; and how a turn goes on then."""

import pytest
import yaml

from qerl.agents.template import TurnTemplate
from qerl.cli_results import add_eval, add_generate
from qerl.errors import QeRLError
from qerl.eval.policy import Ends, Policy
from qerl.eval.request import Request
from qerl.eval.run import _ends
from qerl.eval.trained import Choices, read_trained
from qerl.rollout.engine import SamplingParams
from qerl.rollout.portable.engine import PortableEngine
from tests.support.agents import tool_tokenizer
from tests.support.models import EOS


def test_a_run_says_its_stop_strings_and_the_user_wins(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"stop_strings": ["\n\nUser:"]}))
    choices = Choices(read_trained(tmp_path, "m"))
    assert _ends(Request(), choices, 9) == Ends(("\n\nUser:",))
    assert str(choices).startswith("stop_strings ['\\n\\nUser:'] (from ")
    assert _ends(Request(stop_strings="END"), choices, 9) == Ends(("END",))
    assert _ends(Request(stop_strings=[]), choices, 9) == Ends()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"stop_strings": ["", 3]}))
    with pytest.raises(QeRLError, match=r"stop_strings to .*, which must be a list of texts"):
        read_trained(tmp_path, "m")


@pytest.mark.parametrize("add", [add_eval, add_generate])
def test_stop_strings_on_the_command_line(add):
    import argparse

    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    name = add.__name__.removeprefix("add_")
    words = [name, "m", *(["hello"] if name == "generate" else []), "--stop_strings", "END", "\n\n"]
    assert parser.parse_args(words).stop_strings == ["END", "\n\n"]


def test_a_policy_stops_at_its_tokens_and_the_texts(tiny_model, tiny_tokenizer):
    model = tiny_model("llama", vocab_size=len(tiny_tokenizer))
    engine = PortableEngine(model, 0)
    policy = Policy(model, tiny_tokenizer, engine, (1,), loading=None)
    params = SamplingParams(8, seed=3)
    assert policy.stopping(params, Ends()) == SamplingParams(8, seed=3, stop_token_ids=(1,))
    whole = engine.generate([[7]], 1, params).completions[0].token_ids
    text = tiny_tokenizer.decode(whole[2:4])
    assert text and policy.stopping(params, Ends((text,))).plain == policy.stopping(params, Ends()).plain
    found = engine.generate([[7]], 1, policy.stopping(params, Ends((text,)))).completions[0]
    assert found.token_ids == whole[:4] and found.finish_reason == "stop"


def test_the_end_of_a_turn_is_written_where_the_policy_did_not_draw_it():
    tokenizer = tool_tokenizer()
    template, answer = TurnTemplate(tokenizer), [{"role": "user", "content": "5"}]
    drawn = template.suffix_ids(answer)
    assert template.suffix_ids(answer, tokenizer.eos_token_id) == drawn
    assert tokenizer.decode(template.suffix_ids(answer, 7)) == EOS + tokenizer.decode(drawn)
