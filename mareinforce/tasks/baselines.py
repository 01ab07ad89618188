"""The four teams that trained cooperation is compared with, for any task: what they need beside the task itself.

- A single agent does everybody's work in one answer, with a marker between the parts: `OneAgentPrompt`,
  `OneAgentReward`, `OneAgentLogger`, and ``num_agents: 1``.
- Naive concatenation: the agents answer independently, and that is all. It needs nothing but ``num_turns: 1``.
- A pipeline: agent 0 answers in turn 1, agent 1 in turn 2 with that answer before it, and so on; the others are idle.
  `Pipeline` as transition, `waits` as the formatter of all agents but the first, `FinalReward`, `LatestLogger`, and as
  many turns as agents.
- A discussion: all answer, are shown everybody's answers, and revise: `discussion` as transition, with
  ``external_prompt_passthrough: true`` and ``num_turns: 2``.

All are objects and functions that YAML can name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mareinforce.calling import UserFunction
from mareinforce.errors import ConfigError, PromptError
from mareinforce.rewards.contract import KNOWN_KEYWORDS

MARKER = "[NEXT]"
"""What a single agent writes between the parts of its answer."""

_LOGGER_KEYWORDS = ("agent_completions_turns", "batch_items", "prompts")


# one agent


@dataclass(frozen=True)
class OneAgentPrompt:
    """A formatter: all agents' tasks in one prompt, to be answered in order with the marker between the answers."""

    formatters: list[Callable[..., Any]]
    marker: str = MARKER

    def __call__(self, row: Mapping[str, Any]) -> str:
        tasks: list[str] = []
        for formatter in self.formatters:
            task = formatter(dict(row))
            if not isinstance(task, str):
                raise PromptError(
                    f"OneAgentPrompt puts texts together, and one of its formatters returned a {type(task).__name__}; "
                    f"give formatters that return texts, and set chat_template: true for a chat model."
                )
            tasks.append(f"Task {len(tasks) + 1}:\n{task}")
        count = len(tasks)
        return (
            f"There are {count} tasks. Answer all of them in this order, and write a line {self.marker} between one "
            f"answer and the next.\n\n" + "\n\n".join(tasks) + f"\n\nThe {count} answers:\n"
        )


def split_answer(answer: str, num_parts: int, marker: str = MARKER) -> list[str]:
    """The parts of a single agent's answer; "" for each that is missing. Further markers stay in the last part."""
    parts = [part.strip() for part in answer.split(marker, num_parts - 1)]
    return parts + [""] * (num_parts - len(parts))


@dataclass(frozen=True)
class OneAgentReward:
    """A task's reward for `num_parts` agents, of the parts of one agent's answer. Raises ConfigError as a run would.

    The reward's keywords are those that agents with the parts for answers would have had: each has the one agent's
    prompts, and its answer counts as ended if the whole did.
    """

    reward_func: Callable[..., Any]
    num_parts: int = 2
    marker: str = MARKER

    def __post_init__(self) -> None:
        _check_parts(self.num_parts, self.marker)
        _reward(self.reward_func, self.num_parts)

    def __call__(self, answers: Sequence[str], **known: Any) -> Any:
        parts = [split_answer(answer, self.num_parts, self.marker) for answer in answers]
        for name in ("ended", "prompt_history_per_agent"):
            known[name] = list(known[name]) * self.num_parts
        before = [
            split_answer(answer, self.num_parts, self.marker) for answer in known["response_history_per_agent"][0]
        ]
        known["response_history_per_agent"] = _columns(before, self.num_parts)
        return _score(self.reward_func, _columns(parts, self.num_parts), known)


@dataclass(frozen=True)
class OneAgentLogger:
    """A task's eval_logger for `num_parts` agents, of the parts of one agent's answers."""

    eval_logger: Callable[..., Any]
    num_parts: int = 2
    marker: str = MARKER

    def __post_init__(self) -> None:
        _check_parts(self.num_parts, self.marker)

    def __call__(self, agent_completions_turns: Sequence[Sequence[Sequence[str]]], **known: Any) -> Any:
        (answers,) = agent_completions_turns
        split = [[split_answer(answer, self.num_parts, self.marker) for answer in turns] for turns in answers]
        parts = [[[answer[part] for answer in turns] for turns in split] for part in range(self.num_parts)]
        return _measure(self.eval_logger, parts, known)


# one after the other


def waits(row: Mapping[str, Any], external_prompts: Any = None) -> Any:
    """A formatter: idle at turn 1; later, what the transition wrote, as it is."""
    return external_prompts


@dataclass(frozen=True)
class Pipeline:
    """A transition: after turn t only agent t speaks, and is shown its task and the answers of those before it.

    Args:
        formatters: one an agent, as the agents have them when they answer together.

    Raises:
        PromptError: when called, if there is not one formatter an agent.
    """

    formatters: list[Callable[..., Any]]

    def __call__(
        self,
        num_agents: int,
        turn: int,
        batch_item: Mapping[str, Any],
        response_history_per_agent: Sequence[Sequence[str]],
    ) -> list[Any] | None:
        if len(self.formatters) != num_agents:
            raise PromptError(
                f"Pipeline has {len(self.formatters)} formatters and num_agents is {num_agents}; give one an agent."
            )
        speaker = turn + 1
        if speaker >= num_agents:
            return None  # everybody has spoken
        answers = [response_history_per_agent[agent][agent] for agent in range(speaker)]
        task = self.formatters[speaker](dict(batch_item))
        prompt = _with_text(task, f"{_quoted(answers)}\n\nBuild on that. Give your own answer:\n")
        return [prompt if agent == speaker else None for agent in range(num_agents)]


@dataclass(frozen=True)
class FinalReward:
    """A task's reward of the last turn's joint answer, in which an agent that is idle answers what it last answered.

    Earlier turns earn 0, so that a whole episode earns what its final answer is worth. `ended` and the histories are
    passed on as they are.
    """

    reward_func: Callable[..., Any]

    def __call__(self, *answers: Sequence[str], **known: Any) -> Any:
        turn = known["turn"]
        if turn + 1 < known["num_turns"]:
            return [0.0] * len(answers[0])
        joint = []
        histories = zip(known["prompt_history_per_agent"], known["response_history_per_agent"], strict=True)
        for own, (prompts, responses) in zip(answers, histories, strict=True):
            spoke = [
                past for past, prompt in enumerate(prompts) if prompt is not None
            ]  # the last is this turn, or idle
            joint.append(list(own) if not spoke or spoke[-1] == turn else [responses[spoke[-1]]] * len(own))
        return _score(self.reward_func, joint, known)


@dataclass(frozen=True)
class LatestLogger:
    """A task's eval_logger, of each agent's latest answer so far at every turn. An empty answer counts as idleness."""

    eval_logger: Callable[..., Any]

    def __call__(self, agent_completions_turns: Sequence[Sequence[Sequence[str]]], **known: Any) -> Any:
        def latest(turns: Sequence[str]) -> list[str]:
            so_far = [[text for text in turns[: turn + 1] if text] for turn in range(len(turns))]
            return [texts[-1] if texts else "" for texts in so_far]

        carried = [[latest(turns) for turns in rows] for rows in agent_completions_turns]
        return _measure(self.eval_logger, carried, known)


# all together, twice


def discussion(
    agent_completions: Sequence[str], num_agents: int, prompt_history_per_agent: Sequence[Sequence[Any]]
) -> list[Any]:
    """A transition: every agent is shown its first prompt again, all answers of this turn, and is asked to revise.

    Needs ``external_prompt_passthrough: true`` unless formatters return `external_prompts` as they are: what it makes
    is whole. An agent that was idle at turn 1 stays idle.
    """
    asked = [
        f"{_quoted(agent_completions)}\n\nYou are agent {agent + 1}. Consider the others' answers and give your "
        f"improved answer to your own task:\n"
        for agent in range(num_agents)
    ]
    first = [history[0] for history in prompt_history_per_agent]
    return [None if prompt is None else _with_text(prompt, text) for prompt, text in zip(first, asked, strict=True)]


# what they share


def _quoted(answers: Sequence[str]) -> str:
    return "\n\n".join(f"Agent {agent + 1} answered:\n{answer}" for agent, answer in enumerate(answers))


def _with_text(prompt: Any, text: str) -> Any:
    """The prompt with a text added at its end: of a list of messages, at the end of the last one."""
    if isinstance(prompt, str):
        return f"{prompt}\n\n{text}"
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1].get("content"), str):
        return [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']}\n\n{text}"}]
    raise PromptError(
        f"answers of others can be added to a text or to messages of text, and this prompt is a "
        f"{type(prompt).__name__}; give formatters that return one of those."
    )


def _columns(rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    return [[row[column] for row in rows] for column in range(width)]


def _check_parts(num_parts: int, marker: str) -> None:
    if num_parts < 1 or not marker:
        raise ConfigError(f"num_parts={num_parts}, marker={marker!r}: an answer has at least one part, and a marker.")


def _reward(reward_func: Any, count: int) -> UserFunction:
    lists = [f"answers of agent {agent}" for agent in range(count)]
    return UserFunction(reward_func, "reward_func", positional=lists, known=KNOWN_KEYWORDS, leading="prompts")


def _score(reward_func: Any, joint: Sequence[Sequence[str]], known: Mapping[str, Any]) -> Any:
    function = _reward(reward_func, len(joint))
    lists = [known["prompts"], *joint] if function.leads else joint
    return function.call(lists, known, f"turn {known['turn'] + 1}")


def _measure(eval_logger: Any, completions: Sequence[Any], known: Mapping[str, Any]) -> Any:
    function = UserFunction(eval_logger, "eval_logger", positional=[], known=_LOGGER_KEYWORDS)
    return function.call([], {**known, "agent_completions_turns": completions}, "evaluation")
