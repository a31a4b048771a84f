"""Replay of routing between the kernels of sampler and update, in BF16 and on experts in NVFP4."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qerl.lora.adapter import add_lora
from qerl.rollout.paged.engine import PagedEngine
from qerl.update.kernels import use_kernels
from qerl.update.packed_row import pack_row
from qerl.update.routing import Routing
from tests.gpu.test_family_rows import OF_FAMILIES, SIZES
from tests.support.families import MIXTURES, tiny
from tests.support.models import move_adapter, pack
from tests.support.routing import own_choices, samples_of_engine, without


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_update_takes_the_experts_that_the_kernels_chose(name, packed):
    model = tiny(name, **SIZES | OF_FAMILIES[name]).to("cuda", torch.bfloat16)
    model = move_adapter(add_lora(pack(model) if packed else model, 32, 64, 0.0), 0.02).eval()
    prompts = [torch.randint(2, 500, (count,)).tolist() for count in (300, 1, 40)]
    samples = samples_of_engine(PagedEngine(model, 0), prompts, samples=16)
    path = use_kernels(model.get_base_model())
    assert path.by_segment, path
    device, sampler = torch.device("cuda"), torch.tensor([x for s in samples for x in s.logprobs])
    routing = Routing(model.get_base_model())
    distance = {}
    for replayed, given in ((True, samples), (False, without(samples))):
        row = pack_row(given, range(len(given)), device)
        chosen, logps = own_choices(model, row, True)
        distance[replayed] = float((logps.detach().cpu() - sampler).abs().mean())
        if replayed:
            assert torch.equal(chosen, row.choices_LMC.long())
    differ, known = routing.take_counts()
    print(f"distance {distance}, {differ} of {known} choices differ")
    assert differ < 0.05 * known
    assert distance[True] < 0.01 and distance[True] <= 1.1 * distance[False]
