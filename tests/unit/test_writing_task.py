"""The writing task by hand: every part's points, nothing for nothing, and what feedback says."""

from __future__ import annotations

import pytest

from mareinforce.data.sources import Source, load_rows
from mareinforce.errors import ConfigError, PromptError
from mareinforce.tasks.writing import (
    POINTS,
    Targets,
    WritingFeedback,
    WritingReward,
    band,
    content_words,
    long_summary,
    measure,
    short_summary,
    transition_categories,
    words,
    writing_eval_aggregator,
    writing_eval_logger,
    writing_feedback,
    writing_reward,
)

THREE_KINDS = "however therefore finally"


def text(count: int, distinct: int, extra: str = "") -> str:
    """`count` words of which `distinct` differ, none of them a stop word; `extra` is counted among both."""
    given = extra.split()
    names = [*given, *(f"word{index}" for index in range(distinct - len(given)))]
    return " ".join([*names, *[names[0]] * (count - len(names))])


FIRST = text(20, 10)
SECOND = text(50, 20, THREE_KINDS)


def scored(first: str, second: str, **targets) -> dict[str, float]:
    """The one joint answer's reward and components."""
    return {name: values[0] for name, values in WritingReward(Targets(**targets))([first], [second]).items()}


def test_an_answer_that_meets_all_targets_earns_three():
    assert scored(FIRST, SECOND) == {"reward": 3.0, **POINTS}
    assert sum(POINTS.values()) == 3.0
    assert writing_reward([FIRST, FIRST], [SECOND, SECOND])["reward"] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("count", "share"), [(20, 1.0), (35, 1.0), (50, 1.0), (10, 0.5), (1, 1 / 20), (100, 0.5), (200, 0.25)]
)
def test_first_length_is_graded_on_both_sides_of_its_range(count, share):
    assert scored(text(count, 1), "x")["first_length"] == pytest.approx(0.5 * share)


@pytest.mark.parametrize(
    ("count", "share"), [(40, 1.0), (50, 1.0), (60, 1.0), (20, 0.5), (10, 0.25), (120, 0.5), (90, 2 / 3), (39, 39 / 40)]
)
def test_length_ratio_is_that_of_words(count, share):
    assert scored(FIRST, text(count, 1))["length_ratio"] == pytest.approx(share)
    assert scored(FIRST, text(count, 1).replace(" ", "  \n"))["length_ratio"] == pytest.approx(share)


@pytest.mark.parametrize(("distinct", "share"), [(15, 1.0), (30, 1.0), (10, 10 / 15), (5, 5 / 15), (40, 30 / 40)])
def test_unique_words_is_the_ratio_of_set_sizes_whatever_the_lengths(distinct, share):
    assert scored(FIRST, text(60, distinct))["unique_words"] == pytest.approx(share)
    assert scored(FIRST, text(60, distinct) + " the of and" * 20)["unique_words"] == pytest.approx(share)


def test_nothing_but_stop_words_has_no_unique_words():
    assert content_words("The of AND it's didn't cat's") == {"cat's"}
    assert scored("the of and", SECOND)["unique_words"] == 0.0
    assert scored(FIRST, "the of and")["unique_words"] == 0.0
    assert scored(FIRST, "the of and")["length_ratio"] == pytest.approx(3 / 40)


@pytest.mark.parametrize(
    ("second", "kinds"),
    [
        ("nothing here", 0),
        ("However, it rained", 1),
        ("however whereas instead although", 1),
        ("however, and therefore", 2),
        ("In\nAddition to the cat, for example", 2),
        (THREE_KINDS, 3),
        (f"{THREE_KINDS} moreover for instance", 3),
        ("whatsoever thusly nextdoor", 0),
    ],
)
def test_style_counts_categories_and_not_words(second, kinds):
    assert scored(FIRST, second)["style"] == pytest.approx(0.5 * min(kinds, 3) / 3)
    assert scored(second, "x")["style"] == 0.0  # the first's own transition words earn nothing
    assert min(len(transition_categories(second)), 3) == kinds


@pytest.mark.parametrize(("first", "second"), [("", SECOND), (FIRST, ""), ("", ""), (" \n", SECOND), (FIRST, "... !")])
def test_where_one_has_no_words_nothing_is_earned(first, second):
    assert scored(first, second) == dict.fromkeys(["reward", *POINTS], 0.0)


def test_the_reward_is_the_sum_of_its_parts_and_stays_between_0_and_3():
    firsts = [text(count, 1 + count // 3) for count in (1, 7, 20, 33, 50, 90)]
    seconds = [text(count, 1 + count // 2, THREE_KINDS[: count % 26]) for count in (30, 26, 52, 100, 180, 20)]
    found = writing_reward(firsts, seconds)
    for index, reward in enumerate(found["reward"]):
        assert reward == pytest.approx(sum(found[name][index] for name in POINTS))
        assert 0.0 < reward <= 3.0
    assert found["reward"] != writing_reward(seconds, firsts)["reward"]


def test_band_by_hand():
    assert [band(x, 2.0, 4.0) for x in (0.0, 1.0, 2.0, 3.0, 4.0, 8.0)] == [0.0, 0.5, 1.0, 1.0, 1.0, 0.5]
    assert words("It\u2019s 5 o'clock, re-do 'it'!") == ["it's", "5", "o'clock", "re", "do", "it"]


def test_targets_can_be_moved_and_impossible_ones_are_refused():
    assert scored("one two", "three four five six", first_words=[2, 3])["first_length"] == 0.5
    assert scored(FIRST, "however", categories=1)["style"] == 0.5
    for wrong in ({"first_words": (0, 3)}, {"length_ratio": (3, 2)}, {"categories": 0}, {"categories": 7}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Targets(**wrong)


def test_the_two_agents_are_asked_for_two_summaries_of_the_same_post():
    row = {"prompt": "SUBREDDIT: r/pets\n\nPOST: My cat is late.\n\nTL;DR:"}
    short, long = short_summary(row), long_summary(row)
    assert "short" in short
    assert "detailed" in long
    assert short != long
    assert all("My cat is late." in each and "TL;DR" not in each for each in (short, long))
    assert short_summary(row, external_prompts="as it is") == long_summary(row, external_prompts="as it is")
    with pytest.raises(PromptError, match="list"):
        short_summary({"prompt": [{"role": "user", "content": "x"}]})


def test_feedback_is_a_whole_prompt_with_each_agents_own_numbers():
    first, second = writing_feedback("My cat is late.", [text(10, 5), text(15, 6, "however")], 2)
    assert first.startswith(short_summary({"prompt": "My cat is late."}))
    assert second.startswith(long_summary({"prompt": "My cat is late."}))
    assert text(10, 5) in first
    assert text(10, 5) not in second
    assert "10 words and should have 20 to 50" in first
    assert "15 words and uses 1 kinds of transition words; it should use at least 3" in second
    assert all("1.50 times as long" in each and "1.20 times as many" in each for each in (first, second))
    moved = WritingFeedback(Targets(first_words=(3, 4)))("x", ["a", "b"], 2)
    assert "should have 3 to 4." in moved[0]
    with pytest.raises(PromptError, match="num_agents is 3"):
        writing_feedback("x", ["a", "b", "c"], 3)


def test_evaluation_measures_every_turn_there_was():
    turns = [[[FIRST, text(10, 5)], [FIRST]], [[SECOND, SECOND], [""]]]
    rows = writing_eval_logger(turns)
    assert rows[0]["turn_1/length_ratio"] == 2.5
    assert rows[0]["turn_2/length_ratio"] == 5.0
    assert rows[1] == {f"turn_1/{name}": value for name, value in measure(FIRST, "").items()}
    means = writing_eval_aggregator(rows)
    assert means["turn_1/second_words"] == 25.0
    assert means["turn_2/categories"] == 3.0


def test_the_posts_come_with_the_package():
    train, test = load_rows(Source("posts")), load_rows(Source("posts", "test"))
    assert (len(train), len(test)) == (14, 6)
    posts = [row["prompt"] for row in [*train, *test]]
    assert len(set(posts)) == 20
    assert all(60 <= len(post.split()) <= 150 for post in posts)
    assert len(load_rows(Source("posts", "train[:3]"))) == 3
