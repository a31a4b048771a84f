"""The portable engine's parts: which sequences decode together, the cache, attention, positions."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

from qerl.rollout.engine import SamplingParams
from qerl.rollout.portable import runner
from qerl.rollout.portable.engine import PortableEngine, SequenceId, Wave, plan_waves
from qerl.rollout.portable.runner import PreallocatedCache
from qerl.rollout.session import new_sequences
from tests.support.portable import PAD, PROMPTS, sampled


class TestPlan:
    def test_groups_stay_together_where_they_fit(self):
        assert plan_waves(3, 2, 5) == [
            [SequenceId(0, 0), SequenceId(0, 1), SequenceId(1, 0), SequenceId(1, 1)],
            [SequenceId(2, 0), SequenceId(2, 1)],
        ]

    def test_a_group_larger_than_a_wave_is_split(self):
        assert plan_waves(2, 3, 2) == [
            [SequenceId(0, 0), SequenceId(0, 1)],
            [SequenceId(0, 2)],
            [SequenceId(1, 0), SequenceId(1, 1)],
            [SequenceId(1, 2)],
        ]

    @pytest.mark.parametrize("limit", [1, 2, 5, 8, 64])
    def test_every_sequence_runs_once(self, limit):
        waves = plan_waves(7, 4, limit)
        assert [s for wave in waves for s in wave] == [SequenceId(p, s) for p in range(7) for s in range(4)]
        assert max(len(wave) for wave in waves) <= limit


class TestWave:
    def wave(self, size, max_tokens=3, stops=(9,)):
        params = SamplingParams(max_tokens, stop_token_ids=stops)
        return Wave(new_sequences([[1]], [params] * size))

    def test_ends_on_stop_length_and_error(self):
        wave = self.wave(4)
        sequences = list(wave.rows)
        wave.record([9, 1, 1, 1], [-1.0] * 4, [0.5] * 4, [True, True, False, True])
        assert wave.compact() == [3, 1]
        assert wave.rows == [sequences[3], sequences[1]]
        assert wave.record([2, 2], [-2.0] * 2, [0.5] * 2, [True, False]) == [sequences[1]]
        assert wave.compact() == [0]
        wave.record([3], [-3.0], [0.5], [True])
        assert wave.compact() == []
        assert [s.token_ids for s in sequences] == [[9], [1], [], [1, 2, 3]]
        assert [s.logprobs for s in sequences] == [[-1.0], [-1.0], [], [-1.0, -2.0, -3.0]]
        assert [s.finish_reason for s in sequences] == ["stop", "error", "error", "length"]
        assert all(len(s.token_ids) == len(s.logprobs) == len(s.entropies) for s in sequences)

    def test_nothing_moves_while_all_run(self):
        wave = self.wave(2)
        wave.record([1, 1], [-1.0] * 2, [0.5] * 2, [True, True])
        assert wave.compact() is None

    def test_rows_follow_their_sequences_through_any_order_of_finishing(self):
        generator = torch.Generator().manual_seed(0)
        wave = self.wave(40, max_tokens=1000, stops=(1,))
        owners, left = torch.arange(40), 0
        while wave.rows:
            assert owners.tolist() == [sequence.index for sequence in wave.rows]
            stops = (torch.rand(len(owners), generator=generator) < 0.15).long().tolist()
            left += len(wave.record(stops, [0.0] * len(stops), [0.0] * len(stops), [True] * len(stops)))
            sources = wave.compact()
            if sources is not None:
                moved = [row for row, source in enumerate(sources) if row != source]
                assert len(moved) <= sum(stops)
                owners = owners[sources]
        assert left == 40


def cache_of(layers: int) -> PreallocatedCache:
    return PreallocatedCache([False] * layers, torch.device("cpu"))


class TestCache:
    def test_equals_a_cache_that_copies(self):
        generator = torch.Generator().manual_seed(1)
        ours, theirs = cache_of(2), DynamicCache()

        def append(rows, tokens):
            for layer in range(2):
                states = torch.randn(2, rows, 3, tokens, 4, generator=generator)
                got, expected = ours.update(*states, layer), theirs.update(*states, layer)
                assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
            assert ours.get_seq_length() == theirs.get_seq_length()
            assert ours.get_mask_sizes(1, 0) == theirs.get_mask_sizes(1, 0)

        append(rows=2, tokens=5)
        ours.repeat(torch.tensor([0, 0, 1, 1, 1]), capacity=9)
        theirs.batch_select_indices(torch.tensor([0, 0, 1, 1, 1]))
        append(rows=5, tokens=1)
        append(rows=5, tokens=1)
        ours.keep([4, 1, 2])
        theirs.batch_select_indices(torch.tensor([4, 1, 2]))
        append(rows=3, tokens=1)
        ours.keep([0, 1])
        theirs.batch_select_indices(torch.tensor([0, 1]))
        append(rows=2, tokens=1)

    @pytest.mark.parametrize("width", [4, 6])
    def test_rows_that_were_taken_join_another_batch(self, width):
        """Of three rows of 4, 3 and 2 tokens the last two are taken, and join one of ``width``."""
        generator = torch.Generator().manual_seed(1)
        first, second, other = (cache_of(1) for _ in range(3))
        states = torch.randn(2, 3, 2, 4, 5, generator=generator)
        first.update(*states, 0)
        taken = [first.take(1, 3), first.take(2, 2)]
        second.load(taken, [3, 1], capacity=8)
        new = torch.randn(2, 2, 2, 1, 5, generator=generator)
        keys = second.update(*new, 0)[0]
        assert torch.equal(keys[0, :, :3], states[0, 1, :, 1:])
        assert torch.equal(keys[1, :, 2:], torch.cat([states[0, 2, :, 2:3], new[0, 1]], dim=1))
        assert not keys[1, :, :2].any()
        running = torch.randn(2, 1, 2, width, 5, generator=generator)
        other.update(*running, 0)
        other.join(second, width=width, capacity=9)
        keys, values = other.update(*torch.ones(2, 3, 2, 1, 5), 0)
        assert keys.shape == (3, 2, width + 1, 5)
        assert torch.equal(values[0, :, :width], running[1, 0])
        assert torch.equal(values[1, :, width - 4 : width - 1], states[1, 1, :, 1:])
        assert not keys[1:, :, : width - 4].any()

    def test_a_new_token_is_written_in_place(self):
        cache = cache_of(1)
        cache.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), 0)
        cache.repeat(torch.tensor([0, 0]), capacity=5)
        new = torch.ones(2, 1, 1, 4)
        addresses = {tuple(t.data_ptr() for t in cache.update(new, new, 0)) for _ in range(2)}
        cache.keep([1])
        addresses.add(tuple(buffer.data_ptr() for buffer in (cache.layers[0].keys, cache.layers[0].values)))
        assert len(addresses) == 1


class TestAttention:
    @pytest.mark.parametrize("masked", [True, False])
    @pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (5, 1)])
    def test_equals_attention_with_repeated_heads(self, masked, heads, kv_heads):
        generator = torch.Generator().manual_seed(1)
        query, key, value = (
            torch.randn(3, n, tokens, 8, generator=generator, dtype=torch.float64)
            for n, tokens in ((heads, 1), (kv_heads, 7), (kv_heads, 7))
        )
        mask = (torch.rand(3, 1, 1, 7, generator=generator) < 0.7) if masked else None
        got, _ = runner._grouped_decode_attention(torch.nn.Module(), query, key, value, mask, scaling=0.9)
        key, value = (states.repeat_interleave(heads // kv_heads, dim=1) for states in (key, value))
        scores = query @ key.mT * 0.9
        if masked:
            scores = scores.masked_fill(~mask, -torch.inf)
        expected = (scores.softmax(-1) @ value).transpose(1, 2)
        assert got.shape == expected.shape
        assert (got - expected).abs().max() < 1e-12

    @pytest.mark.parametrize("implementation", ["sdpa", "eager"])
    def test_replaces_sdpa_for_the_call_and_nothing_else(self, tiny_model, implementation):
        model, seen = tiny_model("llama", attn_implementation=implementation), set()
        model.register_forward_pre_hook(lambda *_: seen.add(model.config._attn_implementation))
        PortableEngine(model, PAD).generate(PROMPTS, 1, sampled())
        assert seen == {runner._GROUPED_DECODE if implementation == "sdpa" else "eager"}
        assert model.config._attn_implementation == implementation
