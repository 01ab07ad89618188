"""What the module takes from its arguments, and what it refuses because two of them disagree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mareinforce.cli  # noqa: F401 (Lightning keeps the stderr it is imported with)
from mareinforce import MAGRPOConfig, MAGRPOTrainer, MultiAgentReinforce, fit
from mareinforce.config_rules import check_for_ranks
from mareinforce.data.sources import load_rows
from mareinforce.errors import ConfigError, DataError
from mareinforce.evaluation import Evaluators
from mareinforce.metrics import RunningMeans, node_metrics
from mareinforce.optim import sample_weights
from mareinforce.rollout.credit import assign_returns, node_samples
from tests.learning.games import table_agents
from tests.numerics.games import Game, Policy, all_outcomes
from tests.numerics.test_exact_expectation import config_for, reward
from tests.numerics.test_returns import node

ONE_TURN = MAGRPOConfig(num_turns=1)


def length(*texts: list[str]) -> list[float]:
    return [0.0 for _ in texts[0]]


def test_the_number_of_agents_is_that_of_the_list():
    three = MAGRPOConfig(num_turns=1, num_agents=3)
    assert MultiAgentReinforce(agents=["tiny-story"] * 3, reward_func=length, config=three).config.num_agents == 3
    with pytest.raises(ConfigError, match=r"num_agents=3 but agents lists 2"):
        MAGRPOTrainer(agents=["tiny-story"] * 2, num_agents=3, reward_func=length, args=three)


def test_an_algorithm_that_contradicts_the_configuration_is_refused():
    with pytest.raises(ConfigError, match="marloo"):
        MultiAgentReinforce("marloo", agent_model="tiny-story", reward_func=length, config=ONE_TURN)
    agreed = MAGRPOConfig(num_turns=1, advantage_mode="rloo")
    for algorithm in ("marloo", None):
        made = MultiAgentReinforce(algorithm, agent_model="tiny-story", reward_func=length, config=agreed)
        assert made.config.advantage_mode == "rloo"


def test_a_tree_weighted_step_is_the_mean_over_rows_also_where_an_agent_is_idle():
    game = Game(reward, 1, Policy(), speaks=lambda history, agent: agent == 0)
    from mareinforce.rollout.expand import Episode
    from mareinforce.types import Sampling

    root = next(all_outcomes(game, Episode(1, 2, Sampling(1), 0))).root
    assign_returns(root, num_turns=1, discount=1.0, hold=False)
    config = config_for(game, rollout_buffer_size="rollout", prompts_per_step=2)
    for rows, weight in ((2, 0.5), (1, 1.0)):
        (sample,) = node_samples(root, config, [0, 0], rows)  # the only row in which this agent speaks
        assert sample_weights([sample], config) == [weight]


def test_a_component_cannot_take_the_place_of_a_metric_of_ours():
    root = node([0.5, 0.5])
    root.components = {"raw_reward": [9.0, 9.0], "style": [3.0, 3.0]}
    assign_returns(root, num_turns=1, discount=1.0, hold=False)
    found = node_metrics(root)
    assert found["turn_1/raw_reward_mean"] == 0.5
    assert found["turn_1/style_mean"] == 3.0


def test_numpy_numbers_are_numbers_to_the_aggregator_and_nan_is_not():
    def evaluators(value):
        return Evaluators(lambda **_: [{}], lambda metrics: {"x": value})

    assert evaluators(np.float32(1.5)).metrics([[["a"]]], [{}], ["p"], 1) == {"eval/x": 1.5}
    with pytest.raises(ConfigError, match="finite numbers"):
        evaluators(float("nan")).metrics([[["a"]]], [{}], ["p"], 1)


def test_lines_of_a_file_end_where_json_says_so(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n{"prompt": "c"}\n', encoding="utf-8")
    rows = load_rows({"path": str(path)})
    assert [rows[0]["prompt"], rows[1]["prompt"]] == ["a\u2028b", "c"]


def test_a_dictionary_of_splits_is_told_as_such():
    with pytest.raises(DataError, match="splits"):
        load_rows({"train": [{"prompt": "x"}]})


def test_maxima_are_the_largest_and_everything_else_is_a_mean():
    means = RunningMeans()
    for value in (1.0, 3.0, 2.0):
        means.add_agent(0, {"sampling_gap": value, "loss": value})
    assert means.take() == {"agent_0/sampling_gap": 3.0, "agent_0/loss": 2.0}
    means.add_agent(0, {"sampling_gap": -1.0})
    assert means.take() == {"agent_0/sampling_gap": -1.0}  # nothing is left of the last row


def test_means_of_two_processes_are_merged_by_their_weights():
    whole, parts = RunningMeans(), [RunningMeans(), RunningMeans()]
    for index, value in enumerate((1.0, 3.0, 5.0)):
        for means in (whole, parts[index // 2]):
            means.add_agent(0, {"sampling_gap": -value, "loss": value})
    merged = RunningMeans()
    for part in parts:
        merged.merge(part.state_dict())
    assert merged.take() == whole.take() == {"agent_0/sampling_gap": -1.0, "agent_0/loss": 3.0}  # not (2 + 5) / 2


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel_training": "mp", "agent_devices": "cpu"},
        {"agent_devices": ["cpu", "cuda:0"]},
        {"reference_devices": "cuda:0"},
    ],
)
def test_what_several_processes_cannot_do_is_refused(fields):
    config = MAGRPOConfig(num_agents=2, num_turns=1)
    for name, value in fields.items():
        setattr(config, name, value)  # devices that this machine may not have
    with pytest.raises(ConfigError, match="2 processes"):
        check_for_ranks(config, 2)
    check_for_ranks(config, 1)
    check_for_ranks(MAGRPOConfig(agent_devices="cpu"), 2)


@pytest.mark.parametrize("content", [{"weights": torch.zeros(2)}, torch.zeros(2), b"no checkpoint"])
def test_a_file_that_is_no_checkpoint_of_ours_is_refused_in_a_sentence(tmp_path, capsys, content):
    path = tmp_path / "some.ckpt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    told = refused(tmp_path, capsys, "--ckpt_path", str(path))
    assert "some.ckpt" in told
    assert "Traceback" not in told


def test_a_setting_that_lightning_cannot_follow_is_told_in_a_sentence(tmp_path, capsys):
    told = refused(tmp_path, capsys, "--trainer.accelerator", "gpu", "--trainer.devices", "1")
    assert told.count("error: ") == 1
    assert "Traceback" not in told


def refused(folder, capsys, *arguments: str) -> str:
    task = ["--model.agent_model=tiny-story", "--model.reward_func=mareinforce.tasks.story.length_ratio_reward"]
    rest = ["--model.config.num_turns=1", "--data.train.path=story-prompts", f"--trainer.default_root_dir={folder}"]
    assert fit.main([*task, *rest, *arguments]) == 1
    return capsys.readouterr().err


def test_age_counts_changes_of_the_weights_not_mini_batches_without_signal(tmp_path):
    def reward(first: list[str], second: list[str], prompts: list[str]) -> list[float]:
        flat = prompts[0] == "go"
        return [1.0 if flat else float(k) for k in range(len(first))]

    agents, tokenizer = table_agents(["go", "on", "a", "b"], ["a", "b"])
    rows = [{"prompt": word} for word in ("go", "go", "on", "on")]
    trainer = MAGRPOTrainer(
        agents=agents, tokenizer=tokenizer, reward_func=reward, train_dataset=rows, shuffle=False,
        default_root_dir=tmp_path,
        args=MAGRPOConfig(
            num_turns=1, num_train_epochs=1, prompts_per_step=4, rollout_buffer_size="rollout", train_batch_size=1,
            max_new_tokens=1, eval_interval=0, agent_learning_rate=0.1, importance_sampling="token", seed=0,
        ),
    )  # fmt: skip
    trainer.train()
    assert trainer.module.updates == [4, 4]
    assert trainer.module.policy_versions == [2, 2]  # two of four mini-batches had nothing to teach
