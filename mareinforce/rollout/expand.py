"""Breadth-first growth of rollout trees: a whole level is sampled, scored and expanded at a time."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mareinforce.config import MAGRPOConfig
from mareinforce.errors import MareinforceWarning, OverlongPrompt, PromptError
from mareinforce.phases import Phases
from mareinforce.rewards.contract import JointAnswers, Reward
from mareinforce.rollout.joint import joint_actions
from mareinforce.rollout.prompts import Formatters, with_others_words
from mareinforce.rollout.transition import Branch, Transition
from mareinforce.rollout.tree import Node, valid
from mareinforce.types import Answers, Encoder, Engine, IndexedRow, Prompt, Purpose, Request, Row, Sampling, StreamKey


@dataclass(frozen=True, slots=True)
class Episode:
    """The rules one rollout is played by."""

    num_turns: int
    num_completions: int
    sampling: Sampling
    seed: int
    epoch: int = 0
    purpose: Purpose = "train"
    joint_mode: Literal["aligned", "cross"] = "aligned"
    early_termination_threshold: float | None = None
    early_termination_on: Literal["node_mean", "joint_action"] = "node_mean"

    @classmethod
    def training(cls, config: MAGRPOConfig, seed: int, epoch: int) -> Episode:
        """K completions an agent and node, combined, expanded and stopped as the configuration says."""
        return cls(
            num_turns=config.num_turns,
            num_completions=config.num_generations,
            sampling=_sampling(config, config.temperature),
            seed=seed,
            epoch=epoch,
            joint_mode="cross" if config.joint_mode == "cross" else "aligned",
            early_termination_threshold=config.early_termination_threshold,
            early_termination_on=config.early_termination_on,
        )

    @classmethod
    def evaluation(cls, config: MAGRPOConfig, seed: int) -> Episode:
        """One completion an agent and turn, all turns played; the same streams at every evaluation of a run."""
        temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
        return cls(config.num_turns, 1, _sampling(config, temperature), seed, purpose="eval")


def _sampling(config: MAGRPOConfig, temperature: float) -> Sampling:
    return Sampling(config.max_new_tokens, config.min_new_tokens, temperature, config.top_p, config.top_k)


@dataclass(frozen=True, slots=True)
class Expansion:
    """Grows the trees of several rows together, with the user's callables in their places."""

    engine: Engine
    encoder: Encoder
    reward: Reward
    formatters: Formatters
    transition: Transition | None
    num_agents: int
    overflow: Literal["error", "truncate_left", "stop_branch"] = "error"
    overlong: Counter[str] = field(default_factory=Counter)  # prompts too long for their model, by purpose
    phases: Phases = field(default_factory=Phases)

    def grow(self, rows: Sequence[IndexedRow], episode: Episode) -> list[Node]:
        """Roll out every row. Returns one tree a row, in order, with rewards and without returns."""
        roots = [self._root(index, row, episode.purpose) for index, row in rows]
        level = roots
        for turn in range(episode.num_turns):
            with self.phases.measure("generation"):
                self._sample(level, episode)
            with self.phases.measure("reward"):
                self._score(level, turn, episode)
            if turn + 1 < episode.num_turns:
                with self.phases.measure("transition"):
                    level = self._expand(level, episode)
        return roots

    def first_prompts(self, index: int, row: Row, purpose: str = "check") -> list[Answers | None]:
        """What each agent is shown at turn 1 of a row, [N]. Raises PromptError, naming the row, if it cannot be."""
        prompts = [self.formatters.format(agent, row) for agent in range(self.num_agents)]
        answers = self._shown(index, row, prompts, 0, purpose)
        assert answers is not None  # at turn 1 there is no branch to stop
        for answer in answers:
            if answer is not None:
                answer.conversation = self.formatters.conversation(row, answer.prompt)
        if all(answer is None for answer in answers):
            raise PromptError(
                f"row {index}: the formatters gave None for all {self.num_agents} agents at turn 1, so nobody speaks; "
                f"give at least one of them a prompt, or drop the row."
            )
        return answers

    def _root(self, index: int, row: Row, purpose: str) -> Node:
        return Node(row_index=index, row=row, answers=self.first_prompts(index, row, purpose))

    def _shown(
        self, index: int, row: Row, prompts: Sequence[Prompt | None], turn: int, purpose: str
    ) -> list[Answers | None] | None:
        """What each agent is shown, [N]; None if a prompt that is too long stops the branch."""
        answers: list[Answers | None] = []
        for agent, prompt in enumerate(prompts):
            if prompt is None:
                answers.append(None)
                continue
            try:
                answers.append(Answers(prompt, self.encoder.encode(agent, prompt)))
            except OverlongPrompt as error:
                stops = self.overflow == "stop_branch" and turn > 0
                if not stops and (self.overflow != "truncate_left" or error.limit < 1):
                    raise PromptError(f"row {index}, turn {turn + 1}: {error}") from error
                self.overlong[purpose] += 1
                self._say_overlong(index, turn, agent, error)
                if stops:
                    return None
                answers.append(Answers(prompt, error.ids[-error.limit :]))
            except PromptError as error:
                raise PromptError(f"row {index}, turn {turn + 1}: {error}") from error
        return answers

    def _say_overlong(self, index: int, turn: int, agent: int, error: OverlongPrompt) -> None:
        if sum(self.overlong.values()) == 1:
            done = "its branch ends there" if self.overflow == "stop_branch" else "it was cut to its last"
            room = "" if self.overflow == "stop_branch" else f" {error.limit}"
            warnings.warn(
                f"row {index}, turn {turn + 1}: a prompt of agent {agent} has {len(error.ids)} tokens, with room for "
                f"{error.limit}; {done}{room} (prompt_overflow: {self.overflow}). Later ones are counted in the metric "
                f"overlong_prompts.",
                MareinforceWarning,
                stacklevel=2,
            )

    def _sample(self, level: Sequence[Node], episode: Episode) -> None:
        """Sample the completions of a whole level in one call of the engine."""
        speaking = [(node, agent, answers) for node in level for agent, answers in enumerate(node.answers) if answers]
        requests = [
            Request(agent, answers.prompt_ids, self._streams(node, agent, episode)) for node, agent, answers in speaking
        ]
        for (_, _, answers), completions in zip(speaking, self.engine.sample(requests, episode.sampling), strict=True):
            answers.completions = completions

    @staticmethod
    def _streams(node: Node, agent: int, episode: Episode) -> tuple[StreamKey, ...]:
        return tuple(
            StreamKey(episode.purpose, episode.seed, episode.epoch, node.row_index, node.path, agent, k)
            for k in range(episode.num_completions)
        )

    def _score(self, level: Sequence[Node], turn: int, episode: Episode) -> None:
        """Score every joint action, one call of the reward a node, and decide which are not expanded."""
        for node in level:
            speaking = [answers is not None for answers in node.answers]
            node.joint_actions = joint_actions(speaking, episode.num_completions, episode.joint_mode)
        told = [self._joint_answers(node, turn, episode.num_turns) for node in level]
        for node, scores in zip(level, self.reward.score_all(told), strict=True):
            node.raw_rewards, node.rewards, node.components = scores.raw, scores.processed, scores.components
            node.children = [None for _ in node.joint_actions]
            last = turn + 1 == episode.num_turns
            node.stopped = [False for _ in node.joint_actions] if last else stopped_early(node.rewards, episode)

    def _joint_answers(self, node: Node, turn: int, num_turns: int) -> JointAnswers:
        agents, joint = range(self.num_agents), range(len(node.joint_actions))
        return JointAnswers(
            [[node.text(agent, j) for j in joint] for agent in agents],
            row=node.row,
            prompt=self.formatters.row_prompt(node.row),
            turn=turn,
            num_turns=num_turns,
            prompt_history_per_agent=node.prompt_history(),
            response_history_per_agent=node.response_history(),
            ended=[[node.ended(agent, j) for j in joint] for agent in agents],
            path=node.path,
        )

    def _expand(self, level: Sequence[Node], episode: Episode) -> list[Node]:
        """Give every joint action that goes on its child node, and return these; a branch ends where all agents get
        None, and where the reward was skipped."""
        on = [
            (node, j, reward)
            for node in level
            for j, (reward, stopped) in enumerate(zip(node.raw_rewards, node.stopped, strict=True))
            if reward is not None and not stopped
        ]
        if on and self.transition is None:
            raise PromptError("num_turns is above 1, but there is no external_transition to lead to the next turn.")
        branches = [self._branch(node, j, reward) for node, j, reward in on]
        prompts = [] if self.transition is None else self.transition.next_prompts(branches)
        for (node, j, _), external in zip(on, prompts, strict=True):
            node.children[j] = self._child(node, j, external, episode)
        return [child for node in level for child in node.children if child is not None]

    def _branch(self, node: Node, joint_action: int, reward: float) -> Branch:
        return Branch(
            prompt=self.formatters.row_prompt(node.row),
            agent_completions=[node.text(agent, joint_action) for agent in range(self.num_agents)],
            prompt_history_per_agent=node.prompt_history(),
            response_history_per_agent=node.responses_through(joint_action),
            batch_item=node.row,
            turn=node.turn,
            reward=reward,
            path=(*node.path, joint_action),
        )

    def _child(self, node: Node, joint_action: int, external: list[Prompt | None], episode: Episode) -> Node | None:
        response_history = node.responses_through(joint_action)
        spoken: list[dict[str, Any]] = [
            {"prompt_history": conversation, "response_history": responses}
            for conversation, responses in zip(node.conversation_history(), response_history, strict=True)
        ]
        if self.formatters.history == "all":
            said = [node.text(agent, joint_action) for agent in range(self.num_agents)]
            external = [
                with_others_words(prompt, agent, said) if isinstance(prompt, str) else prompt
                for agent, prompt in enumerate(external)
            ]
        prompts = [
            None if prompt is None else self.formatters.format(agent, node.row, prompt, **spoken[agent])
            for agent, prompt in enumerate(external)
        ]
        answers = self._shown(node.row_index, node.row, prompts, node.turn + 1, episode.purpose)
        if answers is None:
            return None
        for agent, answer in enumerate(answers):
            if answer is not None:
                answer.conversation = self.formatters.conversation(
                    node.row, answer.prompt, external[agent], **spoken[agent]
                )
        if all(answer is None for answer in answers):
            return None
        return Node(node.row_index, node.row, answers, parent=node, parent_action=joint_action)


def stopped_early(rewards: Sequence[float | None], episode: Episode) -> list[bool]:
    """Which joint actions of a node are not expanded because of what they, or all of them, have earned already, [J].

    A skipped reward (None) is in no mean, and is not expanded anyway.
    """
    threshold, found = episode.early_termination_threshold, valid(rewards)
    if threshold is None or not found:
        return [False for _ in rewards]
    if episode.early_termination_on == "joint_action":
        return [reward is not None and reward > threshold for reward in rewards]
    over = sum(found) / len(found) > threshold
    return [over and reward is not None for reward in rewards]
