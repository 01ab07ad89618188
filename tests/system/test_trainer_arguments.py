"""Arguments that cannot be meant are refused when the trainer is made, before anything loads."""

from __future__ import annotations

import copy

import pytest

from mareinforce import MAGRPOConfig, MAGRPOTrainer
from mareinforce.errors import AgentError, ConfigError
from tests.system.runs import rank, table_team


def make(team=None, /, **options):
    models, tokenizer = team or table_team()
    given = {"agents": models, "tokenizer": tokenizer, "args": MAGRPOConfig(num_turns=1), "reward_func": rank}
    return MAGRPOTrainer(**given | options)


def test_the_same_model_for_two_agents_is_refused_naming_both():
    (model, other), tokenizer = table_team()
    args = MAGRPOConfig(num_turns=1, num_agents=3)
    with pytest.raises(AgentError, match="agents 0 and 2 are the same model object"):
        make(([model, other, model], tokenizer), args=args)
    make(([model, other, copy.deepcopy(model)], tokenizer), args=args)


def test_loaded_models_need_a_tokenizer():
    models, tokenizer = table_team()
    with pytest.raises(AgentError, match="agent 0 is a loaded model without a tokenizer"):
        make((models, None))
    with pytest.raises(AgentError, match="agent 1 is a loaded model without a tokenizer"):
        make((models, [tokenizer, None]))
    make((models, [tokenizer, tokenizer]))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"agent_model": "tiny-story"}, "agent_model and agents are both given"),
        ({"agents": None, "tokenizer": None}, "no agents: set agent_model .* or agents"),
        ({"agents": "tiny-story", "tokenizer": None}, "agents='tiny-story': must be a list"),
        ({"agents": table_team()[0][0]}, "agents=.*: must be a list"),
        ({"agents": []}, r"agents=\[\]: must be a list"),
        ({"agents": None, "agent_model": table_team()[0][0]}, "agent_model=TableModel: must be a name"),
        ({"args": MAGRPOConfig(num_turns=1, num_agents=3)}, "num_agents=3.*num_agents=2"),
        ({"eval_logger": lambda prompts: []}, "eval_logger is given without eval_aggregator"),
        ({"eval_aggregator": lambda metrics: {}}, "eval_aggregator is given without eval_logger"),
        ({"reward_func": None}, "reward_func is missing"),
        ({"reward_func": lambda first: [1.0]}, "reward_func .*2 positional"),
        ({"reward_func": lambda first, second, turns: []}, "requires 'turns'.*Did you mean 'turn'"),
        ({"reward_processor": 100}, "reward_processor is 100"),
        ({"args": MAGRPOConfig(num_turns=2)}, "num_turns=2 needs external_transition"),
        ({"external_transition": lambda prompt, answers: []}, "requires 'answers'"),
        ({"formatters": [str]}, "formatters has 1 entries and num_agents is 2"),
        ({"model_config": {"dtyp": "float32"}}, "model_config.dtyp.*Did you mean 'dtype'"),
    ],
)
def test_arguments_that_cannot_be_meant(options, says):
    with pytest.raises(ConfigError, match=says):
        make(**options)


def test_both_evaluators_together_are_taken():
    made = make(eval_logger=lambda prompts: [], eval_aggregator=lambda metrics: {})
    assert made.module.team is None
