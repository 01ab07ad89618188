"""A rollout tree as a small drawing: a dot a joint answer, its colour the reward, a square where a branch stopped."""

from __future__ import annotations

from mareinforce.callbacks.completion_table import number

from mareinforce.rollout.tree import Node, nodes_by_level

MAX_LEAVES = 256
"""Joint answers without a child, beyond which there is no drawing."""
_TURN_HEIGHT, _TOP, _LEFT, _DOT = 76, 22, 56, 5
_LOW, _MIDDLE, _HIGH = (227, 119, 94), (240, 232, 214), (82, 168, 148)
"""Colours of the lowest, the middle and the highest reward, that those who do not tell red from green can tell."""
_SKIPPED = "#b8bfcc"


def shade(reward: float | None, scale: tuple[float, float]) -> str:
    """The colour of a reward between the lowest and the highest of its tree; grey for one that was skipped."""
    low, high = scale
    if reward is None:
        return _SKIPPED
    share = 0.5 if high <= low else (reward - low) / (high - low)
    start, end, part = (_LOW, _MIDDLE, 2 * share) if share < 0.5 else (_MIDDLE, _HIGH, 2 * share - 1)
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(start, end, strict=True))
    return f"rgb({red},{green},{blue})"


def drawing(root: Node, scale: tuple[float, float]) -> str:
    """SVG of the whole tree, or nothing where it would be too wide."""
    nodes = list(nodes_by_level(root))
    leaves = sum(child is None for node in nodes for child in node.children)
    if leaves > MAX_LEAVES:
        return ""
    gap = max(14, min(64, 1000 // leaves))
    lines: list[str] = []
    marks: list[str] = []
    _place(root, 0, gap, scale, lines, marks)
    turns = 1 + nodes[-1].turn
    labels = [
        f'<text x="4" y="{_height(turn) + _TURN_HEIGHT // 2 + 4}">turn {turn + 1}</text>' for turn in range(turns)
    ]
    width, height = _LEFT + leaves * gap + 10, _height(turns) - _TURN_HEIGHT // 2 + 16
    colours = ", ".join(shade(scale[0] + share * (scale[1] - scale[0]), scale) for share in (0.0, 0.5, 1.0))
    ramp = f'<span class="ramp" style="background: linear-gradient(90deg, {colours})"></span>'
    return (
        f'<div class="drawing"><svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">'
        f"{''.join(lines)}{''.join(marks)}{''.join(labels)}</svg>"
        f'<p class="dim">A dot is a joint answer, its colour the reward, {scale[0]:.4g} {ramp} {scale[1]:.4g}. '
        f"Squares were stopped early.</p></div>"
    )


def _height(turn: int) -> int:
    """Where a node of a turn is; its joint answers are half a turn below."""
    return _TOP + turn * _TURN_HEIGHT


def _place(
    node: Node, leaves: int, gap: int, scale: tuple[float, float], lines: list[str], marks: list[str]
) -> tuple[float, int]:
    """Draw what is below a node, the first leaf being number ``leaves``; returns where it is, and the next leaf."""
    y, below = _height(node.turn), _height(node.turn) + _TURN_HEIGHT // 2
    places = []
    for child in node.children:
        if child is None:
            places.append(_LEFT + (leaves + 0.5) * gap)
            leaves += 1
        else:
            x, leaves = _place(child, leaves, gap, scale, lines, marks)
            lines.append(f'<line x1="{x:.1f}" y1="{below}" x2="{x:.1f}" y2="{_height(node.turn + 1)}"/>')
            places.append(x)
    middle = (places[0] + places[-1]) / 2
    for j, x in enumerate(places):
        lines.append(f'<line x1="{middle:.1f}" y1="{y}" x2="{x:.1f}" y2="{below}"/>')
        marks.append(_mark(node, j, x, below, shade(node.rewards[j], scale)))
    marks.append(f'<circle cx="{middle:.1f}" cy="{y}" r="3" fill="#8a94a6"/>')
    return middle, leaves


def _mark(node: Node, j: int, x: float, y: float, colour: str) -> str:
    told = f"reward {number(node.rewards[j])}, return {number(node.returns[j])}"
    if node.stopped[j]:
        place = f'x="{x - _DOT:.1f}" y="{y - _DOT}" width="{2 * _DOT}" height="{2 * _DOT}"'
        tip = f"<title>{told}, stopped early</title>"
        return f'<rect {place} fill="{colour}" stroke="#3d4fb8" stroke-width="2">{tip}</rect>'
    place = f'cx="{x:.1f}" cy="{y}" r="{_DOT}"'
    return f'<circle {place} fill="{colour}" stroke="#8a94a6"><title>{told}</title></circle>'
