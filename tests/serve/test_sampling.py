"""Sampling for a server's clients: the same tokens whoever else asks, and the policy that they are of."""

import math
from dataclasses import replace

import pytest
import torch

from qerl.errors import QeRLError
from qerl.noise.schedule import NoiseSchedule
from qerl.rollout.portable.engine import PortableEngine, PortableSession
from qerl.rollout.portable.runner import Runner
from qerl_serve.types import AdamParams
from tests.support.models import EOS, make_tiny_tokenizer
from tests.support.serve import DATA, base_of, datum, lora, request, sampled, tiny_backend

ADAM = AdamParams(learning_rate=3e-2)
PROMPTS = [(5, 9, 77), (8,), (64, 7, 8, 9, 30)]


def trained(folder, steps=2, model_id="a", **options):
    backend = tiny_backend(folder, **options)
    backend.create_model(model_id, lora())
    train(backend, model_id, steps)
    return backend


def train(backend, model_id="a", steps=1):
    for _ in range(steps):
        backend.forward_backward(model_id, DATA, "cross_entropy", {}, False)
        backend.optim_step(model_id, ADAM)


def tokens(results):
    return {n: [list(sequence.tokens) for sequence in result.sequences] for n, result in results.items()}


def logprobs_of(backend, model_id, prompt, drawn):
    whole = [*prompt, *drawn]
    output = backend.forward_backward(model_id, [datum(whole)], "cross_entropy", {}, True)
    return output.logprobs[0].tolist()


def test_sampled_logprobs_are_those_of_the_prompt_and_of_the_loss(tmp_path):
    backend = trained(tmp_path)
    key = backend.save_for_sampler("a", None)
    (drawn,) = sampled(backend, [request(key)])[0].sequences
    whole = (5, 9, 77, *drawn.tokens)
    asked = request(key, whole, max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=3)
    scored = sampled(backend, [asked])[0]
    assert math.isnan(scored.prompt_logprobs[0])
    assert scored.prompt_logprobs[3:] == pytest.approx(drawn.logprobs, abs=1e-5)
    assert scored.prompt_logprobs[1:] == logprobs_of(backend, "a", whole[:3], whole[3:])
    assert [len(best) for best in scored.topk_prompt_logprobs] == [0] + [3] * (len(whole) - 1)
    columns = (whole, scored.prompt_logprobs, scored.topk_prompt_logprobs)
    for token, own, best in list(zip(*columns, strict=True))[1:]:
        assert [value for _, value in best] == sorted((value for _, value in best), reverse=True)
        assert dict(best).get(token, own) == pytest.approx(own, abs=1e-5)
        assert best[0][1] >= own - 1e-5
    assert sampled(backend, [request(key, [7], prompt_logprobs=True)])[0].prompt_logprobs == pytest.approx(
        [math.nan], nan_ok=True
    )


def test_the_same_tokens_whoever_shares_the_batch(tmp_path):
    backend = trained(tmp_path)
    key, base = backend.save_for_sampler("a", None), backend.sampler("tiny")
    asked = [
        request(key, prompt, seed, max_tokens, num_samples=n, temperature=t)
        for prompt in PROMPTS[:2]
        for seed, max_tokens, n, t in ((1, 6, 2, 1.0), (2, 9, 1, 1.0), (1, 4, 1, 0.0), (3, 5, 1, 0.7))
    ]
    asked += [request(base, PROMPTS[0], 1), request(key, PROMPTS[0], 9, top_k=3), request(key, top_p=0.5)]
    alone = {number: sampled(backend, [each])[0] for number, each in enumerate(asked)}
    together = sampled(backend, asked)
    assert tokens(together) == tokens(alone)
    arriving = sampled(backend, asked[:3], [(), asked[3:5], asked[5:]])
    assert tokens(arriving) == tokens(alone)
    assert tokens(alone)[0][0] != tokens(alone)[0][1]  # two samples of one request
    for number, result in together.items():
        for sequence, other in zip(result.sequences, alone[number].sequences, strict=True):
            assert sequence.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_what_comes_late_joins_before_anything_has_ended(tmp_path):
    backend = trained(tmp_path)
    key = backend.save_for_sampler("a", None)
    asked = [request(key, prompt, 1, 60, stop_token_ids=(), num_samples=2) for prompt in PROMPTS]
    late = [request(key, prompt, seed, 5, stop_token_ids=()) for prompt in PROMPTS[1:] for seed in (1, 2)]
    alone = {number: sampled(backend, [each])[0] for number, each in enumerate([*asked, *late])}
    waiting = iter([(), (), (), late])
    answers = list(backend.sample(asked, lambda: next(waiting, ())))
    assert [number for number, _ in answers] == [3, 4, 5, 6, 0, 1, 2]
    assert tokens(dict(answers)) == tokens(alone)


def test_equal_prompts_of_a_burst_are_prefilled_once(tmp_path, monkeypatch):
    backend = trained(tmp_path)
    key = backend.save_for_sampler("a", None)
    prefilled, prefill = [], Runner.prefill

    def spy(runner, prompts, *args):
        prefilled.extend(map(tuple, prompts))
        return prefill(runner, prompts, *args)

    monkeypatch.setattr(Runner, "prefill", spy)
    sampled(backend, [request(key, prompt, seed) for seed in range(8) for prompt in PROMPTS])
    assert sorted(prefilled) == sorted(PROMPTS)


def test_what_ends_a_completion_is_each_requests_own(tmp_path):
    backend = trained(tmp_path)
    key = backend.save_for_sampler("a", None)
    (free,) = sampled(backend, [request(key, max_tokens=40, stop_token_ids=())])[0].sequences
    assert len(free.tokens) == 40 and free.stop_reason == "length"
    stop = free.tokens[5]
    (ended,) = sampled(backend, [request(key, max_tokens=40, stop_token_ids=(stop,))])[0].sequences
    assert list(ended.tokens) == list(free.tokens[: free.tokens.index(stop) + 1])
    assert ended.stop_reason == "stop"
    tokenizer = make_tiny_tokenizer()
    texts = [tokenizer.decode(free.tokens[:n]) for n in range(41)]
    string = texts[9][-2:]
    stops = (string,), ("absent",)
    asked = [request(key, max_tokens=40, stop_token_ids=(), stop_strings=each) for each in stops]
    by_text, by_nothing = (result.sequences[0] for result in sampled(backend, asked).values())
    first = next(n for n, text in enumerate(texts) if string in text)
    assert (by_text.stop_reason, by_nothing.stop_reason) == ("stop", "length")
    assert by_text.tokens == free.tokens[:first] and by_nothing.tokens == free.tokens


def test_without_a_word_a_completion_ends_where_the_model_ends(tmp_path):
    backend = tiny_backend(tmp_path)
    base = backend.sampler("tiny")
    end = make_tiny_tokenizer().convert_tokens_to_ids(EOS)
    results = sampled(backend, [request(base, seed=seed, max_tokens=100) for seed in range(8)])
    ended = [r.sequences[0] for r in results.values() if r.sequences[0].stop_reason == "stop"]
    assert ended and all(sequence.tokens[-1] == end for sequence in ended)
    assert all(end not in sequence.tokens[:-1] for sequence in ended)


def test_a_snapshot_stays_while_its_model_trains(tmp_path):
    backend = trained(tmp_path)
    key = backend.save_for_sampler("a", None)
    before = sampled(backend, [request(key)])
    _, snapshot = backend._policies[key]
    live = next(iter(backend._adapters.get("a").matrices.values()))
    assert next(iter(snapshot.matrices.values())) is live  # no copy as long as nothing changes
    train(backend)
    assert sampled(backend, [request(key)]) == before
    newer = backend.save_for_sampler("a", None)
    assert sampled(backend, [request(newer)]) != before
    backend.drop_sampler(newer)
    train(backend, steps=2)
    assert sampled(backend, [request(key)]) == before
    backend.drop_sampler(key)
    (gone,) = sampled(backend, [request(key)]).values()
    assert isinstance(gone, QeRLError)


NOISE = NoiseSchedule(sigma_start=0.3, sigma_end=0.1, stages=2, total_steps=2)


def test_noise_is_in_the_samples_of_a_model_and_in_nothing_else(tmp_path):
    clean, noisy = trained(tmp_path / "c"), trained(tmp_path / "n", noise=NOISE)
    keys = [backend.save_for_sampler("a", None) for backend in (clean, noisy)]

    pairs = list(zip((clean, noisy), keys, strict=True))

    def both(**options):
        return [sampled(b, [request(k, **options)])[0] for b, k in pairs]

    without, drawn = both()
    assert list(without.sequences[0].logprobs) != list(drawn.sequences[0].logprobs)
    again = sampled(noisy, [request(keys[1])])[0]
    assert again == drawn
    exact = logprobs_of(noisy, "a", (5, 9, 77), drawn.sequences[0].tokens)[2:]
    gap = torch.tensor(exact) - torch.tensor(drawn.sequences[0].logprobs)
    assert 1e-3 < gap.abs().mean() < 3  # what importance sampling corrects
    assert both(temperature=0.0)[0].sequences == both(temperature=0.0)[1].sequences
    scores = [result.prompt_logprobs[1:] for result in both(prompt_logprobs=True)]
    assert scores[0] == scores[1]
    bases = [sampled(b, [request(b.sampler("tiny"))])[0] for b in (clean, noisy)]
    assert bases[0] == bases[1]
    first = [trained(tmp_path / f"0{n}", steps=0, noise=n) for n in (None, NOISE)]
    of_first = [sampled(b, [request(b.save_for_sampler("a", None))])[0] for b in first]
    assert of_first[0] == of_first[1]  # the first stage has none


BAD = (
    ({"prompt": ()}, "at least one token"),
    ({"prompt": (5, 128)}, "id 128"),
    ({"prompt": (-1,)}, "id -1"),
    ({"prompt": (5,) * 512}, "512 tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"num_samples": 0}, "num_samples"),
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stop_token_ids": (200,)}, "id 200"),
    ({"stop_strings": ("a", "")}, "empty"),
    ({"sampler": "nobody"}, "no such sampler"),
)


def test_a_request_that_cannot_be_served_gets_a_sentence_and_the_others_their_samples(tmp_path):
    backend = tiny_backend(tmp_path)
    right = request(backend.sampler("tiny"))
    wrong = [request(**{"sampler": right.sampler} | options) for options, _ in BAD]
    results = sampled(backend, [right, *wrong, right])
    for number, (_, sentence) in enumerate(BAD, start=1):
        assert isinstance(results[number], QeRLError) and sentence in str(results[number])
    assert results[0].sequences == results[len(BAD) + 1].sequences


def test_logits_that_are_not_finite_end_in_a_sentence(tmp_path):
    backend = tiny_backend(tmp_path)
    with torch.no_grad():
        base_of(backend).get_output_embeddings().weight[3] = math.nan
    (result,) = sampled(backend, [request(backend.sampler("tiny"))]).values()
    assert isinstance(result, QeRLError) and "not finite" in str(result)


def test_a_failing_session_answers_all_that_wait_in_it_and_no_others(tmp_path, monkeypatch):
    backend = trained(tmp_path)
    key, base = backend.save_for_sampler("a", None), backend.sampler("tiny")
    right, make, calls = sampled(backend, [request(base)])[0], PortableEngine.session, []

    def fails(*args, **rest):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("a defect")
        return make(*args, **rest)

    monkeypatch.setattr(PortableEngine, "session", fails)
    results = sampled(backend, [request(key), request(key, (8,), temperature=0.5), request(base)])
    assert [str(results[n]) for n in (0, 1)] == ["a defect"] * 2
    assert results[2] == right


def test_what_is_refused_to_one_request_is_not_refused_to_its_group(tmp_path, monkeypatch):
    backend = trained(tmp_path)
    key = backend.save_for_sampler("a", None)
    asked = [request(key, prompt, seed) for seed in (1, 2) for prompt in PROMPTS]
    asked[4] = request(key, PROMPTS[1], 2, prompt_logprobs=True)
    (host,) = backend._hosts.values()
    right, start, score = sampled(backend, asked), PortableSession.start, host.score

    def starts(session, prompts, samples, params, **rest):
        if max(own.max_tokens for own in params) == 400:
            raise QeRLError("it does not fit")
        return start(session, prompts, samples, params, **rest)

    def scores(requests):
        if any(each.max_tokens == 7 for each in requests):
            raise QeRLError("it cannot be scored")
        return score(requests)

    monkeypatch.setattr(PortableSession, "start", starts)
    object.__setattr__(host, "score", scores)
    wrong = [request(key, PROMPTS[0], 3, 400), request(key, PROMPTS[1], 3, 7, prompt_logprobs=True)]
    results = sampled(backend, [*asked, *wrong], [(), [request(key, (3,), 1, 400)]])
    assert [str(results.pop(n)) for n in (6, 7, 8)] == [
        "it does not fit", "it cannot be scored", "it does not fit",
    ]  # fmt: skip
    assert tokens(results) == tokens(right)


def test_joiners_do_not_keep_the_others_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr("qerl_serve.sampling.MAX_JOINERS", 4)
    backend = trained(tmp_path)
    base = backend.sampler("tiny")
    other = request(backend.save_for_sampler("a", None), max_tokens=1)
    waiting = iter([[other]] + [[request(base, seed=seed, max_tokens=1)] for seed in range(20)])
    order = [n for n, _ in backend.sample([request(base, max_tokens=1)], lambda: next(waiting, ()))]
    assert order.index(1) < 7
    assert sorted(order) == list(range(len(order)))


class Patience:
    """Says so many times that an answer is wanted."""

    def __init__(self, times):
        self.left = times

    def __call__(self):
        self.left -= 1
        return self.left >= 0


def test_samples_without_texts_that_end_them_have_no_stop_that_reads_tokens(tmp_path, monkeypatch):
    backend, start, seen = trained(tmp_path), PortableSession.start, []

    def starts(session, prompts, samples, params, **rest):
        seen.extend(any(stop.reads_tokens for stop in own.stops) for own in params)
        return start(session, prompts, samples, params, **rest)

    monkeypatch.setattr(PortableSession, "start", starts)
    key = backend.save_for_sampler("a", None)
    for texts in ((), ("a",)):
        sampled(backend, [request(key, max_tokens=1, stop_strings=texts)])
    assert seen == [False, True]


@pytest.mark.slow
def test_what_nobody_waits_for_is_not_decoded_to_its_end(tmp_path):
    backend = trained(tmp_path)
    key = backend.save_for_sampler("a", None)
    asked = [request(key, prompt, max_tokens=200, stop_token_ids=()) for prompt in PROMPTS]
    whole = sampled(backend, asked[:1])
    gone = replace(asked[0], num_samples=2, wanted=Patience(9))
    found = sampled(backend, [gone, asked[1], replace(asked[2], prompt_logprobs=True, wanted=Patience(0))])
    for number in (0, 2):
        assert isinstance(found[number], QeRLError) and "is gone" in str(found[number])
    assert -30 < gone.wanted.left < 0  # asked once a token of each sample, of which there could be 400
    assert tokens({1: found[1]}) == tokens({1: sampled(backend, [asked[1]])[0]})
    assert tokens(whole) == tokens(sampled(backend, asked[:1]))


def test_requests_of_a_policy_share_a_session_whatever_their_settings(tmp_path, monkeypatch):
    """Greedy ones too, unless the others have noise."""
    make, made = PortableEngine.session, []

    def counted(*args, **rest):
        made.append(args)
        return make(*args, **rest)

    monkeypatch.setattr(PortableEngine, "session", counted)
    for noise, sessions in ((None, 1), (NOISE, 2)):
        backend = trained(tmp_path / str(sessions), steps=1, noise=noise)
        key = backend.save_for_sampler("a", None)
        kinds = (
            {"temperature": 0.0},
            {"temperature": 0.7, "top_p": 0.5},
            {"top_k": 3},
            {"stop_token_ids": (3,)},
        )
        asked = [request(key, (5,), place, **kind) for place, kind in enumerate(kinds)]
        alone = {number: sampled(backend, [each])[0] for number, each in enumerate(asked)}
        made.clear()
        assert tokens(sampled(backend, asked[:1], [asked[1:3], asked[3:]])) == tokens(alone)
        assert len(made) == sessions
