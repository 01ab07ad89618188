"""From grown trees to node samples: returns up the tree, then each agent's own returns and advantages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mareinforce.agents.micro_batches import micro_batches
from mareinforce.agents.node_scoring import Told
from mareinforce.agents.team import Team
from mareinforce.algorithms.advantages import BaselineMode, Normalization, advantages, is_zero_signal
from mareinforce.algorithms.kl import joint_action_count
from mareinforce.algorithms.returns import completion_returns, held_return, joint_return
from mareinforce.config import MAGRPOConfig
from mareinforce.rollout.tree import Node, nodes_by_level, valid
from mareinforce.types import NodeSample, ReferenceKL


def assign_returns(root: Node, *, num_turns: int, discount: float, hold: bool) -> list[float | None]:
    """Fill `returns` of every node of a tree, leaves first; return the root's, [J].

    A joint action has none (None) if its reward was skipped, or if no joint action of its child has one: its reward
    alone would stand for a future that is not known.
    """
    returns: list[float | None] = []
    for j, reward in enumerate(root.rewards):
        child = root.children[j]
        if reward is None:
            returns.append(None)
        elif child is not None:
            below = valid(assign_returns(child, num_turns=num_turns, discount=discount, hold=hold))
            returns.append(joint_return(reward, below, discount) if below else None)
        elif hold and root.stopped[j]:
            returns.append(held_return(reward, num_turns - 1 - root.turn, discount))
        else:
            returns.append(reward)
    root.returns = returns
    return returns


def tree_env_steps(root: Node) -> int:
    """Joint actions of a whole tree."""
    return sum(len(node.rewards) for node in nodes_by_level(root))


def number_env_steps(
    trees: Sequence[Node], env_step: int, sizes: Sequence[Sequence[int]] | None = None, rank: int = 0
) -> int:
    """Number the joint actions of whole trees: row by row, level by level. Returns the new count.

    Those whose reward was skipped count too: they were played, and the numbers of the others do not depend on them.

    ``sizes``: `tree_env_steps` of the trees that each rank has grown in this step; default: of these. Rows are counted
    in the order they were dealt to the ranks in, so numbers are those of one process that has all the rows.
    """
    sizes = [[tree_env_steps(root) for root in trees]] if sizes is None else sizes
    dealt = sorted((place, other) for other, own in enumerate(sizes) for place in range(len(own)))
    for place, other in dealt:
        count = env_step
        for node in nodes_by_level(trees[place]) if other == rank else ():
            count += len(node.rewards)
            node.env_step = count
        env_step += sizes[other][place]
    return env_step


def full_tree_nodes(num_agents: int, num_completions: int, joint_mode: str, turn: int) -> int:
    """Nodes of a full tree at a turn: K^t aligned, K^(N t) cross."""
    branching = num_completions ** (num_agents if joint_mode == "cross" else 1)
    return int(branching**turn)


def reach_weight(node: Node) -> float:
    """1 / (joint actions with a return at each node on the way here): a node's share of its turn where all ancestors
    are full."""
    return 1.0 if node.parent is None else reach_weight(node.parent) / len(valid(node.parent.returns))


def measure_reference_kl(team: Team, agent: int, trees: Sequence[Node], config: MAGRPOConfig) -> None:
    """Fill in the KL of an agent's answers at every node of the trees, as many nodes at once as the budget allows."""
    nodes = [node for root in trees for node in nodes_by_level(root)]
    answered = [answers for node in nodes if (answers := node.answers[agent]) is not None]
    told = [Told(answers.prompt_ids, [one.ids for one in answers.completions]) for answers in answered]
    found: list[list[ReferenceKL]] = [[] for _ in told]
    for pieces in micro_batches(told, config.update_token_budget):
        part = [piece.of(told) for piece in pieces]
        kls = team.reference_kl(agent, part, config.temperature, config.reference_kl_estimator)
        for piece, kl in zip(pieces, kls, strict=True):
            found[piece.node].append(kl)
    for answers, kls in zip(answered, found, strict=True):
        answers.kl = ReferenceKL(*(torch.cat(parts) for parts in zip(*kls, strict=True)))


def kl_penalty(kl: ReferenceKL, node: Node, config: MAGRPOConfig) -> Tensor:
    """Coefficient x KL of each completion, float64 [K]; once for every return that its own adds up."""
    size = len(kl.charged)
    speaking = sum(answers is not None for answers in node.answers)
    joint = joint_action_count(size, speaking, config.joint_mode, config.cross_reduction)
    if config.reference_kl_placement == "advantage" and config.advantage_normalization is not False:
        joint = 1  # a normalised advantage has no scale that a sum could have changed
    return config.reference_kl_coef * joint * kl.charged


def penalised_advantages(returns: Tensor, penalty: Tensor | None, config: MAGRPOConfig) -> Tensor:
    """Advantages [K] from returns [K], with the KL inside the return or subtracted from the finished advantage."""
    mode: BaselineMode = config.advantage_mode
    normalization: Normalization = config.advantage_normalization
    if penalty is None:
        return advantages(returns, mode, normalization)
    if config.reference_kl_placement == "return":
        return advantages(returns - penalty, mode, normalization)
    return advantages(returns, mode, normalization) - penalty


def node_samples(
    node: Node, config: MAGRPOConfig, policy_versions: Sequence[int], num_rows: int = 1
) -> list[NodeSample]:
    """One sample per speaking agent of a node whose returns are assigned.

    It holds the completions that take part in a joint action with a return; an agent that has fewer than two of them
    gets no sample.

    ``policy_versions``: [N]. ``num_rows``: rows rolled out together (B), whose mean a tree-weighted update is; rows in
    which an agent is idle count in it.
    """
    counts = torch.tensor([one is not None for one in node.returns])
    joint_returns = torch.tensor([0.0 if one is None else one for one in node.returns], dtype=torch.float64)
    weight = config.discount**node.turn * reach_weight(node) / num_rows if config.turn_weighting == "tree" else 1.0
    samples = []
    for agent, answers in enumerate(node.answers):
        if answers is None:
            continue
        indices = [index for joint in node.joint_actions if (index := joint[agent]) is not None]
        kept = sorted({k for k, one in zip(indices, node.returns, strict=True) if one is not None})
        if len(kept) < 2:
            continue
        size = len(answers.completions)
        returns = completion_returns(joint_returns, indices, size, config.cross_reduction, counts)[kept]
        kl, penalty = None, None
        if answers.kl is not None:
            kl = ReferenceKL(answers.kl.charged[kept], answers.kl.k3[kept])
            penalty = kl_penalty(answers.kl, node, config)[kept]
        samples.append(
            NodeSample(
                agent=agent,
                turn=node.turn,
                row=node.row_index,
                path=node.path,
                prompt_ids=answers.prompt_ids,
                completions=tuple(answers.completions[k] for k in kept),
                returns=returns,
                advantages=penalised_advantages(returns, penalty, config),
                zero_signal=is_zero_signal(returns),
                weight=weight,
                env_step=node.env_step,
                policy_version=policy_versions[agent],
                kl=kl,
                kl_penalty=penalty,
                ks=tuple(kept),
            )
        )
    return samples
