"""Stops: where a turn ends by what its tokens say, and in the portable engine."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from qerl.errors import QeRLError
from qerl.rollout.portable.engine import PortableEngine
from qerl.rollout.stops import Cut, StopStrings, StopTokens, first_cut
from tests.support.portable import PAD, PROMPTS, sampled

PIECES = ["a", "b", ":", " ", "ab", "b:a", " User", "User:", "\n\n", "é", "€", "-é", "€€:", "<stop>"]


@pytest.fixture(scope="module")
def byte_tokenizer():
    """Tokens of several characters, all bytes by themselves, and two that end within a character."""
    letters = bytes_to_unicode()
    pieces = [text.encode() for text in PIECES[:-1]] + [b":\xe2", b"\xac:"] + [bytes([i]) for i in range(256)]
    words = dict.fromkeys("".join(letters[byte] for byte in piece) for piece in pieces)
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    made.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    return made


@pytest.fixture(scope="module")
def space_tokenizer():
    """As Llama 2's: words have their space before them, which the first token loses; the rest is bytes."""
    pieces = ["a", "b", ":", "▁", "ab", "▁b", "▁a:", "b:▁", "▁User", "€:", "<stop>"]
    vocab = {piece: number for number, piece in enumerate([*pieces, *(f"<0x{i:02X}>" for i in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    space, bytes_, fuse = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
    tokenizer.decoder = decoders.Sequence([space, bytes_, fuse, decoders.Strip(" ", 1, 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    made.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    return made


@pytest.mark.parametrize("strings", [["b: "], [":€"], ["é", "a: b"], [" "]])
def test_a_turn_ends_where_spaces_belong_to_the_words_behind_them(space_tokenizer, strings):
    _compare_with_decoding_everything(space_tokenizer, strings, 11)


@pytest.mark.parametrize(
    "strings", [["🙂"], ["\u200d"], ["👩\u200d👩\u200d👧"], ["\U0001f643END"], ["<a>"], ["ﬁ", "é:"]]
)
def test_a_turn_ends_where_bytes_are_characters_only_together(space_tokenizer, strings):
    bytes_ = [space_tokenizer.convert_tokens_to_ids(f"<0x{i:02X}>") for i in (0x99, 0xF0, 0x41, 0xE2)]
    _compare_with_decoding_everything(space_tokenizer, strings, 11, bytes_)


@pytest.mark.parametrize("strings", [["b:"], [":€"], ["\n\nUser:", "é:"], ["a<stop>"], ["a" * 5, "o"]])
def test_a_turn_ends_with_the_token_that_completes_a_text(byte_tokenizer, strings):
    """The two tokens that end within a character are among the common ones."""
    _compare_with_decoding_everything(byte_tokenizer, strings, len(PIECES) + 1)


def _compare_with_decoding_everything(tokenizer, strings, common, more=()):
    """However the tokens of a turn are split into rounds; the reference decodes everything at every token."""
    rng = random.Random(repr(strings))
    stop = StopStrings(tokenizer, strings)
    spelled = [tokenizer.encode(text) for text in strings]
    parts = [*range(common), *more, *[len(tokenizer) - 1] * 3, *(number for ids in spelled for number in ids)]
    pieces = [[number] for number in parts] + (spelled * 3 if more else [])
    found = 0
    for _ in range(150):
        ids = [number for piece in rng.choices(pieces, k=rng.randint(1, 30)) for number in piece]
        start = rng.randint(0, min(3, len(ids) - 1))
        skips = "<stop>" not in strings[0]
        texts = [
            tokenizer.decode(ids[start:n], skip_special_tokens=skips) for n in range(start + 1, len(ids) + 1)
        ]
        says = (start + 1 + i for i, text in enumerate(texts) if any(each in text for each in strings))
        expected, got, checked = next(says, None), None, start
        while got is None and checked < len(ids):
            until = min(len(ids), checked + rng.randint(1, 16))
            got = stop.end([], ids[:until], start, checked)
            checked = until
        assert got == expected
        found += got is not None
    assert 5 < found < 150


def test_the_first_stop_ends_a_turn():
    early, late, none = StopTokens([7]), StopTokens([9, 8]), StopTokens([])
    late.reason = "length"
    assert first_cut([late, early, none], [7], [7, 1, 7, 9], 1, 1) == Cut(3, "stop")
    assert first_cut([late, early], [], [1, 9, 7], 0, 0) == Cut(2, "length")
    assert first_cut([late, StopTokens([9])], [], [9], 0, 0) == Cut(1, "length")
    assert first_cut([none], [], [9], 0, 0) is None is first_cut([], [], [9], 0, 0)


def test_an_empty_text_is_refused(byte_tokenizer):
    for strings in ([], ["a", ""]):
        with pytest.raises(QeRLError, match="list of stop strings is empty, or has an empty string"):
            StopStrings(byte_tokenizer, strings)


def test_completions_end_at_their_stops_and_draw_the_same_up_to_there(tiny_model, tiny_tokenizer):
    model = tiny_model("llama", vocab_size=len(tiny_tokenizer))
    engine = PortableEngine(model, PAD)
    prompts = [[token % len(tiny_tokenizer) for token in prompt] for prompt in PROMPTS]
    whole = engine.generate(prompts, 2, sampled()).completions
    text = tiny_tokenizer.decode(whole[3].token_ids[4:6])
    stops = (StopStrings(tiny_tokenizer, [text]), StopTokens([whole[0].token_ids[2]]))
    cut = engine.generate(prompts, 2, sampled(stops=stops)).completions
    assert (cut[3].token_ids, cut[3].finish_reason) == (whole[3].token_ids[:6], "stop")
    assert (cut[0].token_ids, cut[0].finish_reason) == (whole[0].token_ids[:3], "stop")
    for short, long in zip(cut, whole, strict=True):
        count = len(short.token_ids)
        assert short.token_ids == long.token_ids[:count]
        assert short.logprobs == pytest.approx(long.logprobs[:count], abs=1e-5)
        assert short.finish_reason == ("stop" if count < len(long.token_ids) else long.finish_reason)


def test_sequences_of_a_session_have_stops_of_their_own(tiny_model):
    model = tiny_model("llama")
    whole = PortableEngine(model, PAD).generate(PROMPTS[:1], 2, sampled()).completions
    shared = (StopTokens([whole[1].token_ids[1]]),)
    with PortableEngine(model, PAD).session(sampled(stops=shared)) as session:
        own = (StopTokens([whole[0].token_ids[3]]),)
        session.start(PROMPTS[:1], 2, [sampled(stops=own), sampled()])
        found = {}
        while session.busy:
            found |= {ended.index: ended.completion for ended in session.next()}
        assert found[0].token_ids == whole[0].token_ids[:4] and found[0].finish_reason == "stop"
        assert found[1].token_ids == whole[1].token_ids
        with pytest.raises(QeRLError, match="1 sampling parameters for 2 sequences"):
            session.start(PROMPTS[:1], 2, [sampled()])


def test_a_turn_does_not_end_by_what_others_wrote(tiny_model, tiny_tokenizer):
    """Half of a text that others wrote and half that was drawn are none."""
    model = tiny_model("llama", vocab_size=len(tiny_tokenizer))
    prompt = [[5, 17, 33]]
    whole = PortableEngine(model, PAD).generate(prompt, 1, sampled()).completions[0].token_ids
    halves = StopStrings(tiny_tokenizer, [tiny_tokenizer.decode(whole[1:3])])
    params = sampled(stop_token_ids=(whole[0],), stops=(halves,))
    with PortableEngine(model, PAD).session(params) as session:
        session.start(prompt, 1)
        assert session.next()[0].completion.token_ids == whole[:1]
        session.go_on(0, whole[1:2])
        assert len(session.next()[0].completion.token_ids) > 1
