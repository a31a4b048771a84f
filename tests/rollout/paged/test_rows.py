"""What the rows of a decode step tell attention to read."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.rows import Rows
from qerl.rollout.session import Prompt, Sequence
from qerl.rollout.stops import Stop, StopTokens


class Gone(Stop):
    """Ends a turn as soon as it is told to, whatever its tokens."""

    reads_tokens = False
    now = False

    def end(self, prompt_ids, token_ids, start, checked):
        return checked + 1 if self.now else None


def sequence(row: int, prompt: Prompt, blocks: list[int]) -> Sequence:
    return Sequence(row, prompt, 0, SamplingParams(8), max_tokens=8, blocks={0: blocks}, row=row)


def test_a_groups_samples_read_their_prompt_together_and_their_own_tokens_alone():
    rows = Rows(count=4, max_new=8, table_width=3, pools=1, kinds=2, device=torch.device("cpu"))
    long, short = (
        Prompt(0, [5, 6, 7], blocks={0: [11]}),
        Prompt(1, [5], blocks={0: []}),
    )  # short has nothing cached
    running = {
        3: sequence(3, long, [1, 2]),
        0: sequence(0, short, [3]),
        1: sequence(1, long, [4]),
        2: sequence(2, long, [5, 6, 7]),
    }
    rows.attend(running, [2, 3])
    assert rows.inputs.tables[0].tolist() == [
        [11, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0],
        [3, 0, 0], [4, 0, 0], [5, 6, 7], [1, 2, 0],
    ]  # fmt: skip
    assert rows.inputs.items[0][1].tolist() == [3, 1, 2, 0, 0, 1, 2, 3]
    assert rows.inputs.items[0][0].tolist() == [
        [0, 2, 0, 0], [2, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0],
        [4, 1, 4, 1], [5, 1, 5, 1], [6, 1, 6, 1], [7, 1, 7, 1],
    ]  # fmt: skip
    assert rows.inputs.items[1][1].tolist() == [3, 1, 2, 0, 0, 1, 2, 3]
    assert rows.inputs.items[1][0][:4, :2].tolist() == [[0, 3], [0, 0], [0, 0], [0, 0]]
    del running[2], running[0]
    rows.attend(running, [2, 3])
    assert rows.inputs.tables[0][0].tolist() == [11, 0, 0] and not rows.inputs.tables[0][4].any()
    assert rows.inputs.items[0][1].tolist()[:2] == [3, 1]
    assert [count for _, count, *_ in rows.inputs.items[0][0].tolist()] == [2, 0, 0, 0, 0, 1, 0, 1]


def test_what_sequences_have_passes_through_their_rows_unchanged():
    rows = Rows(count=4, max_new=8, table_width=3, pools=1, kinds=1, device=torch.device("cpu"))
    prompt = Prompt(0, [5, 6, 7], blocks={0: [11]})
    three, one, none = (sequence(row, prompt, [row]) for row in (2, 0, 3))
    for each, tokens in ((three, [9, 8, 7]), (one, [4])):
        each.token_ids, each.generated = tokens, len(tokens)
        each.logprobs, each.entropies = [-0.5] * len(tokens), [0.25] * len(tokens)
    rows.place([three, one, none])
    assert rows.state.token_T.tolist() == [4, 0, 7, 7]  # the last of each; a prompt's where there is none
    assert rows.state.position_T.tolist() == [3, 0, 5, 2]
    assert rows.state.done_T.tolist() == [0, 1, 0, 0]
    before = [(list(each.token_ids), list(each.logprobs), list(each.entropies)) for each in (three, one)]
    rows.end({2: three, 0: one, 3: none})
    assert [(each.token_ids, each.logprobs, each.entropies) for each in (three, one)] == before
    assert none.token_ids == [] and rows.state.done_T.tolist() == [1, 1, 1, 1]


def test_tokens_are_read_in_every_round_only_for_stops_that_look_at_them():
    rows = Rows(count=3, max_new=8, table_width=3, pools=1, kinds=1, device=torch.device("cpu"))
    prompt, gone = Prompt(0, [5, 6, 7], blocks={0: [11]}), Gone()
    running = {row: sequence(row, prompt, [row]) for row in range(3)}
    running[0].stops, running[1].stops, running[2].stops = (gone,), (StopTokens([99]), gone), (gone,)
    rows.place([*running.values()])
    rows.state.out_token_TM[:] = torch.arange(8)
    rows.state.generated_T[:] = 3
    generated, ended, _ = rows.read(running)
    assert (generated, ended) == ({0: 3, 1: 3, 2: 3}, [])
    assert [each.token_ids for each in running.values()] == [[], [0, 1, 2], []]
    for each in running.values():
        each.generated = 3
    gone.now = True
    rows.state.generated_T[:2] = 6
    rows.state.done_T[2] = 3  # its logits were not finite, so it has drawn nothing
    generated, ended, _ = rows.read(running)
    assert (generated, sorted(ended)) == ({0: 4, 1: 4, 2: 3}, [0, 1, 2])
    assert [each.token_ids for each in running.values()] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2]]
    assert [each.finish_reason for each in running.values()] == ["stop", "stop", "error"]
    assert rows.state.done_T.tolist() == [1, 1, 3]
