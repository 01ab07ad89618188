"""A sample of joint answers now and then: as lines in a file, as a table in the console, and for a tracker."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from mareinforce.callbacks.bounded_lines import BoundedLines
from mareinforce.callbacks.console import print_beside_progress, rendered
from mareinforce.callbacks.trackers import log_table

from mareinforce.errors import ConfigError
from mareinforce.rollout.tree import Node, nodes_by_level
from mareinforce.rollout_table import VERSION, as_line, whole_lines
from mareinforce.types import NodeSample, Prompt

FILE_NAME = "completions.jsonl"
Record = dict[str, Any]
COLUMNS = (
    "env_step", "turn", "row", "path", "joint_action", "agent", "prompt", "completion", "ended", "reward", "raw_reward",
    "return", "advantage",
)  # fmt: skip
"""Of the tracker's table, which has a line an agent."""


class CompletionTable(L.Callback):
    """Shows a few joint answers of every turn, every so often: prompts, texts, reward, return and advantages.

    They go into `completions.jsonl` in the run folder, a line a joint answer (docs/callbacks.md has the fields); to the
    console, with texts cut short; and to Weights & Biases or TensorBoard, where they are among the loggers, as one
    table that keeps what was sent before. Which answers are shown is decided by the run's seed and the environment
    step; nothing that training draws is touched.

    Args:
        every_n_env_steps: show those of the first batch, and of the batch in which as many steps have passed since.
        num_samples: joint answers a turn.
        console: print the table too.
        max_characters: of a text in the console; longer ones are cut in the middle.
        max_bytes: a file that would grow beyond this becomes `completions.1.jsonl`, in place of an older one.
        max_rows: joint answers that the tracker's table keeps, the newest.

    Raises:
        ConfigError: a number below 1.
    """

    def __init__(
        self,
        every_n_env_steps: int = 500,
        num_samples: int = 2,
        console: bool = True,
        max_characters: int = 240,
        max_bytes: int = 16 * 2**20,
        max_rows: int = 500,
    ) -> None:
        numbers = {"every_n_env_steps": every_n_env_steps, "num_samples": num_samples,
                   "max_characters": max_characters, "max_bytes": max_bytes, "max_rows": max_rows}  # fmt: skip
        for name, number in numbers.items():
            if number < 1:
                raise ConfigError(f"CompletionTable {name}={number}: must be at least 1.")
        self.every_n_env_steps, self.num_samples, self.console = every_n_env_steps, num_samples, console
        self.max_characters, self.max_bytes = max_characters, max_bytes
        self._history: deque[Record] = deque(maxlen=max_rows)
        self._shown_at: int | None = None  # environment step
        self._lines: BoundedLines | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Find the file, take out of it what a killed run wrote after its checkpoint, and take up what is left."""
        folder = trainer.log_dir or trainer.default_root_dir  # asked on every rank: it is rank 0's
        self._lines = None
        self._history.clear()
        if pl_module.env_step == 0:
            self._shown_at = None
        if not trainer.is_global_zero:
            return
        self._lines = BoundedLines(Path(folder) / FILE_NAME, self.max_bytes, "CompletionTable")
        self._lines.go_on_from(pl_module.env_step)
        for file in (self._lines.older, self._lines.path):
            if file.exists():
                self._history.extend(record for _, record in whole_lines(file))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Show some of the batch's joint answers (with several processes of those of the first), if it is time."""
        step = pl_module.env_step
        if self._shown_at is not None and step - self._shown_at < self.every_n_env_steps:
            return
        if self._lines is None or not outputs["trees"]:
            return
        self._shown_at = step
        choice = random.Random(f"{pl_module.seed}-{step}")
        chosen = sampled_joint_actions(outputs["trees"], self.num_samples, choice)
        where = {"epoch": trainer.current_epoch, "batch": pl_module.batches}
        records = joint_records(chosen, outputs["samples"], where)
        self._lines.append([as_line(record) for record in records])
        self._history.extend(records)
        if self.console:
            print_beside_progress(trainer, rendered(console_table(records, self.max_characters), sys.stdout))
        rows = [row for record in self._history for row in tracker_rows(record)]
        log_table(trainer.loggers, "completions", COLUMNS, rows, step)

    def state_dict(self) -> dict[str, Any]:
        """When it last showed something."""
        return {"shown_at": self._shown_at}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting from there."""
        self._shown_at = state_dict["shown_at"]


def sampled_joint_actions(trees: Sequence[Node], count: int, choice: random.Random) -> list[tuple[Node, int]]:
    """Up to ``count`` joint actions of each turn, any of them as likely as another, in the order of the trees."""
    by_turn: dict[int, list[tuple[Node, int]]] = {}
    for root in trees:
        for node in nodes_by_level(root):
            by_turn.setdefault(node.turn, []).extend((node, j) for j in range(len(node.joint_actions)))
    return [
        turn[index]
        for _, turn in sorted(by_turn.items())
        for index in sorted(choice.sample(range(len(turn)), min(count, len(turn))))
    ]


def joint_records(
    chosen: Sequence[tuple[Node, int]], samples: Sequence[NodeSample], where: Mapping[str, int]
) -> list[Record]:
    """One record a joint action; ``agents`` has None for one that is idle."""
    credit = {(sample.env_step, sample.agent): sample for sample in samples}  # no two nodes share a step
    return [
        {
            "version": VERSION,
            "env_step": node.env_step,
            **where,
            "row": node.row_index,
            "path": "/".join(map(str, node.path)),
            "turn": node.turn + 1,
            "joint_action": j,
            "raw_reward": node.raw_rewards[j],
            "reward": node.rewards[j],
            "components": {name: values[j] for name, values in node.components.items()},
            "return": node.returns[j],
            "stopped": node.stopped[j],
            "agents": [_said(node, j, agent, credit.get((node.env_step, agent))) for agent in range(len(node.answers))],
        }
        for node, j in chosen
    ]


def credit_of(sample: NodeSample | None, k: int) -> tuple[float, float] | tuple[None, None]:
    """Return and advantage of a node's k-th completion; None where it was left out because a reward was skipped."""
    kept = () if sample is None else sample.ks or tuple(range(len(sample.completions)))
    if sample is None or k not in kept:
        return None, None
    return float(sample.returns[kept.index(k)]), float(sample.advantages[kept.index(k)])


def _said(node: Node, j: int, agent: int, sample: NodeSample | None) -> Record | None:
    answers, k = node.answers[agent], node.joint_actions[j][agent]
    if answers is None or k is None:
        return None
    completion = answers.completions[k]
    own_return, advantage = credit_of(sample, k)
    return {
        "prompt": answers.prompt,
        "completion": completion.text,
        "ended": completion.ended,
        "tokens": len(completion.ids),
        "return": own_return,
        "advantage": advantage,
    }


def tracker_rows(record: Record) -> list[list[Any]]:
    """A record as lines of the tracker's table, one an agent that speaks."""
    joint = {name: record[name] for name in ("env_step", "turn", "row", "path", "joint_action", "reward", "raw_reward")}
    return [
        [{**joint, "agent": agent, **said, "prompt": plain(said["prompt"])}[name] for name in COLUMNS]
        for agent, said in enumerate(record["agents"])
        if said is not None
    ]


def plain(prompt: Prompt) -> str:
    """A prompt as text, whatever it is."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)


def number(value: float | None) -> str:
    """A reward or a return for people."""
    return "skipped" if value is None else f"{value:.4g}"


def shortened(text: str, limit: int) -> str:
    """About ``limit`` characters, with what was cut out of the middle told."""
    if len(text) <= limit + 24:  # what says how much is left out takes room too
        return text
    head = limit * 2 // 3
    return f"{text[:head]} [+{len(text) - limit} characters] {text[len(text) - (limit - head) :]}"


def console_table(records: Sequence[Record], limit: int) -> Any:
    """A table for the console: a section a joint answer, and in it a line an agent."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    first = records[0]
    title = f"joint answers at environment step {first['env_step']}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for name in ("turn", "agent"):
        table.add_column(name, justify="right", style="cyan", no_wrap=True)
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("answer", ratio=4, overflow="fold")
    for name in ("reward", "return", "advantage"):
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        speaking = [(agent, said) for agent, said in enumerate(record["agents"]) if said is not None]
        for index, (agent, said) in enumerate(speaking):
            same = index > 0 and said["prompt"] == speaking[index - 1][1]["prompt"]
            answer = Text(shortened(said["completion"], limit))
            if not said["ended"]:
                answer.append(" [cut]", style="yellow")
            advantage = said["advantage"]
            table.add_row(
                str(record["turn"]) if index == 0 else "",
                str(agent),
                Text("the same" if same else shortened(plain(said["prompt"]), limit // 2), style="dim"),
                answer,
                number(record["reward"]) if index == 0 else "",
                number(record["return"]) if index == 0 else "",
                "" if advantage is None else Text(f"{advantage:+.3f}", style="green" if advantage > 0 else "red"),
                end_section=index + 1 == len(speaking),
            )
    return table
