"""What a plan proposes fits, keeps the samples, and is the fastest that fits."""

import dataclasses

import pytest

from qerl.families.sizes import SIZES
from qerl.plan.parts import Activations
from qerl.plan.phases import make_plan
from qerl.plan.propose import (
    ENOUGH_TOKENS,
    FEW_TOKENS,
    MARGIN,
    STEP,
    cost,
    fastest,
    fits,
    propose,
    tokens_that_fit,
)
from qerl.plan.render import _title, verdict
from tests.support.plan import GB80, work


@pytest.mark.parametrize("name", ["1.5b", "7b", "32b", "72b"])
@pytest.mark.parametrize("tokens", [512, 4096])
def test_proposals_fit_and_keep_the_samples(name, tokens):
    sizes = SIZES[name]
    wanted = work(completion_tokens=tokens, group=16, microbatch=16, microbatches=8)
    plan = propose(sizes, wanted, GB80, samples=256)
    assert plan is not None and fits(plan)
    assert plan.peak * MARGIN <= GB80
    assert (plan.work.microbatch, plan.work.microbatches) == (16, 8)
    assert plan.sequences == plan.work.sequences


@pytest.mark.parametrize("capacity", [9e9, 10e9, 11e9, 12.5e9, 16e9, 40e9])
@pytest.mark.parametrize("microbatch", [1, 8, 64])
def test_tokens_that_fit(capacity, microbatch):
    sizes, wanted = SIZES["7b"], work(microbatch=microbatch)
    sample, whole = wanted.tokens_of(1), wanted.tokens_of(microbatch)
    most = min(whole, ENOUGH_TOKENS)
    fitting = [
        limit
        for limit in (sample, *range(sample // STEP * STEP + STEP, most, STEP), most)
        if fits(make_plan(sizes, dataclasses.replace(wanted, tokens_per_forward=limit), int(capacity)))
    ]
    assert tokens_that_fit(sizes, wanted, int(capacity)) == max(fitting, default=None)


@pytest.mark.parametrize(
    "name, gigabytes", [("7b", 8), ("7b", 10), ("7b", 16), ("7b", 80), ("32b", 80), ("72b", 80)]
)
def test_fastest(name, gigabytes):
    """Of all settings that fit, whole samples in a forward pass, none is faster."""
    sizes, capacity = SIZES[name], gigabytes * 10**9
    wanted = work(rank=16, completion_tokens=1024)
    tried = [
        dataclasses.replace(wanted, tokens_per_forward=limit, every_n_layers=n)
        for limit in map(wanted.tokens_of, (2, 3, 4, 8))
        for n in (1, 2, 3, 4, 8, 16, 24, 64)
        if n <= sizes.layers
    ]
    fitting = [cost(sizes, one) for one in tried if fits(make_plan(sizes, one, capacity))]
    found = fastest(sizes, wanted, capacity)
    if gigabytes == 8:
        assert found is None and not fitting
        return
    assert found is not None and fits(make_plan(sizes, found, capacity))
    assert not fitting or cost(sizes, found) <= min(fitting)


def test_microbatches_share_a_pass_where_memory_allows():
    """16 losses of 8 x 1024 tokens on 141 GB: two at a time, which is enough."""
    sizes, wanted = SIZES["7b"], work(completion_tokens=1024, microbatches=16, sequences=128)
    found = fastest(sizes, wanted, 150 * 10**9)
    assert found is not None and (found.tokens, found.passes) == (16894, 8)
    small = fastest(sizes, wanted, 40 * 10**9)
    assert small is not None and small.passes >= 16, "layers that keep their activations are worth more"
    parallel = fastest(sizes, dataclasses.replace(wanted, processes=2), 150 * 10**9)
    assert parallel is not None and (parallel.passes, parallel.tokens) == (8, 16894)
    short = fastest(sizes, dataclasses.replace(wanted, completion_tokens=32), GB80)
    assert short is not None and (short.passes, short.tokens) == (1, 8176), "one pass of 8176 tokens"


def test_no_layer_is_recomputed_where_all_fit():
    sizes = SIZES["7b"]
    found = fastest(sizes, work(completion_tokens=256), GB80)
    assert found is not None and found.every_n_layers == sizes.layers + 1
    assert Activations(sizes, found).recomputed == 0


def test_settings_that_are_given_are_kept():
    sizes, wanted = SIZES["7b"], work()
    free = fastest(sizes, wanted, GB80)
    assert free is not None and free.tokens_per_forward is not None
    assert free.every_n_layers > 1 and FEW_TOKENS <= free.tokens_per_forward <= ENOUGH_TOKENS
    every = fastest(sizes, wanted, GB80, every=[1])
    assert every is not None and (every.every_n_layers, every.tokens_per_forward) == (1, 16639)
    limit = fastest(sizes, wanted, GB80, limits=[5000])
    assert limit is not None and limit.tokens_per_forward == 5000
    assert fastest(sizes, wanted, GB80, limits=[16639], every=[28]) is None


def test_inputs_of_layers_wait_in_the_cpus_memory_where_nothing_else_fits():
    sizes, short, long = SIZES["qwen3-8b"], work(completion_tokens=98304), work(completion_tokens=131072)
    found, there = (fastest(sizes, wanted, GB80) for wanted in (short, long))
    assert found is not None and not found.offload
    assert there is not None and there.checkpointing == {"every_n_layers": 1, "offload": True}
    plan = make_plan(sizes, there, GB80)
    assert fits(plan)
    assert plan.on_host == 36 * 2**31  # each input has 1.08e9 bytes, of which torch pins a power of two
    here = make_plan(sizes, dataclasses.replace(there, offload=False), GB80)
    assert here.on_host == 0 and not fits(here)
    assert here.update - plan.update == pytest.approx(1.12 * 35 * 2 * there.tokens * 4096)
    assert f"{plan.on_host / 1e9:.1f} GB of CPU memory" in _title(plan, "8B", "")
    for change in ({"may_offload": False}, {"host_bytes": plan.on_host}):
        assert fastest(sizes, dataclasses.replace(long, **change), GB80) is None
    roomy = dataclasses.replace(long, host_bytes=round(1.06 * plan.on_host), adapters=2, rank=16)
    assert fastest(sizes, roomy, GB80).offload, "how many adapters there are does not decide it"
    assert fastest(sizes, long, GB80, offload=False) is None
    assert fastest(sizes, long, GB80, every=[1]) == there, "which layers and where are two settings"


def test_nothing_fits():
    sizes = SIZES["72b"]
    assert propose(sizes, work(weights="bf16"), GB80, samples=8) is None
    assert verdict(make_plan(sizes, work(weights="bf16"), GB80)).startswith("It does not fit: the update")


def test_verdicts():
    sizes = SIZES["7b"]
    peak = make_plan(sizes, work(), GB80).peak
    assert verdict(make_plan(sizes, work(), GB80)).startswith("It fits: ")
    tight = make_plan(sizes, work(), round(peak * 1.02))
    assert verdict(tight).startswith("It is tight: ")
    assert not fits(tight)
