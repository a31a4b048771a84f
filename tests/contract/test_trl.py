"""What `qerl.trainer.trl` relies on in TRL's source: the first tests to read when the pin of TRL moves."""

import ast
import inspect
import textwrap

from qerl.trainer.batch import PADDED_ON
from qerl.trainer.trl.client import EngineClient
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

# Tensors of a rollout without a token axis, what only images have, and what the loss computes itself here.
_OTHERS = {"advantages", "num_items_in_batch", "importance_sampling_ratio"}
_IMAGES = {
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes",
    "token_type_ids", "mm_token_type_ids", "image_position_ids", "num_images", "num_tiles",
}  # fmt: skip


def tree(method) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method))))


def calls(method, name: str) -> list[ast.Call]:
    """Calls of `self.NAME` or `self.….NAME` in a method."""
    nodes = (node for node in ast.walk(tree(method)) if isinstance(node, ast.Call))
    return [node for node in nodes if isinstance(node.func, ast.Attribute) and node.func.attr == name]


def test_every_tensor_of_a_rollout_is_known() -> None:
    """One with a token axis that dynamic sampling does not know would not be padded."""
    found = set()
    for node in ast.walk(tree(GRPOTrainer._generate_and_score_completions)):
        match node:
            case ast.Assign([ast.Subscript(ast.Name("output"), ast.Constant(key))]):
                found.add(key)
            case ast.Assign([ast.Name("output")], ast.Dict(keys)):
                found |= {ast.literal_eval(key) for key in keys if key is not None}
    ours = {"sampling_entropies"}  # put beside TRL's by the rollout
    assert found == (PADDED_ON.keys() - ours) | _OTHERS | _IMAGES


def test_the_engine_is_called_as_trls_client_is() -> None:
    (call,) = calls(GRPOTrainer._generate_single_turn, "generate")[:1]
    assert {keyword.arg for keyword in call.keywords} == inspect.signature(
        EngineClient.generate
    ).parameters.keys() - {"self"}


def test_the_order_of_the_data_has_the_parts_that_are_replaced() -> None:
    names = inspect.signature(RepeatSampler).parameters
    assert {
        "data_source",
        "mini_repeat_count",
        "batch_size",
        "repeat_count",
        "shuffle",
        "seed",
    } <= names.keys()
    source = inspect.getsource(RepeatSampler.__init__)
    assert "self.generator" in source and "self.seed" in source and "self.shuffle" in source
