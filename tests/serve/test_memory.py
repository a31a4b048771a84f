"""Samples for a server's clients where memory is short: what does not fit beside others waits for them.

Requests go through the books of sampling and of the paged engine; the machine says scripted texts, and its
memory is counted in blocks, some of which captured steps hold until they are dropped.
"""

import random
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from qerl.errors import QeRLError
from qerl.kernels.limits import PAGE
from qerl.rollout.paged.session import PagedSession
from qerl_serve.sampling import Host, Limits, Sampling, Scores
from qerl_serve.types import SampleResult, nothing_overdue
from tests.support.books import blocks_of
from tests.support.limited_pages import BLOCK_BYTES, POSITIONS, made
from tests.support.serve import request

BESIDE = {"blocks": 14, "steps": 5}
"""A machine on which ten blocks fit alone, and nine beside others: the others' steps hold five."""

SMALL, LARGE, HUGE = (40, 40), (300, 300), (700, 300)
"""Tokens of a prompt and of its completion at most: of 2, 10 and 16 blocks."""


def sampling_of(engine, score=lambda requests: [Scores([0.0]) for _ in requests], keeps_prefixes=False):
    host = Host(
        engine,
        Limits(POSITIONS, 10_000, ()),
        lend=lambda policy: nullcontext(),
        noise=None,
        score=score,
        stop_strings=lambda strings: None,
        keeps_prefixes=keeps_prefixes,
    )
    policies = {"base": None, "other": SimpleNamespace(number=5)}
    return Sampling(lambda key: (host, policies[key]))


def asked(size, sampler="base", **options):
    prompt, limit = size
    return request(sampler, (5,) * prompt, max_tokens=limit, stop_token_ids=(), **options)


def answers(engine, requests, arrivals=(), overdue=nothing_overdue, **options):
    """What each request got, by number in the order of answers: the tokens of its samples, or why not."""
    waiting = iter(arrivals)
    found = {}
    for number, result in sampling_of(engine, **options).answer(requests, lambda: next(waiting, ()), overdue):
        assert number not in found
        if isinstance(result, SampleResult):
            found[number] = [len(sequence.tokens) for sequence in result.sequences]
        else:
            found[number] = result
    return found


@pytest.fixture
def starts(monkeypatch):
    """Each time that sequences were started: how many others there were, limits of tokens, whether it was
    refused."""
    seen, start = [], PagedSession.start

    def watched(session, prompts, samples, params, **options):
        before, limits = len(session._scheduler.present), [own.max_tokens for own in params]
        try:
            indices = start(session, prompts, samples, params, **options)
        except QeRLError:
            seen.append((before, limits, True))
            raise
        seen.append((before, limits, False))
        return indices

    monkeypatch.setattr(PagedSession, "start", watched)
    return seen


def test_what_does_not_fit_beside_others_is_sampled_once_they_have_ended(starts):
    arrivals = [[asked(LARGE)], [], [asked(SMALL, num_samples=3)]]
    found = answers(made(**BESIDE), [asked(SMALL)], arrivals)
    assert list(found.items()) == [(0, [40]), (2, [40] * 3), (1, [300])]
    assert starts == [
        (0, [40], False),
        (1, [300], True),
        (1, [40] * 3, False),
        (3, [300], True),  # when the first had ended
        (0, [300], False),
    ]


def test_what_does_not_fit_alone_is_refused_with_its_sentence_and_the_others_are_not():
    for size, sentence in ((HUGE, "one sequence needs"), (LARGE, None)):
        for requests in ([asked(size), asked(SMALL)], [asked(SMALL), asked(size)]):
            found = answers(made(**BESIDE), requests, [[], [asked(size)]])
            for number, each in enumerate([*requests, asked(size)]):
                if sentence and len(each.prompt) == size[0]:
                    assert isinstance(found[number], QeRLError) and sentence in str(found[number])
                else:
                    assert found[number] == [each.max_tokens]


def test_what_waits_for_memory_is_tried_again_when_samples_end(starts):
    """Of 40 blocks all are held when others take memory, so a larger cache would have 8; the longest needs 9.
    It ends before the other, beside which there is room in the cache as it is."""
    engine = made(40)
    before = engine.parts.budget
    engine.parts = replace(engine.parts, budget=lambda freed: 8 * BLOCK_BYTES if freed else before(freed))
    requests = [asked((300, 200)), asked((40, 270))]
    found = answers(engine, requests, [[], [asked(SMALL, num_samples=3)]])
    assert list(found.items()) == [(0, [200]), (2, [40] * 3), (1, [270])]
    assert starts == [(0, [200, 270], False), (2, [40] * 3, True), (1, [40] * 3, False)]


@pytest.mark.parametrize("overdue", [nothing_overdue, lambda: lambda: None], ids=["", "paused"])
def test_those_that_come_later_do_not_keep_a_large_one_waiting(monkeypatch, starts, overdue):
    """One arrives in every round, and a small one takes six; also with a pause behind each."""
    monkeypatch.setattr("qerl_serve.sampling.MAX_JOINERS", 4)
    arrivals = [[asked(LARGE)], *([asked(SMALL, seed=seed)] for seed in range(100))]
    found = answers(made(**BESIDE), [asked(SMALL)], arrivals, overdue)
    assert found == {number: [300 if number == 1 else 40] for number in range(102)}
    begun = [limit for _, limits, refused in starts if not refused for limit in limits]
    assert begun.index(300) == 5  # behind the first and four that joined
    assert starts.count((1, [300], True)) < 7  # not tried in every round


def test_sessions_begin_with_the_oldest_of_all_that_wait(monkeypatch, starts):
    """Those of another policy come before a large one or after it."""
    monkeypatch.setattr("qerl_serve.sampling.MAX_JOINERS", 1)
    other = asked((40, 41), "other")
    for waiting, order in (
        ([asked(LARGE), other, asked((40, 42))], [40, 42, 300, 41]),
        ([other, asked(LARGE), asked((40, 42))], [40, 42, 41, 300]),
    ):
        starts.clear()
        answers(made(**BESIDE), [asked(SMALL)], [waiting])
        assert [limit for _, limits, refused in starts if not refused for limit in limits] == order


def test_of_two_large_ones_the_older_begins_first(starts):
    answers(made(**BESIDE), [asked(SMALL)], [[asked(LARGE)], [asked((300, 299))]])
    assert [limits for _, limits, refused in starts if not refused][:2] == [[40], [300]]


def test_a_prompt_is_scored_once_however_often_its_request_is_tried(monkeypatch):
    scored, refused, begin = [], [], PagedSession.start

    def score(requests):
        scored.extend(len(each.prompt) for each in requests)
        return [Scores([float(len(each.prompt))]) for each in requests]

    def start(session, prompts, samples, params, **options):
        if len(prompts[-1]) == 300 and len(refused) < 2:
            refused.append(len(prompts))
            raise QeRLError("not now")
        return begin(session, prompts, samples, params, **options)

    monkeypatch.setattr(PagedSession, "start", start)
    large = asked(LARGE, prompt_logprobs=True)
    sampling = sampling_of(made(**BESIDE), score)
    found = dict(sampling.answer([asked(SMALL), large], lambda: ()))
    assert found[1].prompt_logprobs == [300.0] and len(found[1].sequences[0].tokens) == 300
    assert found[0].prompt_logprobs is None
    assert scored == [300] and refused == [2, 1]


def test_a_large_one_whose_client_has_gone_is_not_begun(starts):
    wanted = iter([True])  # while the small one is sampled
    gone = replace(asked(LARGE), wanted=lambda: next(wanted, False))
    found = answers(made(**BESIDE), [asked(SMALL)], [[gone, asked(LARGE)]])
    assert "is gone" in str(found[1])
    assert found[0] == [40] and found[2] == [300]
    assert (1, [300] * 2, True) in starts


def test_a_session_that_fails_does_not_fail_what_waits_for_memory(monkeypatch, starts):
    """The third round of the small one is a defect; the large one was back at the desk."""
    rounds, decode = [], PagedSession._decode

    def fails(session, meanwhile):
        rounds.append(session)
        if len(rounds) == 3:
            raise RuntimeError("a defect")
        return decode(session, meanwhile)

    monkeypatch.setattr(PagedSession, "_decode", fails)
    found = answers(made(**BESIDE), [asked(SMALL)], [[asked(LARGE)]])
    assert str(found[0]) == "a defect" and found[1] == [300]
    assert [refused for _, _, refused in starts] == [False, True, False]


def test_who_has_no_memory_after_a_pause_is_refused_and_the_others_go_on():
    """Of 40 blocks others take 32 in the first pause; what was drawn is not drawn again."""
    engine, said = made(40), []
    say = engine.say
    engine.say = lambda row, so_far: said.append(len(row.prompt)) or say(row, so_far)

    def take():
        engine.others = 32

    pauses = iter([None, take])
    requests = [asked(LARGE), asked(SMALL, num_samples=2), *(asked(SMALL, seed=n) for n in (1, 2))]
    found = answers(engine, requests, overdue=lambda: next(pauses, None))
    assert isinstance(found.pop(0), QeRLError)
    assert found == {1: [40] * 2, 2: [40], 3: [40]}
    assert said.count(40) == 4 * 6, "rounds of seven tokens for each sample"


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize(("paused", "kept"), [(0.0, False), (0.3, False), (0.3, True)])
def test_whoever_fits_alone_gets_its_samples_whatever_else_is_asked(seed, paused, kept, monkeypatch):
    """Also if it is paused, and others take memory then and give it back; who fits alone beside the most that
    they ever take is served, and who fits only without them may be. Where prefixes are kept the tail of a
    prompt is there twice."""
    rng = random.Random(seed)
    monkeypatch.setattr("qerl_serve.sampling.MAX_JOINERS", rng.choice((1, 3, 64)))
    blocks = rng.randint(6, 30)
    share = rng.choice((blocks, rng.randint(4, blocks)))
    most = rng.randint(0, 8) if paused else 0  # blocks of others
    short = rng.choice((0, rng.randint(1, 8))) if paused else 0  # of them on which the engine counts
    engine = made(blocks + most - short, rows=rng.choice((1, 3, 64)), share=share, steps=rng.randint(0, 8))

    def others():
        assert engine.parts.cache.given_up or not engine.parts.cache.held_bytes
        engine.others = rng.randint(0, most)

    def some(most):
        return [
            asked(
                (rng.choice((1, 40, 100, rng.randint(1, 900))), rng.choice((1, 40, rng.randint(1, 299)))),
                num_samples=rng.choice((1, 1, 3)),
                sampler=rng.choice(("base", "base", "base", "other")),
                temperature=rng.choice((1.0, 0.5)),
                prompt_logprobs=rng.random() < 0.1,
            )
            for _ in range(rng.randint(0, most))
        ]

    requests, arrivals = some(8), [some(2) for _ in range(rng.randint(0, 40))]

    def overdue():
        return others if rng.random() < paused else None

    found = answers(engine, requests, arrivals, overdue, keeps_prefixes=kept)
    given = requests + [each for arrived in arrivals for each in arrived]
    assert sorted(found) == list(range(len(found))) and len(requests) <= len(found) <= len(given)
    for number, result in found.items():
        each = given[number]
        needed = blocks_of(len(each.prompt), each.max_tokens + kept * (PAGE - 1))
        all_samples = [each.max_tokens] * each.num_samples
        if needed <= min(share, blocks - short):
            assert result == all_samples
        elif needed > share or result != all_samples:
            assert isinstance(result, QeRLError) and "one sequence needs" in str(result)
