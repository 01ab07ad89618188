"""The fields of the learning loop: what each means, its unit, its default. Rules are in `config_rules.py`."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Literal, Self

from mareinforce import config_rules
from mareinforce.errors import ConfigError, did_you_mean

BaselineMode = Literal["mean", "max", "rloo", "raw"]

ALGORITHMS: dict[str, BaselineMode] = {"magrpo": "mean", "marloo": "rloo", "maremax": "max", "mareinforce": "raw"}
"""`model.algorithm` -> `advantage_mode`."""


@dataclass
class _KnownFields:
    """Refuses an argument that is no field before a dataclass does, which would not say what was meant."""

    def __new__(cls, /, *values: Any, **named: Any) -> Self:
        taken = inspect.signature(cls.__init__).parameters
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):  # a user's own __init__
            for name in named:
                if name not in taken:
                    raise ConfigError(f"{cls.__name__}.{name}: there is no such field.{did_you_mean(name, taken)}")
        return super().__new__(cls)


@dataclass
class MAGRPOConfig(_KnownFields):
    """Configuration of multi-agent REINFORCE with a group-mean baseline. Raises ConfigError for a bad field."""

    num_agents: int = 2
    """Agents (N). In YAML `model.num_agents` sets it."""
    num_turns: int = 2
    """Turns (T) of an episode; more than 1 needs `external_transition`."""
    num_train_epochs: int = 20
    """Passes over the training rows; in YAML an explicit `trainer.max_epochs` wins."""
    max_updates: int | None = None
    """Updates (mini-batches) per agent after which training ends; None: as many as the epochs hold."""
    agent_learning_rate: float | list[float] = 5e-6
    """AdamW learning rate, one number or one an agent."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to 0 over the run's rows (or over `max_updates`, whichever ends first)."""
    warmup_updates: int = 0
    """Updates over which the learning rate rises linearly to its full value."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's two decay rates."""
    adam_eps: float = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: float | None = None
    """Largest gradient norm of one agent at one update; None: no clipping."""
    logging_steps: int = 50
    """Environment steps between two rows of metrics; values are means since the last row."""

    num_generations: int = 4
    """Completions (K) each agent samples at a node; at least 2."""
    max_new_tokens: int = 256
    """Tokens of a completion at most."""
    min_new_tokens: int = 0
    """Tokens of a completion at least: no end token is drawn before."""
    temperature: float = 1.0
    """Sampling temperature, also of the log-probabilities that are trained."""
    top_p: float = 1.0
    """Nucleus mass to draw from; 1: everything."""
    top_k: int | None = None
    """Most probable tokens to draw from; None: everything."""
    eval_temperature: float | None = None
    """Temperature of evaluation; None: as in training; 0: greedy."""

    discount: float = 1.0
    """Weight of the next turn's return, 0 to 1."""
    joint_mode: Literal["aligned", "cross", "align", "crossed"] = "aligned"
    """aligned: K joint actions, the k-th of every agent together; cross: all combinations. crossed means cross."""
    cross_reduction: Literal["sum", "mean"] = "sum"
    """How the returns of the joint actions a completion takes part in become its own (cross only)."""
    early_termination_threshold: float | None = -0.2
    """Processed reward above which a node is not expanded; None: every branch plays all turns."""
    early_termination_on: Literal["node_mean", "joint_action"] = "node_mean"
    """What is compared with the threshold: the node's mean reward, or each joint action's own."""
    early_termination_value: Literal["zero", "hold"] = "zero"
    """What a stopped branch earns for the turns it skips: nothing, or its last reward again each turn."""
    external_prompt_passthrough: bool = False
    """True: the transition's prompts are used verbatim; False: they replace the row's prompt in the formatter."""
    prompt_overflow: Literal["error", "truncate_left", "stop_branch"] = "error"
    """What happens to a prompt that leaves no room for max_new_tokens in the model's context."""
    history: Literal["none", "own", "all"] | None = None
    """What of its branch an agent's next prompt contains; None: own where rows are messages, else none."""

    chat_template: bool | Literal["auto"] = "auto"
    """auto: conversations use the tokenizer's template, text only with a system_prompt; true: text too; false: none."""
    chat_template_kwargs: dict[str, Any] | None = None
    """What the chat template is given besides the messages, such as {enable_thinking: false}."""
    system_prompt: str | list[str | None] | None = None
    """A system message, one for all agents or one an agent, where the row has none."""
    assistant_prefill: str | list[str | None] | None = None
    """How answers begin, one for all or one an agent: not scored, and in front of the text that the reward sees."""
    stop: str | list[str] | None = None
    """Texts that end a completion; they are scored, and left out of the text that the reward sees."""

    advantage_mode: BaselineMode = "mean"
    """The baseline; in YAML `model.algorithm` sets it."""
    advantage_normalization: bool | Literal["scale"] = True
    """True: standardise inside the group; scale: divide by the deviation only; False: leave as it is."""
    loss_aggregation: Literal["sequence_sum", "token_mean", "constant"] = "sequence_sum"
    """Weight of a token: 1/K; 1/(tokens of the node); 1/(K x max_new_tokens)."""
    mask_truncated: bool = False
    """Leave completions cut at max_new_tokens out of the loss (they still count in K and in the baseline)."""
    exclude_final_token: bool = False
    """Leave each completion's last token out of the loss, as CoMLRL does; for comparisons."""
    importance_sampling: Literal["none", "token", "sequence"] = "none"
    """Weigh by the ratio of new to behaviour probability, per token or per completion."""
    importance_cap: float = 2.0
    """The ratio is cut here."""

    prompts_per_step: int = 1
    """Rows (B) rolled out together."""
    rollout_buffer_size: int | Literal["rollout"] = 2
    """Node samples an agent gathers before it updates; rollout: all of a step at once."""
    train_batch_size: int | None = None
    """Node samples of one optimizer step; None: the whole buffer."""
    update_token_budget: int = 2048
    """Most tokens of one forward and backward pass of an update: bounds its memory, changes no gradient."""
    rollout_token_budget: int = 32768
    """Most tokens (rows x (prompt + new tokens)) that are sampled together: bounds the memory of a rollout."""
    turn_weighting: Literal["sample", "tree"] = "sample"
    """sample: every node sample counts alike; tree: the update is the gradient of the whole tree's objective."""

    eval_interval: int = 16
    """Batches between evaluations, counted within the epoch and before the batch trains; 0: never."""
    eval_num_samples: int = 4
    """Rows of one evaluation."""
    eval_batch_size: int = 1
    """Evaluation rows rolled out together."""

    parallel_training: Literal["none", "mp"] = "none"
    """mp: agents generate and update concurrently, each on its device."""
    agent_devices: str | list[str] | None = None
    """Devices, one for all or one an agent."""
    reference_kl_enabled: bool = False
    """Subtract the KL to a frozen reference from the returns."""
    reference_kl_coef: float = 0.1
    """Weight of that KL."""
    reference_kl_estimator: Literal["k1", "k3"] = "k1"
    """Estimator of that KL; k3 is what is logged either way."""
    reference_kl_placement: Literal["return", "advantage"] = "return"
    """return: before baseline and normalisation; advantage: after."""
    reference: Literal["start", "base"] | None = None
    """What agents are kept near: their start, or the base of their adapter; None: start, which a new adapter shares."""
    reference_devices: str | list[str] | None = None
    """Devices of the references of agents that are trained whole, one for all or one an agent; None: the agent's."""
    rollout_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Precision of sampling; None: that of training."""
    on_reward_error: Literal["stop", "skip"] = "stop"
    """What a reward that fails does: stop the run, or leave the joint actions it failed for out of their group."""
    reward_timeout: float | None = None
    """Seconds one call of the reward or the transition may take; None: no limit."""
    reward_workers: int = 0
    """Calls of the reward or the transition at once; 0: one after the other (async def: all of a level at once)."""
    reward_worker_kind: Literal["thread", "process"] = "thread"
    """What those calls are made in: threads, for what waits (a service); processes, for what computes."""
    value_clip_range: float | None = None
    """Not of this family (there is no critic): refused by name."""
    seed: int | None = None
    """Decides every sample and the order of the rows; None: that of `seed_everything`, else 0."""

    def __post_init__(self) -> None:
        config_rules.check(self)
        self.joint_mode = "aligned" if self.joint_mode in ("aligned", "align") else "cross"

    @property
    def references(self) -> bool:
        """Is there a reference to be kept near?"""
        return self.reference_kl_enabled and self.reference_kl_coef > 0

    @property
    def learning_rates(self) -> list[float]:
        """One learning rate an agent."""
        rate = self.agent_learning_rate
        return list(rate) if isinstance(rate, list) else [rate] * self.num_agents


@dataclass
class MARLOOConfig(MAGRPOConfig):
    """As MAGRPOConfig, with the leave-one-out baseline."""

    advantage_mode: BaselineMode = "rloo"


@dataclass
class MAReMaxConfig(MAGRPOConfig):
    """As MAGRPOConfig, with the group's largest return as baseline."""

    advantage_mode: BaselineMode = "max"


@dataclass
class MAREINFORCEConfig(MAGRPOConfig):
    """As MAGRPOConfig, without a baseline."""

    advantage_mode: BaselineMode = "raw"
