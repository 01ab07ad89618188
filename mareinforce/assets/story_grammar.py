"""The invented sentences that the tiny story model is taught, and the prompts that ask for them.

A prompt names a hero and a thing (``Tell a story about a lazy fox and a kite.``). A story is a sequence of sentences
about them. After every sentence it ends with the same probability, so the number of sentences is geometric and lengths
spread from one sentence to ten. Little else is left to chance: most of what a sampled story can vary in is its length.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

ANIMALS = ("fox", "bear", "mouse", "cat", "frog", "crow", "hare", "deer", "goat", "swan")
QUALITIES = ("small", "brave", "quiet", "red", "clever", "lazy", "lucky", "gentle")
THINGS = ("moon", "lamp", "river", "boat", "bell", "garden", "star", "kite", "cloud", "hill")
DOES_TO = ("finds", "sees", "paints", "hides", "follows", "loves", "carries", "wakes")
DOES = (
    ("sings", "softly"),
    ("sleeps", "near"),
    ("dances", "slowly"),
    ("waits", "under"),
    ("dreams", "of"),
    ("laughs", "again"),
)
GLUE = (".", "The", "It", "Then", "Soon", "the", "it", "a", "and", "Tell", "Write", "story", "about")

PAD, BOS, EOS, UNK = SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
VOCABULARY = (*SPECIAL, *GLUE, *ANIMALS, *QUALITIES, *THINGS, *DOES_TO, *(word for pair in DOES for word in pair))
"""All tokens, in the order of their ids."""

STOP_PROBABILITY = 0.2  # after every sentence: 4.7 sentences in the mean
MAX_SENTENCES = 13


@dataclass(frozen=True)
class Subject:
    """What a story is about."""

    quality: str
    animal: str
    thing: str

    def prompt(self, verb: str) -> str:
        """``Tell a story about a lazy fox and a kite.``"""
        return f"{verb} a story about a {self.quality} {self.animal} and a {self.thing}."


def draw_subject(rng: random.Random) -> Subject:
    """A random hero and a random thing."""
    return Subject(rng.choice(QUALITIES), rng.choice(ANIMALS), rng.choice(THINGS))


def draw_sentence(subject: Subject, number: int, rng: random.Random) -> str:
    """Sentence ``number`` of a story, from 0: the first names the hero in full, the others take turns."""
    starts = ("It", f"Then the {subject.animal}", "Soon it")
    start = f"The {subject.quality} {subject.animal}" if number == 0 else starts[(number - 1) % 3]
    if number == 0 or rng.random() < 0.5:
        return f"{start} {rng.choice(DOES_TO)} the {subject.thing}."
    verb, rest = rng.choice(DOES)
    place = f" the {subject.thing}" if rest in ("near", "under", "of") else ""
    return f"{start} {verb} {rest}{place}."


def draw_story(subject: Subject, rng: random.Random) -> str:
    """A story of 1 to ``MAX_SENTENCES`` sentences, separated by spaces."""
    sentences = [draw_sentence(subject, 0, rng)]
    while len(sentences) < MAX_SENTENCES and rng.random() >= STOP_PROBABILITY:
        sentences.append(draw_sentence(subject, len(sentences), rng))
    return " ".join(sentences)


def draw_prompts(count: int, rng: random.Random) -> list[str]:
    """``count`` different prompts, in random order."""
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        prompts[draw_subject(rng).prompt(rng.choice(("Tell", "Write")))] = None
    return list(prompts)
