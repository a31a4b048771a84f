"""The settings of a run in six groups: the model, its data, sampling, loss, noise, and the run itself.

Each field is declared once: its type with its range, its default, and below it the sentence that `qerl
fields`, `qerl train --help` and docs/configuration.md show, in the order in which they show it. The flat
dataclass `qerl.settings.config.QeRLConfig` has its fields from here, each under its alias, else its name, and
gives the groups back as `QeRLConfig.groups`.

Fields that contradict each other are found by the plain functions of a group's `rules`, and by those of
`Settings` across groups. They run twice: on the fields as given, in which None means unset, and on those of
the finished settings.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from qerl.errors import QeRLError
from qerl.noise.draw import NoiseScale
from qerl.noise.schedule import NoiseKind, NoiseSchedule
from qerl.rollout.engine import KvCacheDtype
from qerl.settings.algorithms import CLIPPED, UNSAID
from qerl.settings.checks import (
    MOST,
    Count,
    Group,
    Names,
    NonNegative,
    Options,
    Passage,
    Passages,
    Positive,
    PositiveInt,
    PositiveShare,
    Share,
    ShareBelow1,
    ShareOrSteps,
    Text,
)
from qerl.settings.foreign import not_of_studies_alone
from qerl.settings.parents import TrainerFields
from qerl.weight_formats import (
    AS_PUBLISHED,
    DEFAULT_FORMAT,
    DEFAULT_ROUNDING,
    FORMATS,
    Rounding,
    WeightFormatName,
)


def _default(group: Group, name: str) -> Any:
    return type(group).model_fields[name].default


# --- Model --------------------------------------------------------------------------------------------------


def _full_needs_dense_weights(model: Any) -> None:
    weights = model.weights or DEFAULT_FORMAT
    if model.tuning == "full" and not FORMATS[weights].trains_in_full:
        raise QeRLError(
            f"tuning: full cannot train packed {weights} weights; set weights: bf16 or tuning: lora."
        )


class Model(Group):
    """Which weights are trained, in which formats, and the adapter on them."""

    model_config = ConfigDict(alias_generator=lambda name: "model" if name == "name" else name)
    rules = (_full_needs_dense_weights,)

    name: Text | None = None
    """Hub id, local folder or .gguf file of the base model; required."""
    weights: WeightFormatName | None = None
    """Format of the frozen linear layers: nvfp4, mxfp4, nf4, bf16 (unquantised) or as-published (each layer
    as its folder has it); unset, the format of a packed folder, as-published for a folder in several formats,
    else nvfp4."""
    rounding: Rounding = DEFAULT_ROUNDING
    """How an unquantised checkpoint is rounded while loading: mse (least error) or rtn (nearest)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of activations, embeddings, norms and head; auto is float32 on the CPU and for full tuning,
    bfloat16 otherwise."""
    tuning: Literal["lora", "full"] = "lora"
    """Train LoRA adapters or all weights (full: bf16 weights only)."""
    adapter: Text | None = None
    """Folder of a LoRA adapter to continue training, with its own rank, alpha, dropout and target modules;
    unset, a fresh adapter."""
    lora_r: PositiveInt = 32
    """Rank of the adapters."""
    lora_alpha: PositiveInt = 32
    """Numerator of LoRA's scale alpha / r."""
    lora_dropout: ShareBelow1 = 0.0
    """Dropout on the adapters' input."""
    lora_target_modules: Annotated[Names, Field(min_length=1)] | None = None
    """Names of the linear layers that get an adapter; unset, all of the decoder except those of experts."""
    lora_experts: Literal["shared", "each"] = "shared"
    """If linears of experts get adapters: one for all experts of a layer (shared), or one per expert
    (each)."""
    disable_dropout: bool = False
    """Turn off all dropout of the model, including that of its adapters."""
    cast_lm_head_to_fp32: bool = False
    """Compute the head in float32; its weights must not be tied to the embeddings."""
    trust_remote_code: bool = False
    """Load models and tokenizers that come with their own Python code, which then runs here."""
    router_aux_loss_coef: NonNegative | None = None
    """Weight of the router's loss of a mixture of experts, which must be 0; unset, 0 for adapters, with which
    routers are frozen."""
    model_init_kwargs: Options | None = None
    """Arguments of transformers' from_pretrained; each sets the field that means the same, such as dtype, or
    is refused."""


# --- Data ---------------------------------------------------------------------------------------------------


def _floor_needs_curriculum(data: Any) -> None:
    if data.curriculum_floor != _default(data, "curriculum_floor") and not data.curriculum:
        raise QeRLError("curriculum_floor needs a curriculum; set curriculum: true, or remove it.")


class Data(Group):
    """The task with its prompts and rewards, and the tools and environments that answer the model."""

    rules = (_floor_needs_curriculum,)

    task: Text | None = None
    """Task to train on (gsm8k, bigmath, arithmetic, jsonl:PATH, demonstrations:PATH, PATH.py:Class, mixture,
    ...); required."""
    task_options: Options = {}
    """Keyword arguments of the task, for example {level: wp1}."""
    reward_files: Names = []
    """Reward functions of your own, each PATH.py:function, or PATH.py where the file has only one."""
    judge: Options = {}
    """A model behind an OpenAI-compatible endpoint as a reward: {url: http://127.0.0.1:8000/v1, model: NAME},
    and the other arguments of qerl.rewards.judge.Judge; empty for none."""
    reward_timeout: Positive = 10.0
    """Seconds a reward function may take for one sample."""
    reward_errors: Literal["stop", "tolerate"] = "stop"
    """If a reward function fails on every sample of a step, end the run (stop), or go on with zeros, or with
    no reward at all from a judge or a sandbox (tolerate)."""
    max_prompt_length: PositiveInt | None = None
    """Largest number of tokens of a prompt; longer ones are left out and counted."""
    chat_template_kwargs: Options | None = None
    """Arguments of the chat template, for example {enable_thinking: false}."""
    shuffle_dataset: bool = True
    """Take the problems in a random order, a new one in each epoch."""
    max_length: PositiveInt | None = 1024
    """With algorithm: sft: largest number of tokens of a demonstration; longer ones are cut at their end.
    Null cuts none."""
    completion_only_loss: bool | None = None
    """With algorithm: sft: whether the loss of a prompt with its completion covers only the completion;
    unset, it does."""
    assistant_only_loss: bool | None = None
    """With algorithm: sft: whether the loss covers only the assistant's turns, all of them; unset, it does
    for `messages`."""
    curriculum: bool = False
    """Sample problems less often whose latest groups were all right or all wrong; a group with mixed outcomes
    brings a problem back."""
    curriculum_floor: PositiveShare = 0.1
    """Smallest probability with which a problem that curriculum samples less keeps its place in a rollout."""
    eval_samples: PositiveInt = 64
    """Number of held-out problems for evaluation while training."""
    tools: Names = []
    """Functions that the model may call, each PATH.py:function or the name of a built-in one (calculator);
    they need a chat template with tools."""
    environment: Text | None = None
    """Environment of each sample: PATH.py:Class, the name of a built-in one (calculator, guess_number), or
    endpoint:PATH.py:function for an agent that speaks OpenAI's chat API to the policy."""
    environment_options: Options = {}
    """Keyword arguments of the environment; for an endpoint timeout, at_once, process, host and port."""
    max_tool_calling_iterations: PositiveInt | None = None
    """Largest number of turns of a sample that tools or an environment answer; unset, as many as
    max_completion_length allows."""
    tool_timeout: Positive = 30.0
    """Seconds that a call of a tool, or an answer of an environment, may take."""
    tool_errors: Literal["text", "end"] = "text"
    """A tool call that raises or takes too long is reported to the model as text (text) or ends its
    trajectory (end)."""
    tool_output_limit: PositiveInt = 4000
    """Largest number of characters of what a tool or an environment answers; longer answers are cut."""


# --- Sampling -----------------------------------------------------------------------------------------------


def _budget_leaves_an_answer(sampling: Any) -> None:
    budget, longest = sampling.thinking_budget, sampling.max_completion_length
    if budget is not None and budget >= longest:
        raise QeRLError(
            f"thinking_budget is {budget}; it must be below max_completion_length, which is {longest}, to "
            "leave room for an answer."
        )
    if budget is None and sampling.thinking_end != _default(sampling, "thinking_end"):
        raise QeRLError("thinking_end needs a thinking_budget; set it, or remove thinking_end.")


class Sampling(Group):
    """How completions are drawn, how many, and where they end."""

    rules = (_budget_leaves_an_answer,)

    num_generations: Annotated[int, Field(ge=2, le=MOST)] = 8
    """Number of samples per prompt, which form a group."""
    num_generations_eval: PositiveInt | None = None
    """Number of samples per prompt in evaluations; unset, num_generations."""
    steps_per_generation: PositiveInt | None = None
    """Number of microbatches sampled at a time; unset, those of one optimizer step
    (gradient_accumulation_steps)."""
    generation_batch_size: PositiveInt | None = None
    """Number of completions sampled at a time over all processes, in place of steps_per_generation."""
    temperature: Positive = 1.0
    """Temperature of sampling, and of the policy that is trained."""
    top_p: PositiveShare = 1.0
    """Draw from the likeliest tokens that together have this share of the probability."""
    top_k: Count = 0
    """Draw from this number of likeliest tokens; 0 for all."""
    min_p: Share | None = None
    """Smallest probability of a token to draw, as a share of the likeliest token's."""
    max_completion_length: PositiveInt = 512
    """Largest number of tokens of a completion."""
    stop_strings: Passages = []
    """Texts that end a completion, or in a trajectory of several turns a turn, at the token that completes
    the text; the text stays in the completion. For transformers' generate this is stop_strings, for vLLM stop
    with include_stop_str_in_output."""
    thinking_budget: PositiveInt | None = None
    """Largest number of tokens of a turn before its thoughts, from `<think>` to `</think>`, are closed by
    thinking_end, which is masked like the output of tools; the model goes on within max_completion_length.
    Unset, thoughts have no limit of their own."""
    thinking_end: Passage = "\n</think>\n\n"
    """Text that closes thoughts, with `</think>` in it."""
    max_staleness: Annotated[int, Field(ge=0, le=4)] = 0
    """Largest number of optimizer steps by which a group may start before the step that trains on it, in rows
    that are free while the last samples of a rollout are drawn; unfinished samples and their keys and values
    are kept during the update, so samples come from older policies too. With the default loss that cost a
    model of 135M no more than 0.02 of accuracy; docs/training.md has the intervals. With 0 each step is
    sampled by itself."""
    max_sequences: PositiveInt | None = None
    """Largest number of sequences decoded at the same time; unset, 64 (portable engine) or 512 (paged
    engine)."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """Format of the keys and values of rollouts: auto (bfloat16) or fp8 (E4M3 without scales, which takes
    half the memory; paged engine only). fp8 is experimental: `python -m bench parity` measures it on your
    model. It is refused for models whose keys have a bias (Qwen2, Qwen2.5)."""
    generation_kwargs: Options | None = None
    """Arguments of transformers' generate or of vLLM; each sets the field that means the same, such as
    temperature, or is refused."""


# --- Loss ---------------------------------------------------------------------------------------------------

LossType = Literal[
    "grpo", "dapo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo", "dppo_tv", "dppo_kl", "clip_cov",
    "kl_cov",
]  # fmt: skip
Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"
]
RatioCorrection = Annotated[
    Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    BeforeValidator(not_of_studies_alone),
]

_OF_VESPO = ("token_truncate", "token_mask")
"""Modes of the importance correction that TRL's VESPO loss accepts."""


def _vespo_needs_ratios_per_token(loss: Any) -> None:
    if loss.loss_type == "vespo" and loss.vllm_importance_sampling_mode not in _OF_VESPO:
        raise QeRLError(
            "loss_type vespo needs ratios per token; set "
            f"vllm_importance_sampling_mode to {' or '.join(_OF_VESPO)}."
        )


def _cispo_bounds_the_ratio_itself(loss: Any) -> None:
    if loss.loss_type == "cispo" and loss.epsilon_high is not None and loss.epsilon_high < 1:
        raise QeRLError(
            f"loss_type cispo takes epsilon_high as the largest ratio itself, and {loss.epsilon_high} is "
            "below nearly every ratio; set it to 1 or more, 5.0 as in TRL's documentation."
        )


def _divergence_is_of_tokens(loss: Any) -> None:
    if loss.loss_type in ("dppo_tv", "dppo_kl") and loss.importance_sampling_level == "sequence":
        raise QeRLError(
            f"loss_type {loss.loss_type} masks tokens by their own change of probability; set "
            "importance_sampling_level: token."
        )


def _rejection_has_a_threshold(loss: Any) -> None:
    rule, threshold = loss.rollout_rs, loss.rollout_rs_threshold
    if (rule is None) != (threshold is None):
        raise QeRLError(
            "rollout_rs and rollout_rs_threshold need each other; set both (1.001 is usual for seq_mean_k1, "
            "0.01 for seq_mean_k3), or remove both."
        )
    if rule == "seq_mean_k1" and threshold <= 1:
        raise QeRLError(
            f"rollout_rs seq_mean_k1 takes rollout_rs_threshold as the largest mean ratio, and {threshold} "
            "is not above 1; set 1.001 for example."
        )


def _bnpo_counts_tokens_of_microbatches(loss: Any) -> None:
    if loss.filter_zero_advantages and loss.loss_type == "bnpo" and loss.loss_agg_mode is None:
        raise QeRLError(
            "filter_zero_advantages leaves groups without signal out of a step's divisor, but loss_type bnpo "
            "divides by the tokens of a microbatch; set loss_type: dapo."
        )


def _only_rewards_are_filtered(loss: Any) -> None:
    if loss.filter_zero_advantages and (loss.beta or loss.teacher is not None):
        other = "beta" if loss.beta else "a teacher"
        raise QeRLError(
            f"filter_zero_advantages leaves groups without signal out of the loss's divisor, but {other} "
            "gives their tokens a loss; remove one of the two."
        )


def _mean_scale_is_of_totals(loss: Any) -> None:
    if loss.scale_rewards == "mean" and loss.overlong_buffer:
        raise QeRLError(
            "scale_rewards: mean needs rewards that are not negative, and overlong_buffer gives long samples "
            "negative ones; set overlong_buffer: 0, or another scale_rewards."
        )
    if loss.scale_rewards == "mean" and loss.multi_objective_aggregation != "sum_then_normalize":
        raise QeRLError(
            "scale_rewards: mean divides by the mean of summed rewards; set multi_objective_aggregation: "
            "sum_then_normalize."
        )


_WITHOUT_DELTA = ("cispo", "sapo", "vespo", "kl_cov")

_OF_LOSS = {
    "clip_cov_ratio": "clip_cov", "clip_cov_lb": "clip_cov", "clip_cov_ub": "clip_cov",
    "kl_cov_ratio": "kl_cov", "ppo_kl_coef": "kl_cov",
}  # fmt: skip


def _fields_of_a_loss_have_it(loss: Any) -> None:
    if loss.loss_type is None:
        return
    if loss.delta is not None and loss.loss_type in _WITHOUT_DELTA:
        raise QeRLError(f"loss_type {loss.loss_type} has no clip that delta bounds; remove delta.")
    for name, owner in _OF_LOSS.items():
        if loss.loss_type != owner and getattr(loss, name) != _default(loss, name):
            raise QeRLError(f"{name} acts with loss_type: {owner}; set that, or remove {name}.")


def _a_ratio_to_the_sampler_is_not_truncated(loss: Any) -> None:
    if not loss.use_rollout_logprobs or loss.vllm_importance_sampling_mode.endswith("mask"):
        return
    for name in ("vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"):
        if getattr(loss, name) != _default(loss, name):
            raise QeRLError(
                f"{name} truncates the importance-sampling factor, which use_rollout_logprobs makes part of "
                "the loss's own ratio; set vllm_importance_sampling_mode: token_mask, which masks tokens "
                f"beyond the bound, or remove {name}."
            )


def _covariance_bounds_are_in_order(loss: Any) -> None:
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        raise QeRLError(
            f"clip_cov_lb is {loss.clip_cov_lb} and clip_cov_ub {loss.clip_cov_ub}; set the first below the "
            "second."
        )


def _pass_at_k_keeps_its_scale(loss: Any) -> None:
    if loss.pass_at_k is None:
        return
    if loss.multi_objective_aggregation != "sum_then_normalize":
        raise QeRLError(
            "pass_at_k takes the best of summed rewards; set multi_objective_aggregation: sum_then_normalize."
        )
    if loss.scale_rewards in ("group", "mean", True):
        raise QeRLError(
            "pass_at_k changes the gap between right and wrong samples of a group, which scale_rewards: "
            f"{'mean' if loss.scale_rewards == 'mean' else 'group'} would divide out again; set "
            "scale_rewards: none (or batch)."
        )


def _truncated_are_masked_or_punished(loss: Any) -> None:
    if loss.mask_truncated_completions and loss.overlong_buffer:
        raise QeRLError(
            "mask_truncated_completions leaves out the samples that overlong_buffer punishes; set one of "
            "the two."
        )


def _entropy_bounds_are_in_order(loss: Any) -> None:
    if loss.entropy_coef_min > loss.entropy_coef_max:
        raise QeRLError(
            f"entropy_coef_min is {loss.entropy_coef_min} and entropy_coef_max {loss.entropy_coef_max}; "
            "swap them."
        )


TEACHER_ADAPTER = "adapter:"
"""Prefix of the folder of a teacher that is an adapter."""


_OF_TEACHER = ("teacher", "teacher_prompt", "teacher_weights", "distillation_alpha", "distillation_weight")


def _a_teacher_is_named(loss: Any) -> None:
    if loss.algorithm == "distill":
        if loss.teacher is None:
            raise QeRLError(
                "algorithm: distill needs a teacher; set teacher to base, adapter:PATH or a model's name."
            )
        return
    for name in _OF_TEACHER:
        if getattr(loss, name) != _default(loss, name):
            raise QeRLError(f"{name} acts with algorithm: distill; set that, or remove {name}.")


def _only_models_have_formats(loss: Any) -> None:
    teacher = loss.teacher or ""
    if loss.teacher_weights is not None and (teacher == "base" or teacher.startswith(TEACHER_ADAPTER)):
        raise QeRLError(
            f"teacher_weights is for a teacher that is a separate model, and teacher is {teacher}; remove it."
        )


_OF_REWARDS_ALONE = ("cispo", "sapo", "vespo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov")
"""Losses whose name has no effect on a teacher's term, unlike losses that differ in its divisor."""


def _a_lone_teacher_needs_no_signal(loss: Any) -> None:
    if loss.teacher is None or loss.distillation_weight < 1.0:
        return
    idle = {
        "dynamic_sampling_batches": loss.dynamic_sampling_batches,
        "off_policy_mask_threshold": loss.off_policy_mask_threshold is not None,
        "top_entropy_quantile": loss.top_entropy_quantile < 1.0,
        "rollout_rs": loss.rollout_rs is not None,
        "pass_at_k": loss.pass_at_k is not None,
        f"loss_type {loss.loss_type}": loss.loss_type in _OF_REWARDS_ALONE,
    }
    for name in (name for name, is_set in idle.items() if is_set):
        raise QeRLError(
            f"{name} acts on rewards, which have no weight in the loss at distillation_weight: 1; set that "
            f"below 1, or remove {name}."
        )


def _a_reference_that_moves_exists(loss: Any) -> None:
    if loss.sync_ref_model and loss.beta == 0.0:
        raise QeRLError(
            "sync_ref_model has no reference to move: beta is 0; set beta, or remove sync_ref_model."
        )


class Loss(Group):
    """The algorithm: rewards and advantages, the loss, and what it corrects for."""

    rules = (
        _vespo_needs_ratios_per_token,
        _cispo_bounds_the_ratio_itself,
        _divergence_is_of_tokens,
        _rejection_has_a_threshold,
        _bnpo_counts_tokens_of_microbatches,
        _only_rewards_are_filtered,
        _mean_scale_is_of_totals,
        _fields_of_a_loss_have_it,
        _a_ratio_to_the_sampler_is_not_truncated,
        _covariance_bounds_are_in_order,
        _pass_at_k_keeps_its_scale,
        _truncated_are_masked_or_punished,
        _entropy_bounds_are_in_order,
        _a_reference_that_moves_exists,
        _a_teacher_is_named,
        _only_models_have_formats,
        _a_lone_teacher_needs_no_signal,
    )

    algorithm: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "dppo", "distill", "sft"] | None = None
    """Preset of a paper's algorithm, which sets fields that are not set otherwise (grpo without the paper's
    KL, which is beta: 0.04); unset, each field has its default; sft learns from the task's demonstrations
    instead of rewards."""
    loss_type: LossType | None = None
    """Loss, by TRL's and verl's names: dppo_kl drops the tokens whose probability has already moved too far
    from the sampler's; dapo clips the ratio, and is the default if a field that bounds a ratio or its
    correction is set; both are means over all tokens of the batch. grpo, the loss of GRPO's paper, is the
    mean over samples of each sample's own mean, in which a token of a long sample counts less, so that wrong
    answers grow long; docs/training.md has the others."""
    loss_agg_mode: Aggregation | None = None
    """How the losses of tokens are divided and added, by verl's names, and prompt-mean, in which all prompts
    count alike; unset, as loss_type does it."""
    filter_zero_advantages: bool = False
    """Leave groups without signal out of the number of tokens or samples that the loss is divided by; TRL
    counts them. Refused with beta or a teacher, with which these groups have a loss."""
    epsilon: NonNegative | None = None
    """Clip distance of the ratio below 1, and above 1 if epsilon_high is unset; for loss_type dppo_tv and
    dppo_kl the largest divergence. Unset, 0.05 for dppo_kl, 1 for clip_cov, and 0.2 for others."""
    epsilon_high: NonNegative | None = None
    """The same as `epsilon` for ratios above 1, and the largest ratio itself for loss_type cispo; unset,
    `epsilon`."""
    delta: Positive | None = None
    """Largest ratio of samples with a negative advantage (two-sided clip), and of all samples with dppo_tv
    and dppo_kl; refused with cispo, sapo, vespo and kl_cov, which have no such clip. Unset, 20 for dppo_kl
    without an algorithm, and none for others."""
    importance_sampling_level: Literal["token", "sequence"] | None = None
    """Whether a ratio is that of a token or of a sequence (GSPO)."""
    use_rollout_logprobs: bool | None = None
    """Compute the loss's ratio to the sampler's log-probabilities instead of those of the policy before its
    first update, which saves the pass for the latter; the ratio then contains the importance correction,
    which is no separate factor: its bounds act only in the modes that mask. Unset, true for dppo_tv and
    dppo_kl only."""
    num_iterations: PositiveInt = 1
    """Number of times that a rollout is trained on."""
    reward_weights: Annotated[list[float], Field(min_length=1)] | None = None
    """Weights of the reward functions in their order; unset, 1 each."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Whether rewards are summed before they are compared in their group or after."""
    scale_rewards: Literal["group", "batch", "mean", "none"] | bool | None = None
    """What divides the advantages: the standard deviation of their group (group, or true), that of the batch,
    the mean reward of their group (MaxRL, for rewards that are not negative, so without overlong_buffer), or
    nothing (none, or false)."""
    mask_truncated_completions: bool = False
    """Leave truncated samples out of the loss, and out of the mean and standard deviation of their group,
    where TRL keeps them, so that the advantages in the loss add up to 0 (docs/numerics.md)."""
    overlong_buffer: ShareBelow1 | None = None
    """Share of max_completion_length over which the length penalty grows from 0 to -1; 0 turns it off."""
    dynamic_sampling_batches: Count | None = None
    """Largest number of groups that a step may sample to replace groups without signal, in multiples of the
    groups it trains on; they enter the same rollout as soon as they are needed."""
    signal: Literal["accuracy", "reward"] | None = None
    """Which groups have a signal: those with right and wrong samples by the reward function `accuracy` or the
    only one (accuracy; right is above 0), or those whose rewards differ (reward). Unset, the algorithm
    decides."""
    pass_at_k: Annotated[int, Field(ge=2)] | None = None
    """Reward the best of k samples in place of each sample by itself, k below num_generations, with
    scale_rewards: none or batch; unset, each by itself."""
    vllm_importance_sampling_correction: bool = True
    """Whether the loss corrects for the ratio of trainer to sampler probabilities."""
    vllm_importance_sampling_mode: RatioCorrection = "token_truncate"
    """How the loss corrects for the ratio of trainer to sampler probabilities, per token or per sequence:
    truncated at the bounds, or masked beyond them."""
    vllm_importance_sampling_clip_max: Positive | None = 3.0
    """Upper bound of the ratio of trainer to sampler probabilities; unset, none."""
    vllm_importance_sampling_clip_min: NonNegative | None = None
    """Lower bound of the ratio of trainer to sampler probabilities; unset, none."""
    rollout_rs: Literal["seq_mean_k1", "seq_mean_k3"] | None = None
    """Leave whole samples in which trainer and sampler are too far apart out of the policy's term of the loss
    (not out of the terms of beta, kl_tau, entropy and a teacher), in addition to the correction: by the
    geometric mean of their ratios (seq_mean_k1) or by the mean of the KL estimator k3 (seq_mean_k3); unset,
    none."""
    rollout_rs_threshold: Positive | None = None
    """With rollout_rs: largest geometric mean, whose reciprocal is the smallest, or largest mean of k3 in
    nats per token."""
    kl_tau: NonNegative = 0.0
    """Weight of the squared log-ratio of trainer to sampler, which pulls each token towards the sampler;
    0.001 in prime-rl."""
    replay_routing: bool = True
    """Whether the update of a mixture of experts takes, for each token, the experts that the sampler chose,
    if the engine records them (paged engine); else its router chooses again. Either way the metric
    routing/differ is the share of recorded choices that the trainer's router would have made otherwise."""
    off_policy_mask_threshold: Positive | None = None
    """Mask samples with a negative advantage whose mean KL from the sampler is above this, as in
    DeepSeek-V3.2; unset, none."""
    beta: NonNegative | None = None
    """Weight of the KL penalty from a reference; with 0 there is no reference."""
    use_bias_correction_kl: bool | None = None
    """Multiply the KL by the ratio, so that its gradient is unbiased (DeepSeek-V3.2)."""
    sync_ref_model: bool = False
    """Whether the reference follows the policy (full tuning only)."""
    ref_model_mixup_alpha: Share = 0.6
    """With sync_ref_model: share of the policy that is mixed into the reference at each synchronisation."""
    ref_model_sync_steps: PositiveInt = 512
    """With sync_ref_model: number of optimizer steps between two synchronisations."""
    teacher: Text | None = None
    """With algorithm: distill: the model whose distributions the policy learns on its own samples: base (the
    model without its adapter; with full tuning, as it begins), adapter:PATH (a saved adapter on the same
    base), or a model by its Hub id, folder or .gguf file."""
    teacher_weights: WeightFormatName | None = None
    """Format of a teacher that is a model of its own, one of those of `weights`; unset, decided by its folder
    as for `weights`."""
    teacher_prompt: Passage | None = None
    """Text that the teacher reads in place of the user's last message: {prompt} in it is that message, {NAME}
    a column of the data, for example {answer}, {{ and }} are braces; unset, the policy's prompt."""
    distillation_alpha: Share = 1.0
    """Divergence from the teacher: 1 is the reverse KL, 0 the forward KL, between them the generalised
    Jensen-Shannon divergence; `beta` of TRL's DistillationTrainer."""
    distillation_weight: PositiveShare = 1.0
    """Share of the divergence from the teacher in the loss, beside that of rewards; at 1 rewards are only
    logged, and may be missing."""
    top_entropy_quantile: Share = 1.0
    """Share of tokens, those of the highest entropy, that the loss takes."""
    entropy_coef: NonNegative = 0.0
    """Weight of the policy's entropy as a bonus."""
    use_adaptive_entropy: bool = False
    """Whether the weight of the entropy bonus grows while the entropy is below entropy_target and falls while
    it is above."""
    entropy_coef_min: NonNegative = 0.0
    """Smallest weight of an adaptive entropy bonus."""
    entropy_coef_max: NonNegative = 1.0
    """Largest weight of an adaptive entropy bonus."""
    entropy_coef_delta: NonNegative = 0.005
    """Change per step of the weight of an adaptive entropy bonus."""
    entropy_target: NonNegative = 0.2
    """Mean entropy per token, in nats, at which an adaptive entropy bonus aims."""
    clip_cov_ratio: PositiveShare = 0.0002
    """Share of tokens whose gradient loss_type clip_cov removes."""
    clip_cov_lb: float = 1.0
    """Covariance of log-probability and advantage above which loss_type clip_cov draws these tokens."""
    clip_cov_ub: float = 5.0
    """Covariance of log-probability and advantage below which loss_type clip_cov draws these tokens."""
    kl_cov_ratio: PositiveShare = 0.0002
    """Share of tokens, those of the largest covariance, that loss_type kl_cov pulls to the old policy."""
    ppo_kl_coef: NonNegative = 1.0
    """Weight of the absolute log-ratio by which loss_type kl_cov pulls tokens to the old policy."""
    sapo_temperature_pos: Positive = 1.0
    """Temperature of SAPO's gate where the advantage is positive."""
    sapo_temperature_neg: Positive = 1.05
    """Temperature of SAPO's gate where the advantage is not positive."""
    vespo_k_pos: NonNegative = 2.0
    """Exponent of VESPO's weight where the advantage is positive."""
    vespo_lambda_pos: NonNegative = 3.0
    """Decay of VESPO's weight where the advantage is positive."""
    vespo_k_neg: NonNegative = 3.0
    """Exponent of VESPO's weight where the advantage is negative."""
    vespo_lambda_neg: NonNegative = 2.0
    """Decay of VESPO's weight where the advantage is negative."""


# --- Noise --------------------------------------------------------------------------------------------------


def _scale_needs_noise(noise: Any) -> None:
    """The schedule may stand beside `noise: false`, so that one flag turns a tuned schedule off and on; a
    recipe that forgot `noise` is refused in `qerl.settings.recipe`, where it is known which fields were
    given."""
    if not noise.enabled and noise.scale != "absolute":
        raise QeRLError("noise_scale needs noise; set noise: true, or remove it.")


class Noise(Group):
    """Adaptive quantization noise in the RMSNorm weights of rollouts."""

    model_config = ConfigDict(alias_generator=lambda name: "noise" if name == "enabled" else f"noise_{name}")
    rules = (_scale_needs_noise,)

    enabled: bool = False
    """Adaptive quantization noise in the RMSNorm weights of rollouts. Off, because it helped in no study here
    (docs/method.md). True is the paper's noise, for which the loss corrects; with
    vllm_importance_sampling_correction: false it does not, as in the paper. A recipe or command line that
    sets a field noise_... has to set this too. In Python and with TRL's parsers, which do not tell what was
    set, the schedule (noise_sigma_start, noise_sigma_end, noise_stages, noise_schedule) is ignored without
    it."""
    scale: NoiseScale = "absolute"
    """Unit of sigma: absolute, the units of the norm weights (the paper's), or relative, shares of each norm
    weight, which mean the same in every layer and model."""
    sigma_start: Positive = 1e-2
    """Standard deviation in the first noisy stage."""
    sigma_end: Positive = 5e-4
    """Standard deviation in the last stage."""
    stages: Annotated[int, Field(ge=2)] = 10
    """Stages of the schedule, the first without noise."""
    schedule: NoiseKind = "exponential"
    """Shape of the decay over the stages."""

    def schedule_of(self, steps: int) -> NoiseSchedule:
        """Return the schedule of sigma for a run of ``steps`` optimizer steps.

        Raises:
            QeRLError: The run is shorter than the schedule has stages.
        """
        return NoiseSchedule(
            sigma_start=self.sigma_start,
            sigma_end=self.sigma_end,
            stages=self.stages,
            total_steps=steps,
            kind=self.schedule,
        )


# --- Run ----------------------------------------------------------------------------------------------------


def _workers_are_there(run: Any) -> None:
    workers = run.dataloader_persistent_workers or run.dataloader_multiprocessing_context is not None
    if workers and not run.dataloader_num_workers:
        raise QeRLError(
            "dataloader_persistent_workers and dataloader_multiprocessing_context need workers; set "
            "dataloader_num_workers."
        )


def _stopping_goes_by_evaluations(run: Any) -> None:
    if run.early_stopping_patience is not None and run.eval_strategy == "no":
        raise QeRLError(
            "early_stopping_patience goes by evaluations, and there are none; set eval_strategy: steps and "
            "eval_steps, or remove it."
        )
    if run.early_stopping_threshold and run.early_stopping_patience is None:
        raise QeRLError(
            "early_stopping_threshold acts with early_stopping_patience; set that too, or remove it."
        )


def evaluates(run: Any) -> bool:
    """Return True if a run with these settings scores held-out problems, at its start or on the way."""
    return bool(run.eval_on_start or run.eval_strategy != "no")


class Run(TrainerFields):
    """Optimizer, schedule, logging, saving and devices; transformers' own fields are options of it too."""

    rules = (_workers_are_there, _stopping_goes_by_evaluations)

    learning_rate: NonNegative | None = None
    """Initial learning rate of the optimizer; unset, 1e-5 for adapters and 1e-6 where `tuning` is full; with
    algorithm: sft, 2e-4 and 2e-5."""
    tokens_per_forward: PositiveInt | None = None
    """Largest number of tokens in one forward pass of the update; a microbatch with more is computed in
    chunks, with the same gradients. Unset, it is what `qerl plan` finds to fit on a GPU, and there is no
    limit on the CPU."""
    backward_dtype: Literal["auto", "fp8"] = "auto"
    """Format of the products that carry gradients back through frozen nvfp4 or mxfp4 weights: auto (16
    bits) or fp8 (E4M3 with a scale for each token). fp8 takes less time and rounds gradients more: those of
    a first step of SmolLM2-135M are off by 0.14 of their norm in place of 0.09, and no study has compared
    what is learned. Forward passes, and so policy and log-probabilities, stay the same. It needs a GPU from
    compute capability 8.9 on and the paged engine, and leaves experts out."""
    per_device_eval_batch_size: PositiveInt | None = None
    """Number of completions that an evaluation samples at a time on each device, in whole groups; unset,
    1024, or 64 where an environment answers."""
    metric_for_best_model: Text | None = None
    """Metric by which load_best_model_at_end chooses; unset, eval_reward. Evaluations compute no loss:
    eval_loss is minus eval_reward. With algorithm: sft eval_loss is the loss of held-out demonstrations, and
    the default metric."""
    early_stopping_patience: PositiveInt | None = None
    """Number of evaluations in a row without a better metric_for_best_model after which training ends; unset,
    it goes on to its last step."""
    early_stopping_threshold: NonNegative = 0.0
    """How much the metric must be better than the best so far to count, with early_stopping_patience."""
    logging_steps: ShareOrSteps = 1
    """Number of optimizer steps between two log lines."""
    logging_nan_inf_filter: bool = False
    """Whether the logged loss leaves out losses that are not finite."""
    log_completions: bool = False
    """Print completions of logged steps, and send them to the reporters."""
    num_completions_to_print: PositiveInt | None = 1
    """With log_completions: how many completions of a logged step are printed; null prints all of them."""
    log_unique_prompts: bool = False
    """With log_completions: send each prompt once, with one of its completions."""
    log_completions_hub_repo: Text | None = None
    """With log_completions: repository of the Hub that gets the completions."""
    bf16: bool | None = False
    """Autocast is not used: `dtype` sets the precision of sampler and trainer alike."""
    ddp_broadcast_buffers: bool | None = False
    """Whether the first of several processes sends the others its buffers in every pass; it cannot be on."""
    ddp_find_unused_parameters: bool | None = False
    """Whether several processes look for adapters without a gradient; it cannot be on."""


# --- All of them --------------------------------------------------------------------------------------------


def _a_moving_reference_is_whole(settings: Any) -> None:
    if settings.loss.sync_ref_model and settings.model.tuning != "full":
        raise QeRLError(
            "sync_ref_model needs tuning: full; with LoRA the reference is the base model, which never "
            "moves. Remove sync_ref_model, or train all weights."
        )


def _an_adapter_teaches_adapters(settings: Any) -> None:
    if str(settings.loss.teacher or "").startswith(TEACHER_ADAPTER) and settings.model.tuning == "full":
        raise QeRLError(
            "A teacher that is an adapter needs a policy with one on the same base; set tuning: lora, or "
            "name a model as teacher."
        )


def _gradients_in_fp8_pass_packed_weights(settings: Any) -> None:
    weights = settings.model.weights
    packed = weights in (None, AS_PUBLISHED) or FORMATS[weights].packed
    if settings.run.backward_dtype == "fp8" and not packed:
        raise QeRLError(
            f"backward_dtype: fp8 is for weights in nvfp4 or mxfp4, and these are {weights}; set "
            "backward_dtype: auto, or weights: nvfp4."
        )


def _best_of_fewer_than_a_group(settings: Any) -> None:
    k, group = settings.loss.pass_at_k, settings.sampling.num_generations
    if k is not None and k >= group:
        raise QeRLError(
            f"pass_at_k is {k}, and a group has only {group} samples (num_generations); set it below that."
        )


def _noise_fits_into_the_run(settings: Any) -> None:
    """Check runs of a given number of steps; `qerl.trainer.preflight` checks those given in epochs, whose
    length is known with the data."""
    if settings.noise.enabled:
        settings.noise.schedule_of(
            settings.run.max_steps if settings.run.max_steps > 0 else settings.noise.stages
        )


def _evaluations_hold_whole_groups(settings: Any) -> None:
    run, sampling = settings.run, settings.sampling
    group, batch = sampling.num_generations_eval or sampling.num_generations, run.per_device_eval_batch_size
    if evaluates(run) and batch is not None:
        check_eval_batch(batch, group)


def check_eval_batch(batch: int, group: int) -> None:
    """Raise if an evaluation's batch does not hold all samples of each of its prompts.

    Raises:
        QeRLError: The batch does not consist of whole groups.
    """
    if batch % group:
        raise QeRLError(
            f"per_device_eval_batch_size is {batch}, which is not a multiple of the {group} samples of a "
            "group (num_generations_eval, else num_generations); change one of them."
        )


_ACT_IN_SFT = {
    "algorithm", "reward_weights", "multi_objective_aggregation", "num_generations_eval", "temperature",
    "top_p", "top_k", "min_p", "max_completion_length", "stop_strings", "thinking_budget", "thinking_end",
    "max_sequences", "kv_cache_dtype", "generation_kwargs",
}  # fmt: skip
"""Fields of the groups sampling and loss that act in the evaluations of algorithm: sft."""

_NOT_IN_SFT = ("curriculum", "tools", "environment")
_OF_SFT = ("max_length", "completion_only_loss", "assistant_only_loss")


def without_effect(loss: Any) -> set[str]:
    """Return the names of fields that act only with another loss or algorithm than this.

    They have their defaults, since the rules refuse any other value.
    """
    names = {name for name, owner in _OF_LOSS.items() if loss.loss_type != owner}
    names |= set() if loss.algorithm == "distill" else {*_OF_TEACHER}
    return names | (set() if loss.algorithm == "sft" else {*_OF_SFT})


_NEVER_STALE: dict[str, tuple[Any, str]] = {
    "num_iterations": (1, "the age of a token assumes that it is trained in a single update"),
    "dynamic_sampling_batches": (0, "the step of each group is fixed before it is sampled"),
    "curriculum": (False, "prompts of coming steps are chosen before the results of this one are known"),
    "noise": (False, "one sample would be drawn under the noise of several steps"),
    "thinking_budget": (None, "samples that are kept over an update have one turn"),
    "tools": ([], "samples that are kept over an update have one turn"),
    "environment": (None, "samples that are kept over an update have one turn"),
    "ignore_data_skip": (False, "groups of coming steps are started in the order of the data"),
}
"""Values that fields must have with `max_staleness`, and why."""


def _stale_samples_are_corrected_for(settings: Any) -> None:
    values = dict(settings.fields())
    if not values["max_staleness"]:
        return
    for name, (needed, why) in _NEVER_STALE.items():
        if values[name] not in (needed, None):
            raise QeRLError(
                f"{name} cannot be combined with max_staleness, because {why}; set {name}: "
                f"{json.dumps(needed)} or max_staleness: 0."
            )
    parts, microbatches = values["steps_per_generation"], values["gradient_accumulation_steps"]
    if parts is not None and parts != microbatches:
        raise QeRLError(
            f"max_staleness is for rollouts of one optimizer step, and steps_per_generation is {parts} with "
            f"gradient_accumulation_steps: {microbatches}; remove steps_per_generation, or set "
            "max_staleness: 0."
        )
    if values["teacher"] is not None and values["distillation_weight"] == 1.0:
        raise QeRLError(
            "max_staleness trains on samples of older policies, which a loss from the teacher alone does not "
            "correct for; set max_staleness: 0, or distillation_weight below 1 to train on rewards, too."
        )
    if values["use_rollout_logprobs"] is False and not values["vllm_importance_sampling_correction"]:
        raise QeRLError(
            "max_staleness trains on samples of older policies, which this loss does not correct for; set "
            "use_rollout_logprobs: true, vllm_importance_sampling_correction: true, or max_staleness: 0."
        )


def _demonstrations_are_not_sampled(settings: Any) -> None:
    sft = settings.loss.algorithm == "sft"
    for group in (settings.sampling, settings.loss, settings.noise, settings.data):
        for field, info in type(group).model_fields.items():
            name, value = info.alias or field, getattr(group, field)
            acts = name in _ACT_IN_SFT if group is not settings.data else name not in _NOT_IN_SFT
            if group is settings.noise:
                acts = name != "noise"  # a schedule may stand beside noise: false
            unset = UNSAID.get(name), CLIPPED.get(name)  # as this version and earlier ones fill it in
            at_default = value in (info.get_default(call_default_factory=True), *unset)
            if sft and not acts and not at_default and (name, value) != ("steps_per_generation", 1):
                raise QeRLError(
                    f"{name} has no effect with algorithm: sft, which learns from demonstrations and samples "
                    "only in evaluations; remove it."
                )
            if not sft and name in _OF_SFT and not at_default:
                raise QeRLError(f"{name} acts only with algorithm: sft; set that, or remove {name}.")


def _processes_hold_whole_groups(settings: Any) -> None:
    """Each process computes a group's prompt once."""
    sampling, batch = settings.sampling, settings.run.per_device_train_batch_size
    times, steps = "steps_per_generation", sampling.steps_per_generation
    if steps is None:  # as TRL fills it in
        times, steps = "gradient_accumulation_steps", settings.run.gradient_accumulation_steps
        if sampling.generation_batch_size is not None:
            return
    group, local = sampling.num_generations, batch * steps
    if settings.loss.algorithm == "sft" or local % group == 0:
        return
    fitting = [size for size in range(2, local + 1) if local % size == 0]
    hint = f"set it to {min(fitting, key=lambda size: abs(size - group))}, or " if fitting else ""
    raise QeRLError(
        f"num_generations is {group}, and the {local} completions that a process samples at a time "
        f"(per_device_train_batch_size {batch} x {times} {steps}) are not a multiple of it; {hint}change the "
        "batch."
    )


class Settings(Group):
    """All settings of a run, by group."""

    rules = (
        _a_moving_reference_is_whole,
        _an_adapter_teaches_adapters,
        _gradients_in_fp8_pass_packed_weights,
        _best_of_fewer_than_a_group,
        _noise_fits_into_the_run,
        _evaluations_hold_whole_groups,
        _demonstrations_are_not_sampled,
        _stale_samples_are_corrected_for,
        _processes_hold_whole_groups,
    )

    model: Model
    data: Data
    sampling: Sampling
    loss: Loss
    noise: Noise
    run: Run

    @classmethod
    def of(cls, flat: Any) -> Self:
        groups: dict[str, Any] = {name: group.of(flat) for name, group in GROUPS.items()}
        return cls(**groups)

    def fields(self) -> Iterator[tuple[str, Any]]:
        """Values by their flat names."""
        for name, group in GROUPS.items():
            own = getattr(self, name)
            yield from (
                (info.alias or field, getattr(own, field)) for field, info in group.model_fields.items()
            )


GROUPS: dict[str, Any] = {name: info.annotation for name, info in Settings.model_fields.items()}
"""The class of each group by its name."""

DECLARED: dict[str, FieldInfo] = {
    name: info for group in GROUPS.values() for name, info in group.flat().items()
}
"""Every field that acts, by its flat name."""

OWN_NAMES = tuple(name for name in DECLARED if name not in TrainerFields.model_fields)
"""The names of fields whose default and sentence are declared here."""


def sentence_of(name: str) -> str:
    """Return the description of a field in one line; empty if its parent class describes it."""
    return " ".join((DECLARED[name].description or "").split())
