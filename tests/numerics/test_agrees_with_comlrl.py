"""Where the two do the same, this project's numbers are those of CoMLRL 1.4.3.

They were recorded from its own code (`fixtures/comlrl_1_4_3/record.py`). CoMLRL leaves each completion's last token
out of the loss, takes log-probs at temperature 1 and keeps credit in float32; hence `exclude_final_token=True` and
tolerances of float32.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mareinforce.agents.team import Team
from mareinforce.algorithms.advantages import advantages
from mareinforce.algorithms.loss import node_loss
from mareinforce.config import MAGRPOConfig
from mareinforce.optim import apply_gradient, build_optimizer, compute_gradient
from mareinforce.types import Completion, NodeSample

FIXTURE = Path(__file__).parent / "fixtures" / "comlrl_1_4_3"
NUMBERS = json.loads((FIXTURE / "numbers.json").read_text(encoding="utf-8"))
NODES = NUMBERS["nodes"]
MODES = ("raw", "mean", "rloo", "max")
COMBINATIONS = [(mode, normalization) for mode in MODES for normalization in (True, False)]
every_combination = pytest.mark.parametrize(("mode", "normalization"), COMBINATIONS)


def recorded(part, mode, normalization):
    (entry,) = (
        entry
        for entry in NUMBERS[part]
        if (entry["advantage_mode"], entry["advantage_normalization"]) == (mode, normalization)
    )
    return entry


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FIXTURE / "model", dtype=torch.float32)


def make_team(model):
    return Team([model], [AutoTokenizer.from_pretrained(FIXTURE / "model")], max_new_tokens=8)


@pytest.fixture(scope="module")
def scored(model):
    """Every node's completions scored by our own code, with the graph."""
    team = make_team(model)
    return [
        team.score(
            0,
            torch.tensor(node["prompt_ids"]),
            [torch.tensor(ids) for ids in node["completion_ids"]],
            temperature=1.0,
        )
        for node in NODES
    ]


def our_advantages(node, mode, normalization):
    return advantages(torch.tensor(node["returns"], dtype=torch.float64), mode=mode, normalization=normalization)


def our_loss(node, scores, mode, normalization, exclude_final_token=True):
    return node_loss(
        scores.logprobs,
        scores.counts,
        our_advantages(node, mode, normalization),
        aggregation="sequence_sum",
        max_new_tokens=len(node["completion_ids"][0]),
        exclude_final_token=exclude_final_token,
    )


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)


def test_the_recorded_groups_have_completions_of_one_length_and_returns_with_spread():
    for node in NODES:
        lengths = {len(ids) for ids in node["completion_ids"]}
        assert len(lengths) == 1
        assert min(lengths) >= 2
        assert len(node["completion_ids"]) == len(node["returns"]) == 4
        assert max(node["returns"]) - min(node["returns"]) > 1
    assert len({len(node["prompt_ids"]) for node in NODES}) == len(NODES)


@every_combination
def test_advantages_agree(mode, normalization):
    for node, theirs in zip(NODES, recorded("single", mode, normalization)["nodes"], strict=True):
        expected = torch.tensor(theirs["advantages"], dtype=torch.float64)

        def agree(other_mode, other_normalization, node=node, expected=expected):
            ours = our_advantages(node, other_mode, other_normalization)
            return bool((ours - expected).abs().max() <= 1e-5 * expected.abs().max())

        assert agree(mode, normalization)
        for other in MODES:
            # Normalisation re-centres, after which nothing tells the modes apart.
            assert agree(other, normalization) == (other == mode or normalization)
        assert not agree(mode, not normalization)
        # "scale" does not re-centre: only what was centred before comes out the same.
        assert agree(mode, "scale") == (normalization and mode in ("mean", "rloo"))


@every_combination
def test_loss_and_gradient_norm_agree(mode, normalization, model, scored):
    for node, scores, theirs in zip(NODES, scored, recorded("single", mode, normalization)["nodes"], strict=True):

        def ours(*args, node=node, scores=scores, **kwargs):
            loss = our_loss(node, scores, *args, **kwargs)
            return loss.item(), torch.nn.utils.get_total_norm(gradients(loss, model)).item()

        loss, norm = pytest.approx(theirs["loss"], rel=1e-4), pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours(mode, normalization) == (loss, norm)

        wrong = [ours(mode, normalization, exclude_final_token=False)]
        if not normalization:
            wrong += [ours(other, normalization) for other in MODES if other != mode]
        for wrong_loss, wrong_norm in wrong:
            assert wrong_loss != loss
            assert wrong_norm != norm


def node_sample(node, mode, normalization):
    ids = [torch.tensor(completion) for completion in node["completion_ids"]]
    return NodeSample(
        agent=0,
        turn=0,
        row=0,
        path=(),
        prompt_ids=torch.tensor(node["prompt_ids"]),
        completions=tuple(Completion(one, torch.zeros(len(one)), ended=True, text="") for one in ids),
        returns=torch.tensor(node["returns"], dtype=torch.float64),
        advantages=our_advantages(node, mode, normalization),
        zero_signal=False,
        weight=1.0,
        env_step=4,
        policy_version=0,
    )


def digest(parameter):
    flat = parameter.detach().double().flatten()
    position = torch.arange(1, len(flat) + 1, dtype=torch.float64) / len(flat)
    sums = [flat.sum(), flat.abs().sum(), (flat * position).sum()]
    return torch.stack([*sums, *flat[:8]])


def distance_after_one_step(model, mode, normalization, entries, make_optimizer, exclude_final_token=True):
    """Largest distance of a recorded digest from ours after one update, relative to how far the step moved it."""
    agent = copy.deepcopy(model)
    config = MAGRPOConfig(
        num_agents=1,
        num_turns=1,
        advantage_mode=mode,
        advantage_normalization=normalization,
        exclude_final_token=exclude_final_token,
    )
    batch = [node_sample(node, mode, normalization) for node in NODES]
    team, optimizer = make_team(agent), make_optimizer(agent)
    apply_gradient(team, optimizer, compute_gradient(team, optimizer, batch, config, policy_version=0))
    before, after = dict(model.named_parameters()), dict(agent.named_parameters())
    distances = []
    for name, entry in entries.items():
        theirs = torch.tensor([entry["sum"], entry["abs_sum"], entry["position_sum"], *entry["first"]]).double()
        moved = (theirs - digest(before[name])).abs().max()
        distances.append(float((digest(after[name]) - theirs).abs().max() / moved))
    assert len(distances) == 5
    return max(distances)


def sgd(agent):
    return torch.optim.SGD(agent.parameters(), lr=0.1)


def adamw(weight_decay):
    return lambda agent: build_optimizer(agent.parameters(), 1e-3, MAGRPOConfig(weight_decay=weight_decay))


@every_combination
def test_parameters_after_one_update_on_a_minibatch_agree(mode, normalization, model):
    theirs = recorded("batch", mode, normalization)

    def distance(key, *args, **kwargs):
        return distance_after_one_step(model, mode, normalization, theirs[key], *args, **kwargs)

    assert distance("sgd_lr_0.1", sgd) < 2e-4
    assert distance("sgd_lr_0.1", sgd, exclude_final_token=False) > 2e-2
    assert distance("adamw_lr_0.001", adamw(0.01)) < 2e-3
    assert distance("adamw_lr_0.001", adamw(0.0)) > 2e-2
