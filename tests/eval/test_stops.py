"""Where completions of an evaluation end: at what the user or the run says; and how a turn goes on then."""

import pytest
import yaml

from qerl.agents.template import TurnTemplate
from qerl.cli_results import add_eval, add_generate
from qerl.errors import QeRLError
from qerl.eval.policy import Policy, choices_of
from qerl.eval.request import Request
from qerl.eval.run import _sampled
from qerl.models.decide import Source
from qerl.rollout.engine import SamplingParams
from qerl.rollout.portable.engine import PortableEngine
from tests.support.agents import tool_tokenizer
from tests.support.models import EOS


def test_a_run_says_its_stop_strings_and_the_user_wins(tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"stop_strings": ["\n\nUser:"]}))
    choices = choices_of(Source("m", tmp_path))

    def ends(**asked):
        return _sampled(Request(**asked), choices)[0].ends

    assert ends() == {"stop_strings": ["\n\nUser:"]}
    assert f"stop_strings ['\\n\\nUser:'] (from {tmp_path}" in str(choices)
    assert ends(stop_strings="END") == {"stop_strings": ["END"]}
    assert ends(stop_strings=[]) == {}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"stop_strings": ["", 3]}))
    with pytest.raises(
        QeRLError, match=r"config.yaml does not hold the settings of a run: stop_strings\[0\] is ''"
    ):
        choices_of(Source("m", tmp_path))


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
    assert policy.stopping(params, Request()) == SamplingParams(8, seed=3, stop_token_ids=(1,))
    whole = engine.generate([[7]], 1, params).completions[0].token_ids
    text = tiny_tokenizer.decode(whole[2:4])
    until = policy.stopping(params, Request(stop_strings=text))
    assert text and until.plain == policy.stopping(params, Request()).plain
    found = engine.generate([[7]], 1, until).completions[0]
    assert found.token_ids == whole[:4] and found.finish_reason == "stop"


def test_the_end_of_a_turn_is_written_where_the_policy_did_not_draw_it():
    tokenizer = tool_tokenizer()
    template, answer = TurnTemplate(tokenizer), [{"role": "user", "content": "5"}]
    drawn = template.suffix_ids(answer)
    assert template.suffix_ids(answer, tokenizer.eos_token_id) == drawn
    assert tokenizer.decode(template.suffix_ids(answer, 7)) == EOS + tokenizer.decode(drawn)
