"""On the same rewards, our rollout trees have the nodes, and each agent the returns, of CoMLRL 1.4.3.

They were recorded from its own `_train_step_returns` (`fixtures/comlrl_1_4_3/record_trees.py`).
"""

import json
from pathlib import Path

import pytest
import torch

from mareinforce.config import MAGRPOConfig
from mareinforce.rewards.contract import Reward
from mareinforce.rollout.credit import assign_returns, node_samples, number_env_steps
from mareinforce.rollout.expand import Episode, Expansion
from mareinforce.rollout.prompts import Formatters
from mareinforce.rollout.transition import Transition
from mareinforce.rollout.tree import nodes_by_level
from mareinforce.types import Completion, Sampling

FIXTURE = Path(__file__).parent / "fixtures" / "comlrl_1_4_3"
TREES = json.loads((FIXTURE / "numbers.json").read_text(encoding="utf-8"))["trees"]


class PathEngine:
    """Answers with texts that name themselves: "0.2|1" is completion 1 of the node with path (0, 2)."""

    def sample(self, requests, sampling):
        def answer(key):
            return Completion(torch.tensor([key.k]), torch.zeros(1), True, f"{show(key.path)}|{key.k}")

        return [[answer(key) for key in request.keys] for request in requests]


class PathEncoder:
    def encode(self, agent, prompt):
        return torch.tensor([0, *read_path(prompt)])


def show(path):
    return ".".join(str(j) for j in path)


def read_path(text):
    return [int(j) for j in text.split(".") if j]


def samples_of_tree(tree, threshold, **settings):
    """Our node samples by (agent, path), on the prescribed rewards; nodes that were not prescribed earn 0."""
    rewards = {show(node["path"]): node["rewards"] for node in tree["nodes_in_order"]}
    num_agents, joint = tree["num_agents"], tree["joint"]

    def joint_action(texts):
        paths, ks = zip(*(text.split("|") for text in texts), strict=True)
        assert len(set(paths)) == 1
        return paths[0], joint.index([int(k) for k in ks])

    def reward(first, second):
        actions = [joint_action(texts) for texts in zip(first, second, strict=True)]
        return [rewards[path][j] if path in rewards else 0.0 for path, j in actions]

    def transition(agent_completions, num_agents):
        path, j = joint_action(agent_completions)
        return [show([*read_path(path), j])] * num_agents

    config = MAGRPOConfig(
        num_agents=num_agents,
        num_turns=tree["num_turns"],
        num_generations=tree["num_generations"],
        joint_mode=tree["joint_mode"],
        early_termination_threshold=threshold,
        **settings,
    )
    expansion = Expansion(
        engine=PathEngine(),
        encoder=PathEncoder(),
        reward=Reward(reward, num_agents),
        formatters=Formatters(None, num_agents),
        transition=Transition(transition, num_agents),
        num_agents=num_agents,
    )
    episode = Episode(
        num_turns=config.num_turns,
        num_completions=config.num_generations,
        sampling=Sampling(max_new_tokens=1),
        seed=0,
        joint_mode=config.joint_mode,
        early_termination_threshold=config.early_termination_threshold,
    )
    (root,) = expansion.grow([(0, {"prompt": ""})], episode)
    assign_returns(root, num_turns=config.num_turns, discount=config.discount, hold=False)
    number_env_steps([root], 0)
    samples = [sample for node in nodes_by_level(root) for sample in node_samples(node, config, [0] * num_agents)]
    return {(sample.agent, sample.path): sample for sample in samples}


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: f"{tree['joint_mode']}-{tree['num_turns']}-turns")
def test_returns_of_a_rollout_tree_agree(tree):
    theirs = {(sample["agent"], tuple(sample["path"])): sample for sample in tree["samples"]}

    def agree(threshold, **settings):
        ours = samples_of_tree(tree, threshold, **settings)
        return ours.keys() == theirs.keys() and all(
            sample.turn == theirs[key]["turn"]
            and sample.returns.tolist() == pytest.approx(theirs[key]["returns"], abs=1e-8)
            for key, sample in ours.items()
        )

    threshold = tree["early_termination_threshold"]
    assert agree(threshold)
    assert not agree(threshold, discount=0.5)
    assert not agree(-100.0)
    if threshold is not None:
        assert not agree(None)
    if tree["joint_mode"] == "cross":
        assert not agree(threshold, cross_reduction="mean")


def test_environment_steps_agree_up_to_the_order_of_the_nodes():
    """CoMLRL counts depth first, we level by level: the same in two turns, another order of the same in three."""
    for tree in TREES:
        ours = samples_of_tree(tree, tree["early_termination_threshold"])
        pairs = [
            (sample["env_step"], ours[sample["agent"], tuple(sample["path"])].env_step) for sample in tree["samples"]
        ]
        assert sorted(a for a, _ in pairs) == sorted(b for _, b in pairs)
        assert all(a == b for a, b in pairs) == (tree["num_turns"] == 2)
