"""The KL to a reference: its values, and which way it moves a policy, in exact expectation over every outcome."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from mareinforce import MAGRPOConfig
from mareinforce.algorithms.kl import sequence_kl, token_kl
from mareinforce.algorithms.loss import node_loss
from mareinforce.rollout.credit import assign_returns, node_samples
from mareinforce.rollout.joint import joint_actions
from mareinforce.rollout.tree import Node
from mareinforce.types import Answers, Completion, ReferenceKL

POLICY, REFERENCE = torch.tensor([-1.0, -1.5]), torch.tensor([-1.5, -1.0])
K, N, COEFFICIENT = 2, 2, 0.3
STARTS = (-3.0, -1.5, -0.4, 0.0, 0.4, 1.5, 3.0)
REFERENCE_LOGIT = 0.7
"""Log-odds of token 1 under the reference."""


def test_values_of_the_estimators():
    assert token_kl(POLICY, REFERENCE, "k3").tolist() == pytest.approx([0.148721, 0.106531][::-1], abs=1e-6)
    assert token_kl(POLICY, REFERENCE, "k1").tolist() == pytest.approx([0.5, -0.5])
    assert float(token_kl(POLICY, REFERENCE, "k3").mean()) == pytest.approx(0.127626, abs=1e-6)
    # the other way round the two would change places
    assert token_kl(REFERENCE, POLICY, "k3").tolist() == pytest.approx([0.148721, 0.106531], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_equal_policies_are_exactly_nothing_apart(estimator):
    assert token_kl(POLICY, POLICY, estimator).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_only_a_completions_own_tokens_count(estimator):
    logprobs, reference = torch.randn(2, 4), torch.randn(2, 4)
    counts = torch.tensor([[True, True, False, False], [True, True, True, True]])
    expected = token_kl(logprobs.double(), reference.double(), estimator)
    found = sequence_kl(logprobs, reference, counts, estimator)
    assert found.tolist() == pytest.approx([float(expected[0, :2].sum()), float(expected[1].sum())])
    assert float(found[0]) != pytest.approx(float(expected[0].sum()))  # fillers would be seen
    logprobs[0, 3], reference[0, 3] = torch.nan, torch.inf
    assert torch.equal(sequence_kl(logprobs, reference, counts, estimator), found)


def logprob(logit: torch.Tensor, token: int) -> torch.Tensor:
    return torch.nn.functional.logsigmoid(logit if token else -logit)


def expected_update(
    starts: tuple[float, float], estimator: str, reward=lambda tokens: 0.0, coefficient=COEFFICIENT, **fields
) -> list[float]:
    """The direction that each agent's logit moves in, averaged over every way that all K answers can come out."""
    config = MAGRPOConfig(
        num_turns=1,
        num_generations=K,
        **{"advantage_normalization": False, **fields},
        reference_kl_enabled=True,
        reference_kl_coef=coefficient,
        reference_kl_estimator=estimator,
    )
    logits = [torch.tensor(start, dtype=torch.float64, requires_grad=True) for start in starts]
    total = torch.zeros((), dtype=torch.float64)
    for outcome in itertools.product(itertools.product((0, 1), repeat=K), repeat=N):
        logprobs = [torch.stack([logprob(logits[i], token) for token in outcome[i]]) for i in range(N)]
        probability = float(sum(one.sum() for one in logprobs).detach().exp())
        reference = [
            torch.stack([logprob(torch.tensor(REFERENCE_LOGIT, dtype=torch.float64), token) for token in tokens])
            for tokens in outcome
        ]
        answers = []
        for i in range(N):
            said = [Completion(torch.tensor([token]), torch.zeros(1), True, str(token)) for token in outcome[i]]
            kinds = {kind: token_kl(logprobs[i].detach(), reference[i], kind) for kind in ("k1", "k3")}
            answers.append(Answers("", torch.tensor([0]), said, kl=ReferenceKL(kinds[estimator], kinds["k3"])))
        node = Node(0, {}, answers)
        node.joint_actions = joint_actions([True] * N, K, config.joint_mode)
        node.rewards = [reward([outcome[i][k] for i, k in enumerate(joint)]) for joint in node.joint_actions]
        node.children, node.stopped = [None] * len(node.rewards), [False] * len(node.rewards)
        assign_returns(node, num_turns=1, discount=1.0, hold=False)
        for sample in node_samples(node, config, [0, 0]):
            counts = torch.ones(K, 1, dtype=torch.bool)
            total = total + probability * node_loss(logprobs[sample.agent][:, None], counts, sample.advantages)
    return [-float(one) for one in torch.autograd.grad(total, logits)]


def kl_gradient(start: float) -> float:
    """d KL(policy || reference) / d logit, from the definition."""
    logit = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(REFERENCE_LOGIT, dtype=torch.float64)
    kl = sum(logprob(logit, t).exp() * (logprob(logit, t) - logprob(reference, t)) for t in (0, 1))
    return float(torch.autograd.grad(kl, logit)[0])


def reward_gradient(starts: tuple[float, float], reward) -> list[float]:
    """d E[reward] / d logit of each agent, from the definition."""
    logits = [torch.tensor(start, dtype=torch.float64, requires_grad=True) for start in starts]
    value = sum((logprob(logits[0], a) + logprob(logits[1], b)).exp() * reward([a, b]) for a in (0, 1) for b in (0, 1))
    return [float(one) for one in torch.autograd.grad(value, logits)]


FACTORS = {"raw": 1.0, "rloo": 1.0, "mean": 1 - 1 / K}


@pytest.mark.parametrize("placement", ["return", "advantage"])
@pytest.mark.parametrize("mode", FACTORS)
def test_k1_moves_by_the_gradient_of_the_kl_from_every_start(mode, placement):
    for start in STARTS:
        fields = {"advantage_mode": mode, "reference_kl_placement": placement}
        factor = FACTORS[mode] if placement == "return" else 1.0  # after the baseline, the baseline takes nothing off
        for moved in expected_update((start, start), "k1", **fields):
            assert moved == pytest.approx(-factor * COEFFICIENT * kl_gradient(start), abs=1e-9)
            assert (moved > 0) == (start < REFERENCE_LOGIT)  # towards the reference


def test_k3_does_not_pull_towards_the_reference_from_everywhere():
    pulls = {}
    for start in STARTS:
        moved, _ = expected_update((start, start), "k3", advantage_mode="rloo")
        assert moved != pytest.approx(-COEFFICIENT * kl_gradient(start), abs=1e-3)
        pulls[start] = (moved > 0) == (start < REFERENCE_LOGIT)
    assert not all(pulls.values())
    near = REFERENCE_LOGIT + 0.05
    moved, _ = expected_update((near, near), "k3", advantage_mode="rloo")
    assert abs(moved) < 0.05 * abs(COEFFICIENT * kl_gradient(near))  # next to the reference it is all but nothing


def coordination(tokens) -> float:
    return {(0, 0): 1.0, (1, 1): 2.0, (0, 1): -0.5, (1, 0): 0.25}[tuple(tokens)]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_in_cross_reward_and_kl_keep_their_proportion(reduction):
    starts = (-0.6, 1.1)
    rewards = reward_gradient(starts, coordination)
    factor = K ** (N - 1) if reduction == "sum" else 1
    moved = expected_update(
        starts, "k1", coordination, advantage_mode="rloo", joint_mode="cross", cross_reduction=reduction
    )
    for found, reward, start in zip(moved, rewards, starts, strict=True):
        assert found == pytest.approx(factor * (reward - COEFFICIENT * kl_gradient(start)), abs=1e-9)
        if reduction == "sum":  # charged once, the KL would weigh half of what it should
            assert found != pytest.approx(factor * reward - COEFFICIENT * kl_gradient(start), abs=1e-3)


def test_a_group_without_reward_signal_is_counted_as_such_and_moves_by_its_kl():
    answers = [
        Answers(
            "",
            torch.tensor([0]),
            [Completion(torch.tensor([1]), torch.zeros(1), True, "")] * K,
            kl=ReferenceKL(torch.tensor([0.0, 1e-3], dtype=torch.float64), torch.zeros(K, dtype=torch.float64)),
        )
        for _ in range(N)
    ]
    node = Node(0, {}, answers)
    node.joint_actions = joint_actions([True] * N, K, "aligned")
    node.rewards, node.children, node.stopped = [1.0] * K, [None] * K, [False] * K
    assign_returns(node, num_turns=1, discount=1.0, hold=False)

    def advantages(**fields):
        config = MAGRPOConfig(num_turns=1, num_generations=K, reference_kl_enabled=True, **fields)
        sample = node_samples(node, config, [0, 0])[0]
        assert sample.zero_signal
        assert sample.kl_penalty.tolist() == pytest.approx([0.0, 1e-4])
        return sample.advantages.tolist()

    assert advantages() == pytest.approx([1.0, -1.0])  # at full size, of which the run warns
    assert advantages(reference_kl_placement="advantage") == pytest.approx([0.0, -1e-4])
    assert advantages(advantage_normalization=False) == pytest.approx([5e-5, -5e-5])
    assert math.isclose(sum(advantages()), 0.0, abs_tol=1e-12)
