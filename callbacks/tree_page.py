"""A rollout tree as HTML and as text: nodes, prompts, texts, rewards, returns, advantages, and what was stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from mareinforce.callbacks.completion_table import credit_of, number, plain, shortened
from mareinforce.callbacks.tree_drawing import drawing, shade

from mareinforce.metrics import mean
from mareinforce.rollout.tree import Node, nodes_by_level, valid
from mareinforce.types import NodeSample

MAX_NODES = 120
"""Nodes that are shown in full; of a larger tree the later ones are only counted."""
TEXT_WIDTH = 100
"""Characters of an answer in the text."""

Samples = Mapping[tuple[int, int], NodeSample]
"""By environment step of the node, and agent."""

STYLE = """
.mareinforce-tree {--ink: #1c2330; --dim: #667085; --line: #d9dee7; --card: #ffffff; --page: #f5f7fa;
  --warn: #a15c00; --warn-back: #fdf0d8; --stop: #3d4fb8; --stop-back: #e8ebfb;
  font: 14px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--page); padding: 20px 24px;
  max-width: 1180px; margin: 0 auto; box-sizing: border-box}
@media (prefers-color-scheme: dark) {.mareinforce-tree {--ink: #e4e8ef; --dim: #97a1b3; --line: #3a4150;
  --card: #20252e; --page: #161a20; --warn: #f2bd6b; --warn-back: #453311; --stop: #aab6ff; --stop-back: #2a3160}}
.mareinforce-tree h1 {font-size: 20px; margin: 0 0 2px}
.mareinforce-tree .facts {color: var(--dim); margin: 0 0 12px}
.mareinforce-tree .drawing {overflow-x: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 8px; margin-bottom: 14px}
.mareinforce-tree .drawing p {margin: 4px 0 0; font-size: 12px}
.mareinforce-tree .ramp {display: inline-block; width: 70px; height: 9px; border-radius: 3px}
.mareinforce-tree .drawing text {fill: var(--dim); font-size: 11px}
.mareinforce-tree .drawing line {stroke: var(--line); stroke-width: 1.5}
.mareinforce-tree details.node {border: 1px solid var(--line); border-left: 4px solid var(--dim); border-radius: 8px;
  background: var(--card); padding: 8px 12px; margin: 8px 0}
.mareinforce-tree summary {cursor: pointer}
.mareinforce-tree summary b {margin-right: 8px}
.mareinforce-tree .dim {color: var(--dim)}
.mareinforce-tree .joint {border-top: 1px solid var(--line); margin-top: 8px; padding-top: 8px}
.mareinforce-tree .head {display: flex; flex-wrap: wrap; gap: 6px 14px; align-items: baseline; margin-bottom: 4px}
.mareinforce-tree .number {font-variant-numeric: tabular-nums}
.mareinforce-tree .chip {border-radius: 4px; padding: 0 7px; color: #10151d; font-variant-numeric: tabular-nums}
.mareinforce-tree .badge {border-radius: 4px; padding: 0 6px; font-size: 12px}
.mareinforce-tree .stop {color: var(--stop); background: var(--stop-back)}
.mareinforce-tree .cut {color: var(--warn); background: var(--warn-back)}
.mareinforce-tree .agents {display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 8px}
.mareinforce-tree pre {white-space: pre-wrap; overflow-wrap: anywhere; margin: 2px 0 0; padding: 6px 8px;
  font-size: 13px; line-height: 1.4; max-height: 15em; overflow-y: auto; background: var(--page);
  border-radius: 6px; color: var(--ink)}
.mareinforce-tree .prompts {margin-top: 4px}
"""


@dataclass(frozen=True, slots=True)
class TreePage:
    """A tree that is done with, as words; nothing of the tree itself is kept."""

    title: str
    html: str
    """To be put into another page, such as a notebook's."""
    text: str

    def document(self) -> str:
        """A page of its own, which needs nothing from elsewhere."""
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>body {{margin: 0; background: #f5f7fa}} "
            "@media (prefers-color-scheme: dark) {body {background: #161a20}}</style></head>\n"
            f"<body>{self.html}</body></html>\n"
        )

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows where there is no HTML."""
        printer.text(self.text)


def tree_page(root: Node, samples: Sequence[NodeSample] = ()) -> TreePage:
    """Render a tree whose returns are assigned; ``samples`` are those made of it, for the advantages."""
    credit = {(sample.env_step, sample.agent): sample for sample in samples if sample.row == root.row_index}
    nodes = list(nodes_by_level(root))
    rewards = [reward for node in nodes for reward in node.rewards]
    there = valid(rewards) or [0.0]
    first, last = root.env_step - len(root.rewards) + 1, nodes[-1].env_step
    title = f"Rollout tree of row {root.row_index}, environment steps {first} to {last}"
    facts = _facts(nodes, rewards)
    shown = {id(node) for node in nodes[:MAX_NODES]}
    scale = (min(there), max(there))
    body = _node_html(root, credit, shown, scale)
    picture = drawing(root, scale)
    html = (
        f'<div class="mareinforce-tree"><style>{STYLE}</style><h1>{escape(title)}</h1><p class="facts">{facts}</p>'
        f"{picture}{body}</div>"
    )
    return TreePage(title, html, "\n".join([title, facts, *_node_text(root, credit, shown)]))


def _facts(nodes: Sequence[Node], rewards: Sequence[float | None]) -> str:
    turns = 1 + nodes[-1].turn
    sizes = {"agent": len(nodes[0].answers), "turn": turns, "node": len(nodes), "joint answer": len(rewards)}
    counts = ", ".join(_count(number, thing) for thing, number in sizes.items())
    stopped = sum(sum(node.stopped) for node in nodes)
    there = valid(rewards)
    span = f"rewards from {min(there):.4g} to {max(there):.4g}" if there else "no reward"
    return f"{counts}, {stopped} of them stopped early; {span}"


def _mean_reward(node: Node) -> str:
    there = valid(node.rewards)
    text: str = number(mean(there) if there else None)
    return text


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _advantage(node: Node, j: int, agent: int, credit: Samples) -> float | None:
    k = node.joint_actions[j][agent]
    return None if k is None else credit_of(credit.get((node.env_step, agent)), k)[1]


def _node_html(node: Node, credit: Samples, shown: set[int], scale: tuple[float, float]) -> str:
    prompts = "".join(
        f'<details class="prompts"><summary class="dim">prompt of agent {agent}</summary>'
        f"<pre>{escape(plain(answers.prompt))}</pre></details>"
        for agent, answers in enumerate(node.answers)
        if answers is not None
    )
    joints = "".join(_joint_html(node, j, credit, shown, scale) for j in range(len(node.joint_actions)))
    after = f" after joint answer {node.parent_action}," if node.parent_action is not None else ""
    all_stopped = '<span class="badge stop">stopped early</span>' if all(node.stopped) else ""
    opened = " open" if node.turn < 2 else ""
    return (
        f'<details class="node"{opened}><summary><b>turn {node.turn + 1}</b><span class="dim">{after} '
        f'{_count(len(node.joint_actions), "joint answer")}, mean reward </span><span class="number">'
        f"{_mean_reward(node)}</span> {all_stopped}</summary>{prompts}{joints}</details>"
    )


def _joint_html(node: Node, j: int, credit: Samples, shown: set[int], scale: tuple[float, float]) -> str:
    agents = "".join(_said_html(node, j, agent, credit) for agent in range(len(node.answers)))
    child = node.children[j]
    below = ""
    if child is not None:
        more = f'<p class="dim">{_count(sum(1 for _ in nodes_by_level(child)), "node")} not shown</p>'
        below = _node_html(child, credit, shown, scale) if id(child) in shown else more
    badge = '<span class="badge stop">stopped early</span>' if node.stopped[j] else ""
    raw = node.raw_rewards[j]
    raw_text = "" if raw == node.rewards[j] else f'<span class="dim number">raw {number(raw)}</span>'
    parts = ", ".join(f"{escape(name)} {number(values[j])}" for name, values in node.components.items())
    return (
        f'<div class="joint"><div class="head"><span class="dim">joint answer {j}</span>'
        f'<span>reward <span class="chip" style="background:{shade(node.rewards[j], scale)}">{number(node.rewards[j])}'
        f'</span></span>{raw_text}<span>return <span class="number">{number(node.returns[j])}</span></span>'
        f"{f'<span class=dim>{parts}</span>' if parts else ''}{badge}</div>"
        f'<div class="agents">{agents}</div>{below}</div>'
    )


def _said_html(node: Node, j: int, agent: int, credit: Samples) -> str:
    answers, k = node.answers[agent], node.joint_actions[j][agent]
    if answers is None or k is None:
        return f'<div class="dim">agent {agent} is idle</div>'
    advantage = _advantage(node, j, agent, credit)
    worth = "" if advantage is None else f' <span class="dim number">advantage {advantage:+.3f}</span>'
    cut = "" if answers.completions[k].ended else ' <span class="badge cut">cut</span>'
    return f"<div><b>agent {agent}</b>{worth}{cut}<pre>{escape(answers.completions[k].text) or '&nbsp;'}</pre></div>"


def _node_text(node: Node, credit: Samples, shown: set[int], indent: str = "") -> list[str]:
    lines = [f"{indent}turn {node.turn + 1}: mean reward {_mean_reward(node)}"]
    for j in range(len(node.joint_actions)):
        last = j + 1 == len(node.joint_actions)
        stopped = "  stopped early" if node.stopped[j] else ""
        numbers = f"reward {number(node.rewards[j])}  return {number(node.returns[j])}{stopped}"
        lines.append(f"{indent}{'└' if last else '├'}─ {j}  {numbers}")
        inside = f"{indent}{' ' if last else '│'}    "
        for agent, answers in enumerate(node.answers):
            k = node.joint_actions[j][agent]
            if answers is None or k is None:
                lines.append(f"{inside}agent {agent} is idle")
                continue
            advantage = _advantage(node, j, agent, credit)
            said = [] if advantage is None else [f"{advantage:+.3f}"]
            said += [] if answers.completions[k].ended else ["cut"]
            text = shortened(" ".join(answers.completions[k].text.split()), TEXT_WIDTH)
            worth = f" ({', '.join(said)})" if said else ""
            lines.append(f"{inside}agent {agent}{worth}: {text}")
        child = node.children[j]
        if child is not None and id(child) in shown:
            lines += _node_text(child, credit, shown, inside)
        elif child is not None:
            lines.append(f"{inside}{_count(sum(1 for _ in nodes_by_level(child)), 'node')} not shown")
    return lines
