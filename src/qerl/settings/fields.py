"""The fields that QeRL adds to TRL's, or gives another default: one line and one sentence each.

A field has a name, a type that is checked when settings are made (`qerl.settings.checks`), a default, and the
sentence that `qerl fields`, `qerl train --help` and docs/configuration.md show. Their order here is the order
there. What follows from fields that are set is in `qerl.settings.config`.

Scripts for TRL make settings with its `TrlParser`, or transformers' `HfArgumentParser`. Both hand a field's
metadata to argparse, which knows `help` alone, and overwrite its type with one that argparse calls. So the
metadata are its `Sentence`, and its type is read from `OWN_TYPES`.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BeforeValidator, Field

from qerl.noise.draw import NoiseScale
from qerl.noise.schedule import NoiseKind
from qerl.rollout.engine import KvCacheDtype
from qerl.settings.checks import (
    Count,
    Drafted,
    Names,
    NonNegative,
    Options,
    Passage,
    Passages,
    Positive,
    PositiveInt,
    PositiveShare,
    ShareBelow1,
    ShareOrSteps,
    Text,
)
from qerl.settings.foreign import not_of_studies_alone
from qerl.weight_formats import DEFAULT_FORMAT, DEFAULT_ROUNDING, Rounding, WeightFormatName

LossType = Literal["grpo", "dapo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo"]
RatioCorrection = Annotated[
    Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    BeforeValidator(not_of_studies_alone),
]


class Sentence(str):
    """What `qerl fields` says of a field.

    Attributes:
        instead_of_trl: Why the default differs from the parent's; empty where it does not.
        group: Heading that begins with this field; empty where the field belongs to the heading before.
    """

    instead_of_trl: str
    group: str

    def __new__(cls, text: str, instead_of_trl: str, group: str) -> "Sentence":
        sentence = super().__new__(cls, text)
        sentence.instead_of_trl, sentence.group = instead_of_trl, group
        return sentence


def _help(
    text: str,
    default: Any = dataclasses.MISSING,
    factory: Any = dataclasses.MISSING,
    instead_of_trl: str = "",
    group: str = "",
) -> Any:
    """A field: its default and the `Sentence` that describes it.

    Args:
        text: The sentence.
        default: Value where nobody sets the field.
        factory: Makes the default, in place of ``default``.
        instead_of_trl, group: As in `Sentence`.
    """
    sentence = Sentence(text, instead_of_trl, group)
    return field(default=default, default_factory=factory, metadata={"help": sentence})


@dataclass
class NewFields:
    """Fields that TRL has not, and those of its algorithm whose defaults follow from `algorithm`."""

    model: Text | None = _help(
        "Hub id, local folder or .gguf file of the base model; required.", None, group="Model"
    )
    weights: WeightFormatName = _help(
        "Format of the frozen linear layers: nvfp4, mxfp4, nf4 or bf16 (unquantised).", DEFAULT_FORMAT
    )
    rounding: Rounding = _help(
        "How an unquantised checkpoint is rounded while loading: mse (least error) or rtn (nearest).",
        DEFAULT_ROUNDING,
    )
    dtype: Literal["auto", "float32", "bfloat16"] = _help(
        "Precision of activations, embeddings, norms and head; auto is float32 on the CPU and for full "
        "tuning, bfloat16 otherwise.",
        "auto",
    )
    tuning: Literal["lora", "full"] = _help(
        "Train LoRA adapters or all weights (full: bf16 weights only).", "lora"
    )
    adapter: Text | None = _help(
        "Folder of a LoRA adapter that goes on training, with its own rank, alpha, dropout and target "
        "modules; unset, a fresh one.",
        None,
        group="Adapter",
    )
    lora_r: PositiveInt = _help("Rank of the adapters.", 32)
    lora_alpha: PositiveInt = _help("Numerator of LoRA's scale alpha / r.", 32)
    lora_dropout: ShareBelow1 = _help("Dropout on the adapters' input.", 0.0)
    lora_target_modules: Annotated[Names, Field(min_length=1)] | None = _help(
        "Names of the linear layers that get an adapter; unset, all of the decoder.", None
    )

    task: Text | None = _help(
        "Task to train on (gsm8k, bigmath, arithmetic, jsonl:PATH, PATH.py:Class, mixture, ...); required.",
        None,
        group="Task and rewards",
    )
    task_options: Options = _help("Keyword arguments of the task, for example {level: wp1}.", factory=dict)
    reward_files: Names = _help(
        "Reward functions of your own, each PATH.py:function, or PATH.py where the file has only one.",
        factory=list,
    )
    judge: Options = _help(
        "A model behind an OpenAI-compatible endpoint as a reward: {url: http://127.0.0.1:8000/v1, model: "
        "NAME}, and the other arguments of qerl.rewards.judge.Judge; empty for none.",
        factory=dict,
    )
    reward_timeout: Positive = _help("Seconds a reward function may take for one sample.", 10.0)
    reward_errors: Literal["stop", "tolerate"] = _help(
        "A reward function that fails on every sample of a step ends the run (stop), or the run goes on "
        "with zeros, without any reward of a judge or a sandbox (tolerate).",
        "stop",
    )
    early_rewards: bool = _help(
        "Call reward functions that ask outside of this process (a judge, programs in the sandbox, your own "
        "marked with judges_outside) for each completion as soon as it is finished, while others are "
        "sampled; all other functions are called after the rollout, as without it.",
        False,
    )
    max_prompt_length: PositiveInt | None = _help(
        "Largest number of tokens of a prompt; longer ones are left out and counted.", None
    )
    curriculum: bool = _help(
        "Sample problems less that were solved always or never when they were last sampled; one other "
        "outcome brings a problem back.",
        False,
    )
    curriculum_floor: PositiveShare = _help(
        "Smallest chance with which such a problem keeps its place in a rollout.", 0.1
    )
    eval_samples: PositiveInt = _help("Number of held-out problems for evaluation while training.", 64)
    early_stopping_patience: PositiveInt | None = _help(
        "Number of evaluations in a row without a better metric_for_best_model after which training ends; "
        "unset, it goes on to its last step.",
        None,
    )
    early_stopping_threshold: NonNegative = _help(
        "How much the metric must be better than the best so far to count, with early_stopping_patience.", 0.0
    )

    tools: Names = _help(
        "Functions that the model may call, each PATH.py:function or the name of a built-in one "
        "(calculator); they need a chat template with tools.",
        factory=list,
        group="Tools and environments",
    )
    environment: Text | None = _help(
        "Environment of each sample: PATH.py:Class, or the name of a built-in one (calculator, "
        "guess_number).",
        None,
    )
    environment_options: Options = _help("Keyword arguments of the environment.", factory=dict)
    tool_timeout: Positive = _help(
        "Seconds that a call of a tool, or an answer of an environment, may take.", 30.0
    )
    tool_errors: Literal["text", "end"] = _help(
        "A call that raises or takes too long is told to the model as a text (text) or ends its trajectory "
        "(end).",
        "text",
    )
    tool_output_limit: PositiveInt = _help(
        "Largest number of characters of what a tool or an environment answers; longer answers are cut.", 4000
    )

    algorithm: Literal["grpo", "dapo"] = _help(
        "Preset for the other fields of this group, but for the loss, that are left unset.",
        "grpo",
        group="Algorithm",
    )
    loss_type: LossType = _help(
        "Loss, by TRL's names, with either algorithm: dapo is the mean over all tokens of the batch; grpo, "
        "that of GRPO's paper, the mean of each sample's own mean, in which a token of a long sample counts "
        "less, so that wrong answers grow long; docs/numerics.md has the others.",
        "dapo",
    )
    epsilon_high: NonNegative | None = _help(
        "Upper clip distance; unset, `epsilon` for GRPO and 0.28 for DAPO.", None
    )
    mask_truncated_completions: bool = _help(
        "Leave truncated samples out of the loss, and out of the mean and standard deviation of their group, "
        "in which TRL leaves them, so that the advantages that the loss sees add up to 0 "
        "(docs/numerics.md).",
        False,
    )
    dynamic_sampling_rounds: Count | None = _help(
        "Largest number of extra rollouts per step, each of which replaces groups without signal.", None
    )
    signal: Literal["accuracy", "reward"] | None = _help(
        "Which groups have a signal: those with right and wrong samples by the reward function `accuracy` or "
        "the only one (accuracy; right is above 0), or those whose rewards differ (reward). Unset, the "
        "algorithm decides.",
        None,
    )
    pass_at_k: Annotated[int, Field(ge=2)] | None = _help(
        "Reward the best of k samples in place of each sample by itself, k below num_generations, with "
        "scale_rewards: none or batch; unset, each by itself.",
        None,
    )
    overlong_buffer: ShareBelow1 | None = _help(
        "Share of max_completion_length over which the length penalty grows from 0 to -1; 0 turns it off.",
        None,
    )

    noise: bool = _help(
        "Adaptive quantization noise in the RMSNorm weights of rollouts. Off, because it helped in no study "
        "here (docs/method.md). True is the paper's noise, for which the loss corrects; with "
        "vllm_importance_sampling_correction: false it does not, as in the paper. A recipe or command line "
        "that sets a field noise_... has to set this too. In Python and for TRL's parsers, which do not tell "
        "what was set, the schedule (noise_sigma_start, noise_sigma_end, noise_stages, noise_schedule) is "
        "ignored without it.",
        False,
        group="Noise",
    )
    noise_scale: NoiseScale = _help(
        "What sigma counts in: absolute, the units of the norm weights (the paper's), or relative, shares of "
        "each norm weight, which mean the same in every layer and model.",
        "absolute",
    )
    noise_sigma_start: Positive = _help("Standard deviation in the first noisy stage.", 1e-2)
    noise_sigma_end: Positive = _help("Standard deviation in the last stage.", 5e-4)
    noise_stages: Annotated[int, Field(ge=2)] = _help("Stages of the schedule, the first without noise.", 10)
    noise_schedule: NoiseKind = _help("Shape of the decay over the stages.", "exponential")

    max_sequences: PositiveInt | None = _help(
        "Largest number of sequences decoded at the same time; unset, 64 (portable engine) or 512 (paged "
        "engine).",
        None,
        group="Rollouts and update",
    )
    stop_strings: Passages = _help(
        "Texts that end a completion, or in a trajectory of several turns a turn, with the token that "
        "completes one; the text stays in it. For transformers' generate this is stop_strings, for vLLM "
        "stop with include_stop_str_in_output.",
        factory=list,
    )
    thinking_budget: PositiveInt | None = _help(
        "Largest number of tokens of a turn before its thoughts, from `<think>` to `</think>`, are closed by "
        "thinking_end, which is masked as what tools say is; the model goes on within max_completion_length. "
        "Unset, it thinks as long as it likes.",
        None,
    )
    thinking_end: Passage = _help("Text that closes thoughts, with `</think>` in it.", "\n</think>\n\n")

    kv_cache_dtype: KvCacheDtype = _help(
        "Format of the keys and values of rollouts: auto (bfloat16) or fp8 (E4M3 without scales, which takes "
        "half the memory; paged engine only). fp8 is experimental: `python -m bench parity` measures it "
        "on your model. It is refused for models whose keys have a bias (Qwen2, Qwen2.5).",
        "auto",
    )

    speculative_tokens: Drafted = _help(
        "Largest number of tokens, up to 15, that are drafted for a sequence where at most four run, and "
        "computed in one pass: what followed its last tokens in itself or in other samples of its prompt. "
        "Samples are those drawn without drafts, up to rounding. 0 drafts none. A draft costs a "
        "large model little; what it wins depends on how often completions repeat themselves.",
        0,
    )

    tokens_per_forward: PositiveInt | None = _help(
        "Largest number of tokens in one forward pass of the update; a microbatch with more is computed in "
        "chunks, with the same gradients. Unset, it is what `qerl plan` finds to fit on a GPU, and there is "
        "no limit on the CPU.",
        None,
    )


@dataclass
class ChangedFields:
    """Fields of TRL and transformers whose defaults or meaning are others here."""

    bf16: bool | None = _help(
        "Autocast is not used: `dtype` sets the precision of sampler and trainer alike.",
        False,
        instead_of_trl="Autocast would make the trainer's policy differ from the sampler's.",
        group="Fields of TRL and transformers with another default or meaning",
    )
    metric_for_best_model: Text | None = _help(
        "Metric by which load_best_model_at_end chooses; unset, eval_reward. Evaluations compute no loss: "
        "eval_loss is minus eval_reward.",
        None,
    )
    per_device_eval_batch_size: PositiveInt | None = _help(
        "Number of completions that an evaluation samples at a time on each device, in whole groups; unset, "
        "1024, or 64 where an environment answers.",
        None,
        instead_of_trl="No loss bounds it by its memory, and 8 leave most rows of the engine empty.",
    )
    learning_rate: NonNegative | None = _help(
        "Initial learning rate of the optimizer; unset, 1e-5 for adapters and 1e-6 where `tuning` is full.",
        None,
        instead_of_trl="TRL's 1e-6 suits training all weights; the paper trains adapters on NVFP4 with 1e-5.",
    )
    logging_steps: ShareOrSteps = _help(
        "Number of optimizer steps between two log lines.",
        1,
        instead_of_trl="A step has a rollout and takes minutes; the curve of a run has few points to spare.",
    )
    logging_nan_inf_filter: bool = _help(
        "Whether the logged loss leaves out losses that are not finite.",
        False,
        instead_of_trl="To look at each loss makes several processes wait; a gradient that is not finite "
        "ends the run.",
    )
    num_completions_to_print: PositiveInt | None = _help(
        "With log_completions: how many completions of a logged step are printed; null prints all of them.",
        1,
        instead_of_trl="All of them are in the run folder, where `qerl report` and `qerl watch` find them.",
    )
    vllm_importance_sampling_mode: RatioCorrection = _help(
        "How the loss corrects for the ratio of trainer to sampler probabilities, per token or per sequence: "
        "truncated at the bounds, or masked beyond them.",
        "token_truncate",
        instead_of_trl="With noise each token shifts a little; over a sequence that masks most long samples.",
    )
    ddp_broadcast_buffers: bool | None = _help(
        "Whether the first of several processes sends the others its buffers in every pass; it cannot be on.",
        False,
        instead_of_trl="The packed weights are buffers that never change; DDP would send them in every pass.",
    )
    ddp_find_unused_parameters: bool | None = _help(
        "Whether several processes look for adapters without a gradient; it cannot be on.",
        False,
        instead_of_trl="Every backward pass computes a sample, so all adapters have a gradient.",
    )


@dataclass
class OwnFields(ChangedFields, NewFields):
    """All of them, the new ones first; `qerl.settings.config.QeRLConfig` is what users make."""


OWN_NAMES = tuple(spec.name for spec in dataclasses.fields(OwnFields))

OWN_TYPES: dict[str, Any] = get_type_hints(OwnFields, include_extras=True)
"""Type of each of these fields by its name, with its range."""
