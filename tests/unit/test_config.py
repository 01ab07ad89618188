"""What the configuration accepts and refuses."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from mareinforce import MAGRPOConfig, MAREINFORCEConfig, MAReMaxConfig, MARLOOConfig
from mareinforce.errors import ConfigError

DEFAULTS = {
    "num_agents": 2, "num_turns": 2, "num_train_epochs": 20, "agent_learning_rate": 5e-6, "logging_steps": 50,
    "num_generations": 4, "max_new_tokens": 256, "temperature": 1.0, "top_p": 1.0, "top_k": None, "discount": 1.0,
    "joint_mode": "aligned", "early_termination_threshold": -0.2, "rollout_buffer_size": 2, "train_batch_size": None,
    "advantage_normalization": True, "advantage_mode": "mean", "eval_interval": 16, "eval_num_samples": 4,
    "eval_batch_size": 1, "external_prompt_passthrough": False, "parallel_training": "none", "agent_devices": None,
    "reference_kl_enabled": False, "reference_kl_coef": 0.1, "reference_devices": None, "prompts_per_step": 1,
    "turn_weighting": "sample", "importance_sampling": "none", "importance_cap": 2.0, "cross_reduction": "sum",
    "early_termination_on": "node_mean", "early_termination_value": "zero", "exclude_final_token": False,
    "loss_aggregation": "sequence_sum", "mask_truncated": False, "min_new_tokens": 0, "max_grad_norm": None,
    "weight_decay": 0.0, "lr_schedule": "constant", "warmup_updates": 0, "max_updates": None,
    "eval_temperature": None, "rollout_dtype": None, "on_reward_error": "stop", "reward_timeout": None,
    "reward_workers": 0, "prompt_overflow": "error", "reference_kl_estimator": "k1",
}  # fmt: skip


def test_defaults_are_the_documented_ones():
    config = MAGRPOConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS


def test_the_siblings_differ_in_the_baseline_only():
    base = dataclasses.asdict(MAGRPOConfig())
    for sibling, mode in ((MARLOOConfig, "rloo"), (MAReMaxConfig, "max"), (MAREINFORCEConfig, "raw")):
        assert dataclasses.asdict(sibling()) == {**base, "advantage_mode": mode}


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_agents", 0, "at least 1"),
        ("num_turns", 0, "at least 1"),
        ("num_generations", 1, "at least 2"),
        ("max_new_tokens", 0, "at least 1"),
        ("max_new_tokens", 1.5, "a whole number"),
        ("temperature", 0, "eval_temperature"),
        ("temperature", float("nan"), "above 0"),
        ("top_p", 0, "above 0"),
        ("top_p", 1.01, "at most 1"),
        ("top_k", 0, "at least 1"),
        ("discount", -0.1, "between 0 and 1"),
        ("discount", True, "a number"),
        ("joint_mode", "cros", "Did you mean 'cross'"),
        ("advantage_mode", "median", "mean"),
        ("advantage_normalization", "scal", "Did you mean 'scale'"),
        ("early_termination_threshold", float("inf"), "finite"),
        ("rollout_buffer_size", 0, "rollout"),
        ("rollout_buffer_size", "rolout", "Did you mean 'rollout'"),
        ("agent_learning_rate", 0, "above 0"),
        ("agent_learning_rate", "fast", "a number"),
        ("agent_learning_rate", [1e-5], "one an agent"),
        ("agent_learning_rate", [1e-5, -1e-5], "above 0"),
        ("importance_cap", 0.5, "at least 1"),
        ("max_grad_norm", 0, "above 0"),
        ("logging_steps", 0, "at least 1"),
        ("eval_interval", -1, "at least 0"),
        ("mask_truncated", "yes", "true or false"),
        ("adam_betas", [0.9], "2 numbers"),
        ("adam_betas", [0.9, 1.0], "below 1"),
        ("value_clip_range", 0.2, "no critic"),
    ],
)
def test_a_wrong_value_is_refused_by_field_value_and_rule(field, value, rule):
    with pytest.raises(ConfigError) as refused:
        MAGRPOConfig(**{field: value})
    message = str(refused.value)
    assert field in message
    assert rule in message


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"train_batch_size": 3, "rollout_buffer_size": 2}, ("train_batch_size=3", "rollout_buffer_size=2")),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, ("min_new_tokens=9", "max_new_tokens=8")),
        ({"turn_weighting": "tree", "train_batch_size": 2, "rollout_buffer_size": 4}, ("turn_weighting", "train_")),
    ],
)
def test_combinations_that_make_no_sense_are_refused(fields, names):
    with pytest.raises(ConfigError) as refused:
        MAGRPOConfig(**fields)
    assert all(name in str(refused.value) for name in names)


@pytest.mark.parametrize("kind", [MAGRPOConfig, MARLOOConfig, MAReMaxConfig, MAREINFORCEConfig])
def test_a_misspelt_field_is_refused_by_name_with_the_nearest_one(kind):
    with pytest.raises(ConfigError, match=rf"^{kind.__name__}\.num_generation: .*'num_generations'"):
        kind(num_generation=4)
    assert copy.deepcopy(pickle.loads(pickle.dumps(kind(num_generations=5)))) == kind(num_generations=5)


def test_a_subclass_may_take_arguments_of_its_own():
    class Own(MAGRPOConfig):
        def __init__(self, reward_scale=1.0, **rest):
            super().__init__(**rest)
            self.reward_scale = reward_scale

    made = Own(reward_scale=2.0, num_turns=1)
    assert (made.reward_scale, made.num_turns) == (2.0, 1)


def test_numbers_written_as_text_are_numbers():
    config = MAGRPOConfig(agent_learning_rate=["5e-5", 0.5], max_new_tokens=1e2, temperature="0.7")
    assert config.agent_learning_rate == [5e-5, 0.5]
    assert config.max_new_tokens == 100
    assert isinstance(config.max_new_tokens, int)
    assert config.temperature == 0.7


def test_crossed_means_cross():
    assert MAGRPOConfig(joint_mode="crossed").joint_mode == "cross"
    assert MAGRPOConfig(joint_mode="align").joint_mode == "aligned"


def test_learning_rates_are_one_an_agent():
    assert MAGRPOConfig(num_agents=3, agent_learning_rate=1e-4).learning_rates == [1e-4] * 3
    assert MAGRPOConfig(agent_learning_rate=[1e-4, 2e-4]).learning_rates == [1e-4, 2e-4]
