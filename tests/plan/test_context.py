"""The longest completions: what `python -m bench context` wrote, beside the plan as it is now."""

import contextlib
import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import bench.result
from bench import context
from bench.result import RESULTS, read_rows
from lab.writers import card_tables
from qerl.errors import QeRLError
from qerl.families.sizes import SIZES
from qerl.gpu_memory import LIMIT, limit_gb, usable_bytes
from qerl.plan.phases import make_plan
from tests.support.plan import GB80, work


def compare(row):
    """Fails where the plan is more than 5 % off. It is that of today, not that of the day of the run.

    What is in use is compared where the plan leaves less than a fifth of the memory, or the update got no
    more than it needs: torch keeps what it has freed as long as there is more, so elsewhere it says how much
    there was.
    """
    sizes = dataclasses.replace(SIZES[row["shape"]], tied=False)
    asked = work(
        weights=row["weights"],
        rank=row["lora_rank"],
        prompt_tokens=row["prompt_tokens"],
        completion_tokens=row["completion_tokens"],
        microbatches=2,
        tokens_per_forward=row["tokens_per_forward"],
        every_n_layers=row["every_n_layers"],
        offload=row.get("offload", False),
    )
    plan = make_plan(sizes, asked, round(row["capacity_gb"] * 1e9))
    allocated = plan.update - plan.lines[-1].update
    assert allocated / 1e9 == pytest.approx(row["update_allocated_gb"], rel=0.05)
    if plan.update > 0.8e9 * row["capacity_gb"] or "held_gb" in row:
        assert plan.update / 1e9 == pytest.approx(row["update_gb"], rel=0.05)
    if "rollout_gb" in row:  # a run may be cut short ahead of it
        assert plan.rollout / 1e9 == pytest.approx(row["rollout_gb"], rel=0.05)


RECORDED = [row for file in sorted(RESULTS.glob("context-*.json")) for row in read_rows(file.stem)]


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: f"{row['shape']}-{row['completion_tokens']}")
def test_prediction_of_recorded_long_completions(row):
    compare(row)


def test_an_update_is_held_to_what_was_asked(monkeypatch):
    kept = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(context, "keep_within_limit", lambda device: kept.append(limit_gb()))
    monkeypatch.setenv(LIMIT, "80")
    with pytest.raises(QeRLError), context.held_to(42.9):
        assert usable_bytes(limit_gb()) == pytest.approx(42.9e9, abs=10)
        raise QeRLError("memory ran out")
    assert kept == [80]
    monkeypatch.delenv(LIMIT)
    with context.held_to(42.9):
        pass
    assert kept == [80, None]


class CutShort(Exception):
    pass


@pytest.fixture
def on_80_gb(monkeypatch, tmp_path):
    """`bench context` on a GPU of 80 GB that takes what was planned times a factor; results of its own."""
    monkeypatch.setattr(context, "total_bytes", lambda device: GB80)
    monkeypatch.setattr(context, "is_unified", lambda device: False)
    monkeypatch.setattr(context, "gauge", lambda: contextlib.nullcontext(SimpleNamespace(take=lambda: None)))
    where = {"commit": "0123abc", "date": "2026-11-23", "gpu": "NVIDIA H200"}
    monkeypatch.setattr(bench.result, "provenance", lambda command: {"command": command, **where})
    for module in (bench.result, card_tables):
        monkeypatch.setattr(module, "RESULTS", tmp_path)

    def run(tokens, factor=1.0, cut=False, options=()):
        def measure(plan, hold):
            took = factor * plan.update / 1e9
            allocated = factor * (plan.update - plan.lines[-1].update) / 1e9
            held = {"held_gb": 1.05 * plan.update / 1e9} if hold else {}
            yield {"update_s": 9.0, "update_gb": took, "update_allocated_gb": allocated} | held
            if cut:
                raise CutShort
            yield {"rollout_gb": factor * plan.rollout / 1e9, "prefill_s": 8.0, "step_ms": 7.0}

        monkeypatch.setattr(context, "measure", measure)
        context.main(["--tokens", str(tokens), "--out", str(tmp_path / "context-made-up.json"), *options])
        return read_rows("context-made-up")

    return run


@pytest.mark.parametrize("tokens", [98304, 131072])
def test_a_new_result_is_compared_and_stands_in_the_table(on_80_gb, monkeypatch, tokens):
    monkeypatch.setenv("QERL_HOST_GB", "200")
    (row,) = on_80_gb(tokens)
    compare(row)
    cells = f"{row['update_gb']:.1f} ({row['update_gb']:.1f}) | {row['rollout_gb']:.1f} ("
    where = "CPU, 77 GB of it" if tokens == 131072 else "GPU"
    assert f"| Qwen3 8B, 85 GB | {tokens} | {where} | {cells}" in card_tables.context()
    (off,) = on_80_gb(tokens, factor=1.07)
    with pytest.raises(AssertionError):
        compare(off)


def test_a_run_that_is_cut_short_keeps_its_update(on_80_gb, monkeypatch, tmp_path):
    monkeypatch.setenv("QERL_HOST_GB", "200")
    with pytest.raises(CutShort):
        on_80_gb(131072, cut=True)
    (row,) = json.loads((tmp_path / "context-made-up.json").read_text())["rows"]
    assert row["update_s"] == 9.0 and "rollout_gb" not in row
    compare(read_rows("context-made-up")[0])
    said = card_tables.context()
    assert "| 9 | |" in said and "the run ended ahead of it" in said


def test_an_update_that_was_held_is_compared_wherever_there_is_more_memory(on_80_gb, monkeypatch):
    monkeypatch.setenv("QERL_HOST_GB", "200")
    (row,) = on_80_gb(131072, options=["--hold"])
    assert row["planned_update_gb"] < 0.8 * row["capacity_gb"]
    compare(row)
    assert f"Qwen3 8B's update was given {row['held_gb']:.1f} GB at most. " in card_tables.context()
    (more,) = on_80_gb(131072, options=["--hold"])
    with pytest.raises(AssertionError):
        compare(more | {"update_gb": 1.07 * more["update_gb"]})
    compare({key: value for key, value in more.items() if key != "held_gb"} | {"update_gb": 60.0})


def test_where_the_cpus_memory_has_no_room_the_refusal_says_so(on_80_gb, monkeypatch):
    """77.3 GB are pinned; the system gives 24, the environment 200."""
    monkeypatch.delenv("QERL_HOST_GB", raising=False)
    monkeypatch.setattr(context, "host_bytes", lambda processes: 24 * 10**9)
    refusal = (
        r"A completion of 131072 tokens does not fit this GPU by the plan\. It would fit with layer inputs "
        r"offloaded to CPU memory, but 77\.3 GB are pinned there, where 24\.0 GB may be used; if this "
        r"machine has more than it reports, set QERL_HOST_GB to the GB that a run may take\."
    )
    with pytest.raises(QeRLError, match=refusal):
        on_80_gb(131072)
    with pytest.raises(QeRLError, match=r"does not fit this GPU by the plan; `qerl plan` says why\."):
        on_80_gb(10**6)
