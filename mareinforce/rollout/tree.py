"""The rollout tree of one row. Plain records, no tensors touched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mareinforce.types import Answers, NodePath, Prompt, Row

JointAction = tuple[int | None, ...]
"""Which completion each agent contributes, [N]; None for an agent that is idle at the node."""


@dataclass(slots=True, eq=False)
class Node:
    """One joint history: what each agent is shown and answers there, and what the joint answers earn.

    None among rewards and components: the reward of that joint action failed and was skipped. Among returns: it has
    none, because it was skipped itself, or because nothing below it has a return.
    """

    row_index: int
    row: Row
    answers: list[Answers | None]  # [N], None: idle
    parent: Node | None = None
    parent_action: int | None = None  # which joint action of the parent leads here
    joint_actions: list[JointAction] = field(default_factory=list)  # [J]
    raw_rewards: list[float | None] = field(default_factory=list)  # [J]
    rewards: list[float | None] = field(default_factory=list)  # [J], processed
    components: dict[str, list[float | None]] = field(default_factory=dict)  # [J] each
    stopped: list[bool] = field(default_factory=list)  # [J], True: not expanded, by early termination
    children: list[Node | None] = field(default_factory=list)  # [J]
    returns: list[float | None] = field(default_factory=list)  # [J]
    env_step: int = 0  # joint actions scored up to and including this node

    @property
    def path(self) -> NodePath:
        """Joint-action indices from the root."""
        if self.parent is None or self.parent_action is None:
            return ()
        return (*self.parent.path, self.parent_action)

    @property
    def turn(self) -> int:
        """0 at the root."""
        return len(self.path)

    def text(self, agent: int, joint_action: int) -> str:
        """What an agent says in a joint action; "" where it is idle."""
        answers, k = self.answers[agent], self.joint_actions[joint_action][agent]
        return "" if answers is None or k is None else answers.completions[k].text

    def ended(self, agent: int, joint_action: int) -> bool:
        """True if what the agent says there ends by itself (an idle agent's silence does)."""
        answers, k = self.answers[agent], self.joint_actions[joint_action][agent]
        return True if answers is None or k is None else answers.completions[k].ended

    def prompt_history(self) -> list[list[Prompt | None]]:
        """The prompts shown to each agent from the root to this node, [N][turn + 1]; None where it was idle."""
        before = self.parent.prompt_history() if self.parent else [[] for _ in self.answers]
        shown = [None if answers is None else answers.prompt for answers in self.answers]
        return [[*history, prompt] for history, prompt in zip(before, shown, strict=True)]

    def conversation_history(self) -> list[list[Prompt | None]]:
        """What each agent's conversation goes on from, [N][turn + 1]: as shown, or before a formatter added to it."""
        before = self.parent.conversation_history() if self.parent else [[] for _ in self.answers]
        here = [None if answers is None else answers.conversation or answers.prompt for answers in self.answers]
        return [[*history, prompt] for history, prompt in zip(before, here, strict=True)]

    def response_history(self) -> list[list[str]]:
        """What each agent said on the way to this node, [N][turn]; "" where it was idle."""
        if self.parent is None or self.parent_action is None:
            return [[] for _ in self.answers]
        return self.parent.responses_through(self.parent_action)

    def responses_through(self, joint_action: int) -> list[list[str]]:
        """What each agent said up to and including a joint action of this node, [N][turn + 1]."""
        said = [self.text(agent, joint_action) for agent in range(len(self.answers))]
        return [[*history, text] for history, text in zip(self.response_history(), said, strict=True)]


def valid(values: Sequence[float | None]) -> list[float]:
    """Those of a node's values that are there, in their order."""
    return [value for value in values if value is not None]


def nodes_by_level(root: Node) -> Iterator[Node]:
    """Every node of a tree, level by level, in joint-action order within a level."""
    level = [root]
    while level:
        yield from level
        level = [child for node in level for child in node.children if child is not None]
