"""Sessions that are entered again behind a change of the adapter, on captured steps: what is drawn is of the
weights as they are, and keys stay, or are computed again once their memory went to others."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.decode import DecodeStep
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.scheduler import Pace
from tests.support.paged import random_model, score

PROMPTS = [list(range(5, 75)), [7], list(range(20, 99))]
SAMPLES, TOKENS, EARLY = 4, 96, 40
"""Completions have `TOKENS` tokens, of which about `EARLY` are drawn before the adapter changes."""


@torch.no_grad()
def move(model, scale):
    """Change the adapter in place, as an optimizer does."""
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += scale * torch.randn_like(parameter)


@torch.no_grad()
def forced(model, adapters, prompt, tokens, drawn_before, keys_kept):
    """Log-probabilities of tokens of which so many were drawn by the first adapter, the others by the second,
    behind keys that the first has left or behind the second's own."""

    def use(adapter):
        for parameter, values in zip(
            (p for p in model.parameters() if p.requires_grad), adapter, strict=True
        ):
            parameter.copy_(values)

    use(adapters[0])
    first = score(model, prompt, tokens[:drawn_before])
    text = [*prompt, *tokens[:-1]]
    cut = len(prompt) + drawn_before - 1  # the token behind which the second adapter draws is read by it
    if not keys_kept:
        use(adapters[1])
    cache = model(input_ids=torch.tensor([text[:cut]], device="cuda"), use_cache=True).past_key_values
    use(adapters[1])
    logits = model(input_ids=torch.tensor([text[cut:]], device="cuda"), past_key_values=cache).logits[0]
    later = logits.float().log_softmax(-1)
    drawn = torch.tensor(tokens[drawn_before:], device="cuda")[:, None]
    return torch.cat([first, later.gather(-1, drawn)[:, 0]])


@pytest.mark.parametrize("lose", ["pause", "release", "leave", "reset"])
@pytest.mark.parametrize("packed", ["", "nvfp4"])
def test_what_goes_on_is_drawn_by_the_adapter_as_it_is(monkeypatch, packed, lose):
    captured, capture = [], DecodeStep.capture
    monkeypatch.setattr(DecodeStep, "capture", lambda step: captured.append(step) or capture(step))
    model = random_model("qwen2", packed)
    engine = PagedEngine(model, 0, pace=Pace(round_steps=8, spare_rounds=0))
    params = SamplingParams(TOKENS, seed=5)
    with engine.session(params) as session:
        indices = session.start(PROMPTS, SAMPLES)
        while session.length(indices[0]) < EARLY:
            assert not session.next(one_round=True)
    before = [session.length(index) for index in indices]
    read, steps = session.prefilled_tokens, len(captured)
    adapters = [[p.detach().clone() for p in model.parameters() if p.requires_grad]]
    move(model, 0.1)
    adapters.append([p.detach().clone() for p in model.parameters() if p.requires_grad])
    begun = session.leave() if lose in ("leave", "reset") else None
    if lose != "leave":
        getattr(engine, lose)()
    torch.full((1 << 28,), torch.nan, device="cuda")  # whoever has memory that was given up writes there
    again = session if begun is None else None
    with engine.session(params, going_on=again) as session:
        if begun is not None:
            session.start(PROMPTS, SAMPLES, begun=[begun[index] for index in indices])
        found = {}
        while session.busy:
            found |= {turn.index: turn.completion for turn in session.next_finished()}
    if lose == "pause":
        assert session.prefilled_tokens == read, "keys are kept"
    elif lose == "release":
        assert session.prefilled_tokens > read, "and computed again"
    assert (len(captured) == steps) == (lose != "reset"), "a changed adapter captures nothing anew"
    gaps, other = [], []
    for index in indices:
        prompt, one = PROMPTS[index // SAMPLES], found[index]
        own = torch.tensor(one.logprobs, device="cuda")
        expected = forced(model, adapters, prompt, one.token_ids, before[index], keys_kept=lose == "pause")
        gaps.append((own - expected).abs())
        unmoved = forced(model, adapters[:1] * 2, prompt, one.token_ids, before[index], keys_kept=True)
        other.append((own - unmoved)[before[index] :].abs())
    gap, far = torch.cat(gaps).mean(), torch.cat(other).mean()
    print(f"{packed or 'bf16'}, {lose}: mean |difference| {gap:.1e}, from the old adapter {far:.1e}")
    assert gap < 0.1 * far, "passes of bf16 differ, adapters by far more"
