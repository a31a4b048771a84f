"""What a plan counts: parameters and bytes of a real model, measured peaks, the two phases of a step."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from bench.result import RESULTS, read_rows
from bench.step import of_teacher
from qerl.cli import main
from qerl.errors import QeRLError
from qerl.families.sizes import PUBLISHED as CONFIGS
from qerl.families.sizes import SIZES, Run, Sizes
from qerl.fp4.linear import PackedLinear
from qerl.kernels.delta_rule import WORKING_BYTES, numbers_of_key_head
from qerl.lora.adapter import add_lora
from qerl.measure.model_config import declared
from qerl.measure.random_model import adapted_linears
from qerl.models.load import load_model
from qerl.plan.command import plan_command
from qerl.plan.instead import changes
from qerl.plan.layers import LayerActivations
from qerl.plan.parts import Activations, Adapter, Cache, Weights
from qerl.plan.phases import make_plan
from qerl.plan.propose import fastest
from qerl.plan.render import verdict
from qerl.plan.settings import published_bytes
from qerl.rollout.paged.limits import BlockDemand, KVGeometry, Pages
from qerl.trainer.reference import Reference
from qerl.update.chunks import split_rows
from qerl.update.packed_row import Lengths, RowBuilder
from qerl.weight_formats import FORMATS
from tests.support.families import DELTA_NETS, tiny
from tests.support.models import move_adapter
from tests.support.plan import GB80, LINEARS, work

# Parameters as published with the models.
PUBLISHED = {
    "1.5b": 1_543_714_304,
    "3b": 3_085_938_688,
    "7b": 7_615_616_512,
    "14b": 14_770_033_664,
    "32b": 32_763_876_352,
    "72b": 72_706_203_648,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
}


def test_each_further_adapter_of_a_server_takes_its_gradients_and_optimizer_with_it():
    sizes = SIZES["7b"]
    plans = [make_plan(sizes, work(adapters=n), GB80) for n in (1, 8)]
    parameters = Adapter(sizes, 32, LINEARS).parameters
    lines = [{line.name: (line.rollout, line.update) for line in plan.lines} for plan in plans]
    assert "other adapters" not in lines[0]
    assert lines[1]["other adapters"] == (7 * 16 * parameters,) * 2
    assert {name for name, size in lines[1].items() if size != lines[0].get(name)} <= {
        "other adapters", "keys and values",
    }  # fmt: skip


def with_mixer(sizes, **changes):
    """The same sizes with other attention in each layer."""
    mixer = dataclasses.replace(sizes.spec.mixer, **changes)
    return dataclasses.replace(sizes, runs=(Run(sizes.layers, dataclasses.replace(sizes.spec, mixer=mixer)),))


# Exact counts


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4", "bf16"])
def test_bytes_of_weights_and_adapter(tiny_model, tmp_path, family, changes, weights):
    tiny_model(family, **changes).save_pretrained(tmp_path)
    model = load_model(tmp_path, weights, torch.bfloat16, "cpu")
    sizes = Sizes.from_config(json.loads((tmp_path / "config.json").read_text()))
    tensors = list(model.parameters())
    tensors += [b for m in model.modules() if isinstance(m, PackedLinear) for b in m.buffers(recurse=False)]
    assert Weights(sizes, FORMATS[weights]).bytes == sum(tensor.nbytes for tensor in tensors)
    if weights == "bf16":
        assert sizes.parameters == sum(tensor.numel() for tensor in tensors)
    targets = ("q_proj", "v_proj", "down_proj") if family == "qwen3" else LINEARS
    adapted = add_lora(model, rank=6, alpha=6, dropout=0.0, target_modules=targets)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    adapter = Adapter(sizes, 6, targets)
    assert adapter.parameters == sum(p.numel() for p in trained)
    assert adapter.bytes == sum(p.nbytes for p in trained)


def test_bytes_of_gradients_and_optimizer(tiny_model):
    model = tiny_model("qwen2")
    sizes = Sizes.from_config(model.config.to_dict())
    adapted = add_lora(model, rank=4, alpha=4, dropout=0.0)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    adapted(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    optimizer.step()
    moments = [v for state in optimizer.state.values() for name, v in state.items() if name != "step"]
    adapter = Adapter(sizes, 4, LINEARS)
    assert adapter.gradients == sum(p.grad.nbytes for p in trained)
    assert work().optimizer_bytes * adapter.parameters == sum(moment.nbytes for moment in moments)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_known_models(name):
    assert SIZES[name].parameters == PUBLISHED[name]


def test_keys_and_values():
    """7B: 28 layers, 4 heads of 128, keys and values, 2 bytes: 57344 bytes a token."""
    cache = Cache(SIZES["7b"], work(sequences=16))
    block = cache.geometry.bytes((1,))
    assert block == 57344 * 64 == 2 * Cache(cache.sizes, work(cache_bytes=1)).geometry.bytes((1,))
    assert cache.bytes(10**12) == block * (16 * 32 + 3 * 4), "own blocks, prompts of two groups and a third"
    assert cache.bytes(100 * block + 1) == 100 * block


def test_a_server_takes_room_for_what_is_to_come():
    """As its engine does: 27 rows become 32, 300 and 1000 tokens 512 and 1024, and no prompt is shared."""
    served = work(serves=True, prompt_tokens=300, completion_tokens=1000, sequences=27)
    cache = Cache(SIZES["7b"], served)
    block = cache.geometry.bytes((1,))
    assert cache.bytes(10**12) == block * (32 * 16 + 33 * 8)
    assert cache.bytes(100 * block) == 100 * block
    limited = dataclasses.replace(served, max_sequences=30)
    assert Cache(SIZES["7b"], limited).bytes(10**12) == block * (30 * 16 + 31 * 8)
    settings = {"max_completion_length": 1000, "max_prompt_length": 300}
    of_run, of_server = (
        plan_command("7b", [], settings, 80, Console(quiet=True), adapters=adapters) for adapters in (None, 1)
    )
    few = plan_command("7b", [], settings | {"max_sequences": 30}, 80, Console(quiet=True), adapters=1)
    assert (of_server.work.max_sequences, few.work.max_sequences) == (512, 30)
    assert not of_run.work.serves and of_server.work.serves and of_server.rollout > of_run.rollout


@pytest.mark.parametrize("prompt, completion, samples", [(1, 1, 1), (65, 64, 8), (300, 1000, 3)])
def test_rows_that_blocks_hold(prompt, completion, samples):
    demand, geometry = BlockDemand(prompt, completion, samples), KVGeometry((None,), (Pages(0, 1, 1, 1),))
    for blocks in range(200):
        fitting = [rows for rows in range(1, 41) if demand.blocks(rows)[0] <= blocks]
        alone = [1] if blocks >= demand.least[0] else []
        assert demand.rows(geometry, geometry.bytes((blocks,)), 40) == max(fitting + alone, default=0)


# Measured peaks

FRAGMENTED = {
    "step-7b-h200", "step-7b-h200-8ab9739", "step-7b-beside-serve-h200", "step-7b-arch80-h200",
    "step-7b-arch80-h200-8ab9739", "step-7b-16k-h200", "step-qwen3.6-35b-a3b-48gb-h200", "step-7b-equal-h200",
    "step-7b-equal-40bcaf5-h200", "step-7b-backward-h200",
}  # fmt: skip
"""Their first passes had all samples of a step, one token of each, and left segments in torch's allocator
that fit no later pass: in use, and to be had back. The last one left fewer than delta nets of other models
do. What they allocate is compared, as of all others."""


def recorded():
    """Rows of the step benchmark whose update is this project's own."""
    rows = []
    for file in sorted(RESULTS.glob("step-*.json")):
        for row in read_rows(file.stem):
            # Samples that end early leave less in memory than the plan, which is of the longest, says.
            longest = row.get("lengths", "equal") == "equal"
            if "update_gb" in row and row.get("engine", "qerl") == "qerl" and longest:
                name = (
                    f"{row['shape']}-{row['weights']}-r{row['lora_rank']}-{row['prompts']}x{row['samples']}"
                )
                rows.append(
                    pytest.param(
                        row | {"file": file.stem}, id=f"{name}x{row['completion_tokens']}-{file.stem}"
                    )
                )
    assert rows, f"{RESULTS} has no step-*.json"
    return rows


def measured_sizes(row):
    """Of the model that the benchmark built: of its published config, or a Qwen2 whose embeddings are not
    tied."""
    if row["shape"] in CONFIGS:
        return Sizes.by_name(row["shape"])
    sizes = with_mixer(SIZES[row["shape"]], qkv_bias=True, qk_norm="")
    positions = row["prompt_tokens"] + row["completion_tokens"] + 64
    return dataclasses.replace(sizes, tied=False, positions=positions)


@pytest.mark.parametrize("row", recorded())
def test_prediction_of_recorded_peaks(row):
    samples = row["prompts"] * row["samples"]
    sizes = measured_sizes(row)
    plan = make_plan(
        sizes,
        work(
            weights=row["weights"],
            published=published_bytes(sizes, declared(row["shape"])),
            rank=row["lora_rank"],
            targets=adapted_linears(sizes, row.get("lora_experts")),
            shared_lora=row.get("lora_experts") != "each",
            prompt_tokens=row["prompt_tokens"],
            completion_tokens=row["completion_tokens"],
            group=row["samples"],
            sequences=samples,
            microbatch=row["microbatch"],
            microbatches=samples // row["microbatch"],
            tokens_per_forward=row.get("tokens_per_forward"),
            every_n_layers=row.get("every_n_layers", 1),
            fp8_backward=row.get("backward_dtype") == "fp8",
            **of_teacher(row.get("teacher"), row["weights"]),
        ),
        GB80,
    )
    before = [line for line in plan.lines if line.name != "teacher"]
    resident = sum(part.update for part in before[: 2 if "resident_without" in row else 3])
    assert resident / 1e9 == pytest.approx(row["resident_gb"], rel=0.01)
    if "update_allocated_gb" in row:
        context = plan.lines[-1].update
        assert (plan.update - context) / 1e9 == pytest.approx(row["update_allocated_gb"], rel=0.05)
    if row["file"] not in FRAGMENTED:
        assert plan.update / 1e9 == pytest.approx(row["update_gb"], rel=0.05)
    # What torch's allocator still holds of the update before is in the measured figure, but can be had back.
    assert plan.rollout / 1e9 < 1.05 * row["rollout_gb"]


# What a plan says


def test_gradients_in_fp8_take_the_largest_weight_once_more_and_a_gradient_beside_it():
    own = {"tokens_per_forward": 8192, "gradient_checkpointing_kwargs": {"every_n_layers": 1}}
    found = []
    for dtype in ("auto", "fp8"):
        plan = plan_command("7b", [], own | {"backward_dtype": dtype}, 80, Console(quiet=True))
        found.append(Activations(plan.sizes, plan.work))
    plain, fp8 = found
    assert fp8.workspace - plain.workspace == 2 * 18944 * 3584, "a byte for each number of gate and up"
    assert plain.working < fp8.working <= plain.working + 2 * 8192 * 3584


def test_phases_and_sharing():
    sizes = SIZES["7b"]
    base = make_plan(sizes, work(), GB80)
    assert base.peak == base.update == sum(part.update for part in base.lines)
    twice = make_plan(sizes, work(microbatches=2), GB80)
    adapter = Adapter(sizes, 32, LINEARS)
    assert twice.update - base.update == adapter.gradients, "a first microbatch leaves its gradients"
    kept, half = (make_plan(sizes, work(every_n_layers=n), GB80) for n in (0, 2))
    assert kept.update > 2 * base.update
    assert base.update < half.update < kept.update
    assert kept.rollout == half.rollout == base.rollout
    counts = [Activations(sizes, work(every_n_layers=n)).recomputed for n in (1, 2, 3, 28, 29, 0)]
    assert counts == [28, 14, 10, 1, 0, 0]


@pytest.mark.parametrize("every", [1, 2, 3, 28])
def test_layers_are_summed_by_their_own_sizes(every):
    """A 7B of which seven layers have narrower heads and a smaller MLP; every n-th is computed again."""
    sizes, step = SIZES["7b"], work(every_n_layers=every)
    (run,) = sizes.runs
    cut = dataclasses.replace(sizes, runs=(Run(7, run.spec), Run(1, run.spec), Run(20, run.spec)))
    assert make_plan(cut, step, GB80).lines == make_plan(sizes, step, GB80).lines
    narrow = with_mixer(sizes, head_size=64).spec
    small = dataclasses.replace(narrow, mlp=dataclasses.replace(narrow.mlp, intermediate=1024))
    mixed = dataclasses.replace(sizes, runs=(Run(7, small), Run(21, run.spec)))
    other = dataclasses.replace(sizes, runs=(Run(28, small),))
    large, little = (Activations(each, step) for each in (sizes, other))
    again = -(-7 // every)
    kept = [LayerActivations(spec, step).kept for spec in (small, run.spec)]
    found = Activations(mixed, step)
    assert found.recomputed == large.recomputed
    assert found.whole_layers == (7 - again) * kept[0] + (21 - large.recomputed + again) * kept[1]
    assert found.workspace == large.workspace > little.workspace
    for count in (
        lambda each: each.parameters - each.vocabulary * each.hidden * 2 - each.hidden,
        lambda each: Weights(each, FORMATS["nvfp4"]).linears,
        lambda each: Adapter(each, 32, LINEARS).parameters,
        lambda each: Cache(each, step).geometry.bytes((1,)),
    ):
        assert 4 * count(mixed) == count(other) + 3 * count(sizes)
    with pytest.raises(QeRLError, match="layers of this model differ"):
        _ = mixed.spec


def test_keys_that_stay_over_the_update_count_there_too():
    """With them a step fits a card that one without could fill more; what does not fit is said to."""
    plans = [make_plan(SIZES["7b"], work(keeps_keys=kept), GB80) for kept in (False, True)]
    (keys,), (stay,) = ([each for each in plan.lines if each.name == "keys and values"] for plan in plans)
    assert keys.update == 0 and stay.update == stay.rollout == keys.rollout > 0
    assert plans[1].update - plans[0].update == keys.rollout and plans[1].rollout == plans[0].rollout
    hybrid = make_plan(Sizes.by_name("qwen3.6-27b"), work(keeps_keys=True), GB80)
    assert all(each.update == each.rollout > 0 for each in hybrid.lines if each.name == "states of layers")
    tight = work(keeps_keys=True, sequences=256, microbatch=64)
    without = dataclasses.replace(tight, keeps_keys=False)
    capacity = next(n * 10**9 for n in range(8, 80) if fastest(SIZES["7b"], without, n * 10**9))
    plan = make_plan(SIZES["7b"], tight, capacity)
    assert changes(plan)[0].startswith("max_staleness: 0")


def test_sequences_that_do_not_fit_wait():
    sizes = SIZES["72b"]
    plan = make_plan(sizes, work(sequences=128, completion_tokens=8192, microbatch=1), GB80)
    assert 0 < plan.sequences < 128
    assert f"{plan.sequences} of 128 sequences decode side by side" in verdict(plan)
    cache = next(part.rollout for part in plan.lines if part.name == "keys and values")
    keys_and_values = Cache(sizes, plan.work)
    needed = [
        keys_and_values.geometry.bytes(keys_and_values.demand.blocks(plan.sequences + more))
        for more in (0, 1)
    ]
    assert needed[0] <= cache < needed[1]


def test_the_head():
    """7B: 2303 hidden states of 3584, of which 2048 predict; 1024 whole rows of 152,064 logits."""
    hidden, scored = 2 * 2303 * 3584, 2048 * 3584
    one = Activations(SIZES["7b"], work(tokens_per_forward=2303))
    assert one.head == hidden + 8 * scored + 4 * 1024 * 152064
    few = Activations(SIZES["7b"], work(prompt_tokens=1, completion_tokens=300, microbatch=1))
    assert few.head == 10 * 300 * 3584 + 4 * 300 * 152064
    many = Activations(SIZES["7b"], work(microbatch=64))
    assert many.head == 2 * (8 * 255 + 131072) * 3584 + 10 * 131072 * 3584


def test_attention_reads_a_long_prompt_once_for_each_of_its_samples():
    """7B: 16 samples of 512 behind 16384 tokens; 28 query heads share 4 key heads."""
    sizes, long = SIZES["7b"], work(prompt_tokens=16384, completion_tokens=512, group=16, microbatch=16)
    t, m = 16383 + 16 * 512, 17 * 16383 + 16 * 512
    assert (long.tokens, long.keys) == (t, m)
    kept = 2 * t * (3584 + 2 * 3584 + 2 * 512 + 3 * 32) + 4 * t * (1 + 28)
    gradients = 2 * t * (3584 + 4 * 3584) + m * (8 * 512 + 4 * 3584)
    assert Activations(sizes, long).working == kept + gradients + 2 * t * 3584
    alone = dataclasses.replace(long, group=1, microbatch=1)
    mlp = 2 * alone.tokens * (2 * sizes.spec.mlp.intermediate + 3584)
    assert LayerActivations(sizes.spec, alone).backward == mlp


@pytest.mark.parametrize("limit, samples", [(None, 6), (40, 6), (39, 5), (31, 3), (16, 2), (3, 1)])
def test_keys_of_a_pass(limit, samples):
    """As the row of a pass gathers them, of two groups of 3 samples of 4 tokens behind prompts of 9."""
    step = work(prompt_tokens=9, completion_tokens=4, group=3, microbatch=6, tokens_per_forward=limit)
    row, left = RowBuilder(), samples
    while left:
        row.begin_group(torch.arange(8))
        for _ in range(min(3, left)):
            left -= 1
            row.add_branch(0, torch.arange(4), torch.arange(4))
    gathered = row.finish(torch.device("cpu"))
    assert step.keys - step.tokens == len(gathered.branches.keys_M) - gathered.input_ids_1L.numel()


def test_delta_nets_beside_gated_attention():
    """Qwen3.5 9B: 8192 channels, 32 value heads of 128, and 16 heads of 256 with 4 of keys."""
    sizes = Sizes.by_name("qwen3.5-9b")
    (net, full), step = (run.spec for run in sizes.runs[:2]), work(targets=sizes.targets)
    t, hidden, intermediate, rank, values = step.tokens, 4096, 12288, 32, 32 * 128
    states = 4 * 8 * 32 * 128 * 128
    behind = 2 * t * (2 * hidden + 3 * intermediate + 4 * rank) + 4 * t
    own = 2 * t * (hidden + 2 * 8192 + 3 * values + 2 * rank) + 4 * t * (1 + 3 * 32) + states
    assert LayerActivations(net, step).kept == own + behind
    convolution = 2 * t * (hidden + values) + 22 * t * 8192
    assert LayerActivations(net, step).backward == convolution - behind
    for tokens, made_again in ((256, 16 * 9), (8192, None)):
        few = work(targets=sizes.targets, microbatch=1, completion_tokens=tokens)
        made_again = 4 * made_again * numbers_of_key_head(2, 128, 128, True) if made_again else WORKING_BYTES
        rule = 2 * few.tokens * (hidden + 2 * values + 2 * 8192) + 2 * states // 8 + made_again
        left = 2 * few.tokens * (2 * hidden + 3 * intermediate + 4 * rank) + 4 * few.tokens
        assert LayerActivations(net, few).backward == rule - left
    plain = dataclasses.replace(full, mixer=dataclasses.replace(full.mixer, gated=False))
    with_gate, without = (LayerActivations(spec, step) for spec in (full, plain))
    assert with_gate.kept - without.kept == 2 * t * 2 * 16 * 256
    # Both linears in front are written one after the other, gate and up at once.
    assert LayerActivations(net, step).workspace == 2 * (
        2 * intermediate * hidden + 2 * rank * 2 * intermediate
    )


def test_states_have_a_line_of_their_own():
    """One of each sequence, whatever its length, and one of each prompt."""
    sizes = Sizes.by_name("qwen3.5-9b")
    lines = []
    for tokens in (512, 2048):
        plan = make_plan(sizes, work(targets=sizes.targets, completion_tokens=tokens, sequences=16), GB80)
        lines.append({line.name: line.rollout for line in plan.lines})
    cache = Cache(sizes, work(targets=sizes.targets, sequences=16))
    by_pool = dict(zip(cache.geometry.pools, cache.geometry.block_bytes, strict=True))
    assert lines[0]["states of layers"] == lines[1]["states of layers"] == by_pool["state"] * (16 + 3)
    assert lines[1]["keys and values"] == by_pool[None] * (16 * 32 + 3 * 4)
    assert by_pool[None] == 8 * 2 * 4 * 256 * 64 * 2, "8 of 32 layers have keys and values"
    assert "states of layers" not in {line.name for line in make_plan(SIZES["7b"], work(), GB80).lines}


def test_bytes_of_a_model_with_delta_nets(tmp_path):
    tiny(DELTA_NETS).save_pretrained(tmp_path)
    model = load_model(tmp_path, "nvfp4", torch.bfloat16, "cpu")
    sizes = Sizes.from_config(json.loads((tmp_path / "config.json").read_text()))
    tensors = list(model.parameters())
    tensors += [b for m in model.modules() if isinstance(m, PackedLinear) for b in m.buffers(recurse=False)]
    assert Weights(sizes, FORMATS["nvfp4"]).bytes == sum(tensor.nbytes for tensor in tensors)
    adapted = add_lora(model, rank=6, alpha=6, dropout=0.0)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert Adapter(sizes, 6, sizes.targets).parameters == sum(p.numel() for p in trained)


def test_normalised_heads_are_kept_twice():
    sizes = SIZES["qwen3-8b"]
    plain, normalised = (
        LayerActivations(with_mixer(sizes, qk_norm=there).spec, work()) for there in ("", "head")
    )
    heads, kv_heads, size = 32, 8, 128
    a_token = 2 * (heads + kv_heads) * size + 4 * (heads + kv_heads)
    assert normalised.kept - plain.kept == work().tokens * a_token


def test_dropout_leaves_layers_to_peft():
    """Each of the seven inputs is kept in fp32 with a mask, instead of three in bf16; no product is joint."""
    sizes = SIZES["7b"]
    spec = sizes.spec
    joint, alone = (LayerActivations(spec, work(lora_dropout=p)) for p in (0.0, 0.1))
    nf4, nf4_dropout = (LayerActivations(spec, work(weights="nf4", lora_dropout=p)) for p in (0.0, 0.1))
    tokens, intermediate = work().tokens, spec.mlp.intermediate
    inputs = tokens * (5 * spec.hidden + spec.mixer.queries + intermediate)
    assert alone.kept - joint.kept == 5 * inputs - 2 * tokens * (2 * spec.hidden + intermediate)
    assert nf4_dropout.kept - nf4.kept == inputs and alone.kept == nf4_dropout.kept
    assert alone.workspace < joint.workspace, "gate and up are written one after the other"
    said = verdict(make_plan(sizes, work(lora_dropout=0.1), GB80))
    assert "run through PEFT, slower and larger: lora_dropout is 0.1." in said
    assert "PEFT" not in verdict(make_plan(sizes, work(), GB80))


def test_chunks():
    """8 samples of 256 + 2048 tokens: 16639 at once, or at most so many; a chunk holds at least a sample."""
    assert work().tokens == work(tokens_per_forward=16639).tokens == 16639
    assert work(tokens_per_forward=16638).tokens == 16638
    assert work(tokens_per_forward=100).tokens == 2303
    assert (work().scored_tokens, work(tokens_per_forward=2303).scored_tokens) == (16384, 2048)
    assert [work(tokens_per_forward=n, microbatches=2).passes for n in (None, 16638, 100)] == [2, 3, 16]
    sizes = SIZES["7b"]
    small, large = (make_plan(sizes, work(tokens_per_forward=n), GB80) for n in (2303, 8192))
    adapter = Adapter(sizes, 32, LINEARS)
    (gradients,) = [part.update for part in small.lines if part.name == "gradients"]
    assert gradients == adapter.gradients, "an earlier chunk leaves its gradients"
    assert small.update < large.update < make_plan(sizes, work(microbatches=2), GB80).update


@pytest.mark.parametrize("limit", [100, 2303, 5000, 8192, 8447, 16893, 16894, 26000, 10**6])
@pytest.mark.parametrize("microbatch", [2, 8, 16])
def test_passes_and_tokens_are_those_of_the_update(limit, microbatch):
    """A step of 48 samples of 256 + 1024 tokens, whose chunks hold samples of any of its microbatches."""
    count = 48 // microbatch
    step = work(completion_tokens=1024, microbatch=microbatch, microbatches=count, tokens_per_forward=limit)
    lengths = Lengths([1024] * 48, [255] * 48, [row // 8 for row in range(48)])
    passes = [lengths.tokens(chunk) for chunk in split_rows(list(range(48)), lengths, limit)]
    assert step.passes <= len(passes) <= step.passes + 1
    assert step.computed_tokens <= sum(passes) <= 1.1 * step.computed_tokens
    if limit not in (8192, 16893):  # where parts of groups are spread evenly, which costs prompts
        assert (step.passes, step.computed_tokens) == (len(passes), sum(passes))
    assert max(passes) <= step.tokens == max(1279, min(limit, lengths.tokens(range(48))))
    assert step.scored_tokens == min(48 * 1024, step.tokens - 255)
    unlimited = dataclasses.replace(step, tokens_per_forward=None)
    assert (unlimited.passes, unlimited.tokens) == (count, step.tokens_of(microbatch))
    assert unlimited.computed_tokens == count * step.tokens_of(microbatch)


def test_filters_take_no_memory(capsys):
    free, *filtered = (
        plan_command("7b", [], {"max_completion_length": 2048, **filters}, 80, Console(quiet=True))
        for filters in ({}, {"top_p": 0.9, "min_p": 0.1}, {"top_k": 50})
    )
    for plan in filtered:
        assert (plan.rollout, plan.update) == (free.rollout, free.update)


def test_an_adapter_that_goes_on_training_is_its_own_reference(tiny_model, tmp_path):
    model = add_lora(tiny_model("llama"), rank=4, alpha=4, dropout=0.0)
    move_adapter(model).save_pretrained(tmp_path / "adapter")
    model.config.save_pretrained(tmp_path)
    Reference(SimpleNamespace(beta=0.1, sync_ref_model=False), model)
    held = sum(p.nbytes for name, p in model.named_parameters() if ".ref." in name)
    lengths = {"max_prompt_length": 32, "max_completion_length": 64}
    continued = lengths | {"adapter": str(tmp_path / "adapter")}
    plans = [
        plan_command(str(tmp_path), [], fields, 80, Console(quiet=True))
        for fields in (continued | {"beta": 0.1}, continued, lengths | {"beta": 0.1, "lora_r": 4})
    ]
    with_copy, without, fresh = plans
    assert {line.name: line.rollout for line in with_copy.lines}["LoRA of the reference"] == held > 0
    assert with_copy.update == without.update + held
    assert [line.name for line in fresh.lines] == [line.name for line in without.lines]


def test_a_teacher_takes_its_weights_and_a_divergence(tmp_path):
    """32B in 16 bits or packed beside 7B; the base itself takes no weights."""
    lengths = {"max_prompt_length": 256, "max_completion_length": 2048, "tokens_per_forward": 2303}
    lengths |= {"gradient_checkpointing_kwargs": {"every_n_layers": 1, "offload": False}}

    def planned(**fields):
        plan = plan_command("7b", [], lengths | fields, 180, Console(quiet=True))
        return plan, {line.name: line for line in plan.lines}

    alone, _ = planned()
    for weights in ("nvfp4", "bf16"):
        taught, lines = planned(algorithm="distill", teacher="32b", teacher_weights=weights)
        held = Weights(SIZES["32b"], FORMATS[weights].on_engine).bytes
        assert lines["teacher"].rollout == lines["teacher"].update == held
        extra = lines["divergence from the teacher"].update
        assert taught.update == alone.update + held + extra
    tile = 4 * 152064 * (8 * 256 - 1024)
    assert extra == 2048 * (2 * 5120 + 4 * 3584) + tile
    _, lines = planned(algorithm="distill", teacher="base", teacher_prompt="{prompt} {answer}")
    assert "teacher" not in lines
    assert lines["divergence from the teacher"].update == 2048 * (2 * 3584 + 4 * 3584) + tile


def test_a_server_samples_from_its_teacher_and_compares_nothing():
    """Beside the weights an adapter's copies and its keys and values; what a client compares is not here."""
    lengths = {"max_prompt_length": 256, "max_completion_length": 2048}
    lengths |= {"gradient_checkpointing_kwargs": {"every_n_layers": 1, "offload": False}}

    def planned(model, tokens, **fields):
        fields = lengths | {"tokens_per_forward": tokens, "per_device_train_batch_size": 16} | fields
        plan = plan_command(model, [], fields, 180, Console(quiet=True), adapters=1)
        return plan, {line.name: line for line in plan.lines}

    extra = []
    # Of 128 numbers each: layers and key heads.
    for model, teacher, tokens, times in (
        ("7b", "32b", 2303, 64 * 8 / (28 * 4)),
        ("1.5b", "72b", 18000, 80 * 8 / (28 * 2)),
    ):
        taught = {"algorithm": "distill", "teacher": teacher, "teacher_weights": "nvfp4"}
        (alone, before), (beside, lines) = planned(model, tokens), planned(model, tokens, **taught)
        theirs, work = SIZES[teacher], beside.work
        held = Weights(theirs, FORMATS["nvfp4"].on_engine).bytes
        held += Adapter(theirs, 32, work.targets).copies
        assert lines["teacher"].rollout == lines["teacher"].update == held
        keys, own_keys = lines["keys and values"].rollout, before["keys and values"].rollout
        assert keys == pytest.approx(times * own_keys, rel=1e-6)
        assert beside.rollout == alone.rollout + held + keys - own_keys
        # The larger of a layer with the hidden states and of the head, beyond what the update takes.
        t, s, d = work.tokens, work.scored_tokens, theirs.hidden
        a_layer = 2 * t * d + LayerActivations(theirs.spec, work).kept + 2 * s * d
        whole, own = Activations(theirs, work), Activations(beside.sizes, work)
        extra.append(lines["scores of the teacher"].update)
        assert extra[-1] == max(0, max(a_layer, whole.head) - own.kept - own.working)
        assert beside.update == alone.update + held + extra[-1]
        assert "divergence from the teacher" not in lines
    assert extra[0] == 0 < 1e9 < extra[1]
    _, lines = planned("7b", 2303, algorithm="distill", teacher="base", teacher_prompt="{prompt} {answer}")
    assert "teacher" not in lines and lines["scores of the teacher"].update == 0


def test_positions_of_a_stretched_rotary_embedding():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    config = {"model_type": "qwen2", "max_position_embeddings": 32768, "rope_parameters": rope}
    assert Sizes.from_config(config).positions == 131072


def test_several_processes_hold_buckets_of_gradients(capsys):
    one, two = (
        plan_command("7b", [], {"max_completion_length": 2048}, 80, Console(quiet=True), n) for n in (1, 2)
    )
    adapter = Adapter(two.sizes, two.work.rank, two.work.targets)
    assert {p.name: p.update for p in two.lines}["buckets of gradients"] == 4 * adapter.parameters
    assert "buckets of gradients" not in {part.name for part in one.lines}
    assert main(["plan", "7b", "--processes", "2"]) == 0
    said = capsys.readouterr().out
    assert "buckets of gradients" in said and "on each of 2 GPUs" in said
